"""What a node writes: its own key, the round document, and how it left. Pure.

*The key.* Each procedure is a generator of requests, so a thread and a simulator perform the same steps. The key is
written only while it is absent or at the version that this object knows, so a delayed write of unknown outcome cannot
undo a newer one.

*The round document.* It is written only over the revision last seen and while the writer's own key exists, so a thawed
or partitioned member cannot undo what others decided. There is one exception: the last node that leaves a run that has
succeeded closes it while no node's key exists.

*The departure.* The last node records whether the run was stopped on purpose or gave up. The departure exists only
while no node is present and the last one left by itself: a node that dies writes none, and a node that joins removes
it. Nothing is written over a round that this node has not seen.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.clock import Clock, Deadline
from elastic_trainer.errors import ConfigError, LeaseLostError, ReplacedError, StoreUnavailableError, TransientError
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.core import SENIORS, STATE_ORDER
from elastic_trainer.membership.documents import (
    Departure,
    DocumentError,
    Ghost,
    Incident,
    JournalEntry,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.rules import broken
from elastic_trainer.model import Cause, RecoveryMode
from elastic_trainer.store.api import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Order,
    Put,
    Read,
    RunKeys,
    Snapshot,
    TransactionResult,
    absent,
    created_at,
    none_below,
    prefix_end,
    unchanged,
)

if TYPE_CHECKING:
    from elastic_trainer.store.session import LeaseSession

# ---- the steps of a write that takes several requests


@dataclass(frozen=True, slots=True)
class Transaction:
    """Run ``success`` if all guards hold, else ``failure``; answered by a TransactionResult or a store error."""

    guards: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()
    limit_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait. ``shared``: another thread may write this node's key meanwhile."""

    seconds: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """Grant a new lease to replace a lost one."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class ProbePort:
    """Find out whether ``host`` refuses connections to ``port``."""

    host: str
    port: int


Request = Transaction | Pause | Renew | ProbePort
Steps = Generator[Request, TransactionResult | bool | None, None]
"""The requests of one procedure; each gets its answer, or its error is raised, before the next."""


# ---- the oldest keys


STRAYS = 32
"""Foreign keys among the oldest that one request can skip."""


def oldest_keys(keys: RunKeys, count: int) -> Read:
    """Reads the ``count`` oldest keys, oldest first, and a few more in case some are not nodes' keys."""
    end = prefix_end(keys.nodes)
    return Read(keys.nodes, end, limit=count + STRAYS, order=Order.CREATE_REVISION, keys_only=True)


def first_names(keys: Iterable[tuple[str, KeyValue]], ghosts: Iterable[Ghost], count: int) -> list[str]:
    """The nodes that hold the first ``count`` of ``keys``, oldest first, without ghosts (the values are not read)."""
    passed_over = {(ghost.node, ghost.create_revision, ghost.mod_revision) for ghost in ghosts}
    return [name for name, key in keys if (name, key.create_revision, key.mod_revision) not in passed_over][:count]


def written_by_nodes(found: Iterable[KeyValue], keys: RunKeys) -> list[tuple[str, KeyValue]]:
    """The keys of ``found`` that nodes have written, with the nodes' names: leased keys with valid node names.

    Any other key below ``nodes/`` would occupy one of the first places for ever, and keep real nodes from deciding.
    """
    named = ((keys.node_id(item.key), item) for item in found)
    return [(name, item) for name, item in named if name is not None and item.lease]


# ---- the own key


KEY_ATTEMPT_S: Final = 3.0
AGAIN_S: Final = 0.1


