"""The membership rules: from a node's cluster view and the time, what it should do. Pure.

Every node that watches the nodes runs ``decide``; safety does not depend on which node runs it, because one compare
on the round document commits its result.

First the rules; then what they rest on: how often the run may fail at one step, which node stays out when nodes cannot
reach each other, and how a round document is built.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_trainer.ipc.channel import Identity
from elastic_trainer.membership.cluster_view import (
    ClusterView,
    Limits,
    NodeView,
    accused,
    has_slots,
    in_call,
    in_groups,
    is_ghost,
    lost_members,
    newcomers,
    newest_groups,
    next_number,
    same_life,
)
from elastic_trainer.membership.documents import (
    FAILS_ALIKE,
    Ghost,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
    join_address,
)
from elastic_trainer.model import Cause, RecoveryMode
from elastic_trainer.wording import counted

FALSE_STARTS = 2
"""Consecutive lives that failed at startup in the same way on all nodes, after which the run fails."""
_ALONE = "whose workers alone failed"


class Action(StrEnum):
    """What to do now."""

    WAIT = "wait"
    FORM = "form"
    BREAK = "break"
    DRAIN = "drain"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, why, and when to look again if nothing changes."""

    action: Action
    reason: str
    round: RoundDocument | None = None
    again_in_s: float = math.inf


def decide(view: ClusterView, now: float) -> Decision:
    """The rules. The ``reason`` of each decision says why."""
    current = view.round
    if current is not None and current.state is RoundState.CLOSED:
        return Decision(Action.WAIT, "the run is closed")
    turn = _turn(view, now)
    if turn is None:
        return Decision(Action.WAIT, "this node is not present")
    if current is not None and (view.living_members or _is_ending(view, current)):
        decision = _next_round(view, current, now)
    else:
        decision = _first_round(view, now)
    if decision.action is Action.WAIT or turn <= 0.0:
        return decision
    return Decision(Action.WAIT, f"a more senior node decides: {decision.reason}", again_in_s=turn)


def _turn(view: ClusterView, now: float) -> float | None:
    """Seconds until this node may act: 0 for the most senior, more for its deputies; None if it is not present."""
    position = next((i for i, node in enumerate(view.living) if node.id == view.me), None)
    if position is None:
        return None
    changed = max(view.sightings.candidates_since, view.sightings.round_since, view.sightings.failing_since or 0.0)
    return max(0.0, position * view.limits.deputy_delay_s - (now - changed))


def _first_round(view: ClusterView, now: float) -> Decision:
    """No member of an earlier round is left: gather min to max nodes, with a last call.

    Those that came back in the middle of a call complete it first, as in :func:`_replacing_lost`.
    """
    limits, seen = view.limits, view.sightings
    if decision := _cannot_begin(view):
        return decision
    staying = in_call(view, view.candidates)
    ready = in_groups(view, [node for node in view.candidates if node.record.joinable and node not in staying])
    if (staying := in_groups(view, staying)) and seen.enough_since is not None:
        left = seen.candidates_since + limits.last_call_s - now
        if left > 0.0:
            return Decision(Action.WAIT, "last call for more nodes", again_in_s=left)
        reason = "members of an earlier round are in the middle of a call"
        return Decision(Action.FORM, reason, compose(view, staying[: limits.max_nodes], reason))
    if len(ready) >= limits.max_nodes:
        every = f"all {limits.max_nodes} nodes are" if limits.max_nodes > 1 else "the only node is"
        return _form(view, ready, f"{every} present")
    if len(ready) < limits.min_nodes or seen.enough_since is None:
        return _too_few(view, len(ready))
    quiet = seen.candidates_since + limits.last_call_s - now
    bound = seen.enough_since + limits.last_call_limit_s - now
    left = min(quiet, bound)
    if left <= 0.0:
        return _form(view, ready, f"{counted(len(ready), 'node is', 'nodes are')} present and the last call is over")
    return Decision(Action.WAIT, "last call for more nodes", again_in_s=left)


