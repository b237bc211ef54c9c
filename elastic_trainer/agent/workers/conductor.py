"""Leads this node's workers through rounds in place: carries their reports to the run, and its decisions to them.

*Runs in* the agent: reader threads of the channel, the deciding thread (``see``), torchrun's main thread (``begin``).
Writes to the store are left to the announcer's thread, so that none of these waits for it.
*Owns* the table of workers and the watchdog.
*Fails by* nothing: a worker that breaks the protocol is treated as lost.
*Invariant*: a life of this node's workers ends once; after that nothing its workers say counts.
"""

from __future__ import annotations

import math
import threading
from typing import Any

from elastic_trainer.agent.workers.backoff import Backoff
from elastic_trainer.agent.workers.conduct import Conduct, ConductorPorts
from elastic_trainer.agent.workers.duty import Later, later
from elastic_trainer.agent.workers.quarantine import Quarantine
from elastic_trainer.agent.workers.release import Release
from elastic_trainer.agent.workers.roster import Life, Worker
from elastic_trainer.agent.workers.watchdog import Watchdog
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
"""Seconds after which a suspicion that could not be written is dropped: the suspect may have come back since."""


class Conductor:
    """See the module."""

    def __init__(
        self, conduct: Conduct, ports: ConductorPorts, clock: Clock = SYSTEM, call_later: Later = later
    ) -> None:
        self._conduct, self._ports, self._node, self._clock = conduct, ports, conduct.node, clock
        self._announcer, self._create_revision = ports.announcer, ports.create_revision
        self._lock, self._later = threading.RLock(), call_later
        self._release = Release(conduct.sever_timeout_s, self._lock, ports.busy, self._late, clock, call_later)
        self._life = Life(0, 0, ended=True)
        self._document: RoundDocument | None = None
        self._acknowledged = 0
        self._place: int | None = None
        self._evicted = ""
        self._reached: Identity | None = None
        """How far the last life came."""
        self._ended_by: Cause | None = None
        """What ended it."""
        self._strikes = Backoff()
        self._quarantine = Quarantine(
            self._node, ports.reachability, lambda: self._document, self._released, call_later
        )
        self.met = threading.Event()
        """Set when the first worker of the present life has opened a session."""
        self._watchdog = Watchdog(conduct.hang_timeout_s, self._at_work, ports.verdicts, clock)
        self._watchdog.start()

    @property
    def life(self) -> int:
        return self._life.number

    def close(self) -> None:
        """Close the workers' connections: nobody leads them any more."""
        self._watchdog.close()
        self._quarantine.close()
        self._release.close()
        with self._lock:
            for worker in self._life.workers.values():
                worker.connection.close()

    def in_session(self) -> frozenset[int]:
        """The processes that have opened a Session in this life."""
        with self._lock:
            return frozenset(worker.pid for worker in self._life.workers.values())

    def _at_work(self) -> list[Worker]:
        """The workers that have not said farewell."""
        with self._lock:
            return [] if self._life.ended else [each for each in self._life.workers.values() if each.left is None]

    # ---- lives

    def begin(self, size: int, place: int | None = None) -> NodeRecord:
        """torchrun starts ``size`` workers, at ``place`` of a shard group: the record of a node that warms up."""
        with self._lock:
            if not self._life.ended:
                self._end_life("its workers failed")
            back_off_s = self._strikes.back_off_s()
            joins_at = math.inf if self._quarantine.active else self._clock.monotonic() + back_off_s
            self._life = Life(self._life.number, size, joins_at=joins_at)
            if back_off_s:
                logger().warning("node.backs_off", node=self._node, seconds=back_off_s, failures=self._strikes.count)
                life = self._life.number
                self._later(back_off_s, lambda: self._offer(life))
            self._quarantine.clear()
            self._place = place
            self._evicted = ""  # SIGTERM went to a worker alone: torchrun itself would not start it again
            self.met.clear()
            return self._record(NodeState.WARMING)

    def begin_anew(self, why: str) -> None:
        """End a life that has no part in a round, through no fault of its workers: torchrun starts others."""
        with self._lock:
            current, strikes = self._document, self._strikes
            idle = self._my_entry(current) is None or (current is not None and current.state is RoundState.BROKEN)
            if idle and not self._life.ended:
                logger().info("place.changed", node=self._node, place=self._place, reason=why)
                self._end_life(why)
                self._strikes = strikes

    def _offer(self, life: int) -> None:
        """The back-off is over."""
        with self._lock:
            if life == self._life.number and not self._life.ended:
                self._publish()

    def _released(self) -> None:
        """All who train can be reached again."""
        with self._lock:
            self._life.joins_at = 0.0
            self._offer(self._life.number)

    def _end_life(self, cause: str, kind: Cause = Cause.WORKER_LOST) -> None:
        """The workers of this life are gone, or are to go; called with the lock held."""
        life, current = self._life, self._document
        self._look_how_far(life)
        life.ended = True
        self._reached, self._ended_by = life.reached, kind
        if life.size:
            self._strikes = self._strikes.after(life.steps)
        for worker in life.workers.values():
            self._tell(worker, Exit(code=EXIT_FAILURE, reason=cause))
        taking_part = self._my_entry(current) is not None
        self._life = Life(life.number + 1, life.size, ended=True)
        if current is None or not taking_part:  # else it would seem to have left a round that takes it in
            self._announcer.announce(self._record(NodeState.WARMING, planned=False, cause=cause))
            return
        self._acknowledged = max(self._acknowledged, current.last_number + 1)
        reason = f"node {self._node} left the round: {cause}"
        failure = RoundFailure(current.last_number, reason, worker_failed=True, cause=kind)
        self._announcer.break_round(failure, self._record(NodeState.WARMING, planned=False, cause=cause))

    def _look_how_far(self, life: Life) -> None:
        """The last reports of its workers may be a moment old: their pages are not."""
        for worker in life.workers.values():
            try:
                place = self._ports.committed(worker.pid)
            except Exception:  # noqa: BLE001 - whatever a page holds: the life must end
                logger().exception("page.unreadable", pid=worker.pid)
                continue
            if place is not None:
                life.came_to(*place)

    # ---- what the run decides (the deciding thread)

    def see(self, document: RoundDocument) -> None:
        """Pass ``document`` on to the workers, as far as it concerns them."""
        with self._lock:
            self._document = document
            if self._life.ended:
                return
            mine = self._my_entry(document)
            if document.state is RoundState.CLOSED:
                code = 0 if document.result is RunResult.SUCCEEDED else EXIT_FAILURE
                for worker in self._life.workers.values():
                    self._tell(worker, Exit(code=code, reason=document.reason))
            elif document.state is RoundState.BROKEN:
                self._over(document, document.number, document.reason)
            elif document.state is RoundState.ACTIVE and mine is not None:
                self._form(document, mine)
            elif document.state is RoundState.ACTIVE:
                self._over(document, document.number - 1, f"round {document.number} was formed without this node")
                if document.left_out == self._node:
                    self._keep_away(document)
            elif document.state is RoundState.DRAINING:
                self._drain(document, mine)

    def _my_entry(self, document: RoundDocument | None) -> RoundMember | None:
        """This life's entry in ``document``."""
        mine = document.member(self._node) if document is not None else None
        if mine is None or (mine.life, mine.create_revision) != (self._life.number, self._create_revision()):
            return None
        return mine

    def _over(self, document: RoundDocument, number: int, reason: str) -> None:
        """Rounds up to ``number`` are over: send that to the workers, and acknowledge it to the run."""
        self._tell_over(number, reason)
        waited_for = document.member(self._node) is not None or self._node in (ghost.node for ghost in document.ghosts)
        waited_for |= any(worker.told_formation for worker in self._life.workers.values())
        if self._acknowledged <= number and waited_for:
            self._acknowledged = number + 1
            self._publish()

    def _keep_away(self, document: RoundDocument) -> None:
        self._quarantine.enter(document)
        if self._quarantine.active and self._life.joins_at != math.inf:
            self._life.joins_at = math.inf
            self._publish()

    def _tell_over(self, number: int, reason: str) -> None:
        for worker in self._life.workers.values():
            if worker.told_over < number:
                worker.told_over = number
                self._tell(worker, Over(number=number, reason=reason))
                self._release.expect(self._life, worker, number)

    def _late(self, worker: Worker) -> None:
        """It is not free yet: the others must know why, and how far it has come."""
        self._look_how_far(self._life)
        self._publish()

    def _form(self, document: RoundDocument, mine: RoundMember) -> None:
        """Where all leases were lost at once a round follows on one that nobody has seen the end of."""
        self._tell_over(document.number - 1, f"round {document.number} was formed")
        for worker in self._life.workers.values():
            if worker.ready is not None and worker.told_formation < document.number:
                worker.told_formation = worker.inside = document.number
                self._tell(worker, _formation_of(document, mine, worker.local_rank))

    def _drain(self, document: RoundDocument, mine: RoundMember | None) -> None:
        if mine is not None:
            self._form(document, mine)  # a change may be planned before a slow member has seen its round
        following = document.next
        place = self._my_entry(following)
        for worker in self._life.workers.values():
            then = _formation_of(following, place, worker.local_rank) if following and place else None
            if mine is not None and worker.told_drain < document.number:
                worker.told_drain = document.number
                if following is not None:
                    worker.told_formation = following.number
                worker.offered = then.number if then is not None else 0
                self._tell(
                    worker,
                    Drain(number=document.number, reason=document.reason, waits=following is None, next=then),
                )
            elif mine is None and then is not None and worker.told_formation < then.number:
                worker.told_formation = worker.inside = then.number
                self._tell(worker, then)

    # ---- what the workers say (reader threads)

    def admit(self, connection: Connection, local_rank: int) -> Worker | None:
        """A worker has connected; None if it has been refused."""
        with self._lock:
            life = self._life
            if life.ended or local_rank in life.workers:
                connection.send(Exit(code=EXIT_FAILURE, reason="the node's workers are being restarted"))
                return None
            worker = Worker(connection, connection.peer()[0], local_rank, life.number)
            life.workers[local_rank] = worker
            self.met.set()
            self._tell(worker, Welcome(run=self._conduct.run, node=self._node))
            return worker

    def hear(self, worker: Worker, message: Message) -> None:
        worker.heard_at = self._clock.monotonic()
        if isinstance(message, Pong):
            worker.ponged(worker.heard_at)
        if isinstance(message, Failed) and message.forming:
            self._quarantine.ask(self._document)  # takes a moment; what the worker says next comes after it
        elif isinstance(message, Ready) and self._is_accused():
            self._quarantine.ask(self._document)
        with self._lock:
            if worker.life != self._life.number or self._life.ended:
                return
            if isinstance(message, Ready):
                self._ready(worker, message)
                if self._document is not None:
                    self.see(self._document)
            elif isinstance(message, Failed):
                self._failed(message)
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
        if worker.free_for() > worker.told_over:
            self._release.freed(worker)
        if message.planned and message.number == worker.offered:
            worker.inside = message.number
        if message.state is not None:
            self._life.note(Identity.model_validate(message.state.model_dump()))
        self._publish()

    def _is_accused(self) -> bool:
        """Whether the others have broken the round since this node did not answer: can it not reach them either?"""
        return self._document is not None and self._document.accuses(self._node)

    def _left(self, worker: Worker, message: Leaving) -> None:
        worker.left = message
        if message.status == "stopped" and self._document is not None:
            # It left by agreement, so nobody need wait until its process and its key are gone.
            worker.ready = Ready(number=self._document.last_number + 1, planned=True)
        self._publish()

    def _failed(self, message: Failed) -> None:
        """A collective failed: break the round, unless somebody has done so."""
        current = self._document
        if current is None or message.number not in (current.number, current.last_number):
            return
        if current.state in (RoundState.ACTIVE, RoundState.DRAINING):
            reason = f"node {self._node} lost contact with a peer ({message.error})"
            self._acknowledged = max(self._acknowledged, current.last_number + 1)
            failure = RoundFailure(current.last_number, reason, cause=Cause.CONTACT_LOST)
            self._announcer.break_round(failure, self._record(planned=False))

    def _evict(self, reason: str) -> None:
        """This node is asked to go: a planned change."""
        if not self._evicted:
            self._evicted = reason
            logger().info("node.evicted", node=self._node, reason=reason)
            self._publish()

    def gone(self, worker: Worker) -> None:
        """A worker has hung up, or is dead; may come twice."""
        with self._lock:
            self._release.freed(worker)
            if worker.life != self._life.number or self._life.ended:
                return
            if worker.left is not None and worker.left.status in ("done", "stopped"):
                return
            logger().warning("worker.lost", pid=worker.pid, local_rank=worker.local_rank, node=self._node)
            hung = self._ports.verdicts.take(worker.pid)
            cause = "was lost" if hung is None else f"was ended: {hung}"
            kind = Cause.WORKER_LOST if hung is None else Cause.WORKER_HUNG
            self._end_life(f"its worker {worker.local_rank} {cause}", kind)

    # ---- suspicions (the thread of that name)

    def at_work(self) -> tuple[RoundDocument | None, list[Worker]]:
        """The newest round, if this life of the node has a part in it, and its workers; those may be in it still."""
        with self._lock:
            current = self._document
            if self._my_entry(current) is None and (current is None or self._my_entry(current.next) is None):
                return None, []
            return current, self._at_work()

    def accuse(self, document: RoundDocument, suspects: tuple[Ghost, ...], reason: str) -> None:
        """Break the round of ``document`` without ``suspects``, which do not answer, unless it is over."""
        with self._lock:
            if self._life.ended or document is not self._document:
                return
            self._quarantine.found(tuple(each.node for each in suspects))
            failure = RoundFailure(document.last_number, reason, cause=Cause.CONTACT_LOST, suspects=suspects)
            self._announcer.break_round(failure, self._record(), SUSPECTED_S)

    def pass_over(self, worker: Worker, why: str) -> None:
        """``worker``, one of this node's, will not come: let the others go on without it."""
        with self._lock:
            current = self._document
            if current is None or self._life.ended or worker.life != self._life.number or worker.stuck:
                return
            number, worker.stuck = current.last_number, True
            self._acknowledged = max(self._acknowledged, number + 1)
            reason = f"worker {worker.local_rank} of node {self._node} stands still: {why}"
            logger().warning("worker.passed_over", pid=worker.pid, local_rank=worker.local_rank, reason=why)
            failure = RoundFailure(number, reason, cause=Cause.WORKER_HUNG)
            self._announcer.break_round(failure, self._record(cause=why))

    # ---- the node's record

    def _publish(self) -> None:
        self._announcer.announce(self._record())

    def _record(self, state: NodeState | None = None, *, planned: bool | None = None, cause: str = "") -> NodeRecord:
        now = self._clock.monotonic()
        fields: dict[str, Any] = self._life.shown(now)
        fields["state"] = state or self._life.state(now, evicted=bool(self._evicted))
        fields["acknowledged"] = max(self._acknowledged, fields["reported"])
        if planned is not None:
            fields["planned"] = planned
        fields["unreachable"], fields["place"] = self._quarantine.unreachable, self._place
        last: dict[str, Any] = {"reached": self._reached, "ended_by": self._ended_by, "cause": cause}
        return self._conduct.base.model_copy(update=fields | last)

    def _tell(self, worker: Worker, message: Message) -> None:
        try:
            worker.connection.send(message)
        except ChannelClosedError:
            logger().debug("worker.unreachable", pid=worker.pid)


def _formation_of(document: RoundDocument, mine: RoundMember, local_rank: int) -> Formation:
    """The place of one worker in ``document``."""
    return Formation(
        number=document.number,
        nonce=document.nonce,
        store=document.store,
        rank=mine.first_rank + local_rank,
        world_size=document.world_size,
        nodes=tuple(member.node for member in document.members),
        reason=document.reason,
    )
