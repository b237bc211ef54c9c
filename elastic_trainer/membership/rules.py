"""The membership rules: from what a node sees and the time, what it should do. Pure.

``decide`` is run by every node that watches the nodes; safety does not depend on who runs it, because its
result is committed by one compare on the round document (DESIGN section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_trainer.membership.documents import (
    Ghost,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
    join_address,
)
from elastic_trainer.model import Incarnation, RecoveryMode


class Action(StrEnum):
    """What to do now."""

    WAIT = "wait"
    FORM = "form"
    BREAK = "break"
    DRAIN = "drain"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Limits:
    """The parameters of the rules; times in seconds."""

    min_nodes: int
    max_nodes: int
    recovery: RecoveryMode = RecoveryMode.RESTART
    last_call_s: float = 3.0
    last_call_limit_s: float = 60.0
    regroup_grace_s: float = 60.0
    join_batch_s: float = 1.0
    join_interval_s: float = 5.0
    deputy_delay_s: float = 0.25
    report_floor_s: float = 10.0
    failure_limit: int = 3
    stalled_rounds: int = 10


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node's key as seen."""

    id: str
    create_revision: int
    mod_revision: int
    record: NodeRecord

    @property
    def incarnation(self) -> Incarnation:
        """The life that this key stands for."""
        return Incarnation(self.create_revision, self.record.life)


@dataclass(frozen=True, slots=True)
class Sightings:
    """When, on this node's monotonic clock, things were first seen as they are now."""

    candidates_since: float = 0.0
    """The set of nodes that are ready for the next round last changed."""
    enough_since: float | None = None
    """At least min nodes have been ready since."""
    newcomers_since: float | None = None
    """There have been newcomers since."""
    round_since: float = 0.0
    """The round document last changed."""
    failing_since: float | None = None
    """A member has been lost, or has left unplanned, since."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision rests on."""

    me: str
    nodes: Mapping[str, NodeView]
    round: RoundDocument | None
    limits: Limits
    sightings: Sightings
    nonce: str
    """A fresh random name for the round that may be formed."""
    suspects: frozenset[str] = field(default_factory=frozenset)
    """Nodes whose agent's port refuses connections: their process is gone."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, why, and when to look again if nothing changes."""

    action: Action
    reason: str
    round: RoundDocument | None = None
    again_in_s: float | None = None


def decide(view: View, now: float) -> Decision:
    """The rules. Every clause says in ``reason`` why it holds."""
    current = view.round
    if current is not None and current.state is RoundState.CLOSED:
        return Decision(Action.WAIT, "the run is closed")
    turn = _turn(view, now)
    if turn is None:
        return Decision(Action.WAIT, "this node is not present")
    if current is None or not live_members(view):
        decision = _first_round(view, now)
    else:
        decision = _next_round(view, current, now)
    if decision.action is Action.WAIT or turn <= 0.0:
        return decision
    return Decision(Action.WAIT, f"a more senior node decides: {decision.reason}", again_in_s=turn)


def _turn(view: View, now: float) -> float | None:
    """Seconds until this node may act: 0 for the most senior, more for its deputies; None if it is not present."""
    present = [
        node for node in by_seniority(view.nodes.values()) if node.id not in view.suspects and not is_ghost(view, node)
    ]
    position = next((i for i, node in enumerate(present) if node.id == view.me), None)
    if position is None:
        return None
    changed = max(view.sightings.candidates_since, view.sightings.round_since, view.sightings.failing_since or 0.0)
    return max(0.0, position * view.limits.deputy_delay_s - (now - changed))


def by_seniority(nodes: Iterable[NodeView]) -> list[NodeView]:
    """Oldest key first."""
    return sorted(nodes, key=lambda node: node.create_revision)


def is_ghost(view: View, node: NodeView) -> bool:
    """Whether this key was left behind by an excluded node and has not changed since."""
    if view.round is None:
        return False
    return Ghost(node=node.id, mod_revision=node.mod_revision) in view.round.ghosts