def _cannot_begin(view: ClusterView) -> Decision | None:
    """As :func:`_cannot_start`, for nodes in place: their workers join no round before they open a Session."""
    records = [node.record for node in view.living]
    what, times = _false_start(records, view.limits.min_nodes)
    if times < FALSE_STARTS:
        return None
    none_yet = RoundDocument(number=0, nonce=view.nonce, state=RoundState.CLOSED, members=())
    return _failed(view.round or none_yet, f"{what}, {FALSE_STARTS} times in a row: see any node's log")


def _too_few(view: ClusterView, usable: int) -> Decision:
    grouped = f" in whole groups of {view.limits.shard_nodes}" if has_slots(view.limits) else ""
    least = counted(view.limits.min_nodes, "node is", "nodes are")
    return Decision(Action.WAIT, f"{usable} of at least {least} ready{grouped}")


def _form(view: ClusterView, ready: list[NodeView], reason: str) -> Decision:
    return Decision(Action.FORM, reason, compose(view, ready[: view.limits.fitting(len(ready))], reason))


def _next_round(view: ClusterView, current: RoundDocument, now: float) -> Decision:
    """Members of the present round are alive: close the run, break the round, plan a change, or form the next round."""
    if _is_ending(view, current):
        return _ending(view, current)
    if current.state is RoundState.ACTIVE:
        if decision := _cannot_start(view, current):
            return decision
        if lost := lost_members(view):
            return _break(current, lost)
        return _planned(view, current, now)
    if current.final:
        return _failed(current, current.reason)
    if current.state is RoundState.DRAINING and current.next is not None:
        return _switching(view, current, current.next)
    return _regroup(view, current, now)


def _cannot_start(view: ClusterView, current: RoundDocument) -> Decision | None:
    """Fail the run when the workers of all members failed at startup in the same way twice in a row."""
    records = [node.record for member, node in view.living_members if node.record.life == member.life]
    what, times = _false_start(records, len(current.members))
    if not times:
        return None
    if times < FALSE_STARTS:
        return Decision(Action.BREAK, what, broken(current, what, worker_failed=True, cause=Cause.WORKER_LOST))
    return _failed(current, f"{what}, {FALSE_STARTS} times in a row: see any node's log")


def _false_start(records: list[NodeRecord], least: int) -> tuple[str, int]:
    """The startup failure that all nodes (at ``least`` that many) report alike, and how often in a row; 0 if they do
    not agree."""
    found = {record.false_start for record in records}
    if len(records) < least or not found or not all(found) or not alike(found):
        return "", 0
    said = min(found, key=lambda each: (": " in each, each))  # what all have said
    what = f"{FAILS_ALIKE} ({said})"
    return what, min(record.false_starts for record in records)


def alike(starts: Collection[str]) -> bool:
    """Whether lives failed at startup in the same way: ``exit code 1``, or with the words of an exception behind it.

    Their numbers may differ, and a worker that left no words may have had the same.
    """
    codes, words = zip(*((code, said) for code, _, said in (each.partition(": ") for each in starts)), strict=True)
    return len(set(codes)) == 1 and len({re.sub(r"0x[0-9a-f]+|\d+", "#", each) for each in words if each}) <= 1


def _failed(current: RoundDocument, reason: str) -> Decision:
    """Close the run as failed."""
    update = {"state": RoundState.CLOSED, "result": RunResult.FAILED, "reason": reason, "next": None}
    return Decision(Action.CLOSE, reason, current.model_copy(update=update))


def _break(current: RoundDocument, lost: dict[str, str]) -> Decision:
    reason = "; ".join(lost.values())
    return Decision(Action.BREAK, reason, broken(current, reason, cause=Cause.NODE_LOST, lost=tuple(lost)))


