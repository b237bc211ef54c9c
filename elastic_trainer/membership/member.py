"""One node's membership: its presence in the store, the decisions it may carry out, the rounds it waits for.

*Runs in* the node agent: one thread that decides (``membership``), calls from torchrun's main thread.
*Owns* the node's lease and key, the view of the run.
*Fails by* RunClosedError, JoinTimeoutError, SpecMismatchError and StoreUnavailableError (at the start only: later an
outage of the store is waited out).
*Invariant*: the round document is written only against the revision last seen and while this node's own key stands,
so a thawed or partitioned member cannot undo what others decided. A store that was restored from an older state is
brought to where the run was, before anything else is decided.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import (
    ConfigError,
    JoinTimeoutError,
    OutcomeUnknownError,
    RunClosedError,
    StoreUnavailableError,
    TransientError,
)
from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView, Sightings, live_members
from elastic_trainer.membership.composition import broken
from elastic_trainer.membership.delays import Delays
from elastic_trainer.membership.documents import (
    DocumentError,
    Ghost,
    JournalEntry,
    NodeRecord,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.outlook import Outlook, RollCall, named
from elastic_trainer.membership.presence import Presence
from elastic_trainer.membership.probe import Prober
from elastic_trainer.membership.rollback_guard import STATE_ORDER, RollbackGuard, position
from elastic_trainer.membership.rules import Action, Decision, decide
from elastic_trainer.membership.sightings import Tracker
from elastic_trainer.membership.view import Observation, RunView
from elastic_trainer.model import Cause, RecoveryMode
from elastic_trainer.store.api import Compare, Delete, Operation, Put, Read, Store, created_at, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.telemetry.logs import logger

WRITE_TIMEOUT_S = 5.0
WRITE_ATTEMPT_S = 1.5
"""One try of a round write: one sent to an etcd leader that has just died is lost, and is not answered for 7 s."""
JOURNAL_LENGTH = 1000
LOOK_AGAIN_S = 1.0
RESTS_PER_TURN = 3.0
LONGEST_REST_S = 0.2


class Member:
    """The node ``node_id`` in the run of ``keys``.

    ``prober`` tells which nodes' agents are dead, of those that are in doubt.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        presence: Presence,
        limits: Limits,
        *,
        prober: Prober | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._store, self._keys, self._limits, self._clock = store, keys, limits, clock
        self._presence = presence
        self._prober = prober if prober is not None else Prober(clock)
        self._view = RunView(keys)
        self._outlook = Outlook(store, keys, presence, self._view, clock)
        self._tracker = Tracker()
        self._memory = RollbackGuard()
        self._delays = Delays()
        self._reloads = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listeners: list[Callable[[RoundDocument], None]] = []
        self._told_revision = -1

    @property
    def node_id(self) -> str:
        """This node's name."""
        return self._presence.node_id

    def on_round(self, listener: Callable[[RoundDocument], None]) -> None:
        """Call ``listener`` from the deciding thread with each round document, in order."""
        self._listeners.append(listener)

    def start(self, deadline: Deadline) -> None:
        """Follow the run and begin to decide. The node becomes visible with the first ``announce``."""
        self._view.start(self._store)
        if not self._view.wait_loaded(deadline.remaining_s()):
            raise StoreUnavailableError(
                "the store did not send the run's state in time", hint="check its load and the network"
            )
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def look(self) -> Observation:
        """What is known of the run now (no I/O)."""
        return self._view.look()

    def nodes(self, names: Sequence[str], deadline: Deadline) -> dict[str, NodeView]:
        """The keys of ``names``, where they are there; asks the store unless this node follows all nodes."""
        seen = self._view.look()
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

    def announce(self, record: NodeRecord, deadline: Deadline) -> None:
        """Show ``record`` under this node's key; waits out an outage of the store until ``deadline``."""
        self._presence.show(record, deadline)
        self._view.wake()

    def record(self) -> NodeRecord:
        """What this node shows of itself."""
        return self._presence.record

    def is_mine(self, member: RoundMember | None) -> bool:
        """Whether ``member`` means the present life of this node."""
        return member is not None and (member.create_revision, member.life) == (
            self._presence.create_revision,
            self._presence.record.life,
        )

    def break_round(
        self,
        number: int,
        reason: str,
        deadline: Deadline,
        *,
        worker_failed: bool = False,
        cause: Cause | None = None,
        record: NodeRecord | None = None,
        suspects: tuple[Ghost, ...] = (),
    ) -> None:
        """Mark round ``number`` broken if it is still on; waits out an outage of the store.

        With ``record`` this node's key is changed in the same write. ``suspects`` are not waited for.
        """
        while not deadline.expired:
            seen = self._view.look()
            current = seen.round
            if current is None or not _is_on(current, number):
                return
            if current.state is RoundState.DRAINING and self._limits.recovery is RecoveryMode.RESTART:
                return  # it ends by agreement already: all leave it now, each as soon as it hears of it
            document = broken(current, reason, worker_failed=worker_failed, cause=cause, suspects=suspects)
            attempt = deadline.at_most(WRITE_ATTEMPT_S)
            try:
                if self._commit(Decision(Action.BREAK, reason, document), seen, attempt, record):
                    return
            except StoreUnavailableError as error:
                logger().debug("decision.postponed", error=str(error))
            self._view.wait_change(seen.serial, min(0.2, deadline.remaining_s()))

    def create_revision(self) -> int:
        """Which key of this node is meant: 0 before it is shown."""
        return self._presence.create_revision

    def shown(self) -> NodeRecord | None:
        """What this node's key is known to hold; None before it is shown, and after it was lost."""
        return self._presence.shown

    def await_round(self, join_timeout_s: float) -> RoundDocument:
        """Wait for an active round that this life of the node is part of.

        ``join_timeout_s`` bounds the wait while no round is active (a spare waits as long as others train).
        Raises RunClosedError or JoinTimeoutError.
        """
        idle_since = self._clock.monotonic()
        while True:
            seen = self._view.look()
            current = seen.round
            if current is not None and current.state is RoundState.CLOSED:
                raise closed_error(current)
            active = current is not None and current.state is RoundState.ACTIVE
            if current is not None and self.is_mine(current.member(self.node_id)):
                if active:
                    return current
                self._pass_over(current.number, join_timeout_s)
            if active and live_members(self._as_view(seen)):
                idle_since = self._clock.monotonic()
            left = idle_since + join_timeout_s - self._clock.monotonic()
            if left <= 0.0:
                roll = self._roll_call(seen)
                if not (active and roll.round_lives):
                    raise self._join_timeout(join_timeout_s, roll)
                idle_since = self._clock.monotonic()
            self._view.wait_change(seen.serial, min(left, LOOK_AGAIN_S))

    def await_over(self, number: int, deadline: Deadline) -> None:
        """Wait until round ``number`` is not on any more, at most until ``deadline``."""
        while not deadline.expired:
            seen = self._view.look()
            if seen.round is not None and not _is_on(seen.round, number):
                return
            self._view.wait_change(seen.serial, min(deadline.remaining_s(), LOOK_AGAIN_S))

    def _pass_over(self, number: int, limit_s: float) -> None:
        """Round ``number`` was over before this node saw it: be free for the next one, else all would wait for it."""
        record = self.record()
        if record.reported <= number:
            free = {"acknowledged": number + 1, "reported": number + 1, "planned": True, "cause": ""}
            self.announce(record.model_copy(update=free), Deadline.after(limit_s, self._clock))

    def await_end(self, number: int, outage_limit_s: float) -> RoundDocument | None:
        """After this node is done: wait until the run is closed or round ``number`` is over.

        An unreachable store is waited for at most ``outage_limit_s``; None then.
        """
        lost_since: float | None = None
        while True:
            seen = self._view.look()
            current = seen.round
            if current is None or current.state is RoundState.CLOSED or current.number > number:
                return current
            lost_since = None if seen.connected else (lost_since or self._clock.monotonic())
            if lost_since is not None and self._clock.monotonic() - lost_since > outage_limit_s:
                return None
            self._view.wait_change(seen.serial, LOOK_AGAIN_S)

    def leave(self) -> None:
        """Take this node's key away and end all threads. Never raises."""
        self._stop.set()
        self._view.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * WRITE_TIMEOUT_S)
        self._presence.close()
        self._view.close()

    # ---- the deciding thread

    def _run(self) -> None:
        while not self._stop.is_set():
            pause_s = LOOK_AGAIN_S
            began = self._clock.monotonic()
            seen = self._view.look()
            try:
                pause_s = self._turn(seen)
            except TransientError as error:
                pause_s = 0.2
                logger().debug("decision.postponed", error=str(error))
            except ConfigError as error:
                logger().error("decision.refused", error=str(error))
            except Exception:  # noqa: BLE001 - the edge of a thread: a dead decider would be silence
                logger().exception("decision.failed")
            # A crowd that reports one by one is looked at in batches: else one look would follow the other.
            rest_s = RESTS_PER_TURN * (self._clock.monotonic() - began)
            self._clock.wait(self._stop, min(rest_s, LONGEST_REST_S, pause_s))
            self._view.wait_change(seen.serial, pause_s)

    def _turn(self, seen: Observation) -> float:
        """One look and at most one act; seconds until the next look if nothing changes."""
        now = self._clock.monotonic()
        self._memory = self._memory.advance(seen.round, now)
        self._tell(seen)
        if self._presence.away:
            self._presence.return_from_loss(Deadline.after(WRITE_TIMEOUT_S, self._clock))
            self._view.wake()
            return 0.0
        if seen.reloads != self._reloads:
            self._presence.show_again(Deadline.after(WRITE_TIMEOUT_S, self._clock))
            self._reloads = seen.reloads
        if self._memory.behind:
            return self._put_back(seen, now)
        outlook_s = self._outlook.turn(seen, now)
        self._track(seen, now)
        if not seen.decidable:
            return min(LOOK_AGAIN_S, outlook_s)
        view = self._as_view(seen)
        decision = decide(view, now)
        self._delays.note(seen.round, decision, now)
        if decision.action is not Action.WAIT:
            done = self._commit(decision, seen, Deadline.after(WRITE_ATTEMPT_S, self._clock))
            return 0.0 if done else 0.1
        probing_s = self._prober.look(view, self._view.wake)
        again_s = decision.again_in_s if decision.again_in_s is not None else LOOK_AGAIN_S
        return min(LOOK_AGAIN_S, outlook_s, probing_s, again_s)

    def _put_back(self, seen: Observation, now: float) -> float:
        """The store has gone back: end the newest round known, so that the next one follows on that."""
        decision = self._memory.decide(self.node_id, seen.round, now)
        if decision.action is Action.WAIT:
            return decision.again_in_s if decision.again_in_s is not None else LOOK_AGAIN_S
        logger().warning("store.went_back", reason=decision.reason, known_round=position(self._memory.known)[1])
        return 0.0 if self._commit(decision, seen, Deadline.after(WRITE_ATTEMPT_S, self._clock)) else 0.1

    def _track(self, seen: Observation, now: float) -> None:
        """Note since when things are as they are; of the nodes nothing is known where they are not followed."""
        if seen.follows_nodes:
            self._tracker = self._tracker.advance(self._as_view(seen), seen.round_revision, now)
        else:
            same = seen.round_revision == self._tracker.round_revision
            round_since = self._tracker.sightings.round_since if same else now
            self._tracker = Tracker(Sightings(round_since=round_since), round_revision=seen.round_revision)

    def _tell(self, seen: Observation) -> None:
        if seen.round is None or seen.round_revision == self._told_revision or self._memory.behind:
            return
        self._told_revision = seen.round_revision
        for listener in self._listeners:
            listener(seen.round)

    def _as_view(self, seen: Observation) -> ClusterView:
        return ClusterView(
            me=self.node_id,
            nodes=seen.nodes,
            round=seen.round,
            limits=self._limits,
            sightings=self._tracker.sightings,
            nonce=secrets.token_hex(8),
            suspects=self._prober.dead(seen.nodes),
        )

    def _commit(
        self, decision: Decision, seen: Observation, deadline: Deadline, record: NodeRecord | None = None
    ) -> bool:
        """Write the decided round document; False if somebody was faster or this node's key is gone."""
        document = decision.round
        if document is None:
            return True
        created = self._presence.create_revision
        if created == 0:
            return False  # who is not shown decides nothing; and as a guard it would mean that the key is absent
        guards: list[Compare] = [
            unchanged(self._keys.round, seen.round_revision),
            created_at(self._keys.node(self.node_id), created),
        ]
        writes = self._writes(document)
        if record is not None:
            writes.append(self._presence.put(record))
        with self._presence.writing() if record is not None else nullcontext():
            try:
                result = self._store.transact(guards, writes, deadline=deadline)
            except OutcomeUnknownError:
                return False  # the watch tells whether it happened
            if result.succeeded and record is not None:
                self._presence.wrote(record, result.revision)
        if result.succeeded:
            logger().info(
                f"round.{_PAST[document.state]}",
                round=document.number,
                world_size=document.world_size,
                nodes=[member.node for member in document.members],
                reason=decision.reason,
            )
            self._view.note_round(document, result.revision)
        return result.succeeded

    def _writes(self, document: RoundDocument) -> list[Operation]:
        entry = JournalEntry(
            wall=self._clock.wall(),
            by=self.node_id,
            round=document.number,
            state=document.state,
            reason=document.reason,
            nodes=tuple(member.node for member in document.members),
            world_size=document.world_size,
        )
        number = len(RoundState) * document.number + STATE_ORDER[document.state]
        writes: list[Operation] = [
            Put(self._keys.round, document.encode()),
            Put(self._keys.event(number), entry.encode()),
        ]
        if number > JOURNAL_LENGTH:
            writes.append(Delete(self._keys.event(0), range_end=self._keys.event(number - JOURNAL_LENGTH)))
        return writes

    def join_timeout(self, join_timeout_s: float) -> JoinTimeoutError:
        """The error of a node that has waited ``join_timeout_s`` seconds in vain."""
        return self._join_timeout(join_timeout_s, self._roll_call(self._view.look()))

    def _roll_call(self, seen: Observation) -> RollCall:
        if not seen.follows_nodes:
            return self._outlook.roll_call(seen)
        return RollCall(named(sorted(seen.nodes)), bool(live_members(self._as_view(seen))))

    def _join_timeout(self, join_timeout_s: float, roll: RollCall) -> JoinTimeoutError:
        least = self._limits.min_nodes
        return JoinTimeoutError(
            f"fewer than {least} nodes were ready within {join_timeout_s:g} s (present: {roll.present})",
            hint="start more nodes, lower the minimum of --nnodes, or raise --rdzv-conf join_timeout",
        )


def _is_on(current: RoundDocument, number: int) -> bool:
    """Whether round ``number`` is in effect, or about to be."""
    if current.state is RoundState.ACTIVE:
        return current.number == number
    following = current.next.number if current.next is not None else current.number
    return current.state is RoundState.DRAINING and current.number <= number <= following


def closed_error(document: RoundDocument) -> RunClosedError:
    """The error for a node that meets a closed run."""
    succeeded = document.result is RunResult.SUCCEEDED
    how = "has finished" if succeeded else f"has failed: {document.reason}"
    return RunClosedError(
        f"the run {how}",
        succeeded=succeeded,
        hint="use another --rdzv-id, or --rdzv-conf reopen=true to continue it",
    )


_PAST = {
    RoundState.ACTIVE: "formed",
    RoundState.DRAINING: "opened",
    RoundState.BROKEN: "broken",
    RoundState.CLOSED: "closed",
}
