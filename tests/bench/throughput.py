"""What the Trainer costs: the ready-made tasks against hand-written DDP loops at the same settings.

All run in the same processes and take turns, at one rank and at two. The two hand-written loops are the same: what they
differ by is noise. On a machine with a CUDA device the tasks run there, in bf16.

``job RESULT TASK ALTERNATIONS STEPS key=value ...`` is the job: rank 0 writes the seconds of each block of steps. The
Trainer runs undisturbed but for the task's ``loss``, which notes the time at the beginning of a block and lets the
hand-written loops have their turn there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from elastic_trainer.data.workers import placed
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.task import Task, find_task, run_length
from elastic_trainer.jobs.trainer import Trainer, arithmetic
from tests.bench.report import Report, at_most, emit, median, parse, repeated, taken

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
            name = f"{shape.task}, {world} rank{'s' * (world > 1)}"
            words = [shape.task, shape.alternations, shape.steps, *shape.overrides, *more]

            def once(_: int, world: int = world, words: Sequence[object] = words) -> dict[str, float]:
                return compared(taken(Path(__file__), world, *words, limit_s=LIMIT_S))

            found = figures[name] = repeated(options, name, once)
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


# ---- the job

WARM_UP = 3
ENDLESS = 1_000_000


def bare_steps(
    task: Task, model: torch.nn.Module, dataset: Any, config: JobConfig, device: torch.device
) -> Iterator[None]:
    """Each turn is one step of a loop as one writes it for a known number of ranks that never changes."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = model.to(device)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = task.optimizer(model)
    length = run_length(config, len(dataset))
    scheduler = task.scheduler(optimizer, length)
    how = arithmetic(config.precision, device)
    size = config.samples_per_step // ranks
    micro = min(size, config.micro_batch or size)
    wrapped.train()
    for epoch in range(ENDLESS):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))[rank::ranks].tolist()
        for first in range(0, len(order) - size + 1, size):
            optimizer.zero_grad(set_to_none=True)
            for begin in range(first, first + size, micro):
                ids = order[begin : begin + micro]
                batch = SimpleNamespace(data=placed(drawn(dataset, ids), device), epoch=epoch)
                batch.x, batch.y = batch.data[0], batch.data[1] if len(batch.data) > 1 else None
                last = begin + micro >= first + size
                with how.autocast():
                    if last or ranks == 1:
                        loss = task.loss(wrapped, batch)
                    else:
                        with wrapped.no_sync():  # type: ignore[operator]
                            loss = task.loss(wrapped, batch)
                (loss * len(ids) / size).backward()  # type: ignore[no-untyped-call]
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            yield


def drawn(dataset: Any, ids: list[int]) -> Any:
    """The samples ``ids``, put together; rows of plain tensors at once."""
    tensors = getattr(dataset, "tensors", None)
    if tensors is not None:
        return [tensor[ids] for tensor in tensors]
    return default_collate([dataset[number] for number in ids])


class Turns:
    """Who computes when, and what each block took. ``bare()`` makes the hand-written loops, once there are groups."""

    def __init__(self, alternations: int, steps: int, bare: Callable[[], dict[str, Iterator[None]]]) -> None:
        self._blocks, self._steps, self._make = alternations, steps, bare
        self._bare: dict[str, Iterator[None]] = {}
        self._place: tuple[int, int] | None = None
        self._seen = 0
        self._began = 0.0
        self.taken: dict[str, list[float]] = {"trainer": []}

    def loss_asked(self, place: tuple[int, int]) -> None:
        """The Trainer is about to compute a loss, in the global batch number ``place``."""
        if place == self._place:
            return  # another micro-batch of it
        self._place, self._seen = place, self._seen + 1
        block, rest = divmod(self._seen - WARM_UP, self._steps)
        if self._seen < WARM_UP or rest:
            return
        if block:
            self.taken["trainer"].append((_now() - self._began) / self._steps)
        if block < self._blocks:
            self._bare = self._bare or self._make()
            for name in sorted(self._bare, reverse=block % 2 == 1):
                self._block(name)
        self._began = _now()

    def _block(self, name: str) -> None:
        if name not in self.taken:
            self.taken[name] = []
            for _ in range(WARM_UP):
                next(self._bare[name])
        began = _now()
        for _ in range(self._steps):
            next(self._bare[name])
        self.taken[name].append((_now() - began) / self._steps)


def _now() -> float:
    """Seconds, when the device has done what it was given: it would be taken for the next one's work otherwise."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(kind: type[Task], turns: Turns) -> type[Task]:
    """``kind``, which tells ``turns`` whenever the Trainer asks for a loss."""

    class Timed(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            turns.loss_asked((batch.epoch, batch.index))
            result: torch.Tensor = super().loss(model, batch)
            return result

    return Timed


def train(result: Path, name: str, alternations: int, steps: int, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    total = WARM_UP + alternations * steps + 1
    settings = [
        f"checkpoint.directory={result.parent / 'run'}",
        f"max_steps={total}",
        "epochs=null",
        "checkpoint.every_s=null",
        "checkpoint.export=false",
        "evaluation.every_epochs=null",
        "evaluation.every_steps=null",
    ]
    config = load_job(name, [*settings, *overrides])
    kind = find_task(config.task)
    twins: dict[str, torch.nn.Module] = {}

    def bare() -> dict[str, Iterator[None]]:
        task, data, device = kind(config), trainer.data.train, next(trainer.model.parameters()).device
        return {each: bare_steps(task, twin, data, trainer.config, device) for each, twin in twins.items()}

    turns = Turns(alternations, steps, bare)
    trainer = Trainer(timed(kind, turns), config)
    twins |= {each: deepcopy(trainer.model) for each in ("bare", "bare again")}
    report = trainer.run()
    if report["rank"] == 0:
        result.write_text(json.dumps({name: taken[:alternations] for name, taken in turns.taken.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(main())
