"""Leads this node's workers through rounds in place: sends their reports to the run, and its decisions to them. Pure.

Each event is a method of :class:`Conductor`: a worker's message or end, a new round, the start of workers, a suspicion.
What follows is left in its ``outbox``: effects, in order, and calls at later times. A thread
(:mod:`~elastic_trainer.agent.workers.conductor_shell`) or a simulator plays one event at a time and performs what
follows. Also here is what it decides with: the workers of one life (``Life``), how those leave a round that is over
(``Release``), and when the node stays out of rounds (``Quarantine``, ``Backoff``).

*Owns* the table of workers. *Fails by* nothing: a worker that breaks the protocol is treated as lost.
*Invariant*: a life of this node's workers ends once; messages of its workers are ignored after that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.agent.workers.hang_rules import LATE, AnswerDelays, starved_s
from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.ipc.channel import (
    Drain,
    Evicted,
    Exit,
    Failed,
    Formation,
    Identity,
    Leaving,
    Message,
    Over,
    Pong,
    Progress,
    Ready,
    Welcome,
)
from elastic_trainer.membership.documents import (
    Ghost,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.rules import FAILED_ROUNDS, UNFORMED_ROUNDS, blamed, cannot_reach, misleads
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.model import Cause

if TYPE_CHECKING:
    from elastic_trainer.ipc.channel import Connection


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The node whose workers are led. ``base`` is the constant part of the node's record.

    A worker has ``sever_timeout_s`` seconds to leave a round that is over.
    """

    run: str
    node: str
    base: NodeRecord
    sever_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class FalseStart:
    """How the last life failed, and how many consecutive lives failed in that way."""

    what: str
    count: int

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the node's record."""
        return {"false_start": self.what, "false_starts": self.count}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the conductor reads when it needs it; none of it waits or fails.

    ``create_revision()`` is that of the node's key. ``why_hung(pid)`` says why a process that has ended was killed as
    hung, once; ``committed(pid)`` is the round and step on its page; ``busy(pid)`` says why it is still in a round that
    is over, "" if it has no reason; ``queued_s(pid)`` how long each of its threads has waited for a CPU.
    """

    create_revision: Callable[[], int]
    why_hung: Callable[[int], str | None]
    committed: Callable[[int], tuple[int, int] | None]
    busy: Callable[[int], str]
    queued_s: Callable[[int], Mapping[str, float]]


# ---- what follows from an event


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to a worker; if it is gone, its end is another event."""

    connection: Connection
    message: Message


@dataclass(frozen=True, slots=True)
class Announce:
    """Write ``record`` to the node's key as soon as possible; it replaces one that is still pending."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class BreakRound:
    """Write ``record`` and break the round of ``failure``, in one write if possible.

    After ``within_s`` seconds the break is dropped: a suspicion is outdated by then.
    """

    failure: RoundFailure
    record: NodeRecord
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """The nodes that have a key but cannot be reached from here, None if that is unknown; the records of all nodes."""

    missing: tuple[str, ...] | None = None
    records: Mapping[str, NodeRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out whether ``nodes`` can be reached, in another thread, and play ``answered``."""

    nodes: tuple[str, ...]
    answered: Callable[[Reached], None]


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process that is blocked in a round that is over."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Rank 0 of the run has reported its progress."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log: ``event`` at ``level``."""

    level: str
    event: str
    fields: Mapping[str, Any]


Effect = Send | Announce | BreakRound | Ask | Kill | ReportProgress | Note


@dataclass(slots=True)
class Outbox:
    """What follows from the event that is played: effects, in order, and one call for each key at a later time."""

    now: float = 0.0
    """Monotonic time of the event."""
    effects: deque[Effect] = field(default_factory=deque)
    calls: dict[object, tuple[float, Callable[[], None]]] = field(default_factory=dict)

    def add(self, effect: Effect) -> None:
        self.effects.append(effect)

    def log(self, event: str, level: str = "info", **fields: Any) -> None:
        self.effects.append(Note(level, event, fields))

    def later(self, key: object, seconds: float, call: Callable[[], None]) -> None:
        """Make ``call()`` in ``seconds``, in the place of another one of this ``key``."""
        self.calls[key] = self.now + seconds, call

    def drop(self, key: object) -> None:
        self.calls.pop(key, None)

    def play_due(self) -> None:
        """Make the calls that are due."""
        for key in [key for key, (at, _) in self.calls.items() if at <= self.now]:
            if key in self.calls and self.calls[key][0] <= self.now:
                self.calls.pop(key)[1]()

    @property
    def next_at(self) -> float:
        """Monotonic time of the next call."""
        return min((at for at, _ in self.calls.values()), default=math.inf)


# ---- the workers of one life


ENOUGH_STEPS = 10
LONGEST_S = 60.0
DOUBLINGS = 6
"""More lives would exceed :data:`LONGEST_S`."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Consecutive lives that ended before they had committed :data:`ENOUGH_STEPS` steps."""

    count: int = 0

    def after(self, steps: int) -> Backoff:
        """The back-off after a life of ``steps`` committed steps."""
        return Backoff(0 if steps >= ENOUGH_STEPS else self.count + 1)

    def back_off_s(self) -> float:
        """Seconds to wait before joining: 0 after the first such life, then 1, 2, 4, ... up to a minute."""
        doublings = min(self.count - 2, DOUBLINGS)
        return 0.0 if doublings < 0 else min(LONGEST_S, 2.0**doublings)


