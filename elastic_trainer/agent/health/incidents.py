"""Records each incident for people: what ended a round, and how training went on.

The node of rank 0 reports it when the next round has made its first step. Times are this node's own.

*Runs in* the agent: the deciding thread brings round documents, another the workers' pages; under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import Incident, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.writes import no_survivor
from elastic_trainer.model import Cause, Phase

SILENT_S = 60.0
"""Workers without a step by then have no pages (a script without a Session)."""
_PAUSES = (Phase.RENDEZVOUS, Phase.HEALING, Phase.WAITING)


@dataclass(slots=True)
class _Open:
    """A round that has ended, or is about to."""

    ended: RoundDocument
    at: float
    wall: float
    step: int
    formed_at: float | None
    """When the round that ended was formed; None where nobody knows since when nothing is committed."""
    stepped_at: float | None
    """When this node's workers committed their last step before it; None if they had committed none."""
    paused: tuple[int, float]
    """The first worker of this node, and what it had spent in pauses by then."""
    following: RoundDocument | None = None
    agreed_at: float = 0.0
    all_lost: bool = False
    """No node of the round was left to record its end."""


class Incidents:
    """See the module. ``reached``: the newest step that the run is known to have made before this node came."""

    def __init__(self, node: str, reached: int = 0) -> None:
        self._node, self._reached = node, reached
        self._lock = threading.Lock()
        self._active: RoundDocument | None = None
        self._watches = False
        """Whether the newest active round is one that this node has no part in."""
        self._newest: RoundState | None = None
        self._open: _Open | None = None
        self._done: list[Incident] = []
        self._last: list[Reading] = []
        self._formed_at = 0.0
        self._stepped_at: float | None = None
        """When a worker of this node last committed a step."""
        self._reports = False
        """Whether workers have had pages, as those of a script with a Session do."""

    def see(
        self,
        document: RoundDocument,
        now: float,
        wall: float,
        present: Collection[str] = (),
        *,
        takes_part: bool = True,
    ) -> None:
        """The round document has changed. ``present``: the nodes that are there, as far as known.

        ``takes_part``: whether this node's key is in that round; one of the same name may be an earlier process.
        """
        with self._lock:
            if document.state is RoundState.ACTIVE:
                last = self._active
                self._formed(document, now, wall)
                if last is None or last.number != document.number:
                    self._watches = not takes_part
                    self._formed_at = now
            elif document.state is RoundState.CLOSED:
                self._closed(document, now, wall, present)
            elif not self._watches and self._active is not None and document.member(self._node) is not None:
                self._ended(document, now, wall)
            self._newest = document.state

    def complete(self, readings: Sequence[Reading], now: float) -> list[Incident]:
        """The incidents that are complete."""
        with self._lock:
            self._last = list(readings)
            # A worker that the end of a round frees may be in the next before this node has read of it.
            known = [r for r in readings if self._active is None or r.pulse.round <= self._active.number]
            self._stepped_at = _newest(self._stepped_at, known)
            self._reports |= bool(known)
            current = self._open
            if current is not None and current.following is None:
                of_it = [r for r in readings if r.pulse.round <= current.ended.number]
                current.step = max([current.step, *(r.pulse.step for r in of_it)])  # the last report may be old
                current.stepped_at = _newest(current.stepped_at, of_it)
            elif current is not None and current.following is not None:
                first = [r for r in readings if r.pulse.round >= current.following.number and r.pulse.fresh]
                if first:
                    at = min(r.pulse.first_at for r in first)
                    self._complete(current, at, min(r.pulse.step - r.pulse.fresh for r in first))
                elif now - current.agreed_at > SILENT_S and not readings:
                    self._complete(current, current.agreed_at, current.step, resumed=False)
            done, self._done = self._done, []
            return done

    # ---- with the lock held

    def _ended(self, document: RoundDocument, now: float, wall: float) -> None:
        if self._open is not None and self._open.following is None:
            self._open.ended = document  # a failure overrides a planned change
            return
        self._give_up(now)
        self._begin(document, now, wall)

    def _begin(self, document: RoundDocument, now: float, wall: float) -> None:
        step = max((reading.pulse.step for reading in self._last), default=0)
        formed_at = self._formed_at if self._reports else None
        self._open = _Open(document, now, wall, step, formed_at, self._stepped_at, self._paused(now))

    def _give_up(self, now: float) -> None:
        """The round that followed has ended as well, before anybody saw a step of it."""
        current, self._open = self._open, None
        following = current.following if current is not None else None
        if current is not None and following is not None and following.is_first(self._node):
            record = self._record(current, following, now, current.step)
            self._done.append(record.model_copy(update={"resumed": False}))

    def _formed(self, document: RoundDocument, now: float, wall: float) -> None:
        before, self._active = self._active, document
        if before is None or before.number >= document.number:
            return
        if self._watches:
            if self._newest is RoundState.ACTIVE and no_survivor(before, document):
                reached, paused = self._reached, self._paused(now)
                self._open = _Open(before, now, wall, reached, None, None, paused, document, now, all_lost=True)
            return
        if before.member(self._node) is None:
            return
        if self._open is None or self._open.following is not None:
            self._give_up(now)
            self._begin(before, now, wall)  # its end was not seen
        if self._open is not None:
            self._open.following, self._open.agreed_at = document, now

    def _closed(self, document: RoundDocument, now: float, wall: float, present: Collection[str]) -> None:
        if document.result is RunResult.FAILED and (self._active is not None or not document.members):
            if self._open is None or self._open.following is not None:
                self._give_up(now)
                self._begin(document, now, wall)
            names = [member.node for member in document.members] or sorted(present)
            teller = next((name for name in names if name in present), names[0] if names else None)
            if self._open is not None and teller == self._node:
                self._open.ended = document
                self._done.append(self._record(self._open, None, now, self._open.step))
        self._open = self._active = self._stepped_at = None

    def _complete(self, current: _Open, now: float, from_step: int, *, resumed: bool = True) -> None:
        self._open = None
        following = current.following
        if following is None or not following.is_first(self._node):
            return
        incident = self._record(current, following, now, from_step).model_copy(update={"resumed": resumed})
        if incident.planned:  # they trained on until they changed over: the pause is what it took from them
            incident = incident.model_copy(update={"before_s": 0.0, "detect_s": 0.0})
            (worker, paused_s), (before, paused_before_s) = self._paused(now), current.paused
            if worker == before:
                pause_s = round(max(0.0, paused_s - paused_before_s), 3)
                incident = incident.model_copy(update={"regroup_s": 0.0, "resume_s": pause_s})
            elif current.stepped_at is not None:  # it was restarted: the pause is all behind its last step
                regroup_s = round(max(0.0, current.agreed_at - current.stepped_at), 3)
                incident = incident.model_copy(update={"regroup_s": regroup_s})
        self._done.append(incident)

    def _record(self, current: _Open, following: RoundDocument | None, now: float, from_step: int) -> Incident:
        ended = current.ended
        agreed_at = current.agreed_at if following is not None else now
        cause, nodes, ranks = _changed(ended, following)
        reason = (following.reason if following is not None else "") or ended.reason
        if cause is Cause.NODE_LOST and ended.reason not in reason and any(map(ended.accuses, nodes)):
            reason = f"{reason}: {ended.reason}"  # how it was found: it is silent, or its agent is dead
        before_s = detect_s = 0.0  # without a step before the round was formed, and from then on until it ended
        if current.formed_at is not None:
            since = current.formed_at if current.stepped_at is None else current.stepped_at
            before_s = max(0.0, current.formed_at - since)
            detect_s = max(0.0, current.at - max(since, current.formed_at))
        incident = Incident(
            wall=current.wall,
            by=self._node,
            cause=cause,
            round=ended.number,
            next_round=following.number if following is not None else None,
            reason=reason,
            nodes=nodes,
            ranks=ranks,
            world_before=ended.world_size,
            world_after=following.world_size if following is not None else 0,
            step=current.step,
            steps_lost=max(0, current.step - from_step),
            before_s=round(before_s, 3),
            detect_s=round(detect_s, 3),
            regroup_s=round(max(0.0, agreed_at - current.at), 3),
            resume_s=round(max(0.0, now - agreed_at), 3),
        )
        if not current.all_lost:
            return incident
        lost = {
            "cause": Cause.NODE_LOST,
            "reason": f"all nodes of round {ended.number} were lost",
            "nodes": tuple(sorted(member.node for member in ended.members)),
            "ranks": tuple(range(ended.world_size)),
        }
        return incident.model_copy(update=lost)

    def _paused(self, now: float) -> tuple[int, float]:
        if not self._last:
            return 0, 0.0
        seconds = self._last[0].seconds(now)
        return self._last[0].pid, sum(seconds[phase] for phase in _PAUSES)