def live_members(view: View) -> list[tuple[RoundMember, NodeView]]:
    """Members of the round whose very key still exists, in rank order."""
    if view.round is None:
        return []
    return [
        (member, view.nodes[member.node])
        for member in view.round.members
        if member.node in view.nodes
        and view.nodes[member.node].create_revision == member.create_revision
        and not is_ghost(view, view.nodes[member.node])
    ]


def candidates(view: View) -> list[NodeView]:
    """Nodes that are free and willing to take part in the next round: survivors in rank order, then newcomers."""
    willing = [
        node
        for node in by_seniority(view.nodes.values())
        if node.record.state is NodeState.READY
        and _is_free(view, node)
        and node.id not in view.suspects
        and not is_ghost(view, node)
    ]
    order = {member.node: rank for rank, (member, _) in enumerate(live_members(view))}
    return sorted(willing, key=lambda node: order.get(node.id, len(order)))


def _is_free(view: View, node: NodeView) -> bool:
    """Whether this life of the node takes no part in the present round, or its workers have left it."""
    return not _same_life(view, node) or node.record.reported > _number(view)


def _same_life(view: View, node: NodeView) -> bool:
    """Whether the present round means this very life of the node."""
    member = view.round.member(node.id) if view.round else None
    return member is not None and member.incarnation == node.incarnation


def _number(view: View) -> int:
    return 0 if view.round is None else view.round.number


def newcomers(view: View) -> list[NodeView]:
    """Candidates that are not members of the present round."""
    members = {member.node for member, _ in live_members(view)}
    return [node for node in candidates(view) if node.id not in members]


def next_number(view: View) -> int:
    """The number of the round after the present one."""
    return _number(view) + 1


def _first_round(view: View, now: float) -> Decision:
    """Nobody of an earlier round is left: gather min to max nodes, with a last call."""
    limits, ready, seen = view.limits, candidates(view), view.sightings
    if len(ready) >= limits.max_nodes:
        return _form(view, ready, f"all {limits.max_nodes} nodes are here")
    if len(ready) < limits.min_nodes or seen.enough_since is None:
        return Decision(Action.WAIT, f"{len(ready)} of at least {limits.min_nodes} nodes are ready")
    quiet = seen.candidates_since + limits.last_call_s - now
    bound = seen.enough_since + limits.last_call_limit_s - now
    left = min(quiet, bound)
    if left <= 0.0:
        return _form(view, ready, f"{len(ready)} nodes are here and the last call is over")
    return Decision(Action.WAIT, "last call for more nodes", again_in_s=left)


def _next_round(view: View, current: RoundDocument, now: float) -> Decision:
    """Members of the present round are alive: end it, break it, open it to newcomers, or follow it up."""
    if any(node.record.state is NodeState.DONE for _, node in live_members(view)):
        return _ending(view, current)
    if current.state is RoundState.ACTIVE:
        lost = "; ".join(losses(view))
        if lost:
            return Decision(Action.BREAK, lost, broken(current, lost))
        return _planned(view, current, now)
    if current.state is RoundState.DRAINING and current.next is not None:
        return _switching(view, current, current.next)
    return _regroup(view, current, now)


def losses(view: View) -> list[str]:
    """Why the present round cannot go on, one phrase for each member that is lost or has left unplanned.

    While a planned change is under way only those count that the next round needs.
    """
    current = view.round
    if current is None:
        return []
    needed = current.next.members if current.next else current.members
    live = {member.node: node for member, node in live_members(view)}
    phrases = []
    for member in needed:
        node = live.get(member.node) or _newcomer(view, member)
        if node is None:
            phrases.append(f"node {member.node} is gone")
        elif node.record.life != member.life or _left_unplanned(node, current.number):
            phrases.append(f"node {member.node} left the round{_because(node.record.cause)}")
    return phrases


def _newcomer(view: View, member: RoundMember) -> NodeView | None:
    """The node that a planned change takes in as ``member``."""
    node = view.nodes.get(member.node)
    return node if node is not None and node.create_revision == member.create_revision else None


def _left_unplanned(node: NodeView, number: int) -> bool:
    return node.record.acknowledged > number and not node.record.planned


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""


