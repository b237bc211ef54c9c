"""What the core does beside the rules: who watches, who is dead, what it says once, a store that was rolled back."""

from __future__ import annotations

import math
import random
from typing import cast

import pytest

from elastic_trainer.membership.cluster_view import NodeView, Observation
from elastic_trainer.membership.core import (
    CROWD,
    DEPUTY_PATIENCE_S,
    JITTER,
    MIN_DELAY_S,
    OTHERS_AFTER_S,
    PROBE_INTERVAL_S,
    SENIORS,
    AgentProbes,
    ChangeWatch,
    CommitRound,
    Core,
    Delays,
    Ended,
    LogDelay,
    Looked,
    Notify,
    Plan,
    Probed,
    RollbackGuard,
    TurnOutcome,
    WatchScope,
    plan,
    unconfirmed,
)
from elastic_trainer.membership.documents import Ghost, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.rules import Action, Decision
from elastic_trainer.membership.writes import first_names
from elastic_trainer.store.api import KeyValue, RunKeys
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import MemoryStore
from tests.support.threadless import no_new_threads
from tests.unit.membership.scenes import LIMITS, Scene, node, round_of

PAIR = [node("a", 1), node("b", 2)]
REVISION = 7


def step(core: Core, document: RoundDocument | None, now: float, *answers: Ended, serial: int = 1) -> TurnOutcome:
    """Nodes a and b and ``document`` are seen, always at one revision of the store."""
    nodes = {each.id: each for each in PAIR}
    seen = Observation(nodes, document, REVISION if document else 0, True, serial, revision=REVISION)
    return core.step(answers, Looked(seen, create_revision=1, senior=True, away=False), now)


def told(taken: TurnOutcome) -> list[RoundDocument]:
    return [effect.document for effect in taken.effects if isinstance(effect, Notify)]


def core() -> Core:
    return Core("a", LIMITS, 3.0, random.Random(1))


def test_the_end_of_a_round_is_reported_though_its_revision_is_that_of_another() -> None:
    """A store that was restored uses its revisions again: the end that is put back may get the one of the round."""
    mine = core()
    active, broken = round_of(4, PAIR), round_of(4, PAIR, RoundState.BROKEN)
    assert told(step(mine, active, 1.0)) == [active]
    assert told(step(mine, active, 1.1)) == []
    assert told(step(mine, broken, 1.2)) == [broken]


def test_a_write_that_lost_its_compare_is_tried_again_when_something_is_new_or_after_a_while() -> None:
    """Until then the same view would lead to the same write; the time of the next look is given."""
    mine = core()
    step(mine, None, 1.0)
    (commit,) = step(mine, None, 1.0 + LIMITS.last_call_s).effects
    assert isinstance(commit, CommitRound)
    assert commit.decision.action is Action.FORM
    lost = Ended(commit, again_in_s=0.1)
    assert step(mine, None, 5.0, lost) == TurnOutcome((), 5.1)
    assert [type(effect) for effect in step(mine, None, 5.05, serial=2).effects] == [CommitRound]


def test_a_reason_that_lasts_is_said_once() -> None:
    """A recovery that takes no time says nothing; neither does a wait for anything but a broken round's successor."""
    broken, waits = (
        round_of(4, PAIR, RoundState.BROKEN),
        Decision(Action.WAIT, "waiting for b (in checkpoint) to be free"),
    )
    delays = Delays()
    active = broken.model_copy(update={"state": RoundState.ACTIVE})
    notes = [
        (broken, waits, 10.0),
        (broken, Decision(Action.FORM, "all are free", broken), 10.1),
        (broken, waits, 20.0),
    ]
    notes += [(active, waits, 20.0 + after_s) for after_s in (0.1, MIN_DELAY_S, 2 * MIN_DELAY_S)]
    assert [delays.observe(*note) for note in notes] == [None] * len(notes)
    said = [delays.observe(broken, waits, 30.0 + after_s) for after_s in (0.0, MIN_DELAY_S, 2 * MIN_DELAY_S)]
    assert said == [None, LogDelay(4, waits.reason), None]


# ---- who watches the nodes

