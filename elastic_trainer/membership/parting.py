"""What a node leaves behind when it goes: the last one says whether the run was stopped on purpose or given up. Pure.

*Invariant*: the departure is there only while no node is, and the last one has left by itself. A node that dies, or one
that comes, leaves none.
"""

from __future__ import annotations

from elastic_trainer.membership.documents import Departure, RoundDocument
from elastic_trainer.membership.health import Incident
from elastic_trainer.store.api import Compare, Field, Operation, Put, Relation, prefix_end
from elastic_trainer.store.keys import RunKeys

GAVE_UP = "node_gave_up"
STOPPED = "run_stopped"


def parting(
    keys: RunKeys, departure: Departure, current: RoundDocument | None
) -> tuple[tuple[Compare, ...], tuple[Operation, ...], tuple[Operation, ...]]:
    """Guards, what to write for the last node, and what for any other. The node's own key is gone by then."""
    nobody = Compare(keys.nodes, Field.CREATE_REVISION, Relation.EQUAL, 0, range_end=prefix_end(keys.nodes))
    number = int(departure.wall * 1000.0)
    left = Put(keys.departure, departure.encode())
    if not departure.planned:
        gave_up = Put(keys.incident(number), _incident(GAVE_UP, departure, current).encode())
        return (nobody,), (left, gave_up), (gave_up,)
    return (nobody,), (left, Put(keys.incident(number), _incident(STOPPED, departure, current).encode())), ()


def _incident(kind: str, departure: Departure, current: RoundDocument | None) -> Incident:
    reason = (
        f"the last node left on request: {departure.reason}"
        if departure.planned
        else f"node {departure.node} gave up: {departure.reason} (exit code {departure.exit_code})"
    )
    return Incident(
        wall=departure.wall,
        by=departure.node,
        kind=kind,
        round=current.number if current is not None else 0,
        reason=reason,
        nodes=(departure.node,),
        world_before=current.world_size if current is not None else 0,
        step=(current.last_step or 0) if current is not None else 0,
    )