class OwnKey:
    """The key of ``node_id``, bound to ``lease``; ``create_revision`` is 0 until the key exists."""

    def __init__(self, keys: RunKeys, node_id: str, lease: LeaseSession, clock: Clock) -> None:
        self._keys, self._lease, self._clock = keys, lease, clock
        self._key = keys.node(node_id)
        self._oldest = oldest_keys(keys, SENIORS)
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
    def has_ended(self) -> bool:
        """Whether the lease has ended in the store, and the key with it."""
        return self._lease.lost.is_set()

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
        return Put(self._key, record.encode(), self._lease.lease_id)

    def wrote(self, record: NodeRecord, revision: int) -> None:
        """Take note that such a write succeeded, at ``revision`` of the store."""
        self.record = self.written = record
        self._mod_revision = revision

    def publishing(self, record: NodeRecord, deadline: Deadline) -> Steps:
        """Write ``record``; retries during an outage of the store until ``deadline``."""
        self.at_work = False
        while True:
            self.record = record
            try:
                if self.has_ended:
                    yield Renew(min(KEY_ATTEMPT_S, deadline.remaining_s()))
                    self.create_revision = 0
                yield from self._write(record, deadline)
                return
            except LeaseLostError:
                self._lease.lost.set()
            except TransientError:
                if deadline.expired:
                    raise
            yield Pause(AGAIN_S, shared=True)

    def returning(self, deadline: Deadline) -> Steps:
        """After the lease was lost: write the same record as a new incarnation; again if the outcome was unknown.

        A life that is at work is not shown as ready: it is no member of any round under its new key.
        """
        if self.record is None or not self.away:
            return
        if self.has_ended:
            yield Renew(deadline.remaining_s())
            self.create_revision = 0
        state = NodeState.WARMING if self.at_work else self.record.state
        yield from self._write_again(self.record.model_copy(update={"state": state}), deadline)

    def publishing_again(self, deadline: Deadline) -> Steps:
        """Write the present record once more: a restored store may hold an older one."""
        if self.record is not None and not self.away:
            yield from self._write_again(self.record, deadline)

    def _write_again(self, record: NodeRecord, deadline: Deadline) -> Steps:
        try:
            yield from self._write(record, deadline)
        except LeaseLostError:
            self._lease.lost.set()

    def _write(self, record: NodeRecord, deadline: Deadline) -> Steps:
        put = self.put(record)
        self.written = None
        while self.create_revision:
            guard = unchanged(self._key, self._mod_revision)
            result = _result((yield self._transaction(deadline, guard, (put,), (Read(self._key),))))
            there = result.reads[0].first if not result.succeeded else None
            if result.succeeded:
                self.wrote(record, result.revision)
                return
            if there is not None and there.create_revision == self.create_revision:
                self._mod_revision = there.mod_revision  # our write, whose answer was lost; or a restored store
            else:
                self.create_revision = 0
        yield from self._create(record, put, deadline)

    def _create(self, record: NodeRecord, put: Put, deadline: Deadline) -> Steps:
        guard, writes = absent(self._key), (put, self._oldest, Delete(self._keys.departure))
        while True:
            result = _result((yield self._transaction(deadline, guard, writes, (Read(self._key),))))
            if result.succeeded:
                self._created(record, result.revision, result.revision, result.reads[0])
                return
            left_behind = result.reads[0].first
            if left_behind is None:
                continue
            if left_behind.lease == self._lease.lease_id:
                yield from self._adopt(left_behind, record, put, deadline)
                return
            owner = _port_of(left_behind)
            if owner is not None and (yield owner):
                deletion = (Delete(self._key),)
                yield self._transaction(deadline, unchanged(self._key, left_behind.mod_revision), deletion)
            else:
                self._note_taken(deadline)
                yield Pause(AGAIN_S)

    def _note_taken(self, deadline: Deadline) -> None:
        """The key is that of another node. Raises at ``deadline``, and once a dead node's lease would have ended."""
        now, ttl_s = self._clock.monotonic(), self._lease.ttl_s
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

    def _adopt(self, mine: KeyValue, record: NodeRecord, put: Put, deadline: Deadline) -> Steps:
        """Take over the key that an earlier write of ours created; its answer was lost."""
        guard = unchanged(self._key, mine.mod_revision)
        result = _result((yield self._transaction(deadline, guard, (put, self._oldest))))
        if result.succeeded:
            self._created(record, mine.create_revision, result.revision, result.reads[0])

    def _transaction(
        self, deadline: Deadline, guard: Compare, success: tuple[Operation, ...], failure: tuple[Operation, ...] = ()
    ) -> Request:
        return Transaction((guard,), success, failure, min(KEY_ATTEMPT_S, deadline.remaining_s()))

    def _created(self, record: NodeRecord, create_revision: int, mod_revision: int, oldest: Snapshot) -> None:
        first = written_by_nodes(oldest.items, self._keys)[:SENIORS]
        self.senior = any(name == self.node_id for name, _ in first)
        self.create_revision = create_revision
        self._was_there, self._taken = True, None
        self.wrote(record, mod_revision)


