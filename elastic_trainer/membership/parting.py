"""What a node writes when it leaves: the last one records whether the run was stopped on purpose or gave up. Pure.

Where all ranks had passed the end of the training, the run has succeeded: then the last node closes it.

*Invariant*: the departure exists only while no node is present and the last one left by itself. A node that dies writes
none, and a node that joins removes it. Nothing is written over a round that this node has not seen.
"""

from __future__ import annotations

from typing import Any

from elastic_trainer.membership.documents import Departure, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.health import Incident
from elastic_trainer.membership.round_write import Author, round_operations
from elastic_trainer.store.api import Compare, Delete, KeyValue, Operation, Put, Read, none_below, unchanged
from elastic_trainer.store.keys import RunKeys

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