def _planned(view: View, current: RoundDocument, now: float) -> Decision:
    """An active round in which all is well: let nodes leave, take newcomers in, in batches."""
    leaving = [node.id for _, node in live_members(view) if node.record.state is NodeState.DRAINING]
    fresh = newcomers(view)
    room = view.limits.max_nodes - len(current.members) + len(leaving)
    if not leaving:
        if not fresh or room <= 0 or view.sightings.newcomers_since is None:
            return Decision(Action.WAIT, "all is well")
        left = max(
            view.sightings.newcomers_since + view.limits.join_batch_s - now,
            view.sightings.round_since + view.limits.join_interval_s - now,
        )
        if left > 0.0:
            return Decision(Action.WAIT, "collecting newcomers", again_in_s=left)
    joining = [node.id for node in fresh[: max(0, room)]]
    reason = "; ".join(part for part in (_verb(leaving, "leave"), _verb(joining, "join")) if part)
    update = {"state": RoundState.DRAINING, "reason": reason, "next": _after_drain(view, current, joining, reason)}
    return Decision(Action.DRAIN, reason, current.model_copy(update=update))


def _verb(names: list[str], verb: str) -> str:
    if not names:
        return ""
    return f"node {names[0]} {verb}s" if len(names) == 1 else f"nodes {', '.join(names)} {verb}"


def _after_drain(view: View, current: RoundDocument, joining: list[str], reason: str) -> RoundDocument | None:
    """In place: the complete next round. None where workers are restarted, or too few nodes would be left."""
    if view.limits.recovery is RecoveryMode.RESTART:
        return None
    staying = [node for _, node in live_members(view) if node.record.state is NodeState.READY]
    chosen = staying + [view.nodes[name] for name in joining]
    if len(chosen) < view.limits.min_nodes:
        return None
    return _round(view, chosen, reason, last_step=current.last_step, failures=current.failures, stalled=current.stalled)


def _switching(view: View, current: RoundDocument, planned: RoundDocument) -> Decision:
    """A planned change is under way in place: it is over when all that stay have switched."""
    lost = "; ".join(losses(view))
    if lost:
        return Decision(Action.BREAK, lost, broken(current, lost))
    staying = [node for member, node in live_members(view) if planned.member(member.node) is not None]
    behind = [node.id for node in staying if node.record.reported <= current.number]
    if behind:
        return Decision(Action.WAIT, f"waiting for {', '.join(behind)} to reach the agreed step")
    return Decision(Action.FORM, planned.reason, planned)


def _regroup(view: View, current: RoundDocument, now: float) -> Decision:
    """A broken round, or one that is left for a restart: wait for the survivors to be free, then form the next."""
    waited_s = now - view.sightings.round_since
    silent, left = [], []
    for member, node in live_members(view):
        if node.record.life != member.life or node.id in view.suspects or node.record.reported > current.number:
            continue
        bound_s = (
            view.limits.regroup_grace_s if node.record.acknowledged <= current.number else _report_bound_s(view, node)
        )
        if waited_s < bound_s:
            silent.append(node.id)
            left.append(bound_s - waited_s)
    if silent:
        return Decision(Action.WAIT, f"waiting for {', '.join(silent)} to be free", again_in_s=min(left))
    ready = candidates(view)
    if len(ready) < view.limits.min_nodes:
        return Decision(Action.WAIT, f"{len(ready)} of at least {view.limits.min_nodes} nodes are ready")
    if view.limits.recovery is RecoveryMode.IN_PLACE:
        survivors = sum(1 for node in ready if _same_life(view, node))
        ready = ready[: max(view.limits.min_nodes, survivors, len(current.members))]
    return _follow(view, current, ready)


def _report_bound_s(view: View, node: NodeView) -> float:
    """How long a node that has acknowledged may take to free its workers."""
    return max(2.0 * node.record.step_time_s, view.limits.report_floor_s)