def _result(answer: TransactionResult | bool | None) -> TransactionResult:
    if not isinstance(answer, TransactionResult):
        raise TypeError(f"a transaction was answered with {answer!r}")
    return answer


def _port_of(item: KeyValue) -> ProbePort | None:
    """The agent port of a key's owner; None if it has none."""
    try:
        record = NodeRecord.decode(item.value, item.key)
    except DocumentError:
        return None
    return ProbePort(record.address, record.probe_port) if record.probe_port > 0 else None


# ---- the round document


ATTEMPT_S = 1.5
"""Limit of one attempt: a write sent to an etcd leader that has just died is lost, and gets no answer for 7 s."""
JOURNAL_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Author:
    """The writing node, and the create-revision of its key."""

    keys: RunKeys
    node_id: str
    create_revision: int


def round_write(
    author: Author,
    document: RoundDocument,
    over: int,
    wall: float,
    *more: Put,
    limit_s: float = ATTEMPT_S,
    left: bool = False,
) -> Transaction | None:
    """The write of ``document`` over the one of mod-revision ``over``, with ``more``; None for a node without a key.

    ``wall``: Unix time, for the journal. ``left``: read and keep the open incident, as no node of the previous round
    survives to complete it.
    """
    if author.create_revision == 0:
        return None  # a node without a key may not decide; and revision 0 in the guard would mean an absent key
    keys = author.keys
    guards = (unchanged(keys.round, over), created_at(keys.node(author.node_id), author.create_revision))
    return Transaction(guards, (*round_operations(author, document, wall, left=left), *more), limit_s=limit_s)


def round_operations(author: Author, document: RoundDocument, wall: float, *, left: bool = False) -> list[Operation]:
    """The operations that write ``document``, its line in the journal, and what becomes of the open incident."""
    keys = author.keys
    entry = JournalEntry(
        wall=wall,
        by=author.node_id,
        round=document.number,
        state=document.state,
        reason=document.reason,
        nodes=tuple(member.node for member in document.members),
        world_size=document.world_size,
    )
    number = event_number(document)
    writes: list[Operation] = [Put(keys.round, document.encode()), Put(keys.event(number), entry.encode())]
    if document.state is RoundState.BROKEN:
        writes.append(Put(keys.open_incident, _opened(author, document, wall).encode()))
    elif left:
        writes.append(Read(keys.open_incident))
    elif document.state in (RoundState.ACTIVE, RoundState.CLOSED):
        writes.append(Delete(keys.open_incident))  # the next round's first node writes the complete record
    if number > JOURNAL_LENGTH:
        writes.append(Delete(keys.event(0), range_end=keys.event(number - JOURNAL_LENGTH)))
    return writes


def event_number(document: RoundDocument) -> int:
    """The number of the line in the journal that says when ``document`` was written."""
    return len(RoundState) * document.number + STATE_ORDER[document.state]


def _opened(author: Author, document: RoundDocument, wall: float) -> Incident:
    """The incident as known when a round breaks: no node may be left to complete it."""
    return Incident(
        wall=wall,
        by=author.node_id,
        cause=document.cause,
        round=document.number,
        reason=document.reason,
        nodes=document.lost or ((author.node_id,) if document.worker_failed else ()),
        world_before=document.world_size,
        step=document.last_step or 0,
        open=True,
    )


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """Why a node breaks round ``number``. Nobody waits for ``suspects``; ``unformed``: its groups were not formed."""

    number: int
    reason: str
    worker_failed: bool = False
    cause: Cause | None = None
    suspects: tuple[Ghost, ...] = field(default=())
    unformed: bool = False


def breaking(current: RoundDocument | None, failure: RoundFailure, limits: Limits) -> RoundDocument | None:
    """The document that breaks the round of ``failure``; None if that round is not in effect (any more)."""
    if current is None or not is_on(current, failure.number):
        return None
    if current.state is RoundState.DRAINING and limits.recovery is RecoveryMode.RESTART:
        return None  # it already ends by agreement: each member leaves as soon as it sees the document
    return broken(
        current,
        failure.reason,
        worker_failed=failure.worker_failed,
        cause=failure.cause,
        suspects=failure.suspects,
        unformed=failure.unformed,
    )


