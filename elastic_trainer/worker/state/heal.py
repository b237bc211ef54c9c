"""In place, ranks that hold no state or another one get that of a survivor, straight from its memory.

Every round chooses one source, job-wide: of the states that live in some rank, the one committed in the latest
generation, at the highest step; the lowest rank breaks a tie. It goes only to ranks that differ. Where no rank holds a
valid state, the newest checkpoint decides (:mod:`elastic_trainer.worker.state.restore`).

What names a state is what a step's commit changes: parameters, optimizer, scheduler, scaler. Buffers (BatchNorm
statistics) do not: each rank moves its own, and rank 0's are sent to all in the next forward pass. Nor do registered
objects and the position in the data: between two steps the script moves them, and of two ranks one may be through with
that. Whoever is healed gets all of it.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* RoundBrokenError when a peer is gone: then nothing has been changed here, or the state is marked invalid.
*Invariant*: a state is taken over only when it is complete and its digest is that of the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.errors import CheckpointError
from elastic_trainer.model import StateIdentity
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.transfer import share_state

FEW = 3
"""Up to this many ranks get the state one by one; more of them get it by a broadcast to all."""


class Patient(Protocol):
    """The training state of this rank, as healing sees it."""

    def collect(self) -> dict[str, Any]: ...

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` the present one; it is invalid while this runs."""
        ...


@dataclass(frozen=True, slots=True)
class HealPlan:
    """Who gives the state to whom; ``source`` None: no rank holds a valid one."""

    source: int | None
    behind: tuple[int, ...] = ()


def diagnose(states: Sequence[StateIdentity | None]) -> HealPlan:
    """Choose the source among the ``states`` of all ranks, in rank order. Pure."""
    held = [(rank, state) for rank, state in enumerate(states) if state is not None]
    if not held:
        return HealPlan(None)
    newest = max((state.round, state.step) for _, state in held)
    source, wanted = next((rank, state) for rank, state in held if (state.round, state.step) == newest)
    return HealPlan(source, tuple(rank for rank, state in enumerate(states) if state != wanted))


def disagreeing(states: Sequence[StateIdentity | None], source: int) -> list[int]:
    """Ranks whose state should be that of ``source``, since it was committed in the same step, and is not. Pure."""
    held = {rank: each for rank, each in enumerate(states) if each is not None}
    wanted = held[source]
    moment = (wanted.round, wanted.step)
    return [rank for rank, each in held.items() if each != wanted and (each.round, each.step) == moment]


def identity(committed: Mapping[str, Any], lineage: int, step: int) -> StateIdentity:
    """The name of the state with these parts, ``committed`` in generation ``lineage`` after ``step`` steps."""
    return StateIdentity(lineage, step, f"{fingerprint(committed):016x}")


def whole(state: Mapping[str, Any]) -> int:
    """63 bits that depend on every byte of ``state`` but its random generators, which differ on purpose."""
    return fingerprint({name: part for name, part in state.items() if name != "random"})


def heal(
    control: Control,
    mine: StateIdentity | None,
    generation: int,
    patient: Patient,
    notes: Mapping[str, Any],
    done: int = 0,
) -> Healed:
    """Bring all ranks to one state, if any rank holds a valid one.

    ``generation`` is the least that this rank can go on with; ``notes`` of the source come with its state. ``done`` is
    a count of this rank that all ranks get to know.
    """
    row = [0, 0, 0, 0] if mine is None else [1, mine.round, mine.step, int(mine.digest, 16)]
    rows = control.gather([*row, generation, done])
    states = [StateIdentity(r, s, f"{d:016x}") if held else None for held, r, s, d, _, _ in rows]
    newest = max(each[4] for each in rows)
    counts = tuple(each[5] for each in rows)
    found = diagnose(states)
    if found.source is None or not found.behind:
        return Healed(found.source, (), newest, {}, counts)
    told = give(control, found.source, found.behind, patient, notes)
    apart = disagreeing(states, found.source)
    if apart and control.rank == 0:
        logger().warning("ranks.differed", step=rows[found.source][2], ranks=apart, source=found.source)
    return Healed(found.source, found.behind, newest, told, counts)


def give(
    control: Control, source: int, behind: tuple[int, ...], patient: Patient, notes: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The ranks that are ``behind`` take over the state of rank ``source``, whose ``notes`` all get."""
    sent = whole(patient.collect()) if control.rank == source else 0
    text = json.dumps({"notes": dict(notes), "whole": sent}).encode()
    told = json.loads(control.broadcast_bytes(text, source))
    _give(control, HealPlan(source, behind), patient, told["whole"])
    given: Mapping[str, Any] = told["notes"]
    return given


@dataclass(frozen=True, slots=True)
class Healed:
    """What was done: who gave (None: no rank holds a valid state), who received, and the source's notes."""

    source: int | None
    behind: tuple[int, ...]
    generation: int
    """Agreed by all ranks, and later than any before."""
    notes: Mapping[str, Any]
    done: tuple[int, ...] = ()
    """The counts of all ranks, by rank."""


def _give(control: Control, found: HealPlan, patient: Patient, wanted: int) -> None:
    source = found.source
    if source is None:
        return
    if len(found.behind) > FEW:
        tree = patient.collect() if control.rank == source else None
        received = share_state(control, source, tree)
        if control.rank in found.behind:
            _take(patient, received, wanted)
        return
    for target in found.behind:
        pair = Pair(control, source, target)
        if control.rank == source:
            share_state(pair, source, patient.collect())
        elif control.rank == target:
            _take(patient, share_state(pair, source, None), wanted)


def _take(patient: Patient, received: Mapping[str, Any], wanted: int) -> None:
    if whole(received) != wanted:
        raise CheckpointError(
            "the state received from another rank is not the one that it announced",
            hint="a registered object's state_dict() must not change from one call to the next",
        )
    patient.take_over(received)


class Pair(Control):
    """Two ranks of a round: what is broadcast goes from one to the other alone."""

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