PATIENCE_S = 6.0
NAMES = [f"n{number:04d}" for number in range(1024)]
NOT_ON = [RoundState.BROKEN, RoundState.DRAINING]


def run_of(size: int, state: RoundState = RoundState.ACTIVE) -> RoundDocument:
    """A round of nodes whose create-revisions are 10, 11, 12 and so on."""
    return round_of(1, [node(name, 10 + seniority) for seniority, name in enumerate(NAMES[:size])], state)


def planned(document: RoundDocument | None, seniority: int, asked: int = 0, asked_at_s: float = 0.0) -> Plan:
    return plan(document, NAMES[seniority], 10 + seniority, asked, asked_at_s, PATIENCE_S)


def test_the_first_members_ask_at_once_and_the_next_in_line_watch_a_round_that_stays_over() -> None:
    """A round document that makes a node one of the three most senior is enough for it to ask, and only once. Before
    the first round leases must end; of a closed run nothing will be decided any more."""
    for state in (RoundState.ACTIVE, *NOT_ON):
        for seniority in range(SENIORS):
            assert planned(run_of(8, state), seniority) == Plan(0.0, SENIORS)
            assert planned(run_of(8, state), seniority, asked=1).after_s > 0.0
        assert planned(run_of(8, state), SENIORS).after_s > 0.0
        assert planned(run_of(8, state), 2 * SENIORS).after_s >= PATIENCE_S
    for state in NOT_ON:
        for seniority in range(SENIORS, 2 * SENIORS):
            assert planned(run_of(8, state), seniority) == Plan(DEPUTY_PATIENCE_S, None)
    assert planned(None, 5) == Plan(PATIENCE_S, SENIORS)
    assert planned(run_of(4, RoundState.CLOSED), 0).after_s == math.inf


def test_a_crowd_asks_seldom_while_a_round_is_on_and_passes_by_deciders_that_do_nothing() -> None:
    """A thousand nodes send fewer questions in all than a tenth of their number in each patience, yet all ask. While no
    round is on each fruitless question widens the circle by three, less and less often."""
    document = run_of(1024)
    waits = [planned(document, seniority).after_s for seniority in range(SENIORS, 1024)]
    assert sum(PATIENCE_S / after_s for after_s in waits) < 1024 / 7
    assert all(map(math.isfinite, waits))
    over = run_of(64, RoundState.BROKEN)
    plans = [planned(over, 40, asked) for asked in range(6)]
    assert [each.seniors for each in plans] == [3, 6, 9, 12, 15, 18]
    assert [each.after_s / PATIENCE_S for each in plans] == [1, 2, 4, 8, 8, 8]


def test_keys_of_ghosts_take_no_place() -> None:
    """A key left behind counts for nothing while it is as it was, and again when it changes."""
    ghosts = [Ghost(node="a", create_revision=5, mod_revision=5)]
    others = [(name, KeyValue("", b"", number, number)) for number, name in enumerate("bcd", 6)]
    for created, changed, first in ((5, 5, "bcd"), (5, 9, "abc"), (4, 5, "abc")):
        found = [("a", KeyValue("", b"", created, changed)), *others]
        assert first_names(found, ghosts, 3) == list(first)


class Watcher:
    """One that watches the nodes of a run whose round it is in."""

    def __init__(self, seniority: int) -> None:
        self.seniority, self.scope = seniority, WatchScope(NAMES[seniority], PATIENCE_S, random.Random(0))

    def turn(self, present: int, now: float, state: RoundState = RoundState.ACTIVE) -> ChangeWatch | None:
        nodes = {name: node(name, 10 + seniority) for seniority, name in enumerate(NAMES[:present])}
        seen = Observation(nodes, run_of(present, state), round_revision=1, connected=True, serial=1)
        change = self.scope.adjust(Looked(seen, 10 + self.seniority, senior=False, away=False), now)[0]
        assert change is None or isinstance(change, ChangeWatch)
        return change


LONGEST_S = PATIENCE_S * (1 + JITTER)