def is_on(current: RoundDocument, number: int) -> bool:
    """Whether round ``number`` is in effect, or soon will be."""
    if current.state is RoundState.ACTIVE:
        return current.number == number
    return current.state is RoundState.DRAINING and current.number <= number <= current.last_number


def free_again(record: NodeRecord, number: int) -> NodeRecord | None:
    """The record of a restarted node if round ``number`` was over before it saw it; None if it has announced that."""
    if record.reported > number:
        return None
    free = {"acknowledged": number + 1, "reported": number + 1, "planned": True, "cause": ""}
    return record.model_copy(update=free)


# ---- the departure


GAVE_UP = "node_gave_up"
STOPPED = "run_stopped"


def parting(
    keys: RunKeys, departure: Departure, current: RoundDocument | None, revision: int, *, passed: bool = False
) -> tuple[tuple[Compare, ...], tuple[Operation, ...], tuple[Operation, ...]]:
    """Guards, the operations of the last node, and those of any other. The node's own key is already deleted.

    ``current`` is the round document at mod-revision ``revision``; ``passed``: whether all ranks had passed the end of
    the training. The last node reads the open incident, which no other node will complete: see :func:`closing`. Any
    other reads the round document, which may have changed.
    """
    number = int(departure.wall * 1000.0)
    said = Put(keys.incident(number), _incident(departure, current).encode())
    if passed and current is not None:
        reason = f"all ranks had passed the end of the training; {_reason(departure)}"
        update = {"state": RoundState.CLOSED, "result": RunResult.SUCCEEDED, "reason": reason, "next": None}
        ended = current.model_copy(update=update)
        writes: list[Operation] = round_operations(Author(keys, departure.node, 0), ended, departure.wall)
    else:
        writes = [Put(keys.departure, departure.encode())]
    told = () if departure.planned else (said,)
    if_last = (Read(keys.open_incident), *writes, *(told if passed else (said,)))
    return (none_below(keys.nodes), unchanged(keys.round, revision)), if_last, (Read(keys.round), *told)


def closing(
    keys: RunKeys, found: KeyValue, departure: Departure | None, following: RoundDocument | None = None
) -> tuple[tuple[Compare, ...], tuple[Operation, ...]]:
    """Guards and writes that close the incident ``found``, which no other node will complete.

    Either the run ends with ``departure``, or the round ``following`` consists of other nodes.
    """
    opened = Incident.decode(found.value, found.key)
    how = _reason(departure) if departure is not None else "all its nodes were lost"
    update: dict[str, Any] = {"open": False, "reason": f"{opened.reason}; {how}"}
    if following is not None:
        update |= {"next_round": following.number, "world_after": following.world_size}
    closed = opened.model_copy(update=update)
    put = Put(keys.incident(int(opened.wall * 1000.0)), closed.encode())
    return (unchanged(found.key, found.mod_revision),), (put, Delete(found.key))


def is_left(before: RoundDocument | None, following: RoundDocument) -> bool:
    """Whether no node of the broken round ``before`` is in ``following``: then none can complete its incident."""
    return before is not None and before.state is RoundState.BROKEN and no_survivor(before, following)


def no_survivor(before: RoundDocument, following: RoundDocument) -> bool:
    """Whether ``following`` has no node of ``before``; a node of the same name with a new key is another node."""
    keys = {(member.node, member.create_revision) for member in before.members}
    return keys.isdisjoint((member.node, member.create_revision) for member in following.members)


def _reason(departure: Departure) -> str:
    if departure.planned:
        return f"the last node left on request: {departure.reason}"
    return f"node {departure.node} gave up: {departure.reason} (exit code {departure.exit_code})"


def _incident(departure: Departure, current: RoundDocument | None) -> Incident:
    return Incident(
        wall=departure.wall,
        by=departure.node,
        kind=STOPPED if departure.planned else GAVE_UP,
        round=current.number if current is not None else 0,
        reason=_reason(departure),
        nodes=(departure.node,),
        world_before=current.world_size if current is not None else 0,
        step=max(departure.step, (current.last_step or 0) if current is not None else 0),
    )