def _newest(stepped_at: float | None, readings: Sequence[Reading]) -> float | None:
    """The newest time of a committed step."""
    times = [reading.pulse.stepped_at for reading in readings if reading.pulse.stepped_at]
    return max(times, default=None) if stepped_at is None else max([stepped_at, *times])


def _changed(
    ended: RoundDocument, following: RoundDocument | None
) -> tuple[Cause | None, tuple[str, ...], tuple[int, ...]]:
    """What ended the round, and the nodes and ranks concerned.

    The nodes that are in one of the two rounds only, and the ranks on those that the next one lacks; if there are none,
    those whose workers were started again since, unless all were.
    """
    before = {member.node for member in ended.members}
    after = {member.node: member.incarnation for member in following.members} if following is not None else {}
    cause = following.cause if following is not None and following.cause is not None else ended.cause
    if ended.state is RoundState.DRAINING:
        cause = Cause.NODE_LEFT if before - after.keys() else Cause.NODE_JOINED
    renewed = [each for each in ended.members if after.get(each.node, each.incarnation) != each.incarnation]
    if len(renewed) == len(ended.members) != 1:
        renewed = []
    gone = [each for each in ended.members if following is not None and each.node not in after]
    nodes = before ^ after.keys() if following is not None else set()
    ranks = (rank for m in gone or renewed for rank in range(m.first_rank, m.first_rank + m.local_world_size))
    return cause, tuple(sorted(nodes or {each.node for each in renewed})), tuple(ranks)
