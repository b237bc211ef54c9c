"""The protocol under random faults on virtual time: no schedule breaks an invariant, and each broken rule is found.

``python -m tests.simulation SEED`` repeats one schedule with its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_trainer.agent.rendezvous import in_place
from elastic_trainer.membership import cluster_view, core, rules, writes
from elastic_trainer.membership.cluster_view import ClusterView
from elastic_trainer.membership.core import RollbackGuard
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.rules import Decision
from elastic_trainer.store.api import Compare, Field, Relation
from tests.simulation.invariants import (
    KEEP_ORDER,
    LIVENESS,
    ONE_ACTIVE,
    ONLY_GROW,
    SAME_RANKS,
    STAYS_CLOSED,
    WHOLE_GROUPS,
    WITHIN_LIMITS,
    Violation,
)
from tests.simulation.world import play

SCHEDULES, SHARDS = 2000, 8
PER_SHARD = SCHEDULES // SHARDS
FOUND_WITHIN = 1200
"""Upper bound on the schedules until a broken rule is found."""


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_of_faults_breaks_an_invariant(shard: int) -> None:
    """Nodes, workers, networks and etcd fail in every way that the simulation knows: each fault happens, rounds are
    formed and steps are made in between, and when the faults are over training goes on or the run is closed."""
    faults: Counter[str] = Counter()
    rounds = steps = 0
    for seed in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
        counts = play(seed)
        faults.update(counts.faults)
        rounds, steps = rounds + counts.rounds, steps + counts.steps
    assert len(faults) == 21, faults
    assert rounds > 2 * PER_SHARD
    assert steps > 10 * PER_SHARD


def test_a_seed_repeats_its_schedule() -> None:
    first: list[str] = []
    again: list[str] = []
    for seed in range(20):
        play(seed, first.append)
        play(seed, again.append)
    assert len(first) > 200
    assert first == again


# ---- each rule broken on purpose

Break = Callable[[pytest.MonkeyPatch], None]


def _holds_always(key: str, revision: int) -> Compare:
    return Compare(key, Field.MOD_REVISION, Relation.GREATER, -1)


def write_over_any_round(patch: pytest.MonkeyPatch) -> None:
    """The compare on the round document is gone."""
    patch.setattr(writes, "unchanged", _holds_always)


def repeat_the_number(patch: pytest.MonkeyPatch) -> None:
    """The next round has the number of the present one."""
    patch.setattr(rules, "next_number", lambda view: max(1, cluster_view.number_of(view)))


def break_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A round that was broken is active still."""
    broken = rules.broken

    def kept(current: RoundDocument, *given: object, **more: object) -> RoundDocument:
        document = broken(current, *given, **more)  # type: ignore[arg-type]
        return document.model_copy(update={"state": RoundState.ACTIVE})

    patch.setattr(rules, "broken", kept)
    patch.setattr(writes, "broken", kept)


def forget_what_was_seen(patch: pytest.MonkeyPatch) -> None:
    """A store that went back is believed."""
    patch.setattr(RollbackGuard, "advance", lambda self, seen, now: RollbackGuard(seen))


def give_all_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """Each node of a round begins at rank 0."""
    compose = rules.compose

    def composed(*given: object, **more: object) -> RoundDocument:
        document = compose(*given, **more)  # type: ignore[arg-type]
        members = tuple(member._replace(first_rank=0) for member in document.members)
        return document.model_copy(update={"members": members})

    patch.setattr(rules, "compose", composed)


def put_newcomers_first(patch: pytest.MonkeyPatch) -> None:
    """The order of the nodes is turned round with each round."""
    candidates = ClusterView.__dict__["candidates"].func
    patch.setattr(ClusterView, "candidates", property(lambda view: candidates(view)[::-1]))


def drop_one_of_the_planned(patch: pytest.MonkeyPatch) -> None:
    """A planned change ends in another round than the one that its members hold."""
    switching = rules._switching

    def dropped(view: ClusterView, current: RoundDocument, planned: RoundDocument) -> Decision:
        decision = switching(view, current, planned)
        if decision.round is None or decision.round.state is not RoundState.ACTIVE:
            return decision
        return replace(decision, round=planned.model_copy(update={"members": planned.members[:-1]}))

    patch.setattr(rules, "_switching", dropped)


def go_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """A closed run counts as one whose round is broken."""
    decide = rules.decide

    def decided(view: ClusterView, now: float) -> Decision:
        current = view.round
        if current is not None and current.state is RoundState.CLOSED:
            view = replace(view, round=current.model_copy(update={"state": RoundState.BROKEN}))
        return decide(view, now)

    patch.setattr(core, "decide", decided)


def take_one_more(patch: pytest.MonkeyPatch) -> None:
    """A round may have one node more than max."""
    decide = rules.decide

    def decided(view: ClusterView, now: float) -> Decision:
        return decide(replace(view, limits=replace(view.limits, max_nodes=view.limits.max_nodes + 1)), now)

    patch.setattr(core, "decide", decided)


def never_return(patch: pytest.MonkeyPatch) -> None:
    """A node whose lease was lost does not show itself again."""
    patch.setattr(writes.OwnKey, "away", property(lambda self: False))


def forget_the_slots(patch: pytest.MonkeyPatch) -> None:
    """Groups are made of whoever comes, as in restart mode."""
    for module in (rules, cluster_view):
        patch.setattr(module, "in_groups", lambda view, ready: list(ready))


def never_move(patch: pytest.MonkeyPatch) -> None:
    """Spares of one slot wait for ever for those of another."""
    patch.setattr(in_place, "move", lambda view: None)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (write_over_any_round, ONE_ACTIVE),
        (repeat_the_number, ONE_ACTIVE),
        (break_without_an_end, ONLY_GROW),
        (give_all_the_first_rank, SAME_RANKS),
        (put_newcomers_first, KEEP_ORDER),
        (drop_one_of_the_planned, SAME_RANKS),
        (go_on_after_the_end, STAYS_CLOSED),
        (take_one_more, WITHIN_LIMITS),
        (never_return, LIVENESS),
        (forget_what_was_seen, ONLY_GROW),
        (forget_the_slots, WHOLE_GROUPS),
        (never_move, LIVENESS),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_rule_is_found(broken: Break, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each invariant can fail: with a rule broken some schedule breaks it, and names its seed."""
    broken(monkeypatch)
    found = (violation for violation in map(_violation, range(FOUND_WITHIN)) if violation is not None)
    first = next((violation for violation in found if violation.rule == rule), None)
    assert first is not None, f"{FOUND_WITHIN} schedules have not found it"
    assert "seed " in str(first)


def _violation(seed: int) -> Violation | None:
    try:
        play(seed)
    except Violation as violation:
        return violation
    return None
