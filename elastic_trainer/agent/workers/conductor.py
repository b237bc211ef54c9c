"""Leads this node's workers through rounds in place: sends their reports to the run, and its decisions to them.

*Runs in* the agent: reader threads of the channel, the deciding thread (``see``), torchrun's main thread (``begin``),
one at a time. Nothing here waits: what takes time is a port, which is called back or writes later.
*Owns* the table of workers.
*Fails by* nothing: a worker that breaks the protocol is treated as lost.
*Invariant*: a life of this node's workers ends once; messages of its workers are ignored after that.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from elastic_trainer.agent.workers.backoff import Backoff
from elastic_trainer.agent.workers.conductor_config import ConductorConfig, ConductorPorts
from elastic_trainer.agent.workers.false_starts import FalseStart
from elastic_trainer.agent.workers.periodic import Cancellable, Later
from elastic_trainer.agent.workers.quarantine import Quarantine
from elastic_trainer.agent.workers.reachability import Reached
from elastic_trainer.agent.workers.release import Release
from elastic_trainer.agent.workers.roster import Life, Worker
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.ipc.channel import ChannelClosedError, Connection
from elastic_trainer.ipc.messages import (
    Drain,
    Evicted,
    Exit,
    Failed,
    Formation,
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
    Identity,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.round_write import RoundFailure
from elastic_trainer.model import Cause
from elastic_trainer.telemetry.logs import logger

SUSPECTED_S = 1.0
"""Seconds after which an unwritten suspicion is dropped: the suspect may have recovered since."""


class Conductor:
    """See the module."""

    def __init__(
        self, conduct: ConductorConfig, ports: ConductorPorts, call_later: Later, clock: Clock = SYSTEM
    ) -> None:
        self._config, self._ports, self._node, self._clock = conduct, ports, conduct.node, clock
        self._record_writer, self._create_revision = ports.record_writer, ports.create_revision
        self._lock, self._call_later = threading.RLock(), call_later
        self._release = Release(conduct.sever_timeout_s, ports, self._late, self._later, clock)
        self._life = Life(0, 0, ended=True)
        self._connected: list[Worker] = []
        self._document: RoundDocument | None = None
        self._acknowledged = 0
        self._place: int | None = None
        self._evicted = ""
        self.passed = False
        """Whether a worker has passed the end of the training, which all ranks pass together."""
        self._reached: Identity | None = None
        """The progress of the last life."""
        self._ended_by: Cause | None = None
        """What ended it."""
        self._backoff = Backoff()
        self._quarantine = Quarantine(self._node, self._ask, lambda: self._document, self._released, self._later)
        self.met = threading.Event()
        """Set when the first worker of the present life has opened a session."""
        self._false_start: FalseStart | None = None

    @property
    def life(self) -> int:
        return self._life.number

    def close(self) -> None:
        """Close the workers' connections, which ends their lead."""
        with self._lock:
            self._quarantine.close()
            self._release.close()
            for worker in self._life.workers.values():
                worker.connection.close()

    def in_session(self) -> frozenset[int]:
        """The processes that have opened a Session in this life."""
        with self._lock:
            return frozenset(worker.pid for worker in self._life.workers.values())

    def watched(self) -> list[Worker]:
        """The workers that have not announced that they leave, also those of an ended life that have to exit."""
        with self._lock:
            return [each for each in self._connected if each.left is None]

    def _at_work(self) -> list[Worker]:
        """Those of the present life."""
        return [] if self._life.ended else [each for each in self._life.workers.values() if each.left is None]

    def _later(self, seconds: float, call: Callable[[], None]) -> Cancellable:
        def alone() -> None:
            with self._lock:
                call()

        return self._call_later(seconds, alone)

    def _ask(self, nodes: tuple[str, ...], answered: Callable[[Reached], None]) -> None:
        def alone(reached: Reached) -> None:
            with self._lock:
                answered(reached)

        self._ports.ask(nodes, alone)

    # ---- lives

    def begin(self, size: int, start: FalseStart | None = None) -> NodeRecord:
        """Begin a life of ``size`` workers; the record of a node that warms up.

        ``start``: how the life before failed at startup. The record says so until a worker of this one opens a session.
        """
        with self._lock:
            if not self._life.ended:
                self._end_life("its workers failed")
            back_off_s = self._backoff.back_off_s()
            joins_at = math.inf if self._quarantine.active else self._clock.monotonic() + back_off_s
            self._life = Life(self._life.number, size, joins_at=joins_at)
            if back_off_s:
                logger().warning("node.backed_off", node=self._node, seconds=back_off_s, failures=self._backoff.count)
                life = self._life.number
                self._later(back_off_s, lambda: self._offer(life))
            self._quarantine.clear()
            self._place, self._false_start = None, start
            self._evicted = ""  # the SIGTERM went only to a worker: torchrun, had it got one, would start none
            self.met.clear()
            return self._record(NodeState.WARMING)

    def at(self, place: int | None) -> NodeRecord:
        """The record of a node that warms up at ``place`` of a shard group."""
        with self._lock:
            self._place = place
            return self._record(NodeState.WARMING)

    def restart_workers(self, why: str) -> None:
        """End a life that is in no round, without counting it as a failure: torchrun starts new workers."""
        with self._lock:
            current = self._document
            idle = self._my_entry(current) is None or (current is not None and current.state is RoundState.BROKEN)
            if idle and not self._life.ended:
                self._begin_anew(why)

    def _begin_anew(self, why: str) -> None:
        logger().info("workers.restarted", node=self._node, place=self._place, reason=why)
        strikes = self._backoff
        self._end_life(why)
        self._backoff = strikes

    def _offer(self, life: int) -> None:
        """The back-off is over: announce this node if the life is still the same."""
        if life == self._life.number and not self._life.ended:
            self._publish()

    def _released(self) -> None:
        """All members of the round can be reached again."""
        self._life.joins_at = 0.0
        self._offer(self._life.number)

    def _end_life(self, cause: str, kind: Cause = Cause.WORKER_LOST) -> None:
        """The workers of this life have ended, or are ordered to exit."""
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
            self._record_writer.announce(self._record(NodeState.WARMING, planned=False, cause=cause))
            return
        self._acknowledged = max(self._acknowledged, current.last_number + 1)
        reason = f"node {self._node} left the round: {cause}"
        failure = RoundFailure(current.last_number, reason, worker_failed=True, cause=kind)
        self._record_writer.break_round(failure, self._record(NodeState.WARMING, planned=False, cause=cause))

    def _read_progress(self, life: Life) -> None:
        """Read the progress of ``life`` from its workers' pages, which are newer than their last reports."""
        for worker in life.workers.values():
            try:
                place = self._ports.committed(worker.pid)
            except Exception:  # noqa: BLE001 - the life must end whatever a page contains
                logger().exception("page.unreadable", pid=worker.pid)
                continue
            if place is not None:
                life.came_to(*place)

    # ---- what the run decides (the deciding thread)

    def see(self, document: RoundDocument) -> None:
        """Send the workers what ``document`` means for them."""
        with self._lock:
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
            elif document.state is RoundState.ACTIVE and mine is not None:
                self._form(document, mine)
            elif document.state is RoundState.ACTIVE:
                self._over(document, document.number - 1, f"round {document.number} was formed without this node")
                if document.left_out == self._node:
                    self._quarantine_node(document)
            elif document.state is RoundState.DRAINING:
                self._drain(document, mine)
            running = document.state in (RoundState.ACTIVE, RoundState.DRAINING)
            if running and mine is None and self._left_behind(document.number - 1):
                self._begin_anew(f"round {document.number} was formed without it in the middle of a call")

    def _my_entry(self, document: RoundDocument | None) -> RoundMember | None:
        """This life's entry in ``document``."""
        mine = document.member(self._node) if document is not None else None
        if mine is None or (mine.life, mine.create_revision) != (self._life.number, self._create_revision()):
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

    def _left_behind(self, number: int) -> bool:
        """Whether a worker left round ``number`` in a call: when it could join the others, they will be elsewhere."""
        return any(each.ready and each.ready.in_call and not each.stays_in(number) for each in self._at_work())

    def _quarantine_node(self, document: RoundDocument) -> None:
        self._quarantine.enter(document)
        if self._quarantine.active and self._life.joins_at != math.inf:
            self._life.joins_at = math.inf
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

    def _drain(self, document: RoundDocument, mine: RoundMember | None) -> None:
        if mine is not None:
            self._form(document, mine)  # a change may be planned before a slow member sees this round
        following = document.next
        place = self._my_entry(following)
        for worker in self._life.workers.values():
            then = _formation_of(following, place, worker.local_rank) if following and place else None
            if mine is not None and worker.sent_drain < document.number:
                worker.sent_drain = document.number
                if following is not None:
                    worker.sent_formation = following.number
                worker.offered = then.number if then is not None else 0
                self._send(
                    worker,
                    Drain(number=document.number, reason=document.reason, waits=following is None, next=then),
                )
            elif mine is None and then is not None and worker.sent_formation < then.number:
                worker.sent_formation = worker.inside = then.number
                self._send(worker, then)

    # ---- what the workers say (reader threads)

    def admit(self, connection: Connection, local_rank: int) -> Worker | None:
        """A worker has connected; returns None if it is refused."""
        with self._lock:
            life = self._life
            if life.ended or local_rank in life.workers:
                connection.send(Exit(code=EXIT_FAILURE, reason="the node's workers are being restarted"))
                return None
            worker = Worker(connection, connection.peer()[0], local_rank, life.number)
            life.workers[local_rank] = worker
            self._connected.append(worker)
            self.met.set()
            self._send(worker, Welcome(run=self._config.run, node=self._node))
            return worker

    def receive(self, worker: Worker, message: Message) -> None:
        """Process a message, or keep it while an earlier one of this worker waits for an answer.

        A worker that leaves waits for nothing: its connection closes next.
        """
        with self._lock:
            worker.heard_at = self._clock.monotonic()
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
        message = worker.unread[0]
        answered = partial(self._answered, worker, message)
        if (isinstance(message, Failed) and message.forming) or (isinstance(message, Ready) and self._is_accused()):
            self._quarantine.check(self._round_of(message), message, answered)
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
            self._life.note(
                Identity(round=message.round, step=message.step, epoch=message.epoch, samples=message.samples)
            )
            mine = self._my_entry(self._document)
            if mine is not None and mine.first_rank + worker.local_rank == 0:
                self._ports.on_progress(message)

    def _ready(self, worker: Worker, message: Ready) -> None:
        worker.ready, worker.stuck = message, False
        if worker.free_for() > worker.sent_over:
            self._release.freed(worker)
        if message.planned and message.number == worker.offered:
            worker.inside = message.number
        if message.state is not None:
            self._life.note(Identity.model_validate(message.state.model_dump()))
        self._publish()

    def _round_of(self, message: Failed | Ready) -> RoundDocument | None:
        """The round that ``message`` is about; a planned change may lead to it, and adds members."""
        document = self._document
        if isinstance(message, Failed) and document is not None and document.next is not None:
            return document.next if message.number == document.last_number else document
        return document

    def _is_accused(self) -> bool:
        """Whether the others broke the round because this node did not answer; it may be unable to reach them too."""
        return self._document is not None and self._document.accuses(self._node)

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
            self._record_writer.break_round(failure, self._record(planned=False))

    def _evict(self, reason: str) -> None:
        """This node is asked to leave: a planned change."""
        if not self._evicted:
            self._evicted = reason
            logger().info("node.evicted", node=self._node, reason=reason)
            self._publish()

    def gone(self, worker: Worker) -> None:
        """A worker has closed its connection, or is dead; may be called twice."""
        with self._lock:
            self._release.freed(worker)
            self._connected = [each for each in self._connected if each is not worker]
            if worker.life != self._life.number or self._life.ended:
                return
            if worker.left is not None and worker.left.status in ("done", "stopped"):
                return
            logger().warning("worker.lost", pid=worker.pid, local_rank=worker.local_rank, node=self._node)
            hung = self._ports.why_hung(worker.pid)
            cause = "was lost" if hung is None else f"was killed: {hung}"
            kind = Cause.WORKER_LOST if hung is None else Cause.WORKER_HUNG
            self._end_life(f"its worker {worker.local_rank} {cause}", kind)

    # ---- suspicions (the thread of that name)

    def at_work(self) -> tuple[RoundDocument | None, list[Worker]]:
        """The newest round, if this life is or becomes a member, and the workers that may still be in it."""
        with self._lock:
            current = self._document
            if self._my_entry(current) is None and (current is None or self._my_entry(current.next) is None):
                return None, []
            return current, self._at_work()

    def accuse(self, document: RoundDocument, suspects: tuple[Ghost, ...], reason: str) -> None:
        """Break the round of ``document`` because ``suspects`` do not answer, unless it is over."""
        with self._lock:
            if self._life.ended or document is not self._document:
                return
            self._quarantine.note_unreachable(tuple(each.node for each in suspects))
            failure = RoundFailure(document.last_number, reason, cause=Cause.CONTACT_LOST, suspects=suspects)
            self._record_writer.break_round(failure, self._record(), SUSPECTED_S)

    def exclude(self, worker: Worker, why: str) -> None:
        """``worker`` of this node hangs while others wait for it: break the round, so that they continue without it."""
        with self._lock:
            current = self._document
            if current is None or self._life.ended or worker.life != self._life.number or worker.stuck:
                return
            number, worker.stuck = current.last_number, True
            self._acknowledged = max(self._acknowledged, number + 1)
            reason = f"worker {worker.local_rank} of node {self._node} hangs: {why}"
            logger().warning("worker.excluded", pid=worker.pid, local_rank=worker.local_rank, reason=why)
            failure = RoundFailure(number, reason, cause=Cause.WORKER_HUNG)
            self._record_writer.break_round(failure, self._record(cause=why))

    # ---- the node's record

    def _publish(self) -> None:
        self._record_writer.announce(self._record())

    def _record(self, state: NodeState | None = None, *, planned: bool | None = None, cause: str = "") -> NodeRecord:
        now = self._clock.monotonic()
        fields: dict[str, Any] = self._life.shown(now)
        fields["state"] = state or self._life.state(now, evicted=bool(self._evicted))
        fields["acknowledged"] = max(self._acknowledged, fields["reported"])
        if planned is not None:
            fields["planned"] = planned
        fields["unreachable"], fields["place"] = self._quarantine.unreachable, self._place
        fields["passed"] = self.passed
        if self._false_start is not None and not self.met.is_set():
            fields |= self._false_start.fields
        last: dict[str, Any] = {"reached": self._reached, "ended_by": self._ended_by}
        last["cause"] = cause or self._quarantine.own_fault
        return self._config.base.model_copy(update=fields | last)

    def _send(self, worker: Worker, message: Message) -> None:
        try:
            worker.connection.send(message)
        except ChannelClosedError:
            logger().debug("worker.unreachable", pid=worker.pid)


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