@dataclass(slots=True)
class Worker:
    """One connected worker and its last messages."""

    connection: Connection
    pid: int
    local_rank: int
    life: int
    ready: Ready | None = None
    left: Leaving | None = None
    sent_formation: int = 0
    sent_over: int = 0
    sent_drain: int = 0
    offered: int = 0
    """The round in which a planned change would give it a rank."""
    heard_at: float = 0.0
    """Monotonic time of its last message; 0 before the watchdog has seen it."""
    busy: str = ""
    """Why it is still in a round that is over, if known."""
    pinged_at: float = 0.0
    """Monotonic time of the first unanswered ping; 0: there is none."""
    queued: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each of its threads had waited for a CPU at that time."""
    delays: AnswerDelays = field(default_factory=AnswerDelays)
    """How long its answers have taken."""
    stuck: bool = False
    """Whether it hung while others waited for it, and has not been free since."""
    unread: deque[Message] = field(default_factory=deque)
    """What it has said behind a message that waits for an answer, and first that message."""
    inside: int = 0
    """The newest round that it may have entered: it was sent its rank and had no reason to refuse."""

    def ponged(self, now: float) -> None:
        if self.pinged_at:
            self.delays.add(now - self.pinged_at, now)
        self.pinged_at = 0.0

    def free_for(self) -> int:
        """The lowest round number that this worker is free for; 0 before it is ready.

        This skips a round that was over before the worker was sent its rank: it will report nothing about that one.
        """
        if self.ready is None:
            return 0
        unmet = self.sent_over + 1 if self.inside < self.ready.number else 0
        return max(self.ready.number, unmet)

    def stays_in(self, number: int) -> bool:
        """Whether it may still be in a round up to ``number``; one that joined a later round never reports that."""
        return 0 < self.inside <= number and self.free_for() <= number


@dataclass(slots=True)
class Life:
    """One start of this node's workers."""

    number: int
    size: int
    workers: dict[int, Worker] = field(default_factory=dict)
    ended: bool = False
    first_step: int | None = None
    reached: Identity | None = None
    """The known progress of the job in this life."""
    joins_at: float = 0.0
    """Monotonic time before which this node does not join."""

    @property
    def steps(self) -> int:
        """Steps known to have been committed in this life."""
        return 0 if self.first_step is None or self.reached is None else self.reached.step - self.first_step

    def set_progress(self, position: Identity) -> None:
        """A worker has reported its progress."""
        self.first_step = position.step if self.first_step is None else self.first_step
        if self.reached is None or position.step >= self.reached.step:
            self.reached = position

    def came_to(self, number: int, step: int) -> None:
        """A worker of round ``number`` holds the state after ``step``, whatever its last report says."""
        if self.reached is None or step > self.reached.step:
            self.reached = Identity(round=number, step=step)

    # ---- the node's state

    @property
    def reports(self) -> list[Ready]:
        """The last reports of the workers that are ready."""
        return [worker.ready for worker in self.workers.values() if worker.ready is not None]

    def may_join(self, now: float) -> bool:
        """Whether all workers are ready and the node may join at monotonic time ``now``."""
        whole = bool(self.workers) and len(self.reports) == self.size
        return whole and not self.ended and now >= self.joins_at

    def state(self, now: float, *, evicted: bool) -> NodeState:
        workers = self.workers.values()
        if workers and all(worker.left is not None and worker.left.status == "done" for worker in workers):
            return NodeState.FINISHING
        if not self.may_join(now):
            return NodeState.WARMING
        return NodeState.DRAINING if evicted else NodeState.READY

    def shown(self, now: float) -> dict[str, object]:
        """The fields of the node's record that follow from the workers' messages."""
        reports = self.reports
        complete = self.may_join(now)
        states = [report.state for report in reports if report.state is not None]
        newest = max(states, key=lambda each: (each.round, each.step)) if complete and states else None
        return {
            "life": self.number,
            "reported": min((worker.free_for() for worker in self.workers.values()), default=0) if complete else 0,
            "planned": all(report.planned for report in reports),
            "identity": newest,
            "step_time_s": max((report.step_time_s for report in reports), default=0.0),
            "stuck": any(worker.stuck for worker in self.workers.values()),
            "joinable": all(report.joinable for report in reports),
            "newcomer": any(not report.met for report in reports),
            "met": tuple(met for met in reports[0].met if all(met in each.met for each in reports)) if reports else (),
            "busy": next((worker.busy for worker in self.workers.values() if worker.busy), ""),
            "committed": self.reached.step if self.reached is not None and not self.ended else 0,
        }