def _follow(view: View, current: RoundDocument, ready: list[NodeView]) -> Decision:
    """The round after a broken one, unless the run has failed too often at one place."""
    steps = [node.record.identity.step for node in ready if node.record.identity is not None]
    if not steps:
        return _form(view, ready, current.reason)
    step = max(steps)
    stuck = step == current.last_step
    failures = (current.failures if stuck else 0) + (1 if current.worker_failed else 0)
    stalled = current.stalled + 1 if stuck else 0
    limits = view.limits
    if failures >= limits.failure_limit or stalled >= limits.stalled_rounds:
        what = (
            f"{failures} failures of workers"
            if failures >= limits.failure_limit
            else f"{stalled} rounds in a row ended"
        )
        reason = f"{what} after step {step}, without a step committed since: {current.reason}"
        update = {"state": RoundState.CLOSED, "result": RunResult.FAILED, "reason": reason}
        return Decision(Action.CLOSE, reason, current.model_copy(update=update))
    document = _round(
        view, ready[: limits.max_nodes], current.reason, last_step=step, failures=failures, stalled=stalled
    )
    return Decision(Action.FORM, current.reason, document)


def _ending(view: View, current: RoundDocument) -> Decision:
    """Some member has finished its work: no further round; close when nobody is still at work in this one."""
    live = {member.node: node for member, node in live_members(view)}
    working = [
        name
        for name, node in live.items()
        if node.record.state is not NodeState.DONE and not _is_free(view, node) and name not in view.suspects
    ]
    if working:
        return Decision(Action.WAIT, f"waiting for {', '.join(working)} to finish")
    first = current.members[0].node
    unfinished = [
        m.node for m in current.members if m.node not in live or live[m.node].record.state is not NodeState.DONE
    ]
    succeeded = first not in unfinished
    reason = "all nodes have finished" if not unfinished else f"{', '.join(unfinished)} did not finish"
    result = RunResult.SUCCEEDED if succeeded else RunResult.FAILED
    document = current.model_copy(update={"state": RoundState.CLOSED, "result": result, "reason": reason})
    return Decision(Action.CLOSE, reason, document)


def broken(current: RoundDocument, reason: str, *, worker_failed: bool = False) -> RoundDocument:
    """The round document after a failure.

    A planned change that was under way counts as made, since some ranks may have switched already: what is broken is
    the round that it leads to.
    """
    base = current.next if current.next is not None else current
    ghosts = current.ghosts if current.next is not None else base.ghosts
    update = {
        "state": RoundState.BROKEN,
        "reason": reason,
        "next": None,
        "ghosts": ghosts,
        "worker_failed": worker_failed,
    }
    return base.model_copy(update=update)


def _form(view: View, ready: list[NodeView], reason: str) -> Decision:
    return Decision(Action.FORM, reason, _round(view, ready[: view.limits.max_nodes], reason))


def _round(
    view: View,
    chosen: list[NodeView],
    reason: str,
    *,
    last_step: int | None = None,
    failures: int = 0,
    stalled: int = 0,
) -> RoundDocument:
    """The next round, of ``chosen`` in this order."""
    members, first_rank = [], 0
    for node in chosen:
        size = node.record.local_world_size
        members.append(
            RoundMember(
                node=node.id,
                create_revision=node.create_revision,
                life=node.record.life,
                first_rank=first_rank,
                local_world_size=size,
                role=node.record.role,
            )
        )
        first_rank += size
    head = chosen[0].record
    return RoundDocument(
        epoch=view.round.epoch if view.round else 1,
        number=next_number(view),
        nonce=view.nonce,
        state=RoundState.ACTIVE,
        members=tuple(members),
        store=join_address(head.address, head.store_port),
        ghosts=_ghosts(view, {node.id for node in chosen}),
        reason=reason,
        last_step=last_step,
        failures=failures,
        stalled=stalled,
    )


def _ghosts(view: View, chosen: set[str]) -> tuple[Ghost, ...]:
    """Keys of members that the next round leaves out although their lease still stands."""
    left_out = {node.id: node for _, node in live_members(view)}
    left_out |= {node.id: node for node in view.nodes.values() if is_ghost(view, node)}
    present = {node.id for node in candidates(view)}
    present |= {node.id for node in view.nodes.values() if node.record.state is NodeState.WARMING}
    return tuple(
        Ghost(node=name, mod_revision=node.mod_revision)
        for name, node in sorted(left_out.items())
        if name not in chosen and name not in present
    )