@pytest.mark.parametrize(
    ("seniority", "present", "state"),
    [(SENIORS - 1, CROWD + 1, RoundState.ACTIVE), (SENIORS, CROWD, RoundState.ACTIVE)]
    + [(SENIORS, CROWD + 1, state) for state in NOT_ON],
)
def test_nobody_stops_watching_in_a_small_run_or_while_a_round_is_over(
    seniority: int, present: int, state: RoundState
) -> None:
    watcher = Watcher(seniority)
    assert [watcher.turn(present, now, state) for now in (100.0, 101.0 + LONGEST_S)] == [None, None]


def test_a_junior_node_of_a_crowd_stops_watching_after_a_while() -> None:
    """Not at once, for its elders may be about to end; and the time begins anew when it was senior meanwhile."""
    watcher = Watcher(SENIORS)
    assert watcher.turn(CROWD + 1, 100.0) is watcher.turn(CROWD + 1, 99.0 + PATIENCE_S) is None
    assert watcher.turn(CROWD, 99.0 + PATIENCE_S) is None
    assert watcher.turn(CROWD + 1, 200.0) is watcher.turn(CROWD + 1, 199.0 + PATIENCE_S) is None
    assert watcher.turn(CROWD + 1, 200.0 + LONGEST_S) == ChangeWatch(nodes=False, reason="3 nodes are more senior")


# ---- who is dead

TRIO = [node("a", 1), node("b", 2), node("c", 3)]


class Lease:
    """As far as a member's thread asks it."""

    ttl_s = 10.0


def asked(scene: Scene) -> list[str]:
    """The names of those in doubt."""
    return [each.id for each in unconfirmed(scene.view())]


def scene_of(state: RoundState, *more: NodeView, **document: RoundDocument) -> Scene:
    """Three members as ``a`` sees them, and others."""
    return Scene().show(*TRIO, *more).adopt(round_of(1, TRIO, state, **document))


def test_who_must_be_alive_for_the_next_round_is_asked_for() -> None:
    """Members of a round that is over, until they have acknowledged its end, but not this node itself; newcomers where
    there is room, which is for one here, and those of a planned change. Nobody when the run is closed or has not
    begun."""
    scene = scene_of(RoundState.BROKEN)
    assert asked(scene) == ["b", "c"]
    assert asked(scene.show(node("c", 3, acknowledged=2))) == ["b"]
    for newcomers, expected in (("x", ["x"]), ("xy", ["x"]), ("", [])):
        added = (node(name, 50 + at) for at, name in enumerate(newcomers))
        assert asked(scene_of(RoundState.ACTIVE, *added)) == expected
    following = round_of(2, [*TRIO, node("x", 50)])
    scene = scene_of(RoundState.DRAINING, node("x", 50), node("y", 51), next=following)
    assert asked(scene.show(node("b", 2, acknowledged=2))) == ["c", "x"]
    assert asked(scene_of(RoundState.CLOSED)) == asked(Scene().show(*TRIO)) == []


def test_nobody_is_known_to_be_dead_who_has_changed_its_key_since() -> None:
    """That is another life. Nor is anybody asked again too soon."""
    scene, probes = scene_of(RoundState.BROKEN), AgentProbes()
    silent = unconfirmed(scene.view())
    probe, _ = probes.is_due(silent, 1.0)
    assert probe is not None
    assert [each.id for each in probe.nodes] == ["b", "c"]
    assert probes.is_due(silent, 1.0 + PROBE_INTERVAL_S / 2) == (None, PROBE_INTERVAL_S)
    probes.on_probed(Probed("b", 2, dead=True))
    probes.on_probed(Probed("c", 3, dead=False))
    assert probes.dead(scene.nodes) == {"b"}
    assert probes.dead({name: node(name, 1, mod=99) for name in "bc"}) == frozenset()


def test_probes_go_on_after_many_that_could_not_be_started() -> None:
    """No thread can be started for them, nor for the watch that the same step changes: they prove nothing."""
    scene, now = scene_of(RoundState.BROKEN), 1.0
    lease = cast("LeaseSession", Lease())
    member = Member(MemoryStore(), RunKeys("/p", "run"), "a", lease, scene.limits, lambda error: None)
    probes = AgentProbes()
    for _ in range(40):
        probe, _ = probes.is_due(unconfirmed(scene.view()), now)
        assert probe is not None
        with no_new_threads():
            member._perform(ChangeWatch(nodes=True, reason="it is among the most senior"))
            member._perform(probe)
        for answer in member._answers:
            if isinstance(answer, Probed):
                probes.on_probed(answer)
        member._answers.clear()
        now += 1.0
    assert probes.dead(scene.nodes) == frozenset()


