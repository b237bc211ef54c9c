"""Long work between the steps of the drill job: evaluations, saves to a slow disk, phases of the script's own.

What comes behind which step follows from the step's number alone, so all ranks do the same, in every life of the job.

*Runs in* the main thread of a worker of the drill job.
*Owns* one file in ``DIR/interludes``, which says when each of them began and ended.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from elastic_trainer.checkpoint import Event, Transition
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.drills import job
from elastic_trainer.worker.report import process_id
from elastic_trainer.worker.session import Session

INTERLUDES = "interludes"


class Interlude(StrEnum):
    EVALUATION = "evaluation"
    """``session.evaluate``, on all ranks together."""
    SAVE = "save"
    """``session.save``: rank 0 writes, the others wait for it."""
    PHASE = "phase"
    """The body of ``session.phase``, each rank for itself."""


class Mark(BaseModel):
    """A rank began an interlude of about ``seconds`` at ``t`` (monotonic), or has ended it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Interlude
    ended: bool
    node: str
    pid: int
    step: int
    seconds: float
    t: float


@dataclass(frozen=True, slots=True)
class Program:
    """An interlude behind one of ``every`` steps, by chance; as many of 1 to 2 s as of 2 to 4 s and of 4 to 8 s."""

    shortest_s: float
    longest_s: float
    every: int
    seed: int

    @classmethod
    def parse(cls, text: str) -> Program:
        """What :meth:`__str__` wrote."""
        shortest, longest, every, seed = text.split(":")
        return cls(float(shortest), float(longest), int(every), int(seed))

    def __str__(self) -> str:
        return f"{self.shortest_s:g}:{self.longest_s:g}:{self.every}:{self.seed}"

    @property
    def entry(self) -> tuple[str, ...]:
        """What torchrun runs: the drill's job with these interludes."""
        return "-m", __name__, "--interludes", str(self)

    def behind(self, step: int) -> tuple[Interlude, float] | None:
        """What comes behind ``step``, and its seconds."""
        chance = random.Random(f"{self.seed} {step}")
        if chance.random() * self.every >= 1.0:
            return None
        seconds = self.shortest_s * (self.longest_s / self.shortest_s) ** chance.random()
        return chance.choice(list(Interlude)), seconds


class Interludes:
    """See the module."""

    def __init__(self, program: Program, directory: Path) -> None:
        self._program, self._directory = program, directory / INTERLUDES
        self._disk_s = 0.0

    def hear(self, event: Event) -> None:
        """A slow disk: until it has done its work, the save goes on."""
        if event.kind is Transition.COMMITTED:
            pause(self._disk_s)

    def behind(self, step: int, session: Session, model: nn.Module) -> None:
        """Do what comes behind ``step``, which was committed."""
        due = self._program.behind(step)
        if due is None:
            return
        kind, seconds = due
        self._mark(session, kind, seconds, ended=False)
        if kind is Interlude.PHASE:
            with session.phase("evaluation"):
                pause(seconds)
        elif kind is Interlude.SAVE:
            self._save(session, seconds)
        else:
            self._evaluate(session, model, seconds)
        self._mark(session, kind, seconds, ended=True)

    def _save(self, session: Session, seconds: float) -> None:
        self._disk_s = seconds
        try:
            session.save()
        finally:
            self._disk_s = 0.0

    def _evaluate(self, session: Session, model: nn.Module, seconds: float) -> None:
        def measure(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
            pause(seconds / 2)
            return {"samples": (1.0, 1.0)}

        session.evaluate(model, torch.utils.data.TensorDataset(torch.zeros(4)), 1, measure)

    def _mark(self, session: Session, kind: Interlude, seconds: float, *, ended: bool) -> None:
        node, pid = session.environment.node, process_id(session.environment.ledger_dir)
        mark = Mark(
            kind=kind,
            ended=ended,
            node=node,
            pid=pid,
            step=session.step_number,
            seconds=seconds,
            t=SYSTEM.monotonic(),
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{node}-{pid}.jsonl").open("a", encoding="utf-8") as file:
            file.write(mark.model_dump_json() + "\n")


def main(argv: Sequence[str]) -> None:
    """The drill's job, with its options and ``--interludes PROGRAM``."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--interludes", type=Program.parse, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    mine, others = parser.parse_known_args(argv)
    interludes = Interludes(mine.interludes, mine.directory)
    job.main(["--directory", str(mine.directory), *others], interludes.hear, interludes.behind)


if __name__ == "__main__":
    main(sys.argv[1:])
