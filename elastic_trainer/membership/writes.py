"""What a node writes beside its own key (see membership.member): the round document, and how it left. Pure.

*The round document.* It is written only over the revision last seen and while the writer's own key exists, so a thawed
or partitioned member cannot undo what others decided. There is one exception: the last node that leaves a run that has
succeeded closes it while no node's key exists.

*The departure.* The last node records whether the run was stopped on purpose or gave up. The departure exists only
while no node is present and the last one left by itself: a node that dies writes none, and a node that joins removes
it. Nothing is written over a round that this node has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.core import STATE_ORDER
from elastic_trainer.membership.documents import (
    Clue,
    Departure,
    Ghost,
    Incident,
    JournalEntry,
    NodeRecord,
    RoundDocument,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.rules import broken
from elastic_trainer.membership.verdict import Case, judge
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
    created_at,
    none_below,
    prefix_end,
    unchanged,
)

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


# ---- the round document


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
    left: bool = False,
) -> tuple[tuple[Compare, ...], tuple[Operation, ...]] | None:
    """Guards and operations that write ``document`` over the one of mod-revision ``over``, and ``more``.

    None for a node without a key. ``wall``: Unix time, for the journal. ``left``: read and keep the open incident, as
    no node of the previous round survives to complete it.
    """
    if author.create_revision == 0:
        return None  # a node without a key may not decide; and revision 0 in the guard would mean an absent key
    keys = author.keys
    guards = (unchanged(keys.round, over), created_at(keys.node(author.node_id), author.create_revision))
    return guards, (*round_operations(author, document, wall, left=left), *more)


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
    final: bool = False
    """Whether the run ends with it, since trying again cannot help."""


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
        final=failure.final,
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
    closed = closed.model_copy(update={"verdict": judge(Case(closed, _clues(departure, opened.round)))})
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
    incident = Incident(
        wall=departure.wall,
        by=departure.node,
        kind=STOPPED if departure.planned else GAVE_UP,
        round=current.number if current is not None else 0,
        reason=_reason(departure),
        nodes=(departure.node,),
        world_before=current.world_size if current is not None else 0,
        step=max(departure.step, (current.last_step or 0) if current is not None else 0),
    )
    return incident.model_copy(update={"verdict": judge(Case(incident, _clues(departure, incident.round)))})


def _clues(departure: Departure | None, number: int) -> list[Clue]:
    """What the last node had seen of the end of round ``number``."""
    return [each for each in departure.clues if each.round in (number, 0)] if departure is not None else []