# ---- a store that goes back behind what a node has seen

MEMBERS = round_of(1, [node(name, 1 + seniority) for seniority, name in enumerate("abcde")]).members


def document(number: int, state: RoundState = RoundState.ACTIVE, nonce: str = "x", epoch: int = 1) -> RoundDocument:
    return RoundDocument(epoch=epoch, number=number, nonce=nonce, state=state, members=MEMBERS, reason="said so")


def remembered(known: RoundDocument, seen: RoundDocument | None) -> RollbackGuard:
    return RollbackGuard().advance(known, 0.0).advance(seen, 10.0)


DRAINING, BROKEN, CLOSED = RoundState.DRAINING, RoundState.BROKEN, RoundState.CLOSED


@pytest.mark.parametrize(
    ("known", "seen", "behind"),
    [
        (document(1), document(1), False),
        (document(1), document(1, DRAINING), False),
        (document(1, DRAINING), document(1, BROKEN), False),
        (document(1, BROKEN), document(2, nonce="y"), False),
        (document(1, BROKEN), document(1, CLOSED), False),
        (document(5, CLOSED), document(5, BROKEN, epoch=2), False),
        (document(3), document(1), True),
        (document(3), None, True),
        (document(3, BROKEN), document(3), True),
        (document(3), document(2, BROKEN), True),
        (document(3), document(2, CLOSED), True),
        (document(3, nonce="x"), document(3, nonce="y"), True),
    ],
)
def test_an_older_store_is_given_the_end_of_the_newest_round(
    known: RoundDocument, seen: RoundDocument | None, behind: bool
) -> None:
    """So the next round follows on it, whatever the store held; another round under the same number counts as older.
    What becomes of a round in order, a reopened run among it, is believed and remembered."""
    after = remembered(known, seen)
    decision = after.decide("a", seen, 10.0)
    assert after.behind == behind
    if not behind:
        assert (after.known, decision.action) == (seen, Action.WAIT)
        return
    assert decision.action is Action.BREAK
    assert decision.round is not None
    assert (decision.round.number, decision.round.state, decision.round.nonce) == (3, BROKEN, "x")
    assert "the store was rolled back" in decision.reason
    assert not after.advance(decision.round, 11.0).behind


@pytest.mark.parametrize("remembers", [True, False])
def test_a_planned_change_that_was_under_way_counts_as_made(remembers: bool) -> None:
    """In the round that is remembered some workers may have switched already; in the store, newcomers may have begun to
    form the planned one: no other may get that number."""
    planned = document(3, RoundState.DRAINING).model_copy(update={"next": document(4, nonce="z")})
    known, seen = (planned, document(2)) if remembers else (document(3, RoundState.BROKEN), planned)
    decision = remembered(known, seen).decide("a", seen, 10.0)
    assert decision.round is not None
    assert (decision.round.number, decision.round.nonce, decision.round.next) == (4, "z", None)
    assert decision.round.state is RoundState.BROKEN


def test_a_closed_run_stays_closed() -> None:
    closed = document(3, RoundState.CLOSED).model_copy(update={"result": RunResult.SUCCEEDED})
    decision = remembered(closed, document(3)).decide("a", document(3), 10.0)
    assert (decision.action, decision.round) == (Action.CLOSE, closed)


def test_only_the_first_members_write_at_once() -> None:
    after = remembered(document(3), None)
    assert [after.decide(name, None, 10.0).action for name in "abcd"] == [*[Action.BREAK] * 3, Action.WAIT]
    assert after.decide("d", None, 10.0).again_in_s == OTHERS_AFTER_S
    assert after.decide("d", None, 10.0 + OTHERS_AFTER_S).action is Action.BREAK
    assert after.advance(None, 20.0).behind_since == 10.0, "the patience does not begin anew"
