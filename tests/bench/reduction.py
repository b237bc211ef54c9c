"""What equal bits cost: a step with reduction='tree' against a hand-written DDP loop with the same micro-batches.

Both run in the same processes and take turns, at two and at four ranks, with a network of few operations for each
parameter (all is communication) and with a convolutional one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Report, at_most, emit, median, note, parse
from tests.bench.turns import taken

JOB = Path(__file__).with_name("reduction_job.py")
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
QUICK = {"cnn": Shape("cnn", 4, 4, 2, 2)}


def main(argv: Sequence[str] | None = None) -> int:
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


def compared(blocks: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the blocks; the ratio is that of blocks next to each other."""
    return {
        "tree_ms": 1e3 * median(blocks["tree"]),
        "ddp_ms": 1e3 * median(blocks["ddp"]),
        "ratio": median([mine / other for mine, other in zip(blocks["tree"], blocks["ddp"], strict=True)]),
    }


def trained(world: int, shape: Shape) -> dict[str, list[float]]:
    numbers = (shape.width, shape.micro, shape.alternations, shape.steps)
    return taken(JOB, world, shape.kind, *numbers, limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