def _planned(view: ClusterView, current: RoundDocument, now: float) -> Decision:
    """A healthy active round: let nodes leave and add newcomers, in batches."""
    alive = [node for _, node in view.living_members]
    leaving = [node.id for node in alive if node.record.state is NodeState.DRAINING]
    # In restart mode the present round may test whether the others succeed without this process of a node.
    tested = current.left_out if view.limits.recovery is RecoveryMode.RESTART else None
    fresh = [node for node in newcomers(view) if node.id != tested or node.record.ended_by is None]
    staying = len(current.members) - len(leaving)
    able = in_groups(view, [node for node in alive if node.id not in leaving] + fresh)
    size = view.limits.fitting(len(able))
    chosen = able[: size if has_slots(view.limits) else max(size, staying)]
    joining = [node.id for node in chosen if node in fresh]
    spare = 0 < size < staying  # in the middle of the script's call all survivors continued, whatever sizes are allowed
    if not leaving and not spare:
        if not joining or view.sightings.newcomers_since is None:
            return Decision(Action.WAIT, "all is well")
        left = max(
            view.sightings.newcomers_since + view.limits.join_batch_s - now,
            view.sightings.round_since + view.limits.join_interval_s - now,
        )
        if left > 0.0 and len(current.members) >= view.limits.min_nodes:
            return Decision(Action.WAIT, "collecting newcomers", again_in_s=left)
    dropped = [node.id for node in alive if node.id not in leaving and node not in chosen]
    most = counted(size, "node")
    changes = (
        _verb(leaving, "leave"),
        _verb(joining, "join"),
        _spare(view, dropped) if has_slots(view.limits) else f"a round may have {most}" if spare else "",
    )
    reason = "; ".join(change for change in changes if change)
    update = {"state": RoundState.DRAINING, "reason": reason, "next": _after_drain(view, current, chosen, reason)}
    return Decision(Action.DRAIN, reason, current.model_copy(update=update))


def _verb(names: list[str], verb: str) -> str:
    if not names:
        return ""
    return f"node {names[0]} {verb}s" if len(names) == 1 else f"nodes {', '.join(names)} {verb}"


def _spare(view: ClusterView, names: list[str]) -> str:
    """A phrase that names the nodes without a whole group; empty if there are none."""
    slots = (f"{name} (place {view.nodes[name].record.shard_slot})" for name in names)
    return f"without a whole shard group: {', '.join(slots)}" if names else ""


def _after_drain(
    view: ClusterView, current: RoundDocument, chosen: list[NodeView], reason: str
) -> RoundDocument | None:
    """In place: the complete next round. None in restart mode, or if too few nodes would be left or all that hold the
    shards of a slot would leave: the state must be saved before they are gone."""
    if view.limits.recovery is RecoveryMode.RESTART:
        return None
    members = {node.id for _, node in view.living_members}
    chosen = in_groups(
        view, [node for node in chosen if node.id not in members or node.record.state is NodeState.READY]
    )
    held = {node.record.shard_slot for node in chosen if node.id in members}
    all_held = len(held) == view.limits.shard_nodes if has_slots(view.limits) else bool(held)
    if not all_held or view.limits.fitting(len(chosen)) != len(chosen):
        return None
    return compose(view, chosen, reason, carried(current))


def _switching(view: ClusterView, current: RoundDocument, planned: RoundDocument) -> Decision:
    """A planned change is in progress in place: it is over when all remaining members have switched."""
    if lost := lost_members(view):
        return _break(current, lost)
    names = {member.node for member in planned.members}
    staying = [node for member, node in view.living_members if member.node in names]
    behind = [node.id for node in staying if node.record.reported <= current.number]
    if behind:
        return Decision(Action.WAIT, f"waiting for {', '.join(behind)} to reach the agreed step")
    return Decision(Action.FORM, planned.reason, planned)