LONGEST_PAUSE_S: Final = 0.25
LOOKS_PER_LIMIT: Final = 8


@dataclass(slots=True)
class _Expected:
    """A worker of ``life`` that has to leave round ``number``; its time counts from ``blocked_at``."""

    life: Life
    worker: Worker
    number: int
    blocked_at: float
    looked_at: float
    queued: Mapping[str, float] = field(default_factory=dict)
    """What its threads had waited for a CPU at the first look."""


class Release:
    """Makes workers leave a round that is over: waits for busy ones, kills blocked ones.

    The worker gets a message, shuts down its sockets and interrupts its waits. If it is still blocked (in a raw
    collective of the script, or in a driver) only killing the process helps; torchrun then restarts it. A worker that
    saves, evaluates or compiles is not blocked: :mod:`elastic_trainer.agent.health.node_health` bounds that time, and
    the record shows the other nodes what they wait for: ``late()`` is called while one stays.
    """

    def __init__(self, sever_timeout_s: float, facts: WorkerFacts, outbox: Outbox, late: Callable[[], None]) -> None:
        self._sever_timeout_s, self._facts, self._outbox, self._late = sever_timeout_s, facts, outbox, late
        self._pause_s = min(LONGEST_PAUSE_S, sever_timeout_s / LOOKS_PER_LIMIT)

    def expect(self, life: Life, worker: Worker, number: int) -> None:
        """Round ``number`` is over: expect ``worker`` to report soon that it is free."""
        self.freed(worker)
        now = self._outbox.now
        self._look_later(_Expected(life, worker, number, now, now))

    def freed(self, worker: Worker) -> None:
        """``worker`` is free, or has ended."""
        worker.busy = ""
        self._outbox.drop(("release", worker.pid))

    def _look_later(self, each: _Expected) -> None:
        self._outbox.later(("release", each.worker.pid), self._pause_s, partial(self._look, each))

    def _look(self, each: _Expected) -> None:
        worker, now = each.worker, self._outbox.now
        if each.life.ended or worker.left is not None or not worker.stays_in(each.number):
            return
        busy, queued = self._facts.busy(worker.pid), self._facts.queued_s(worker.pid)
        stood_still = now - each.looked_at > LATE * self._pause_s
        each.looked_at = now
        step_s = worker.ready.step_time_s if worker.ready is not None else 0.0
        limit_s = max(self._sever_timeout_s, 2.0 * step_s) + starved_s(queued, each.queued)
        if busy or stood_still or worker.unread:  # this agent was frozen, or has not read what the worker says
            each.blocked_at = now
        elif now - each.blocked_at > limit_s:
            self._outbox.add(Kill(worker.pid, f"it did not leave round {each.number}, which is over"))
            return
        each.queued = each.queued or queued
        if busy and busy != worker.busy:  # the last reason explains the delay until it is free: it had no time since
            worker.busy = busy
            self._outbox.log(
                "worker.awaited", pid=worker.pid, local_rank=worker.local_rank, over=each.number, busy=busy
            )
        self._late()
        self._look_later(each)


SHORTEST_S = 1.0
TIMES_UNSEEN = 10.0
"""How much longer a node keeps out whose agent reaches the others while its workers do not: only a round could show
that they do again, and each try stops the others."""


