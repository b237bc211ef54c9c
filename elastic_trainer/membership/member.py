"""One node's membership: a thin thread around the protocol's core, and the methods that the node's agent calls.

*Runs in* the node agent: one deciding thread (``membership``), short-lived threads that probe, and calls from
torchrun's main thread.
*Owns* the node's lease and key, the view of the run.
*Fails by* RunClosedError, JoinTimeoutError, SpecMismatchError and StoreUnavailableError (at the start only: later an
outage of the store is waited out); ConfigError when another live node uses the same id, ReplacedError when that came
later.
*Invariant*: every write of the round document is a ``round_write``. If the store was restored from an older state, the
member first brings it forward to where the run was, before it decides anything else.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import (
    ConfigError,
    ElasticTrainerError,
    JoinTimeoutError,
    LeaseLostError,
    OutcomeUnknownError,
    ReplacedError,
    RunClosedError,
    StoreUnavailableError,
    TransientError,
)
from elastic_trainer.ipc.address import LOOPBACK, refusal_proves
from elastic_trainer.membership.cluster_view import Limits, NodeView, Observation, has_slots
from elastic_trainer.membership.core import (
    LEASE_SLACK_S,
    LOOK_AGAIN_S,
    PROBE_TIMEOUT_S,
    SENIORS,
    Answer,
    AskOldest,
    ChangeWatch,
    CommitRound,
    Core,
    Effect,
    Ended,
    LogDelay,
    Looked,
    Notify,
    Oldest,
    Probed,
    PublishAgain,
    Return,
)
from elastic_trainer.membership.documents import (
    Departure,
    DocumentError,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.view import RunView
from elastic_trainer.membership.writes import (
    STRAYS,
    Author,
    RoundFailure,
    breaking,
    closing,
    first_names,
    free_again,
    is_left,
    is_on,
    oldest_keys,
    parting,
    round_write,
    written_by_nodes,
)
from elastic_trainer.store.api import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Read,
    RunKeys,
    Store,
    TransactionResult,
    absent,
    prefix_end,
    unchanged,
)
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.wording import counted

WRITE_TIMEOUT_S = 5.0
ATTEMPT_S = 1.5
"""Limit of one attempt: a write sent to an etcd leader that has just died is lost, and gets no answer for 7 s."""
ASK_LIMIT_S = 2.0
PARTING_S = 2.0
LOST_RACE_S = 0.1
OUTAGE_S = 0.2
"""Seconds until the core looks again after a write that lost its compare, or that failed in the store."""
RESTS_PER_TURN = 3.0
LONGEST_REST_S = 0.2


class Member:
    """The node ``node_id`` in the run of ``keys``, its key under the lease of ``session``.

    ``replaced(error)`` is called from the deciding thread when the node cannot return: another one has its name.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        node_id: str,
        session: LeaseSession,
        limits: Limits,
        replaced: Callable[[ReplacedError], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._store, self._keys, self.limits, self._clock = store, keys, limits, clock
        self.node_id, self._session, self._replaced = node_id, session, replaced
        self._key = OwnKey(store, keys, node_id, session, clock)
        self._view = RunView(keys)
        self._core = Core(node_id, limits, session.ttl_s + LEASE_SLACK_S, random.SystemRandom())
        self._answers = deque[Answer]()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listeners: list[Callable[[RoundDocument], None]] = []

    def on_round(self, listener: Callable[[RoundDocument], None]) -> None:
        """Call ``listener`` from the deciding thread with each round document, in order."""
        self._listeners.append(listener)

    def start(self, deadline: Deadline) -> None:
        """Start to watch the run and to decide. The node becomes visible with the first ``announce``."""
        self._view.start(self._store)
        if not self._view.wait_loaded(deadline.remaining_s()):
            raise StoreUnavailableError(
                "the store did not send the run's state in time", hint="check its load and the network"
            )
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def observation(self) -> Observation:
        """The latest observation of the run (no I/O)."""
        return self._view.observation()

    def nodes(self, names: Sequence[str], deadline: Deadline) -> dict[str, NodeView]:
        """The existing keys of ``names``; asks the store unless this node watches all nodes."""
        seen = self._view.observation()
        if seen.follows_nodes:
            return {name: seen.nodes[name] for name in names if name in seen.nodes}
        result = self._store.transact([], [Read(self._keys.node(name)) for name in names], deadline=deadline)
        found = {}
        for name, item in zip(names, (read.first for read in result.reads), strict=True):
            with suppress(DocumentError):
                if item is not None:
                    record = NodeRecord.decode(item.value, item.key)
                    found[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        return found

    def found_dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """Those of ``nodes`` whose agents this node has found dead (no I/O)."""
        return self._core.found_dead(nodes)

    def announce(self, record: NodeRecord, deadline: Deadline) -> None:
        """Write ``record`` to this node's key; waits out an outage of the store until ``deadline``."""
        self._key.publish(record, deadline)
        self._view.wake()

    def work_begins(self) -> None:
        """In restart mode: the workers of the announced life are being started. The next ``announce`` ends it."""
        self._key.at_work = True

    def record(self) -> NodeRecord:
        """The record that this node last announced."""
        if self._key.record is None:
            raise RuntimeError("nothing has been announced yet")
        return self._key.record

    def is_mine(self, member: RoundMember | None) -> bool:
        """Whether ``member`` is the present life of this node."""
        return self._key.is_mine(member)

    def break_round(self, failure: RoundFailure, deadline: Deadline, record: NodeRecord | None = None) -> None:
        """Break the round of ``failure`` if it is still in effect; waits out an outage of the store.

        With ``record`` the same write also changes this node's key.
        """
        while not deadline.expired:
            seen = self._view.observation()
            document = breaking(seen.round, failure, self.limits)
            if document is None:
                return
            try:
                if self._commit(document, failure.reason, seen, min(ATTEMPT_S, deadline.remaining_s()), record):
                    return
            except StoreUnavailableError as error:
                logger().debug("decision.postponed", error=str(error))
            self._view.wait_change(seen.serial, min(0.2, deadline.remaining_s()))

    def create_revision(self) -> int:
        """Create-revision of this node's key; 0 before the key exists."""
        return self._key.create_revision

    def published(self) -> NodeRecord | None:
        """The record that this node's key is known to hold; None before it exists, and after it was lost."""
        return self._key.published

    def await_round(self, join_timeout_s: float) -> RoundDocument:
        """Wait for an active round that has this life of the node as a member.

        ``join_timeout_s`` bounds the wait while no round is active (a spare waits as long as others train).
        Raises RunClosedError or JoinTimeoutError.
        """
        idle_since = self._clock.monotonic()
        while True:
            seen = self._view.observation()
            current = seen.round
            if current is not None and current.state is RoundState.CLOSED:
                raise closed_error(current)
            active = current is not None and current.state is RoundState.ACTIVE
            if current is not None and self.is_mine(current.member(self.node_id)):
                if active:
                    return current
                if (record := free_again(self.record(), current.number)) is not None:  # else all would wait for it
                    self.announce(record, Deadline.after(join_timeout_s, self._clock))
            if active and _has_live_members(seen):
                idle_since = self._clock.monotonic()
            left = idle_since + join_timeout_s - self._clock.monotonic()
            if left <= 0.0:
                roll = self._roll_call(seen)
                if not (active and roll.round_lives):
                    raise self._join_timeout(join_timeout_s, roll)
                idle_since = self._clock.monotonic()
            self._view.wait_change(seen.serial, min(left, LOOK_AGAIN_S))

    def await_over(self, number: int, deadline: Deadline) -> None:
        """Wait until round ``number`` is no longer in effect, at most until ``deadline``."""
        while not deadline.expired:
            seen = self._view.observation()
            if seen.round is not None and not is_on(seen.round, number):
                return
            self._view.wait_change(seen.serial, min(deadline.remaining_s(), LOOK_AGAIN_S))

    def await_end(self, number: int, outage_limit_s: float) -> RoundDocument | None:
        """After this node has finished: wait until the run is closed or round ``number`` is over.

        Returns None if the store was unreachable for ``outage_limit_s``.
        """
        lost_since: float | None = None
        while True:
            seen = self._view.observation()
            current = seen.round
            if current is None or current.state is RoundState.CLOSED or current.number > number:
                return current
            lost_since = None if seen.connected else (lost_since or self._clock.monotonic())
            if lost_since is not None and self._clock.monotonic() - lost_since > outage_limit_s:
                return None
            self._view.wait_change(seen.serial, LOOK_AGAIN_S)

    def leave(self, departure: Departure | None = None) -> None:
        """Delete this node's key and stop all threads; ``departure`` records why. Never raises."""
        self._stop.set()
        self._view.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * WRITE_TIMEOUT_S)
        self._session.close()  # if the store is unreachable, the key disappears when its lease ends
        self._view.close()
        if departure is not None:
            self._record(departure)

    def _record(self, departure: Departure) -> None:
        if self.create_revision() == 0:
            return  # it was never in the run
        record, seen = self._key.record, self._view.observation()
        current, revision = seen.round, seen.round_revision
        deadline = Deadline.after(PARTING_S, self._clock)
        try:
            while current is None or current.state is not RoundState.CLOSED:  # a closed run has its own reason
                passed = record is not None and record.passed
                writes = parting(self._keys, departure, current, revision, passed=passed)
                left = self._store.transact(*writes, deadline=deadline)
                if left.succeeded and not passed:
                    self._close_incident(left, departure)
                found = left.reads[0].first
                if left.succeeded or (found.mod_revision if found is not None else 0) == revision:
                    return
                current = RoundDocument.decode(found.value, found.key) if found is not None else None
                revision = found.mod_revision if found is not None else 0
        except ElasticTrainerError as error:
            logger().warning("departure.not_written", error=str(error), reason=departure.reason)

    def _close_incident(
        self, read: TransactionResult, departure: Departure | None, following: RoundDocument | None = None
    ) -> None:
        """Move the open incident that was ``read`` into the history."""
        found = read.reads[0].first
        if found is None:
            return
        try:
            writes = closing(self._keys, found, departure, following)
            self._store.transact(*writes, deadline=Deadline.after(PARTING_S, self._clock))
        except ElasticTrainerError as error:
            logger().warning("incident.unclosed", error=str(error))

    # ---- the deciding thread

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock.monotonic()
            self._view.tidy()
            seen = self._view.observation()
            next_at = began + LOOK_AGAIN_S
            try:
                looked = Looked(seen, self._key.create_revision, self._key.senior, self._key.away)
                answers = [self._answers.popleft() for _ in range(len(self._answers))]
                step = self._core.step(answers, looked, began)
                next_at = step.next_at
                for effect in step.effects:
                    self._perform(effect)
            except Exception:  # noqa: BLE001 - the edge of a thread: a dead deciding thread would go unnoticed
                logger().exception("decision.failed")
                next_at = began + LOOK_AGAIN_S
            # Handles changes in batches: a thousand nodes that report one by one would cause as many looks.
            now = self._clock.monotonic()
            self._clock.wait(self._stop, min(RESTS_PER_TURN * (now - began), LONGEST_REST_S, max(0.0, next_at - began)))
            self._view.wait_change(seen.serial, next_at - self._clock.monotonic())

    def _perform(self, effect: Effect) -> None:
        """Perform ``effect`` and queue its outcome for the next step."""
        again_in_s = None
        try:
            if not self._do(effect):
                again_in_s = LOST_RACE_S
        except TransientError as error:
            again_in_s = OUTAGE_S
            logger().debug("decision.postponed", error=str(error))
        except ConfigError as error:
            again_in_s = LOOK_AGAIN_S
            logger().error("decision.refused", error=str(error))
        except ReplacedError as error:
            again_in_s = LOOK_AGAIN_S
            logger().error("decision.refused", error=str(error))
            self._replaced(error)
        except RuntimeError:  # for example no thread can be started; the step's other effects do not depend on it
            again_in_s = OUTAGE_S
            logger().exception("decision.failed")
        self._answers.append(Ended(effect, again_in_s))

    def _do(self, effect: Effect) -> bool:
        """Perform ``effect``; False if another node was faster or this node's key is gone."""
        if isinstance(effect, Notify):
            for listener in self._listeners:
                listener(effect.document)
        elif isinstance(effect, Return):
            was_away = self._key.away
            self._key.come_back(Deadline.after(WRITE_TIMEOUT_S, self._clock))
            if was_away:
                logger().warning("node.returned", node=self.node_id, create_revision=self._key.create_revision)
            self._view.wake()
        elif isinstance(effect, PublishAgain):
            self._key.publish_again(Deadline.after(WRITE_TIMEOUT_S, self._clock))
        elif isinstance(effect, CommitRound):
            if (document := effect.decision.round) is not None:
                if effect.rolled_back:
                    logger().warning("store.rolled_back", reason=effect.decision.reason, known_round=document.number)
                return self._commit(document, effect.decision.reason, effect.seen, ATTEMPT_S)
        elif isinstance(effect, ChangeWatch):
            logger().debug("nodes.followed", nodes=effect.nodes, reason=effect.reason)
            self._view.switch(self._store, nodes=effect.nodes)
        elif isinstance(effect, AskOldest):
            self._answers.append(self._oldest(effect))
        elif isinstance(effect, LogDelay):
            logger().info("round.delayed", after=effect.after, reason=effect.reason)
        else:
            for node in effect.nodes:
                try:
                    threading.Thread(target=self._probe, args=(node,), name=f"probe-{node.id}", daemon=True).start()
                except RuntimeError:  # the limit of processes is reached
                    self._probed(Probed(node.id, node.mod_revision, dead=False))
        return True

    def _probe(self, node: NodeView) -> None:
        dead = False
        try:
            address = node.record.address
            dead = refusal_proves(self._key.address, address) and refuses(
                address, node.record.probe_port, PROBE_TIMEOUT_S
            )
            if dead:
                logger().warning("node.found_dead", node=node.id, address=address)
        finally:
            self._probed(Probed(node.id, node.mod_revision, dead))

    def _oldest(self, effect: AskOldest) -> Oldest:
        wanted = oldest_keys(self._keys, effect.seniors + len(effect.ghosts))
        found = self._store.transact([], [wanted], deadline=Deadline.after(ASK_LIMIT_S, self._clock)).reads[0]
        names = first_names(written_by_nodes(found.items, self._keys), effect.ghosts, effect.seniors)
        return Oldest(tuple(names), effect.seniors)

    def _probed(self, answer: Probed) -> None:
        self._answers.append(answer)
        if answer.dead:
            self._view.wake()

    def _commit(
        self, document: RoundDocument, reason: str, seen: Observation, limit_s: float, record: NodeRecord | None = None
    ) -> bool:
        """Write the round document; False if another node was faster or this node's key is gone."""
        author = Author(self._keys, self.node_id, self._key.create_revision)
        with self._key.lock if record is not None else nullcontext():
            more = []
            if record is not None:
                self._key.written = None
                more = [self._key.put(record)]
            wall, left = self._clock.wall(), document.state is RoundState.ACTIVE and is_left(seen.round, document)
            write = round_write(author, document, seen.round_revision, wall, *more, left=left)
            if write is None:
                return False
            try:
                result = self._store.transact(*write, deadline=Deadline.after(limit_s, self._clock))
            except OutcomeUnknownError:
                return False  # the watch shows whether it happened
            if result.succeeded and record is not None:
                self._key.wrote(record, result.revision)
        if result.succeeded:
            _note(document, reason)
            self._view.note_round(document, result.revision, seen)
            if left:
                self._close_incident(result, None, document)
        return result.succeeded

    def join_timeout(self, join_timeout_s: float) -> JoinTimeoutError:
        return self._join_timeout(join_timeout_s, self._roll_call(self._view.observation()))

    def _roll_call(self, seen: Observation) -> RollCall:
        if not seen.follows_nodes:
            return roll_call(self._store, self._keys, seen.round, Deadline.after(ASK_LIMIT_S, self._clock))
        return RollCall(named(sorted(seen.nodes)), _has_live_members(seen))

    def _join_timeout(self, join_timeout_s: float, roll: RollCall) -> JoinTimeoutError:
        least, were = counted(self.limits.min_nodes, "node"), "was" if self.limits.min_nodes == 1 else "were"
        grouped = f" in whole shard groups of {self.limits.shard_nodes}" if has_slots(self.limits) else ""
        return JoinTimeoutError(
            f"fewer than {least}{grouped} {were} ready within {join_timeout_s:g} s (present: {roll.present})",
            hint="start more nodes, lower the minimum of --nnodes, or raise --rdzv-conf join_timeout",
        )


# ---- the own key


KEY_ATTEMPT_S = 3.0
KEY_PAUSE_S = 0.1


class OwnKey:
    """The key of ``node_id``, bound to the lease of ``session``; ``create_revision`` is 0 until the key exists.

    It is written only while it is absent or at the version that this object knows, so a delayed write of unknown
    outcome cannot undo a newer one.
    """

    def __init__(self, store: Store, keys: RunKeys, node_id: str, session: LeaseSession, clock: Clock) -> None:
        self._store, self._keys, self._session, self._clock = store, keys, session, clock
        self._key = keys.node(node_id)
        self._oldest = oldest_keys(keys, SENIORS)
        self.lock = threading.RLock()
        """Held by the one thread that writes the key: torchrun's main thread, the record writer or the deciding one."""
        self.node_id = node_id
        self.create_revision = 0
        self.senior = False
        """Whether it was among the most senior nodes when its key was created."""
        self.record: NodeRecord | None = None
        """The record that the key holds or should hold."""
        self.at_work = False
        """In restart mode: whether this life's workers were started. They cannot join another round."""
        self.written: NodeRecord | None = None
        """What the key is known to hold while its lease lives; None while the outcome of a write is unknown."""
        self._mod_revision = 0
        self._was_there = False
        """Whether the key has existed: then another node with this name came later."""
        self._taken: tuple[float, float] | None = None
        """When the key was seen to be that of another node that may live: first, in several attempts, and last."""

    @property
    def address(self) -> str:
        """The one that this node announces."""
        return self.record.address if self.record is not None else LOOPBACK

    @property
    def has_ended(self) -> bool:
        """Whether the lease has ended in the store, and the key with it."""
        return self._session.lost.is_set()

    @property
    def published(self) -> NodeRecord | None:
        """The record that the key is known to hold; None if it may be absent or may already hold a newer record."""
        return None if self.has_ended or not self.create_revision else self.written

    @property
    def away(self) -> bool:
        """Whether the key must be written (again): its lease has ended, or no write is known to have succeeded."""
        return self.record is not None and (self.has_ended or self.create_revision == 0)

    def is_mine(self, member: RoundMember | None) -> bool:
        """Whether ``member`` of a round is the present life of this node."""
        mine = (self.create_revision, self.record.life) if self.record is not None else None
        return member is not None and (member.create_revision, member.life) == mine

    def put(self, record: NodeRecord) -> Put:
        """The write of ``record``, for a transaction guarded by the round and this key's create-revision."""
        return Put(self._key, record.encode(), self._session.lease_id)

    def wrote(self, record: NodeRecord, revision: int) -> None:
        """Take note that such a write succeeded, at ``revision`` of the store."""
        self.record = self.written = record
        self._mod_revision = revision

    def publish(self, record: NodeRecord, deadline: Deadline) -> None:
        """Write ``record``; retries during an outage of the store until ``deadline``."""
        with self.lock:
            self.at_work = False
            while True:
                self.record = record
                try:
                    if self.has_ended:
                        self._session.renew(deadline.at_most(KEY_ATTEMPT_S))
                        self.create_revision = 0
                    self._write(record, deadline)
                    return
                except LeaseLostError:
                    self._session.lost.set()
                except TransientError:
                    if deadline.expired:
                        raise
                self.lock.release()  # another thread may write the key meanwhile
                try:
                    pause(KEY_PAUSE_S, clock=self._clock)
                finally:
                    self.lock.acquire()

    def come_back(self, deadline: Deadline) -> None:
        """After the lease was lost: write the same record as a new incarnation; again if the outcome was unknown.

        A life that is at work is not shown as ready: it is no member of any round under its new key.
        """
        with self.lock:
            if self.record is None or not self.away:
                return
            if self.has_ended:
                self._session.renew(deadline)
                self.create_revision = 0
            state = NodeState.WARMING if self.at_work else self.record.state
            self._write_again(self.record.model_copy(update={"state": state}), deadline)

    def publish_again(self, deadline: Deadline) -> None:
        """Write the present record once more: a restored store may hold an older one."""
        with self.lock:
            if self.record is not None and not self.away:
                self._write_again(self.record, deadline)

    def _write_again(self, record: NodeRecord, deadline: Deadline) -> None:
        try:
            self._write(record, deadline)
        except LeaseLostError:
            self._session.lost.set()

    def _write(self, record: NodeRecord, deadline: Deadline) -> None:
        put = self.put(record)
        self.written = None
        while self.create_revision:
            result = self._transact(deadline, unchanged(self._key, self._mod_revision), put)
            if result.succeeded:
                self.wrote(record, result.revision)
                return
            there = result.reads[0].first
            if there is not None and there.create_revision == self.create_revision:
                self._mod_revision = there.mod_revision  # our write, whose answer was lost; or a restored store
            else:
                self.create_revision = 0
        self._create(record, put, deadline)

    def _create(self, record: NodeRecord, put: Put, deadline: Deadline) -> None:
        while True:
            result = self._transact(deadline, absent(self._key), put, self._oldest, Delete(self._keys.departure))
            if result.succeeded:
                self._created(record, result.revision, result)
                return
            left_behind = result.reads[0].first
            if left_behind is None:
                continue
            at_that = unchanged(self._key, left_behind.mod_revision)
            if left_behind.lease == self._session.lease_id:  # an earlier write of ours, whose answer was lost
                result = self._transact(deadline, at_that, put, self._oldest)
                if result.succeeded:
                    self._created(record, left_behind.create_revision, result)
                return
            if self._is_dead(left_behind):
                self._transact(deadline, at_that, Delete(self._key))
            else:
                self._note_taken(deadline)
                pause(KEY_PAUSE_S, clock=self._clock)

    def _is_dead(self, key: KeyValue) -> bool:
        """Whether the host of the node that wrote ``key`` refuses connections to its agent's port."""
        try:
            record = NodeRecord.decode(key.value, key.key)
        except DocumentError:
            return False
        proves = record.probe_port > 0 and refusal_proves(self.address, record.address)
        return proves and refuses(record.address, record.probe_port, PROBE_LIMIT_S)

    def _note_taken(self, deadline: Deadline) -> None:
        """The key is that of another node. Raises at ``deadline``, and once a dead node's lease would have ended."""
        now, ttl_s = self._clock.monotonic(), self._session.ttl_s
        since, last = self._taken or (now, now)
        if now - last > ttl_s:
            since = now  # leases last longer when the store was away
        self._taken = since, now
        if now - since > 2 * ttl_s + 2.0:
            whose = f"another live node of this run has the id {self.node_id!r}"
            hint = "give each node its own --rdzv-conf node_id, or omit the option"
            if self._was_there:
                raise ReplacedError(f"{whose} since this one lost its lease; the run goes on without it", hint=hint)
            raise ConfigError(whose, hint=hint)
        if deadline.expired:
            raise StoreUnavailableError(f"the key of an earlier node {self.node_id!r} did not disappear in time")

    def _transact(self, deadline: Deadline, guard: Compare, *writes: Operation) -> TransactionResult:
        """Do ``writes`` if ``guard`` holds, else read the key."""
        return self._store.transact([guard], writes, [Read(self._key)], deadline=deadline.at_most(KEY_ATTEMPT_S))

    def _created(self, record: NodeRecord, create_revision: int, result: TransactionResult) -> None:
        first = written_by_nodes(result.reads[0].items, self._keys)[:SENIORS]
        self.senior = any(name == self.node_id for name, _ in first)
        self.create_revision = create_revision
        self._was_there, self._taken = True, None
        self.wrote(record, result.revision)


def closed_error(document: RoundDocument) -> RunClosedError:
    """The error for a node that meets a closed run."""
    succeeded = document.result is RunResult.SUCCEEDED
    how = "has finished" if succeeded else f"has failed: {document.reason}"
    return RunClosedError(
        f"the run {how}",
        succeeded=succeeded,
        hint="use another --rdzv-id, or --rdzv-conf reopen=true to continue it",
    )


def _note(document: RoundDocument, reason: str) -> None:
    """Log each state change of a round, on the node that wrote it."""
    names = [member.node for member in document.members]
    log = logger().bind(round=document.number, world_size=document.world_size, nodes=names, reason=reason)
    match document.state:
        case RoundState.ACTIVE:
            log.info("round.formed")
        case RoundState.DRAINING:
            log.info("drain.started")
        case RoundState.BROKEN:
            log.info("round.broken")
        case RoundState.CLOSED:
            log.info("round.closed")


# ---- probes of agents' ports


ENDING_S = 0.1
"""How long a connection that was accepted is kept: until the next probe."""
PROBE_LIMIT_S = 0.2


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether ``host`` refuses connections to ``port``; a timeout proves nothing.

    The kernel accepts for a killed process until its sockets close, and a container's network is gone soon after: then
    nobody refuses the next probe. So a connection is kept for a moment, and made again if the other side closes it.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as accepted:
            accepted.settimeout(min(ENDING_S, timeout_s))
            with contextlib.suppress(ConnectionResetError):
                accepted.recv(1)
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


# ---- who is there


NAMED = 32
"""Upper bound on the nodes that a message names."""
CALLED = 64
"""Members that are looked up; if none of them is present, the round counts as having no live member."""


@dataclass(frozen=True, slots=True)
class RollCall:
    """The present nodes, for people, and whether members of the round are among them."""

    present: str
    round_lives: bool


def roll_call(store: Store, keys: RunKeys, current: RoundDocument | None, deadline: Deadline) -> RollCall:
    """Read the nodes of the run from the store."""
    everyone = Read(keys.nodes, prefix_end(keys.nodes), limit=NAMED + 1 + STRAYS, keys_only=True)
    members = current.members[:CALLED] if current is not None else ()
    reads = [Read(keys.node(member.node), keys_only=True) for member in members]
    try:
        found = store.transact([], [everyone, *reads], deadline=deadline)
    except ElasticTrainerError as error:
        return RollCall(f"not known: {error}", round_lives=False)
    names = [name for name, _ in written_by_nodes(found.reads[0].items, keys)]
    there = [read.first for read in found.reads[1:]]
    lives = any(
        key is not None and key.create_revision == member.create_revision
        for key, member in zip(there, members, strict=True)
    )
    return RollCall(named(names), lives)


def _has_live_members(seen: Observation) -> bool:
    current = seen.round
    return current is not None and any(
        (node := seen.nodes.get(member.node)) is not None
        and node.create_revision == member.create_revision
        and node.ghost not in current.ghosts
        for member in current.members
    )


def named(names: list[str]) -> str:
    """The first of ``names``, in words."""
    if not names:
        return "none"
    return ", ".join(names[:NAMED]) + (" and others" if len(names) > NAMED else "")