def _regroup(view: ClusterView, current: RoundDocument, now: float) -> Decision:
    """A round that is broken or drains for a restart: wait until the survivors are free, then form the next."""
    waited_s = now - view.sightings.round_since
    # Without those that may hold a newer step than the free survivors, steps would be lost.
    free = [each.record.identity for each in view.candidates if same_life(view, each)]
    newest = max((identity.step for identity in free if identity is not None), default=-1)
    silent, left = [], []
    for member, node in view.living_members:
        record = node.record
        if record.life > member.life or node.id in view.suspects or record.reported > current.number or record.stuck:
            continue
        bound_s = _bound_s(view, current, node, newest)
        if waited_s < bound_s:
            silent.append(f"{node.id} ({node.record.busy})" if node.record.busy else node.id)
            left.append(bound_s - waited_s)
    # A member that did not answer has twice as long as the last survivor took to be free to prove that it lives: on a
    # busy machine all answers come late.
    took_s = view.sightings.candidates_since - view.sightings.round_since
    grace_s = min(max(view.limits.suspect_grace_s, 2.0 * took_s), view.limits.suspect_grace_limit_s)
    if suspected := [node.id for node in accused(view) if waited_s < grace_s]:
        silent += suspected
        left.append(grace_s - waited_s)
    if silent:
        return Decision(Action.WAIT, f"waiting for {', '.join(silent)} to be free", again_in_s=min(left))
    ready = view.candidates
    if (usable := len(in_groups(view, ready))) < view.limits.min_nodes:
        return _too_few(view, usable)
    return _follow(view, current, ready)


def _bound_s(view: ClusterView, current: RoundDocument, node: NodeView, newest: int) -> float:
    """How long ``node`` may take to leave the round after its end, in seconds.

    ``newest``: the newest step that a free survivor holds, -1 if none does.
    """
    if current.state is RoundState.DRAINING and view.limits.recovery is RecoveryMode.IN_PLACE:
        return math.inf  # by agreement: its workers finish the step and save a checkpoint
    if view.limits.recovery is RecoveryMode.IN_PLACE and (node.record.busy or node.record.committed > newest):
        return math.inf  # its agent kills workers that stay without a reason; if the agent is dead, its lease ends
    if node.record.acknowledged <= current.number:
        return view.limits.regroup_grace_s
    return max(2.0 * node.record.step_time_s, view.limits.report_floor_s)