class Quarantine:
    """Keeps a node out of rounds while it cannot reach all members; otherwise each of its joins would stop all nodes.

    ``present()`` is the present round; ``released()`` is called when its members can be reached.
    """

    def __init__(
        self,
        node: str,
        outbox: Outbox,
        present: Callable[[], RoundDocument | None],
        released: Callable[[], None],
    ) -> None:
        self._node, self._outbox, self._present, self._released = node, outbox, present, released
        self.unreachable: tuple[str, ...] = ()
        """Nodes that this one could not reach when a round with them failed to form; itself if they cannot reach it."""
        self._unseen = False
        """Whether this node's agent reached those whom its workers did not."""
        self.active = False
        """Whether this node stays out of rounds."""
        self._asked_in, self._answer = -1, ""
        self._checks: deque[tuple[RoundDocument, Failed | Ready, Callable[[str], None]]] = deque()
        self._since_round = 0
        self._backoff = Backoff()

    def check(self, document: RoundDocument | None, message: Failed | Ready, then: Callable[[str], None]) -> None:
        """Find the nodes that this one cannot reach, if others could not reach it in the round of ``document``, or if
        that was not the first consecutive round that failed to form. ``message``: what a worker said about that round.

        Calls ``then`` with who was not reached, where, and what to do, for people; empty if nobody is known.
        """
        if document is None or (document.stalled < FAILED_ROUNDS - 1 and not document.accuses(self._node)):
            then("")
            return
        self._checks.append((document, message, then))
        if len(self._checks) == 1:  # of several workers that report one round, all get the answer
            self._check_next()

    def _check_next(self) -> None:
        document, message, _ = self._checks[0]
        news = isinstance(message, Failed) and bool(message.tried or message.loopback)
        if document.number == self._asked_in and (self._answer or not news):
            self._checked()
            return
        self._asked_in = document.number
        if isinstance(message, Failed) and message.loopback:
            self._note(document, message, Reached())
            return
        self._outbox.add(Ask(self._others(document), partial(self._note, document, message)))

    def _note(self, document: RoundDocument, message: Failed | Ready, reached: Reached) -> None:
        nodes, self._answer = self._find(document, message, reached)
        self.note_unreachable(nodes)
        if nodes:
            fields = {"round": document.number, "unreachable": nodes, "reason": self._answer}
            self._outbox.log("node.cut_off", "warning", node=self._node, **fields)
        self._checked()

    def _checked(self) -> None:
        _, _, then = self._checks[0]
        then(self._answer)  # may add one
        self._checks.popleft()
        if self._checks:
            self._check_next()

    def _others(self, document: RoundDocument) -> tuple[str, ...]:
        return tuple(member.node for member in document.members if member.node != self._node)

    def _find(self, document: RoundDocument, message: Failed | Ready, reached: Reached) -> tuple[tuple[str, ...], str]:
        """This node if its worker knows that others cannot reach it, the nodes that this agent does not reach, else the
        one that its worker did not; and the sentence about it."""
        if isinstance(message, Failed) and message.loopback:
            self._unseen = True
            return (self._node,), misleads(self._node, message.loopback)
        others = {name: reached.records[name] for name in self._others(document) if name in reached.records}
        self._unseen = False
        if missing := reached.missing:
            record = others[missing[0]]
            why = f"its agent does not answer at port {record.probe_port}"
            return missing, cannot_reach(self._node, missing[0], record.address, "", why)
        if isinstance(message, Failed) and (one := blamed(message.tried, others)) is not None:
            self._unseen = True
            return (one,), cannot_reach(self._node, one, others[one].address, message.tried, message.error)
        return (), ""

    @property
    def own_fault(self) -> str:
        """Why others cannot reach this node's workers, if it knows."""
        return self._answer if self._node in self.unreachable else ""

    def note_unreachable(self, nodes: tuple[str, ...]) -> None:
        """``nodes`` cannot be reached. If no round can form without them, check again until they can."""
        self.unreachable = nodes
        if nodes:
            self._after(SHORTEST_S, self._look_again, away=False)

    def clear(self) -> None:
        """Steps were committed, or the workers are new: forget earlier failures."""
        self.unreachable = ()
        if not self.active:
            self._backoff, self._unseen = Backoff(), False

    def enter(self, document: RoundDocument) -> None:
        """The round of ``document`` excludes this node as unreachable. Acts once for each round."""
        if document.number <= self._since_round:
            return
        self._since_round, self.active = document.number, True
        self._unseen |= document.unformed >= UNFORMED_ROUNDS
        self._wait()

    def _wait(self) -> None:
        self._backoff = self._backoff.after(0)
        seconds = max(SHORTEST_S, self._backoff.back_off_s()) * (TIMES_UNSEEN if self._unseen else 1.0)
        self._outbox.log("node.quarantined", "warning", node=self._node, seconds=seconds, unreachable=self.unreachable)
        self._after(seconds, self._try_again, away=True)

    def _after(self, seconds: float, act: Callable[[], None], *, away: bool) -> None:
        """Schedule ``act``, unless the node has become a member (``away``) or was excluded, which has its own timer."""
        if self.active is away:
            self._outbox.later("quarantine", seconds, act)

    def _look_again(self) -> None:
        document = self._present()
        if self.active or not self.unreachable or document is None:
            return
        if document.state is RoundState.BROKEN:  # otherwise committed steps prove that all can be reached
            self._outbox.add(Ask(self._others(document), self._looked_again))
        else:
            self._looked_again(Reached())

    def _looked_again(self, reached: Reached) -> None:
        if reached.missing == () and not self.active:
            self.unreachable = ()
            self._released()
        else:
            self._after(SHORTEST_S, self._look_again, away=False)

    def _try_again(self) -> None:
        document = self._present()
        if self.active and document is not None:
            self._outbox.add(Ask(self._others(document), self._tried_again))

    def _tried_again(self, reached: Reached) -> None:
        if not self.active:
            return
        self.unreachable = reached.missing or ()
        if reached.missing != ():  # without the store no round could add this node either
            self._wait()
            return
        self.active = False
        self._outbox.log("quarantine.ended", node=self._node)
        self._released()


