"""In place, ranks with no state or a different one receive that of a survivor, straight from its memory.

Each round has one source: of the states that some rank holds, the one committed in the latest generation, at the
highest step. Where their digests differ, as after an error of a machine's memory, it is the one that most of those
ranks hold; the lowest rank breaks a tie. Only ranks that differ receive it. Where no rank holds a valid state, the
newest checkpoint decides (:mod:`elastic_trainer.worker.state.restore`).

A state is identified by what a step's commit changes: parameters, optimizer, scheduler, scaler. Buffers (BatchNorm
statistics) are left out: each rank moves its own, and the next forward pass sends rank 0's to all. So are registered
objects and the position in the data, which the script moves between two steps: one rank may have done so before
another. A healed rank receives all of it.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* RoundBrokenError when a peer is gone: then nothing has changed here, or the state is marked invalid.
*Invariant*: a state is adopted only when it is complete and has the digest of the source.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.errors import CheckpointError
from elastic_trainer.model import StateIdentity
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.restore import StateCandidate, whole
from elastic_trainer.worker.state.transfer import share_state

FEW = 3
"""Up to this many ranks receive the state one by one, more of them by a broadcast to all."""


class Patient(Protocol):
    """The training state of this rank, as healing sees it."""

    def collect(self) -> dict[str, Any]: ...

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` the present one; it is invalid while this runs."""
        ...


@dataclass(frozen=True, slots=True)
class Healed:
    """Who gave the state (None: no rank holds a valid one), who received it, and the source's notes."""

    source: int | None
    behind: tuple[int, ...]
    generation: int
    """The same on all ranks, and later than any before."""
    notes: Mapping[str, Any]
    done: tuple[int, ...]
    """The counts of all ranks, by rank."""
    torn: bool = False
    """Whether ranks hold shards, but not all of one state."""


def identity(committed: Mapping[str, Any], lineage: int, step: int) -> StateIdentity:
    """The name of the state with these parts, ``committed`` in generation ``lineage`` after ``step`` steps."""
    return StateIdentity(lineage, step, f"{fingerprint(committed):016x}")


def choose_by_place(moments: Sequence[StateCandidate | None], size: int) -> tuple[int, ...] | None:
    """The lowest rank of each of the ``size`` places that holds the newest state of which all places have a holder.

    Rank r is at place r modulo ``size``. None if there is no such state. Pure.
    """
    for moment in sorted({each for each in moments if each is not None}, reverse=True):
        found = [
            next((rank for rank in range(place, len(moments), size) if moments[rank] == moment), None)
            for place in range(size)
        ]
        if None not in found:
            return tuple(rank for rank in found if rank is not None)
    return None


def most_common(states: Sequence[StateIdentity | None], sources: Sequence[int], size: int) -> tuple[int, ...]:
    """For each place the lowest rank that holds the most common of the states as new as that of its source. Pure."""
    found = []
    for place, source in enumerate(sources):
        newest = _moment(states[source])
        ranks = [rank for rank in range(place, len(states), size) if _moment(states[rank]) == newest]
        counts = Counter(states[rank] for rank in ranks)
        found.append(max(ranks, key=lambda rank: counts[states[rank]]))
    return tuple(found)


def _moment(state: StateIdentity | None) -> StateCandidate | None:
    return None if state is None else StateCandidate(state.round, state.step)


def heal(
    control: Control,
    mine: StateIdentity | None,
    generation: int,
    patient: Patient,
    notes: Mapping[str, Any],
    done: int,
    alike: Control | None = None,
) -> Healed:
    """Bring all ranks to one state, if any rank holds a valid one.

    ``alike`` are the ranks that hold the same shard as this one, if the model is sharded: ranks of one place. Then all
    adopt the newest state of which each place has a holder; each place has a source of its own, and all heal at once.

    ``generation`` is the least that this rank can continue with; the source's ``notes`` come with its state. ``done``
    is a count of this rank that all ranks learn.
    """
    row = [0, 0, 0, 0] if mine is None else [1, mine.round, mine.step, int(mine.digest, 16)]
    rows = control.gather([*row, generation, done])
    states = [StateIdentity(r, s, f"{d:016x}") if held else None for held, r, s, d, _, _ in rows]
    newest, counts = max(each[4] for each in rows), tuple(each[5] for each in rows)
    moments = [_moment(each) for each in states]
    size = control.world_size // alike.world_size if alike is not None else 1
    sources = choose_by_place(moments, size)
    if sources is None:
        return Healed(None, (), newest, {}, counts, torn=any(moments))
    sources, place = most_common(states, sources, size), control.rank % size
    source = sources[place]
    behind = tuple(rank for rank, each in enumerate(states) if each != states[sources[rank % size]])
    mine_behind = tuple(rank // size for rank in behind if rank % size == place)
    received = give(alike or control, source // size, mine_behind, patient, notes) if mine_behind else {}
    if not behind:
        return Healed(source, (), newest, {}, counts)
    apart = [rank for rank in behind if moments[rank] == moments[source]]
    if apart and control.rank == 0:  # the same step, and yet a different state
        logger().warning("ranks.differed", step=rows[source][2], ranks=apart, source=source)
    return Healed(source, behind, newest, received, counts)


def give(
    control: Control, source: int, behind: tuple[int, ...], patient: Patient, notes: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The ranks that are ``behind`` adopt the state of rank ``source``; all ranks get its ``notes``."""
    gives = control.rank == source
    text = json.dumps({"notes": dict(notes), "whole": whole(patient.collect()) if gives else 0}).encode()
    announced = json.loads(control.broadcast_bytes(text, source))
    if len(behind) > FEW:
        received = share_state(control, source, patient.collect() if gives else None)
        if control.rank in behind:
            _take(patient, received, announced["whole"])
    else:
        for target in behind:
            pair = Pair(control, source, target)
            if gives:
                share_state(pair, source, patient.collect())
            elif control.rank == target:
                _take(patient, share_state(pair, source, None), announced["whole"])
    given: Mapping[str, Any] = announced["notes"]
    return given


def _take(patient: Patient, received: Mapping[str, Any], wanted: int) -> None:
    if whole(received) != wanted:
        raise CheckpointError(
            "the state received from another rank is not the one that it announced",
            hint="a registered object's state_dict() must not change from one call to the next",
        )
    patient.take_over(received)


class Pair(Control):
    """Two ranks of a round: broadcasts go from one to the other alone."""

    def __init__(self, whole: Control, source: int, target: int) -> None:
        super().__init__(None, whole.rank, whole.world_size)
        self._whole, self._source, self._target = whole, source, target

    def agree(self, error: Any) -> None:
        """An error of the source ends its process; the target learns that as the end of the round."""
        if error is not None:
            raise error

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self.rank == self._source:
            self._whole.send(tensor, self._target)
        else:
            self._whole.receive(tensor, self._source)
