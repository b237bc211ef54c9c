"""Starts jobs the way users do, in processes of their own, and collects what they leave."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.worker.launch import environment
from tests.support.forked import Forked

LIMIT_S = 600.0
QUICK = ("data.limit=200", "epochs=2", "global_batch=25", "model.width=4", "logging.loss_every=1")
"""Overrides for a run of 16 steps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished job."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        reports = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        assert len(reports) == 1, f"one report was expected: {self.out!r}\n{self.err}"
        report: dict[str, Any] = reports[0]
        return report

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]


def command(world: int = 1) -> list[str]:
    module = ["-m", "elastic_trainer.training"]
    if world == 1:
        return module
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *module]


def train(*arguments: str, world: int = 1, cwd: Path | None = None) -> Outcome:
    return ran([*command(world), *arguments], cwd)


def ran(words: Sequence[str], cwd: Path | None = None, limit_s: float = LIMIT_S) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = Forked(words, environment(), out, err, cwd)
        try:
            code = process.wait(limit_s)
        finally:
            process.kill()
        return Outcome(code, out.read_text(), err.read_text())


def records(directory: Path) -> list[dict[str, Any]]:
    """The lines of the metrics file without its notes."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    notes = ("wall", "round", "world_size")
    return [{name: value for name, value in line.items() if name not in notes} for line in lines]
