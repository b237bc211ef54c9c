"""The transaction that changes the round document, and the document that breaks a round. Pure.

*Invariant*: the document is written only over the revision last seen and while the writer's own key exists, so a
thawed or partitioned member cannot undo what others decided. There is one exception: the last node that leaves a run
that has succeeded closes it while no node's key exists, see :mod:`elastic_trainer.membership.parting`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.composition import broken
from elastic_trainer.membership.documents import Ghost, JournalEntry, NodeRecord, RoundDocument, RoundState
from elastic_trainer.membership.effects import Transaction
from elastic_trainer.membership.health import Incident
from elastic_trainer.membership.rollback_guard import STATE_ORDER
from elastic_trainer.model import Cause, RecoveryMode
from elastic_trainer.store.api import Delete, Operation, Put, Read, created_at, unchanged
from elastic_trainer.store.keys import RunKeys

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
