"""What equal bits cost: a step with reduction='tree' against a hand-written DDP loop with the same micro-batches.

Both run in the same processes and take turns, at two and at four ranks, with a network of few operations for each
parameter (all is communication) and with a convolutional one.

``job RESULT MODEL WIDTH MICRO ALTERNATIONS STEPS`` is the job: both loops accumulate over the same eight micro-batches
of MICRO samples, and rank 0 writes what each block of steps took.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from tests.bench.report import Report, at_most, emit, median, parse, repeated, taken
from tests.bench.step_overhead import CLASSES, ENDLESS, block, in_turn, prepared

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
            where = f"{name}, {world} ranks"
            run = partial(taken, Path(__file__), world, *astuple(shape), limit_s=LIMIT_S)
            found = repeated(options, where, lambda _, run=run: compared(run()))  # type: ignore[misc]
            figures[where] = found
            musts.append(at_most(f"{where}: times as long as DDP", found["ratio"], 1.3))
    return emit(Report(options, figures, musts))


def compared(blocks: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the blocks; the ratio is that of blocks next to each other."""
    return {
        "tree_ms": 1e3 * median(blocks["tree"]),
        "ddp_ms": 1e3 * median(blocks["ddp"]),
        "ratio": median([mine / other for mine, other in zip(blocks["tree"], blocks["ddp"], strict=True)]),
    }


# ---- the job

MICRO_BATCHES, SIDE, WARM_UP = 8, 16, 3


def build(kind: str, width: int) -> nn.Module:
    """``mlp``: few operations for each parameter; ``cnn``: many, with BatchNorm."""
    torch.manual_seed(1)
    if kind == "mlp":
        layers = [nn.Flatten(), nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, CLASSES))
    blocks = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(2):
        blocks += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def tree_steps(session: Session, model: nn.Module, data: TensorDataset, micro: int) -> Iterator[None]:
    optimizer = adamw(model)
    wrapped = session.wrap(model, optimizer=optimizer, reduction="tree")
    for batch in session.batches(data, global_batch_size=MICRO_BATCHES * micro, micro_batch_size=micro, epochs=ENDLESS):
        with session.step() as step:
            for part in step.micro_batches(batch):
                step.backward(cross_entropy(wrapped(part.x), part.y))
            optimizer.step()
        yield


def ddp_steps(session: Session, model: nn.Module, data: TensorDataset, micro: int) -> Iterator[None]:
    """Each turn is one step of a hand-written loop with gradient accumulation."""
    optimizer, own = adamw(model), MICRO_BATCHES // session.world_size
    wrapped = DistributedDataParallel(model)
    x, y = data.tensors
    for epoch in range(ENDLESS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for first in range(0, len(order) - MICRO_BATCHES * micro + 1, MICRO_BATCHES * micro):
            optimizer.zero_grad(set_to_none=True)
            for number in range(own):
                begin = first + (session.rank * own + number) * micro
                ids = order[begin : begin + micro]
                with wrapped.no_sync() if number < own - 1 else nullcontext():
                    loss = cross_entropy(wrapped(x[ids]), y[ids]) / own
                    loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield


def train(result: Path, kind: str, width: int, micro: int, alternations: int, count: int) -> None:
    data = prepared(1, SIDE, SIDE)
    with Session(device="cpu") as session:
        model = build(kind, width)
        twin = deepcopy(model)
        loops = {"tree": tree_steps(session, model, data, micro)}
        block(loops["tree"], WARM_UP)
        loops["ddp"] = ddp_steps(session, twin, data, micro)
        block(loops["ddp"], WARM_UP)
        taken = in_turn(loops, alternations, count)
        if session.is_rank0:
            result.write_text(json.dumps({name: [wall for wall, _ in each] for name, each in taken.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:8]))
    else:
        sys.exit(main())
