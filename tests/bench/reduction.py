"""What equal bits cost: a step with reduction='tree' against a hand-written DDP loop with the same micro-batches.

Both run in the same processes and take turns, at two and at four ranks, with a network of few operations for each
parameter (all is communication) and with a convolutional one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import STEADY
from tests.bench.report import Report, at_most, emit, median, note, parse

JOB = Path(__file__).with_name("reduction_job.py")
ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The kind and width of a model, samples a micro-batch, blocks of each loop, steps a block."""

    kind: str
    width: int
    micro: int
    alternations: int
    steps: int


SHAPES = {"mlp, 4.7 M parameters": Shape("mlp", 2048, 16, 12, 4), "cnn, 20 k parameters": Shape("cnn", 32, 16, 12, 4)}
QUICK = {"mlp": Shape("mlp", 64, 4, 2, 2), "cnn": Shape("cnn", 4, 4, 2, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse("reduction", __doc__, argv, repeats=3)
    shapes, worlds = (QUICK, (2,)) if options.quick else (SHAPES, (2, 4))
    figures: dict[str, Any] = {}
    musts = []
    for world in worlds:
        for name, shape in shapes.items():
            repeats = []
            for repeat in range(options.repeats):
                note(f"{name} at {world} ranks: {repeat + 1} of {options.repeats}")
                repeats.append(compared(trained(world, shape)))
            found = {key: median([each[key] for each in repeats]) for key in repeats[0]}
            figures[f"{name}, {world} ranks"] = {**found, "repeats": repeats}
            musts.append(at_most(f"{name}, {world} ranks: times as long as DDP", found["ratio"], 1.3))
    return emit(Report(options, figures, musts))


def compared(taken: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the blocks; the ratio is that of blocks next to each other."""
    return {
        "tree_ms": 1e3 * median(taken["tree"]),
        "ddp_ms": 1e3 * median(taken["ddp"]),
        "ratio": median([mine / other for mine, other in zip(taken["tree"], taken["ddp"], strict=True)]),
    }


def trained(world: int, shape: Shape) -> dict[str, list[float]]:
    """Run one job to its end; what its rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        result = Path(place, "result.json")
        numbers = (shape.width, shape.micro, shape.alternations, shape.steps)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        done = subprocess.run(
            [*launcher, str(JOB), str(result), shape.kind, *map(str, numbers)],
            cwd=ROOT,
            env={**os.environ, **STEADY, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"the job did not end well:\n{done.stderr[-3000:]}")
        taken: dict[str, list[float]] = json.loads(result.read_text())
        return taken


if __name__ == "__main__":
    sys.exit(main())
