"""What training apart saves and costs: bytes sent and final loss of LocalSGD and DiLoCo beside DDP's, on ``gpt``.

All train on the same tokens in the same order, on two ranks, a model of two layers. The loss is that of the validation
text. The outer optimizer has less momentum than in the paper, since there are only 40 outer steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Report, at_least, at_most, emit, median, note, parse
from tests.bench.turns import taken

JOB = Path(__file__).with_name("slow_links_job.py")
LIMIT_S = 1800.0
OUTER = ("outer_lr=1.0", "outer_momentum=0.5")


@dataclass(frozen=True, slots=True)
class Size:
    """What is compared, steps of the run and between two synchronisations, and the shape of job and model."""

    reductions: tuple[str, ...]
    steps: int
    every: int
    tokens: int
    shape: tuple[str, ...]

    def run(self, reduction: str, seed: int, directory: str) -> list[str]:
        apart = [] if reduction == "ddp" else [f"sync_every={self.every}", *(OUTER if reduction == "diloco" else ())]
        length = [f"options.batch_tokens={self.tokens}", f"options.max_tokens={self.steps * self.tokens}"]
        looks = ["evaluation.every_steps=null", "evaluation.every_epochs=null", "options.sample_tokens=0"]
        where = [f"seed={seed}", f"checkpoint.directory={directory}/{reduction}"]
        return [f"reduction={reduction}", *apart, *length, *looks, *where, *self.shape]


FULL = Size(("ddp", "local_sgd", "diloco"), 1200, 30, 2048, ("model.layers=2", "model.width=64"))
QUICK = Size(("ddp", "diloco"), 20, 10, 512, ("model.layers=1", "model.width=32", "data.validation_fraction=0.001"))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("slow_links", __doc__, argv, repeats=2)
    size = QUICK if options.quick else FULL
    repeats = []
    for repeat in range(options.repeats):
        note(f"{repeat + 1} of {options.repeats}")
        repeats.append(trained(size, seed=repeat))
    less = median([each["ddp"]["bytes"] / each["diloco"]["bytes"] for each in repeats])
    losses = {name: median([each[name]["loss"] for each in repeats]) for name in size.reductions}
    musts = [at_least("DDP's bytes over DiLoCo's, for each step of an outer step", less / size.every, 0.9)]
    if not options.quick:
        musts.append(at_most("DiLoCo's final loss over DDP's", losses["diloco"] / losses["ddp"], 1.02))
    figures = {"sync_every": size.every, "times_less_bytes": less, "loss": losses, "repeats": repeats}
    return emit(Report(options, figures, musts))


def trained(size: Size, *, seed: int) -> dict[str, Any]:
    """Run all of them in one job; what its rank 0 wrote, by reduction."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        runs = [size.run(each, seed, place) for each in size.reductions]
        found: Any = taken(JOB, 2, json.dumps(runs), limit_s=LIMIT_S)
    return dict(zip(size.reductions, found, strict=True))


if __name__ == "__main__":
    sys.exit(main())
