"""Snapshots of one run and the list of all runs, for the status page, commands and other programs. Pure.

The fields are the contract of ``/api/runs`` and ``/api/runs/<run>``: unknown values are null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import to_json, to_jsonable_python

from elastic_trainer.membership import stragglers
from elastic_trainer.membership.documents import (
    RANK_FIELDS,
    Incident,
    JournalEntry,
    NodeHealth,
    RoundMember,
    RoundState,
    goodput,
)
from elastic_trainer.membership.stragglers import Stragglers
from elastic_trainer.monitor import state
from elastic_trainer.monitor.attention import ORDER, Concern, concerns
from elastic_trainer.monitor.state import Curves, Observed, RunDocuments
from elastic_trainer.telemetry.families import PHASES

MOST_ROUNDS = 200
MOST_INCIDENTS = 100
MOST_NAMES = 4000
"""Maximum of node names in all rounds together; older rounds keep only their numbers."""
SPEAKERS = 3
"""Nodes whose last lines an incident shows."""
GONE_STATE = "gone"
"""The state of a member of the newest round whose key is missing."""


RankStatus = Mapping[str, Any]
"""One rank: the fields of its health document, ``slowdown``, ``straggler`` and ``stall`` (a state.Stall; null while
it gets on). For a rank without a health document only the numbers are known."""
UNKNOWN: Final[RankStatus] = {**dict.fromkeys(RANK_FIELDS), "slowdown": None, "straggler": False, "stall": None}


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node. ``age_s``: seconds since the last report about its ranks."""

    node: str
    host: str
    state: str
    in_round: bool
    group: int | None
    place: int | None
    """Shard group and place in it, if groups have several nodes; a spare has only a place."""
    metrics: str
    age_s: float | None
    ranks: tuple[RankStatus, ...]
    load: Mapping[str, Any] | None = None
    """How busy its machine is: a ``NodeLoad``."""
    tails: tuple[Mapping[str, Any], ...] = ()
    """What its workers wrote last: ``LogTail``; also those of a node that is gone."""


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The last checkpoint, and counts."""

    step: int
    age_s: float | None
    bytes: int
    duration_s: float
    interval_s: float
    saved: int
    failed: int


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """One transition of the journal."""

    number: int
    state: str
    wall: float
    reason: str
    world_size: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LastRound:
    """The last round that trained. ``duration_s``: from the run's first round to its end; null if that is forgotten."""

    number: int
    world_size: int
    nodes: int
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Whether the store answers, and the age of the data."""

    connected: bool
    age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run in both."""

    run: str
    state: str
    state_s: float | None
    min_nodes: int | None
    max_nodes: int | None
    recovery: str | None
    round: int | None
    world_size: int
    step: int | None
    loss: float | None
    samples_per_s: float | None
    goodput: float | None
    last: LastRound | None
    """Who trained last, if the run has ended or nobody is left."""
    attention: tuple[Concern, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot(RunFacts):
    """``/api/runs/<run>``."""

    epoch: int | None
    shard_nodes: int | None
    shard_groups: int
    """Shard groups of several nodes that train."""
    round_reason: str
    samples: int | None
    steps_per_s: float | None
    step_s: float | None
    data_epoch: int | None
    progress: Mapping[str, Any] | None
    """How far the run is, as rank 0's node knows it: a ``RunProgress``."""
    seconds: Mapping[str, float]
    checkpoint: CheckpointStatus | None
    limits: Mapping[str, float]
    nodes: tuple[NodeStatus, ...]
    rounds: tuple[RoundStatus, ...]
    incidents: tuple[Mapping[str, Any], ...]
    curves: Curves
    unreadable: tuple[str, ...]
    lost: tuple[str, ...]
    """Nodes that the run lost to faults and that have not been replaced."""
    departure: Mapping[str, Any] | None
    """How the last node left, if no node is present."""
    last_lines: tuple[Mapping[str, Any], ...]
    """What the nodes of the newest incident wrote before they were gone: a ``LogTail`` and its ``node``."""
    wall: float
    store: StoreStatus = field(default=StoreStatus(True, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(RunFacts):
    """One row of ``/api/runs``."""

    nodes: int
    stragglers: int
    last_incident: Mapping[str, Any] | None
    """The newest that is no planned change."""


@dataclass(frozen=True, slots=True)
class Listing:
    """``/api/runs``: first the runs that need attention, then running ones, each by name."""

    runs: tuple[RunSummary, ...]
    store: StoreStatus
    wall: float


def as_json(value: object) -> bytes:
    """The JSON of a snapshot or listing; numbers that are not finite become null."""
    return to_json(value, inf_nan_mode="null")


def as_values(value: object) -> dict[str, Any]:
    """The same as plain values."""
    values: dict[str, Any] = to_jsonable_python(value, inf_nan_mode="null")
    return values


def _facts(documents: RunDocuments, seen: Observed) -> dict[str, Any]:
    spec, round_ = documents.spec, documents.round
    return {
        "run": documents.run,
        "state": seen.state,
        "state_s": None if seen.state_since is None else seen.now - seen.state_since,
        "min_nodes": spec.min_nodes if spec is not None else None,
        "max_nodes": spec.max_nodes if spec is not None else None,
        "recovery": str(spec.recovery) if spec is not None else None,
        "round": round_.number if round_ is not None else None,
        "world_size": state.world_size(documents),
        "step": state.current_step(documents),
        "loss": state.current_loss(documents),
        "samples_per_s": seen.samples_per_s,
        "goodput": goodput(documents.counters),
        "last": last_round(documents, seen),
        "attention": concerns(documents, seen),
    }


def snapshot(documents: RunDocuments, seen: Observed, store: StoreStatus = StoreStatus(True, 0.0)) -> RunSnapshot:
    """The snapshot of a run."""
    spec, round_, counters = documents.spec, documents.round, documents.counters
    far = documents.first_health.progress if documents.first_health is not None else None
    samples, left = counters.get("samples"), documents.departure if not documents.living_nodes else None
    return RunSnapshot(
        **_facts(documents, seen),
        epoch=spec.epoch if spec is not None else None,
        shard_nodes=spec.shard_nodes if spec is not None else None,
        shard_groups=state.shard_groups(documents),
        round_reason=round_.reason if round_ is not None else "",
        samples=None if samples is None else int(samples),
        steps_per_s=seen.steps_per_s,
        step_s=seen.step_s,
        data_epoch=documents.progress.epoch if documents.progress is not None else None,
        progress=None if far is None else far.model_dump(mode="json"),
        seconds={phase: counters.get(f"seconds.{phase}", 0.0) for phase in PHASES},
        checkpoint=checkpoint(documents, seen),
        limits={"straggler_ratio": stragglers.RATIO, "straggler_least_s": stragglers.LEAST_EXCESS_S},
        nodes=nodes(documents, seen),
        rounds=rounds(documents.journal),
        incidents=tuple(incident(each) for each in documents.happened[:MOST_INCIDENTS]),
        curves=seen.curves,
        unreadable=documents.unreadable,
        lost=tuple(state.lost_nodes(documents)),
        departure=None if left is None else left.model_dump(mode="json", exclude={"version"}),
        last_lines=last_lines(documents),
        wall=seen.wall,
        store=store,
    )


def last_lines(documents: RunDocuments) -> tuple[Mapping[str, Any], ...]:
    """What the nodes of the newest incident wrote before they were gone; a few nodes speak for all."""
    last = documents.last_fault
    gone = [node for node in (last.nodes if last is not None else ()) if node not in documents.living_nodes]
    return tuple({"node": node, **tail} for node in gone[:SPEAKERS] for tail in _tails(documents.health.get(node)))


def last_round(documents: RunDocuments, seen: Observed) -> LastRound | None:
    """The last round that trained, of a run that has ended or that all have left."""
    journal = documents.journal
    found = next((entry for entry in reversed(journal) if entry.state is RoundState.ACTIVE), None)
    if found is None or seen.state not in state.OVER:
        return None
    took_s = max(0.0, journal[-1].wall - journal[0].wall) if journal[0].round <= 1 else None
    return LastRound(found.round, found.world_size, len(found.nodes), took_s)


def summary(documents: RunDocuments, seen: Observed) -> RunSummary:
    """The row of a run in the list."""
    last = documents.last_fault
    return RunSummary(
        **_facts(documents, seen),
        nodes=len(documents.living_nodes),
        stragglers=len(state.straggling(documents).ranks),
        last_incident=incident(last) if last is not None else None,
    )


def listing(runs: Sequence[RunSummary], store: StoreStatus, wall: float) -> Listing:
    """The list of all runs."""
    over = (state.SUCCEEDED, state.FAILED, state.STOPPED)

    def order(each: RunSummary) -> tuple[int, bool, str]:
        worst = ORDER.index(each.attention[0].look) if each.attention else len(ORDER)
        return worst, each.state in over, each.run

    return Listing(tuple(sorted(runs, key=order)), store, wall)


def checkpoint(documents: RunDocuments, seen: Observed) -> CheckpointStatus | None:
    """The last checkpoint; None before there is one."""
    saved, counters = documents.saved, documents.counters
    if saved is None:
        return None
    return CheckpointStatus(
        step=saved.step,
        age_s=seen.saved_s,
        bytes=saved.bytes,
        duration_s=saved.duration_s,
        interval_s=state.save_interval_s(documents),
        saved=int(counters.get("save.ok", 0)),
        failed=int(counters.get("save.failed", 0)),
    )


def rounds(journal: Sequence[JournalEntry]) -> tuple[RoundStatus, ...]:
    """The newest transitions, oldest first."""
    told, names = [], 0
    for entry in reversed(journal[-MOST_ROUNDS:]):
        names += len(entry.nodes)
        nodes_ = entry.nodes if names <= MOST_NAMES else ()
        told.append(RoundStatus(entry.round, str(entry.state), entry.wall, entry.reason, entry.world_size, nodes_))
    return tuple(reversed(told))


def incident(each: Incident) -> Mapping[str, Any]:
    """An incident with what follows from it: how long training stood still, what it did to it, whether by plan."""
    told = each.model_dump(mode="json", exclude={"version"})
    return {**told, "total_s": each.total_s, "outcome": each.outcome, "planned": each.planned}


def nodes(documents: RunDocuments, seen: Observed) -> tuple[NodeStatus, ...]:
    """The present nodes and missing members of the newest round, by rank, then those without a rank."""
    taking_part, live = state.members(documents), documents.living_nodes
    judgment, slots, stalls = state.straggling(documents), _slots(documents), state.stalls(documents)
    found = []
    for name, view in live.items():
        health, member = documents.health.get(name), taking_part.get(name)
        group, slot = slots.get(name, (None, None)) if member is not None else (None, None)
        told = _ranks(member, view.record.local_world_size, health, judgment)
        ranks = tuple({**rank, "stall": stalls.get((name, rank["local_rank"]))} for rank in told)
        slot = view.record.shard_slot if slot is None else slot
        metrics, present = health.metrics if health is not None else "", str(view.record.state)
        of = name, view.record.host, present, member is not None, group, slot, metrics
        load = health.load.model_dump(mode="json") if health is not None and health.load is not None else None
        found.append(NodeStatus(*of, _age(seen, name), ranks, load, _tails(health)))
    first = {name: member.first_rank for name, member in taking_part.items()}
    found.sort(key=lambda node: (node.node not in first, first.get(node.node, 0), node.node))
    members = documents.round.members if documents.round is not None and not documents.closed else ()
    nobody = Stragglers(frozenset(), None, "")
    for member in (each for each in members if each.node not in live):
        group, slot = slots.get(member.node, (None, None))
        of = member.node, "", GONE_STATE, True, group, slot, ""
        lost = _ranks(member, member.local_world_size, None, nobody)
        tails = _tails(documents.health.get(member.node))
        found.append(NodeStatus(*of, _age(seen, member.node), lost, tails=tails))
    return tuple(found)


def gpu_busy(load: Mapping[str, Any]) -> float | None:
    """The mean over the GPUs of a ``NodeLoad`` that say how busy they are; None if none does."""
    busy = [each["busy"] for each in load.get("gpus") or () if each.get("busy") is not None]
    return sum(busy) / len(busy) if busy else None


def _tails(health: NodeHealth | None) -> tuple[Mapping[str, Any], ...]:
    return tuple(each.model_dump(mode="json") for each in health.tails) if health is not None else ()


def _slots(documents: RunDocuments) -> Mapping[str, tuple[int, int]]:
    """The members of the newest round by shard group and slot, if groups have several nodes."""
    size = documents.spec.shard_nodes if documents.spec is not None else 1
    named = documents.round.members if documents.round is not None and size > 1 else ()
    return {member.node: divmod(at, size) for at, member in enumerate(named)}


def _age(seen: Observed, name: str) -> float | None:
    return seen.now - seen.arrived[name] if name in seen.arrived else None


def _ranks(
    member: RoundMember | None, count: int, health: NodeHealth | None, judgment: Stragglers
) -> tuple[RankStatus, ...]:
    """The ranks of a node: from its health document, otherwise from the round alone."""
    told = {rank.local_rank: rank for rank in health.ranks} if health is not None else {}
    found: list[RankStatus] = []
    for local in sorted({*range(count), *told}):
        number = None if member is None else member.first_rank + local
        numbers = {"rank": number, "local_rank": local}
        if (rank := told.get(local)) is None:
            found.append({**UNKNOWN, **numbers})
            continue
        slowdown = None if number is None else judgment.slowdown(rank.compute_s)
        found.append({**rank.as_status(), **numbers, "slowdown": slowdown, "straggler": number in judgment.ranks})
    return tuple(found)