SUSPECTED_S = 1.0
"""Seconds after which an unwritten suspicion is dropped: the suspect may have recovered since."""


class Conductor:
    """See the module. Whoever plays an event sets ``outbox.now`` before, and performs ``outbox.effects`` after it."""

    def __init__(self, config: ConductorConfig, facts: WorkerFacts) -> None:
        self._config, self._facts, self._node = config, facts, config.node
        self.outbox = Outbox()
        self._release = Release(config.sever_timeout_s, facts, self.outbox, self._late)
        self._life = Life(0, 0, ended=True)
        self._connected: list[Worker] = []
        self._document: RoundDocument | None = None
        self._acknowledged = 0
        self._slot: int | None = None
        self._evicted = ""
        self.passed = False
        """Whether a worker has passed the end of the training, which all ranks pass together."""
        self._reached: Identity | None = None
        """The progress of the last life."""
        self._ended_by: Cause | None = None
        """What ended it."""
        self._backoff = Backoff()
        self._quarantine = Quarantine(self._node, self.outbox, lambda: self._document, self._released)
        self.met = False
        """Whether a worker of the present life has opened a session."""
        self._false_start: FalseStart | None = None

    @property
    def life(self) -> int:
        return self._life.number

    def workers(self) -> list[Worker]:
        """Those that have opened a Session in this life."""
        return list(self._life.workers.values())

    def watched(self) -> list[Worker]:
        """The workers that have not announced that they leave, also those of an ended life that have to exit."""
        return [each for each in self._connected if each.left is None]

    def _at_work(self) -> list[Worker]:
        """Those of the present life."""
        return [] if self._life.ended else [each for each in self._life.workers.values() if each.left is None]

    # ---- lives

    def begin(self, size: int, start: FalseStart | None = None) -> NodeRecord:
        """Begin a life of ``size`` workers; the record of a node that warms up.

        ``start``: how the life before failed at startup. The record says so until a worker of this one opens a session.
        """
        if not self._life.ended:
            left = [each.left for each in self._life.workers.values()]
            if left and all(each is not None and each.status == "restarted" for each in left):
                strikes = self._backoff
                self._end_life("an operator restarted its workers", None, Cause.NODE_LEFT)
                self._backoff = strikes
            else:
                self._end_life("its workers failed")
        back_off_s = self._backoff.back_off_s()
        joins_at = math.inf if self._quarantine.active else self.outbox.now + back_off_s
        self._life = Life(self._life.number, size, joins_at=joins_at)
        if back_off_s:
            fields = {"seconds": back_off_s, "failures": self._backoff.count}
            self.outbox.log("node.backed_off", "warning", node=self._node, **fields)
            self.outbox.later("back-off", back_off_s, partial(self._offer, self._life.number))
        self._quarantine.clear()
        self._slot, self._false_start = None, start
        self._evicted = ""  # the SIGTERM went only to a worker: torchrun, had it got one, would start none
        self.met = False
        return self._record(NodeState.WARMING)

    def record_at(self, slot: int | None) -> NodeRecord:
        """The record of a node that warms up at ``slot`` of a shard group."""
        self._slot = slot
        return self._record(NodeState.WARMING)

    def restart_workers(self, why: str) -> None:
        """End a life that is in no round, without counting it as a failure: torchrun starts new workers."""
        current = self._document
        idle = self._my_entry(current) is None or (current is not None and current.state is RoundState.BROKEN)
        if idle and not self._life.ended:
            self._begin_anew(why)

    def _begin_anew(self, why: str) -> None:
        self.outbox.log("workers.restarted", node=self._node, place=self._slot, reason=why)
        strikes = self._backoff
        self._end_life(why, None)
        self._backoff = strikes

    def _offer(self, life: int) -> None:
        """The back-off is over: announce this node if the life is still the same."""
        if life == self._life.number and not self._life.ended:
            self._publish()

    def _released(self) -> None:
        """All members of the round can be reached again."""
        self._life.joins_at = 0.0
        self._offer(self._life.number)

    def _end_life(
        self, cause: str, kind: Cause | None = Cause.WORKER_LOST, unfailed: Cause = Cause.CONTACT_LOST
    ) -> None:
        """The workers of this life have ended, or are ordered to exit.

        ``kind`` None: not because they failed; ``unfailed`` is then what ends their round.
        """
        life, current = self._life, self._document
        self._read_progress(life)
        life.ended = True
        self._reached, self._ended_by = life.reached, kind
        if life.size:
            self._backoff = self._backoff.after(life.steps)
        for worker in life.workers.values():
            self._send(worker, Exit(code=EXIT_FAILURE, reason=cause))
        taking_part = self._my_entry(current) is not None
        self._life = Life(life.number + 1, life.size, ended=True)
        if current is None or not taking_part:  # a round that only plans to add it must not break
            self.outbox.add(Announce(self._record(NodeState.WARMING, planned=False, cause=cause)))
            return
        self._acknowledged = max(self._acknowledged, current.last_number + 1)
        reason = f"node {self._node} left the round: {cause}"
        failure = RoundFailure(current.last_number, reason, worker_failed=kind is not None, cause=kind or unfailed)
        self.outbox.add(BreakRound(failure, self._record(NodeState.WARMING, planned=False, cause=cause)))

    def _read_progress(self, life: Life) -> None:
        """Read the progress of ``life`` from its workers' pages, which are newer than their last reports."""
        for worker in life.workers.values():
            if (committed := self._facts.committed(worker.pid)) is not None:
                life.came_to(*committed)

    # ---- what the run decides (the deciding thread)

    def see(self, document: RoundDocument) -> None:
        """Send the workers what ``document`` means for them."""
        self._document = document
        if self._life.ended:
            return
        mine = self._my_entry(document)
        if document.state is RoundState.CLOSED:
            code = 0 if document.result is RunResult.SUCCEEDED else EXIT_FAILURE
            for worker in self._life.workers.values():
                self._send(worker, Exit(code=code, reason=document.reason))
        elif document.state is RoundState.BROKEN:
            self._over(document, document.number, document.reason)
            if mine is None and any(
                each.ready and each.ready.in_call and 0 < each.inside < document.number for each in self._at_work()
            ):
                self._begin_anew(f"round {document.number} ended without it in the middle of a call")
        elif mine is not None:
            self._form(document, mine)  # a change may be planned before a slow member sees this round
            if document.state is RoundState.DRAINING:
                self._drain(document, following=self._my_entry(document.next))
        else:
            self._over(document, document.number - 1, f"round {document.number} was formed without this node")
            if document.left_out == self._node:
                self._quarantine.enter(document)
                if self._quarantine.active and self._life.joins_at != math.inf:
                    self._life.joins_at = math.inf
                    self._publish()
            # Who left the round before in a call could join the others only when they are elsewhere.
            if any(e.ready and e.ready.in_call and not e.stays_in(document.number - 1) for e in self._at_work()):
                self._begin_anew(f"round {document.number} was formed without it in the middle of a call")
            elif document.next is not None and (entry := self._my_entry(document.next)) is not None:
                self._join_planned(document.next, entry)

    def _my_entry(self, document: RoundDocument | None) -> RoundMember | None:
        """This life's entry in ``document``."""
        mine = document.member(self._node) if document is not None else None
        if mine is None or (mine.life, mine.create_revision) != (self._life.number, self._facts.create_revision()):
            return None
        return mine

    def _over(self, document: RoundDocument, number: int, reason: str) -> None:
        """Rounds up to ``number`` are over: notify the workers, and acknowledge it to the run."""
        self._send_over(number, reason)
        waited_for = document.member(self._node) is not None or self._node in (ghost.node for ghost in document.ghosts)
        waited_for |= any(worker.sent_formation for worker in self._life.workers.values())
        if self._acknowledged <= number and waited_for:
            self._acknowledged = number + 1
            self._publish()

    def _send_over(self, number: int, reason: str) -> None:
        for worker in self._life.workers.values():
            if worker.sent_over < number:
                worker.sent_over = number
                self._send(worker, Over(number=number, reason=reason))
                self._release.expect(self._life, worker, number)

    def _late(self) -> None:
        """A worker is not free yet: publish why, and its progress."""
        self._read_progress(self._life)
        self._publish()

    def _form(self, document: RoundDocument, mine: RoundMember) -> None:
        """Send the new round to the workers; if all leases were lost at once, no node saw the previous round end."""
        self._send_over(document.number - 1, f"round {document.number} was formed")
        for worker in self._life.workers.values():
            if worker.ready is not None and worker.sent_formation < document.number:
                worker.sent_formation = worker.inside = document.number
                self._send(worker, _formation_of(document, mine, worker.local_rank))

    def _drain(self, document: RoundDocument, following: RoundMember | None) -> None:
        """Send the planned change to the workers, with their ranks in the next round."""
        for worker in self._life.workers.values():
            if worker.sent_drain < document.number:
                worker.sent_drain = document.number
                then = None
                if document.next is not None:
                    worker.sent_formation = document.next.number
                    if following is not None:
                        then = _formation_of(document.next, following, worker.local_rank)
                worker.offered = then.number if then is not None else 0
                waits = document.next is None
                self._send(worker, Drain(number=document.number, reason=document.reason, waits=waits, next=then))

    def _join_planned(self, following: RoundDocument, mine: RoundMember) -> None:
        """A planned change adds this node: its workers form the next round while the others still drain."""
        for worker in self._life.workers.values():
            if worker.sent_formation < following.number:
                worker.sent_formation = worker.inside = following.number
                self._send(worker, _formation_of(following, mine, worker.local_rank))

    # ---- what the workers say (reader threads)

    def admit(self, connection: Connection, pid: int, local_rank: int) -> Worker | None:
        """The worker ``pid`` has connected; returns None if it is refused."""
        life = self._life
        if life.ended or local_rank in life.workers:
            refusal = Exit(code=EXIT_FAILURE, reason="the node's workers are being restarted")
            self.outbox.add(Send(connection, refusal))
            return None
        worker = Worker(connection, pid, local_rank, life.number)
        life.workers[local_rank] = worker
        self._connected.append(worker)
        self.met = True
        self._send(worker, Welcome(run=self._config.run, node=self._node))
        return worker

    def receive(self, worker: Worker, message: Message) -> None:
        """Process a message, or keep it while an earlier one of this worker waits for an answer.

        A worker that leaves waits for nothing: its connection closes next.
        """
        worker.heard_at = self.outbox.now
        if isinstance(message, Pong):
            worker.ponged(worker.heard_at)
            return
        worker.unread.append(message)
        if isinstance(message, Leaving):
            while worker.unread:
                self._process(worker, worker.unread.popleft(), "")
        elif len(worker.unread) == 1:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        """Process the first message; if it may blame other nodes, when it is known whom this one reaches."""
        message, document = worker.unread[0], self._document
        answered = partial(self._answered, worker, message)
        # The others broke the round because this node did not answer; it may be unable to reach them too.
        accused = document is not None and document.accuses(self._node)
        if isinstance(message, Failed) and message.forming:
            if document is not None and document.next is not None and message.number == document.last_number:
                document = document.next  # a planned change leads to the round, and adds members
            self._quarantine.check(document, message, answered)
        elif isinstance(message, Ready) and accused:
            self._quarantine.check(document, message, answered)
        else:
            answered("")

    def _answered(self, worker: Worker, message: Message, why: str) -> None:
        if not worker.unread or worker.unread[0] is not message:
            return  # it has left meanwhile
        worker.unread.popleft()
        self._process(worker, message, why)
        if worker.unread:
            self._read(worker)

    def _process(self, worker: Worker, message: Message, why: str) -> None:
        if worker.life != self._life.number or self._life.ended:
            return
        if isinstance(message, Ready):
            closed = self._document is not None and self._document.state is RoundState.CLOSED
            if message.left_behind and not closed:  # before its record is shown: a round with this life would break
                self._begin_anew("the others have gone on from where its script is")
                return
            self._ready(worker, message)
            if self._document is not None:
                self.see(self._document)
        elif isinstance(message, Failed):
            self._failed(message, why)
        elif isinstance(message, Leaving):
            self._left(worker, message)
        elif isinstance(message, Evicted):
            self._evict(message.reason)
        elif isinstance(message, Progress):
            self._quarantine.clear()
            self._life.set_progress(
                Identity(round=message.round, step=message.step, epoch=message.epoch, samples=message.samples)
            )
            mine = self._my_entry(self._document)
            if mine is not None and mine.first_rank + worker.local_rank == 0:
                self.outbox.add(ReportProgress(message))

    def _ready(self, worker: Worker, message: Ready) -> None:
        worker.ready, worker.stuck = message, False
        if worker.free_for() > worker.sent_over:
            self._release.freed(worker)
        if message.planned and message.number == worker.offered:
            worker.inside = message.number
        if message.state is not None:
            self._life.set_progress(message.state)
        self._publish()

    def _left(self, worker: Worker, message: Leaving) -> None:
        worker.left = message
        self.passed |= message.status == "done"
        if message.status == "stopped" and self._document is not None:
            # It left by agreement, so no node needs to wait for the end of its process or its key.
            worker.ready = Ready(number=self._document.last_number + 1, planned=True)
        self._publish()

    def _failed(self, message: Failed, why: str) -> None:
        """A collective failed: break the round, unless it is broken already. ``why``: which nodes do not reach each
        other, if known."""
        current = self._document
        if current is None or message.number not in (current.number, current.last_number):
            return
        if current.state in (RoundState.ACTIVE, RoundState.DRAINING):
            cause = Cause.CONTACT_LOST
            reason = why or f"node {self._node} lost contact with a peer ({message.error})"
            if message.given_up:
                reason, cause = message.error, Cause.STEP_GIVEN_UP
            self._acknowledged = max(self._acknowledged, current.last_number + 1)
            failure = RoundFailure(current.last_number, reason, cause=cause, unformed=message.forming)
            self.outbox.add(BreakRound(failure, self._record(planned=False)))

    def _evict(self, reason: str) -> None:
        """This node is asked to leave: a planned change."""
        if not self._evicted:
            self._evicted = reason
            self.outbox.log("node.evicted", node=self._node, reason=reason)
            self._publish()

    def gone(self, worker: Worker) -> None:
        """A worker has closed its connection, or is dead; may be called twice."""
        self._release.freed(worker)
        self._connected = [each for each in self._connected if each is not worker]
        if worker.life != self._life.number or self._life.ended:
            return
        if worker.left is not None and worker.left.status in ("done", "stopped", "restarted"):
            return
        fields = {"pid": worker.pid, "local_rank": worker.local_rank}
        self.outbox.log("worker.lost", "warning", node=self._node, **fields)
        hung = self._facts.why_hung(worker.pid)
        cause = "was lost" if hung is None else f"was killed: {hung}"
        kind = Cause.WORKER_LOST if hung is None else Cause.WORKER_HUNG
        self._end_life(f"its worker {worker.local_rank} {cause}", kind)

    # ---- suspicions (the thread of that name)

    def at_work(self) -> tuple[RoundDocument | None, list[Worker]]:
        """The newest round, if this life is or becomes a member, and the workers that may still be in it."""
        current = self._document
        if self._my_entry(current) is None and (current is None or self._my_entry(current.next) is None):
            return None, []
        return current, self._at_work()

    def suspect(self, document: RoundDocument, suspects: tuple[Ghost, ...], reason: str) -> None:
        """Break the round of ``document`` because ``suspects`` do not answer, unless it is over."""
        if self._life.ended or document is not self._document:
            return
        self._quarantine.note_unreachable(tuple(each.node for each in suspects))
        failure = RoundFailure(document.last_number, reason, cause=Cause.CONTACT_LOST, suspects=suspects)
        self.outbox.add(BreakRound(failure, self._record(), SUSPECTED_S))

    def exclude(self, worker: Worker, why: str) -> None:
        """``worker`` of this node hangs while others wait for it: break the round, so that they continue without it."""
        current = self._document
        if current is None or self._life.ended or worker.life != self._life.number or worker.stuck:
            return
        number, worker.stuck = current.last_number, True
        self._acknowledged = max(self._acknowledged, number + 1)
        reason = f"worker {worker.local_rank} of node {self._node} hangs: {why}"
        fields = {"pid": worker.pid, "local_rank": worker.local_rank, "reason": why}
        self.outbox.log("worker.excluded", "warning", **fields)
        failure = RoundFailure(number, reason, cause=Cause.WORKER_HUNG)
        self.outbox.add(BreakRound(failure, self._record(cause=why)))

    # ---- the node's record

    def _publish(self) -> None:
        self.outbox.add(Announce(self._record()))

    def _record(self, state: NodeState | None = None, *, planned: bool | None = None, cause: str = "") -> NodeRecord:
        now = self.outbox.now
        fields: dict[str, Any] = self._life.shown(now)
        fields["state"] = state or self._life.state(now, evicted=bool(self._evicted))
        fields["acknowledged"] = max(self._acknowledged, fields["reported"])
        if planned is not None:
            fields["planned"] = planned
        fields["unreachable"], fields["shard_slot"] = self._quarantine.unreachable, self._slot
        fields["passed"] = self.passed
        if self._false_start is not None and not self.met:
            fields |= self._false_start.fields
        last: dict[str, Any] = {"reached": self._reached, "ended_by": self._ended_by}
        last["cause"] = cause or self._quarantine.own_fault
        return self._config.base.model_copy(update=fields | last)

    def _send(self, worker: Worker, message: Message) -> None:
        self.outbox.add(Send(worker.connection, message))


def _formation_of(document: RoundDocument, mine: RoundMember, local_rank: int) -> Formation:
    """The message that gives one worker its rank in ``document``."""
    return Formation(
        number=document.number,
        nonce=document.nonce,
        store=document.store,
        rank=mine.first_rank + local_rank,
        world_size=document.world_size,
        nodes=tuple(member.node for member in document.members),
        reason=document.reason,
    )
