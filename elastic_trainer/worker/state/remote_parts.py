"""Sharded states in the memory of several nodes' agents: who keeps copies, and reading the newest whole one from there.

*Runs in* the worker's main thread of all ranks at once. *Owns* its connections to agents, until the block ends.
*Fails by* RoundBrokenError when a peer is lost.
*Invariant*: all ranks know the same state, each part from the first rank that has it, or from this node.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from elastic_trainer.checkpoint import StateSnapshot
from elastic_trainer.checkpoint.neighbours import MemoryAddress, Neighbour, RemoteMemory
from elastic_trainer.checkpoint.snapshot import described, notes, whole
from elastic_trainer.worker.comm.control import Control

Part = tuple[int, int, int, int]
"""Round, step, place, and the number of places."""


@contextmanager
def together(
    control: Control, mine: Sequence[tuple[str, StateSnapshot]], here: str | None
) -> Iterator[StateSnapshot | None]:
    """The newest state of which the nodes hold all parts; None if there is none. ``mine`` are the parts in this node's
    memory with their paths, which its agent serves at ``here``.
    """
    own = {_part(each): (path, each) for path, each in mine} if here else {}
    rows = [_read(row) for row in control.gather_bytes(_packed(sorted(own)))]
    chosen = choose([[(*part,) for part in row] for row in rows])
    given = {str(part[2]): _shown(*own[part]) for part, rank in chosen.items() if rank == control.rank}
    shown = control.gather_bytes(_packed([here, given])) if chosen else []
    with ExitStack() as opened:
        parts = []
        for part, rank in chosen.items():
            if part in own:
                parts.append(own[part][1])
                continue
            address, known = _read(shown[rank])
            path, text, stored = known[str(part[2])]
            memory = opened.enter_context(closing(RemoteMemory(MemoryAddress.parse(address), path)))
            parts.append(described(memory, text.encode(), stored=stored))
        yield next(whole(parts), None)


def find_neighbour(control: Control, here: str | None, number: int) -> Neighbour | None:
    """Who keeps copies of what this rank, the ``number``-th of its node, alone holds: the agent of the next node.

    ``here``: where this node's own agent does so for others.
    """
    at = following([row.decode() for row in control.gather_bytes((here or "").encode())], control.rank)
    return Neighbour(MemoryAddress.parse(at), number) if at else None


def following(rows: Sequence[str], rank: int) -> str:
    """The address of the node after that of ``rank``, from those of all ranks; empty if there is none. Pure."""
    mine, others = rows[rank], [*rows[rank:], *rows[:rank]]
    return next((each for each in others if each and each != mine), "") if mine else ""


def choose(rows: Sequence[Sequence[Part]]) -> Mapping[Part, int]:
    """The parts of the newest state that is whole in the memory of all ranks together, each with the first rank that
    has it; none if there is none. ``rows`` are the parts that each rank knows of. Pure.
    """
    holders: dict[Part, int] = {}
    for rank, row in enumerate(rows):
        for part in row:
            holders.setdefault(part, rank)
    states: dict[tuple[int, int, int], list[Part]] = {}
    for part in holders:
        states.setdefault((part[0], part[1], part[3]), []).append(part)
    newest = max((state for state, parts in states.items() if len(parts) == state[2]), default=None)
    return {part: holders[part] for part in sorted(states[newest])} if newest is not None else {}


def _part(snapshot: StateSnapshot) -> Part:
    place, count = snapshot.place or (0, 1)
    return *snapshot.order, place, count


def _shown(path: str, snapshot: StateSnapshot) -> tuple[str, str, bool]:
    """What another node needs to read the part."""
    return path, notes(snapshot.manifest, snapshot.location, snapshot.job).decode(), snapshot.stored


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _read(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
