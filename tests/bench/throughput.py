"""What the Trainer costs: the ready-made tasks against hand-written DDP loops at the same settings.

All run in the same processes and take turns, at one rank and at two. The two hand-written loops are the same: what they
differ by is noise. On a machine with a CUDA device the tasks run there, in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Report, at_most, emit, median, note, parse
from tests.bench.turns import taken

JOB = Path(__file__).with_name("throughput_job.py")
LIMIT_S = 500.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A task, blocks of each loop, steps a block, and what is set differently from the task's own job file."""

    task: str
    alternations: int
    steps: int
    overrides: tuple[str, ...] = ()


SHAPES = (  # ten steps: one look at the global loss in each block
    Shape("mnist", 40, 10),
    Shape("imagefolder", 20, 10, ("sync_batchnorm=false",)),
    Shape("keypoints", 20, 10, ("sync_batchnorm=false",)),
    Shape("gpt", 20, 10, ("micro_batch=4", "options.max_tokens=null")),
)
QUICK = (Shape("mnist", 2, 2, ("data.limit=200",)),)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("throughput", __doc__, argv, repeats=3)
    import torch

    cuda = torch.cuda.is_available()
    more = ("precision=bf16", "pin_memory=true") if cuda else ("device=cpu",)
    worlds = (1, 2) if not cuda or torch.cuda.device_count() > 1 else (1,)
    figures: dict[str, Any] = {}
    musts = []
    for shape in QUICK if options.quick else SHAPES:
        for world in (1,) if options.quick else worlds:
            repeats = []
            for repeat in range(options.repeats):
                note(f"{shape.task} at {world} rank(s): {repeat + 1} of {options.repeats}")
                repeats.append(compared(trained(world, shape, more)))
            found = {key: median([each[key] for each in repeats]) for key in repeats[0]}
            name = f"{shape.task}, {world} rank{'s' * (world > 1)}"
            figures[name] = {**found, "repeats": repeats}
            musts.append(at_most(f"{name}: % longer than by hand", found["longer_by_percent"], 2.0))
    return emit(Report(options, figures, musts))


def compared(blocks: dict[str, list[float]]) -> dict[str, float]:
    """Blocks next to each other are compared: what slows the machine for a while meets all."""
    turns = list(zip(blocks["trainer"], blocks["bare"], blocks["bare again"], strict=True))
    bare_s = median([(one + other) / 2 for _, one, other in turns])
    more_s = median([mine - (one + other) / 2 for mine, one, other in turns])
    return {
        "bare_step_ms": 1e3 * bare_s,
        "longer_by_percent": 100.0 * more_s / bare_s,
        "noise_percent": 100.0 * abs(median([one - other for _, one, other in turns])) / bare_s,
    }


def trained(world: int, shape: Shape, more: Sequence[str]) -> dict[str, list[float]]:
    return taken(JOB, world, shape.task, shape.alternations, shape.steps, *shape.overrides, *more, limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