def _follow(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> Decision:
    """The round after one that is over, unless the run has failed too often at one step."""
    restarts = view.limits.recovery is RecoveryMode.RESTART
    usual = ready if restarts else _replacing_lost(view, current, ready)
    reason, cause = _what_was_lost(view, current, usual)
    tally = count_lives(view, current) if restarts else count(view, current, usual)
    failed_again = not restarts or tally.failures > current.failures
    verdict = tally.verdict(view.limits) if failed_again else ""
    suspect = _suspect(view, tally, ready) if restarts and verdict else None
    absent, why = suspect, (f"node {suspect.id} is excluded, {_ALONE}: {verdict}" if suspect is not None else "")
    if not restarts:
        absent, why = _absent(view, current, ready, _fitting(view, usual, view.limits.max_nodes), tally)
    most = view.limits.max_nodes
    if verdict and suspect is None:
        most = tally.fewest - 1
        fewer = _without(view, current, ready, absent, most)
        if absent is None or tally.failures >= view.limits.failure_limit or not 0 < len(fewer) <= most:
            return _failed(current, f"{verdict}: {reason}")
        # Fewer than in any round since the last step may train. Each count that begins anew has fewer nodes: it ends.
        tally = replace(tally, stalled=0)
    if absent is not None:
        ready = [node for node in ready if node is not absent]
        reason = f"{why}: {reason}"
    ready = _fitting(view, ready if restarts else _replacing_lost(view, current, ready), most)
    if not ready:
        return Decision(Action.WAIT, "the survivors form no whole group for the script's call that they are in")
    if (pair := apart(ready)) is not None:
        return Decision(Action.WAIT, f"nodes {pair[0]} and {pair[1]} cannot reach each other, and both are needed")
    if has_slots(view.limits):
        spares = [node.id for node in view.candidates if same_life(view, node) and node not in ready]
        reason = "; ".join(filter(None, (reason, _spare(view, spares))))
    document = compose(
        view,
        ready,
        reason,
        tally,
        left_out=absent.id if absent is not None else None,
        cause=cause,
    )
    return Decision(Action.FORM, reason, document)


def _what_was_lost(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> tuple[str, Cause | None]:
    """Why there is a next round: the nodes that are lost, rather than the node that noticed first."""
    here = {node.id for node in view.candidates}
    members = view.living_members
    starting = {node.id for _, node in members if node.record.state is NodeState.WARMING}
    stuck = {node.id for _, node in members if node.record.stuck}
    gone = [member.node for member in current.members if member.node not in here | starting | stuck]
    if gone and current.state is RoundState.BROKEN:
        return _lost(gone), Cause.NODE_LOST
    cause = current.cause
    later = {node.id: node.record for member, node in members if node.record.life > member.life}
    failed = starting | (later.keys() - {node.id for node in ready if node.record.planned})
    failed -= {name for name, record in later.items() if record.ended_by is None}  # whose agent has begun them anew
    if failed and cause in (Cause.CONTACT_LOST, Cause.NODE_LOST):  # others noticed before its agent
        hung = any(node.id in failed and node.record.ended_by is Cause.WORKER_HUNG for _, node in members)
        cause = Cause.WORKER_HUNG if hung else Cause.WORKER_LOST
    return _lost(gone) if gone else current.reason, cause


def _lost(names: list[str]) -> str:
    return f"node {names[0]} was lost" if len(names) == 1 else f"nodes {', '.join(names)} were lost"


def _replacing_lost(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> list[NodeView]:
    """In place after a failure: add newcomers only to replace lost nodes, or if too few are left.

    Survivors in the middle of the script's call complete it by themselves, however few they are: a newcomer could not
    join them there, and all would wait for each other. A planned change adds newcomers after the call. A newcomer that
    a planned change has named, but that never joined, is not a survivor.
    """
    if together := in_call(view, ready):
        staying = in_groups(view, together)
        if not staying or in_call(view, staying):  # else nobody of a whole group is in the call
            return staying
    survivors = [node for node in ready if same_life(view, node) and not node.record.newcomer]
    joinable = in_groups(view, [node for node in ready if node.record.joinable])
    if not view.limits.fitting(len(joinable)):
        return in_groups(view, survivors)  # without those in the middle of a step too few are left
    most = max(view.limits.min_nodes, sum(node.record.joinable for node in survivors), len(current.members))
    return joinable[: most - most % view.limits.shard_nodes]


def _suspect(view: ClusterView, tally: FailureBudget, ready: list[NodeView]) -> NodeView | None:
    """The one node whose own workers failed too often at one step, if the others are enough to continue without it.

    The cause may be the machine. If it was the batch, the next failure at that step is on another node, and ends the
    run.
    """
    if tally.failures != view.limits.failure_limit or len(tally.culprits) != 1 or len(ready) <= view.limits.min_nodes:
        return None
    return next((node for node in ready if node.id in tally.culprits), None)


def _absent(
    view: ClusterView, current: RoundDocument, ready: list[NodeView], usual: list[NodeView], tally: FailureBudget
) -> tuple[NodeView | None, str]:
    """The node to leave out because members do not reach each other, and why in words; None if the rest is too few.

    One of ``usual``, who would form the next round, that was in the round that failed; one of ``ready`` may take its
    place.
    """
    tried = [node for node in usual if current.member(node.id) is not None]
    # The network may let the agents through and not the workers: if no node is named, a round without the last to come
    # shows whether it was the cause.
    named = left_out(tried, tally.stalled)
    culprit = absent = named or (tried[-1] if tried and current.unformed >= UNFORMED_ROUNDS else None)
    if [node for node in ready if node.record.identity is not None] == [culprit]:  # the others would begin again
        absent = next((node for node in reversed(tried) if node is not culprit), None)
    if (
        absent is None
        or culprit is None
        or len(_without(view, current, ready, absent, view.limits.max_nodes)) < view.limits.min_nodes
    ):
        return None, ""
    if named is not None:
        why = f"as {named.record.cause}" if names_itself(named) else f"which others cannot reach ({HINT})"
        instead = "" if absent is named else f"instead of node {named.id}, which alone holds the training state, "
        return absent, f"node {absent.id} is excluded, {instead}{why}"
    tries = f"{counted(current.unformed, 'round')} in a row did not form and no node is named"
    return absent, f"node {absent.id}, which joined last, is left out on trial: {tries}"


def _without(
    view: ClusterView, current: RoundDocument, ready: list[NodeView], absent: NodeView | None, most: int
) -> list[NodeView]:
    """In place: who of ``ready`` would form a round of at most ``most`` nodes without ``absent``."""
    others = [node for node in ready if node is not absent]
    return _fitting(view, _replacing_lost(view, current, others), most)


def _fitting(view: ClusterView, ready: list[NodeView], most: int) -> list[NodeView]:
    """As many of ``ready`` as a round may have, at ``most``, in their order; a spare is never the only holder of the
    newest step.

    In the middle of a call all survivors stay; a planned change follows, see ``_planned``.
    """
    if in_call(view, ready) or not all(node.record.joinable for node in ready if same_life(view, node)):
        return ready[: view.limits.max_nodes]
    held = {node.id: identity.step for node in ready if (identity := node.record.identity) and same_life(view, node)}
    return newest_groups(view.limits, ready, view.limits.fitting(min(len(ready), most)), held)


def _ending(view: ClusterView, current: RoundDocument) -> Decision:
    """A member has finished its work: form no further round; close the run when no member still works in this one.

    Once all ranks have passed the end of the training the run has succeeded, whoever leaves or fails afterwards.
    Scripts without a Session do not say that they have: then rank 0's node decides.
    """
    lives = _lives(view, current)
    working = [
        name
        for name, node in lives.items()
        if node.record.state is not NodeState.DONE
        and node.record.reported <= current.number
        and name not in view.suspects
    ]
    if working:
        return Decision(Action.WAIT, f"waiting for {', '.join(working)} to finish")
    first = current.members[0].node
    unfinished = [
        m.node for m in current.members if m.node not in lives or lives[m.node].record.state is not NodeState.DONE
    ]
    passed = _has_passed(view, current)
    reason = "all nodes have finished" if not unfinished else f"{', '.join(unfinished)} did not finish"
    reason += ", but all ranks had passed the end of the training" if unfinished and passed else ""
    result = RunResult.SUCCEEDED if passed or first not in unfinished else RunResult.FAILED
    document = current.model_copy(update={"state": RoundState.CLOSED, "result": result, "reason": reason})
    return Decision(Action.CLOSE, reason, document)


def _lives(view: ClusterView, current: RoundDocument) -> dict[str, NodeView]:
    """Members that are still in the life that the round names, even if they lost their lease and have a new key."""
    return {
        member.node: view.nodes[member.node]
        for member in current.members
        if member.node in view.nodes and view.nodes[member.node].record.life == member.life
    }


def _is_ending(view: ClusterView, current: RoundDocument) -> bool:
    """Whether a member has finished, or all ranks have passed the end. What a member did counts even if it has lost its
    lease since where it decides the run's result."""
    if _has_passed(view, current) or any(node.record.state is NodeState.DONE for _, node in view.living_members):
        return True
    head = _lives(view, current).get(current.members[0].node) if current.members else None
    return head is not None and head.record.state is NodeState.DONE


def _has_passed(view: ClusterView, current: RoundDocument) -> bool:
    """Whether all ranks have passed the end of the training, as far as a member that is present knows."""
    return any(m.node in view.nodes and view.nodes[m.node].record.passed for m in current.members)


# ---- how often the run may fail at one step


@dataclass(frozen=True, slots=True)
class FailureBudget:
    """Failures since the job last made progress, which was to ``step`` (None: no step yet).

    The round document carries the count, for the whole run: a poison batch would kill one node after another, and a
    dead network must not keep it retrying for ever.
    """

    step: int | None
    failures: int
    stalled: int
    position: Identity | None = None
    """The job's position in the data, with the samples of the next step."""
    culprits: tuple[str, ...] = ()
    """In restart mode: the nodes whose own workers failed there."""
    fewest: int = 0
    """The size in nodes of the smallest round that was tried since then; 0 for none."""

    def verdict(self, limits: Limits) -> str:
        """Why the run has to end; empty if it may continue."""
        if self.failures >= limits.failure_limit:
            what = f"{self.failures} worker failures"
        elif self.stalled >= limits.stalled_rounds:
            what = f"{self.stalled} consecutive rounds ended"
        else:
            return ""
        if self.step is None:
            return f"{what} before the first step"
        samples, position = "", self.position
        if position is not None and position.batch:  # each epoch has its own order
            last = position.samples + position.batch - 1
            samples = f" (epoch {position.epoch}, samples {position.samples} to {last} of its order)"
        return f"{what} after step {self.step}, without a step committed since{samples}"


UNSPENT = FailureBudget(None, 0, 0)
"""The budget of a run that starts."""


def carried(current: RoundDocument) -> FailureBudget:
    """The counts as ``current`` carries them."""
    fewest = current.fewest or len(current.members)
    return FailureBudget(current.last_step, current.failures, current.stalled, fewest=fewest)


def count(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> FailureBudget:
    """The counts after the end of the present round, whose successor will consist of ``ready``."""
    if current.state is RoundState.DRAINING:
        return carried(current)
    ended = [node for member, node in view.living_members if node.record.life > member.life]
    # Live nodes know the exact progress; of a dead node it is known only if its workers had heartbeat pages.
    known = [node.record.identity for node in ready if node.record.identity is not None]
    known = known or [node.record.reached for node in ended if node.record.reached is not None]
    position = max(known, key=lambda each: each.step, default=None)
    failed = int(current.worker_failed or any(node.record.ended_by for node in ended))  # else they were begun anew
    if position is not None and (current.last_step is None or position.step > current.last_step):
        return FailureBudget(position.step, failed, 0, position)
    fewest = carried(current).fewest
    return FailureBudget(current.last_step, current.failures + failed, current.stalled + 1, position, fewest=fewest)


def count_lives(view: ClusterView, current: RoundDocument) -> FailureBudget:
    """The counts in restart mode: consecutive lives that ended with a worker failure after the same step.

    Each life starts at a checkpoint, so one that ends before that step says nothing about it: such failures come from
    machines, at any step. A life that ended with the loss of a node says nothing about the step either.
    """
    before = FailureBudget(current.last_step, current.failures, current.stalled, culprits=current.culprits)
    ended = [node for member, node in view.living_members if node.record.life > member.life]
    reached = [node.record.reached for node in ended if node.record.reached is not None]
    position = max((each for each in reached if each.round == current.number), key=lambda each: each.step, default=None)
    culprits = {node.id for node in ended if node.record.ended_by is Cause.WORKER_LOST}
    if current.state is RoundState.DRAINING or position is None or not culprits or len(ended) < len(current.members):
        return before
    if position.step != current.last_step:
        return FailureBudget(position.step, 1, 0, position, tuple(sorted(culprits)))
    return FailureBudget(
        position.step, current.failures + 1, 0, position, tuple(sorted(culprits.union(current.culprits)))
    )


# ---- nodes that cannot reach each other


FAILED_ROUNDS = 2
"""Consecutive rounds without a committed step after which the report of one side alone is enough."""
UNFORMED_ROUNDS = 4
"""Consecutive rounds that could not be formed after which the last to come is left out, though nobody names it."""
HINT = "to check, run 'elastic-trainer doctor --endpoint HOST:2379 --run-id check --peers 2' on both"


def left_out(tried: list[NodeView], stalled: int) -> NodeView | None:
    """The node that most others could not reach, the last one in case of a tie; None if all may stay.

    Two nodes that cannot reach each other may both reach the store and all other nodes, so no lease ends and no agent
    is found dead; yet no round with both of them can ever form.

    ``tried`` were in the round that failed, in this order. Two nodes that report each other count at once; a node that
    only others report may just have been slow for a moment. One that names itself knows better than all others.
    """
    if culprits := [node for node in tried if names_itself(node)]:
        return culprits[-1]
    pairs = _named(tried)
    named = Counter(name for node, name in pairs if stalled >= FAILED_ROUNDS or (name, node) in pairs)
    most = max(named.values(), default=0)
    return next((node for node in reversed(tried) if most and named[node.id] == most), None)


def names_itself(node: NodeView) -> bool:
    """Whether it knows that others cannot reach its workers; its ``cause`` says why."""
    return node.id in node.record.unreachable


def blamed(tried: str, others: Mapping[str, NodeRecord]) -> str | None:
    """The one of ``others`` that a worker did not reach at the address ``tried``; None if that is not known.

    Who announces that address alone, or the only one that there is. A worker that waited in vain tried none: the other
    may have died.
    """
    if not tried:
        return None
    found = [name for name, record in others.items() if record.address == tried] or list(others)
    return found[0] if len(found) == 1 else None


def cannot_reach(node: str, other: str, announced: str, tried: str, why: str) -> str:
    """The sentence for people; ``tried``: where ``node`` looked for ``other``, if known."""
    at = f"{announced}, which {other} announces"
    if tried not in ("", announced):
        at = f"{tried}, which its worker published, while its agent announces {announced}"
    return f"node {node} cannot reach node {other} at {at} ({why}); {HINT}"


def misleads(node: str, interfaces: str) -> str:
    """The sentence about a node whose gloo was bound to loopback interfaces by the user."""
    return (
        f"workers of node {node} publish 127.0.0.1, which no other host reaches: GLOO_SOCKET_IFNAME={interfaces};"
        " unset it there, or name an interface that other hosts reach"
    )


def apart(ready: list[NodeView]) -> tuple[str, str] | None:
    """Two of ``ready`` that report each other: a round with both could not form."""
    named = _named(ready)
    return min(((node, name) for node, name in named if (name, node) in named), default=None)


def _named(ready: list[NodeView]) -> set[tuple[str, str]]:
    """Pairs of ``ready``: the first could not reach the second."""
    present = {node.id for node in ready}
    return {(node.id, name) for node in ready for name in node.record.unreachable if name in present - {node.id}}


# ---- round documents


def compose(
    view: ClusterView,
    chosen: list[NodeView],
    reason: str,
    budget: FailureBudget = UNSPENT,
    *,
    left_out: str | None = None,
    cause: Cause | None = None,
) -> RoundDocument:
    """The next round, with ``chosen`` as members in this order; ``cause`` ended the previous one."""
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
        last_step=budget.step,
        failures=budget.failures,
        stalled=budget.stalled,
        fewest=min(budget.fewest or len(members), len(members)),
        unformed=view.round.unformed if view.round is not None and view.round.state is RoundState.BROKEN else 0,
        culprits=budget.culprits,
        left_out=left_out,
        cause=cause,
    )


def _ghosts(view: ClusterView, chosen: set[str]) -> tuple[Ghost, ...]:
    """Keys of members that the next round excludes although their leases are still alive."""
    left_out = {node.id: node for _, node in view.living_members}
    left_out |= {node.id: node for node in view.nodes.values() if is_ghost(view, node)}
    present = {node.id for node in view.candidates}
    present |= {node.id for node in view.nodes.values() if node.record.state is NodeState.WARMING}
    return tuple(node.ghost for name, node in sorted(left_out.items()) if name not in chosen and name not in present)


def broken(
    current: RoundDocument,
    reason: str,
    *,
    worker_failed: bool = False,
    cause: Cause | None = None,
    suspects: tuple[Ghost, ...] = (),
    lost: tuple[str, ...] = (),
    unformed: bool = False,
    final: bool = False,
) -> RoundDocument:
    """The round document after a failure; ``suspects`` are excluded until they write their keys.

    ``unformed``: ranks did not reach each other when its groups were to be formed.

    A planned change that was in progress counts as made, since some ranks may have switched already: the broken round
    is the one that it leads to.
    """
    base = current.next if current.next is not None else current
    ghosts = current.ghosts if current.next is not None else base.ghosts
    update = {
        "state": RoundState.BROKEN,
        "reason": reason,
        "next": None,
        "ghosts": (*ghosts, *suspects),
        "worker_failed": worker_failed,
        "unformed": base.unformed + 1 if unformed else 0,
        "final": final,
        "cause": cause,
        "lost": lost or tuple(ghost.node for ghost in suspects),
    }
    return base.model_copy(update=update)
