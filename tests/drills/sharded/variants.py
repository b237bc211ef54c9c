"""Under torchrun: ``variants.py DIRECTORY NAMES...``: sharded trainings of each kind, and a loop of torch alone.

Each rank writes what it found: the greatest difference of a parameter, and of predictions and metrics. The last variant
is ``resumed``: it is saved in the middle, and continued by another session.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call

from elastic_trainer import Session
from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.checkpoint.codec import local
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Batch
from tests.drills.sharded.moe import MoeNet
from tests.drills.sharded.train import BATCH, SAMPLES, Net, built, data, optimized, staged
from tests.unit.checkpoint.states import newest_of

STEPS, CLIP, DECAY = SAMPLES // BATCH, 1.0, 0.8
STAGED: dict[str, Any] = {"names": ["pp", "dp_shard"]}
EXPERTS = ["dp_shard_mod_ep", "ep"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"micro": 2},
    "uneven": {"micro": 5},
    "summed": {"count": True, "micro": 3},
    "bf16": {"policy": "bf16", "sgd": True},
    "reduced": {"policy": "reduced", "micro": 3, "sgd": True},
    "recomputed": {"activations": True},
    "compiled": {"compile": True},
    "offloaded": {"offload": True},
    "averaged": {"average": DECAY},
    "scaled": {"scaler": True},
    "tp": {"mesh": [2, 2], "names": ["dp_shard", "tp"]},
    "twice": {"mesh": [2]},
    "twice, accumulated": {"mesh": [2], "micro": 2, "average": DECAY},
    "twice, reduced": {"mesh": [2], "policy": "reduced", "sgd": True},
    "experts": {"mesh": [2, 2], "names": EXPERTS, "save": True},
    "experts twice, accumulated": {"mesh": [1, 2], "names": EXPERTS, "micro": 2, "average": DECAY},
    "staged": STAGED | {"mesh": [2, 1], "schedule": "1F1B", "micro": 5, "scaler": True, "save": True},
    "interleaved": STAGED | {"mesh": [2, 1], "stages_each": 2, "micro": 3, "count": True, "save": True},
    "looped over shards": STAGED | {"mesh": [1, 2], "stages_each": 4, "schedule": "LoopedBFS", "micro": 2},
    "meta": {"meta": True},
    "resumed": {"save": True},
}
OVERFLOW = 1e38
"""Times the first scale of 64, this is infinite."""


def unsharded(options: dict[str, Any]) -> nn.Module:
    return MoeNet() if "ep" in options.get("names", ()) else Net()


def plain(model: nn.Module, options: dict[str, Any]) -> tuple[nn.Module, torch.Tensor]:
    """The loop of torch alone; the model, and the predictions (of its average if there is one)."""
    half, tensors = options.get("policy") is not None, data().tensors
    optimizer, average = optimized(model, options), None
    plan = EpochPlan(SAMPLES, BATCH, None, 1, True)
    order = torch.from_numpy(plan.order(0).astype("int64"))

    def computed(x: torch.Tensor) -> torch.Tensor:
        if not half:
            return model(x)  # type: ignore[no-any-return]
        short = {name: each.to(torch.bfloat16) for name, each in model.named_parameters()}
        return functional_call(model, short, (x.to(torch.bfloat16),))  # type: ignore[no-any-return]

    for number in range(1 if options.get("scaler") else 0, STEPS):  # the scaler's first step overflows
        ids = order[number * BATCH :][:BATCH]
        optimizer.zero_grad()
        ((computed(tensors[0][ids]) - tensors[1][ids]) ** 2).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if options.get("average"):
            own = [each.detach().clone() for each in model.parameters()]
            before = own if average is None else average
            average = [a * DECAY + b * (1 - DECAY) for a, b in zip(before, own, strict=True)]
    with torch.no_grad():
        if average is None:
            return model, computed(tensors[0]).float()
        names = [name for name, _ in model.named_parameters()]
        return model, functional_call(model, dict(zip(names, average, strict=True)), (tensors[0],))


def mean_error(output: torch.Tensor, part: Batch) -> torch.Tensor:
    return ((output - part.y) ** 2).mean()  # type: ignore[no-any-return]


def summed_error(output: torch.Tensor, part: Batch) -> torch.Tensor:
    return ((output - part.y) ** 2).mean(1).sum()  # type: ignore[no-any-return]


def overflowing(output: torch.Tensor, part: Batch) -> torch.Tensor:
    return mean_error(output, part) * OVERFLOW


def trained(
    session: Session, model: nn.Module, options: dict[str, Any], until: int, stage: list[PipelineStage] | None = None
) -> int:
    """How many samples this rank drew, fillers left out."""
    drawn = 0
    optimizer = optimized(model, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if options.get("scaler") else None
    model = session.wrap(model, optimizer=optimizer, scaler=scaler, average=options.get("average"), stage=stage)
    for batch in session.batches(data(), global_batch_size=BATCH, micro_batch_size=options.get("micro"), epochs=9):
        drawn += len(batch) if batch.weight else 0
        with session.step() as step:
            if stage is not None:
                loss = overflowing if scaler is not None and step.number == 1 else mean_error
                counted: dict[str, Any] = {"count": len} if options.get("count") else {}
                step.pipeline(summed_error if counted else loss, schedule=options.get("schedule"), **counted)
            for micro in step.micro_batches(batch) if stage is None else ():
                error = (model(micro.x) - micro.y) ** 2
                if scaler is not None and step.number == 1 and session.rank == session.world_size - 1:
                    error = error * OVERFLOW  # in one shard's samples
                if options.get("count"):
                    step.backward(error.mean(1).sum(), len(micro))
                else:
                    step.backward(error.mean())
            step.clip(CLIP)
            scaler.step(optimizer) if scaler is not None else optimizer.step()
        assert step.loss == step.loss
        if session.step_number == until:
            break
    if options.get("save"):
        session.save(wait=True)
    return drawn


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    here = [(name, each.detach()) for name, each in model.named_parameters() if not each.is_meta]
    return {name: each.full_tensor() for name, each in here}  # type: ignore[attr-defined]


def begun(session: Session, model: nn.Module) -> dict[str, float]:
    """Of a model from the meta device: whether shard ranks drew the same numbers, and how far wrap() moved them."""
    before = whole_of_shards(model)
    session.wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    moved = max(float((a - b).abs().max()) for a, b in zip(before, whole_of_shards(model), strict=True))
    first, second = whole(model)["blocks.0.up.weight"].chunk(2)
    return {"alike": float((first - second).abs().max() < 0.01), "moved": moved}


def whole_of_shards(model: nn.Module) -> list[torch.Tensor]:
    return [local(each.detach()).clone() for each in model.parameters()]


def checked(name: str, directory: Path) -> dict[str, float]:
    options = KINDS[name]
    found: dict[str, float] = {}
    checkpoints = directory / "checkpoints" if options.get("save") else None
    for until in (STEPS // 2, STEPS) if options.get("save") else (STEPS,):
        with Session(checkpoints, seed=1, device="cpu", checkpoint_every_s=None) as session:
            in_stages = "pp" in options.get("names", ())
            model, stage = staged(session, options) if in_stages else (built(session, options), None)
            if options.get("compile"):
                for block in model.blocks:  # type: ignore[union-attr]
                    block.compile(backend="aot_eager")
            if options.get("meta"):
                return begun(session, model)
            found["drawn"] = found.get("drawn", 0) + trained(session, model, options, until, stage)
            mine = whole(session.module)
            used = session.average if options.get("average") else session.module
            rows = session.predict(used, data(), 7, lambda model, batch: model(batch.x).float())
            count = session.evaluate(used, data(), 5, lambda model, batch: {"n": (model(batch.x).shape[0], 1)})["n"]
            assert count == SAMPLES / -(-SAMPLES // 5)
    torch.manual_seed(0)
    reference, expected = plain(unsharded(options), options)
    for key, each in reference.named_parameters():
        if in_stages and key not in mine:
            continue
        other = mine[key if key in mine else _wrapped(key)]
        found["parameters"] = max(found.get("parameters", 0.0), float((other - each).abs().max()))
    found["rows"] = float((rows - expected).abs().max())
    if checkpoints is not None and session.environment.rank == 0:
        loaded = newest_of(CheckpointManager(checkpoints))
        bare = unsharded(options)
        bare.load_state_dict(loaded.state["model"])  # of names and shapes as without a session
        found["stored"] = max(float((dict(bare.named_parameters())[name] - b).abs().max()) for name, b in mine.items())
    return found


def _wrapped(name: str) -> str:
    """The name that checkpoint_wrapper gives."""
    first, number, rest = name.split(".", 2)
    return f"{first}.{number}._checkpoint_wrapped_module.{rest}"


def main() -> None:
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        (folder := directory / name).mkdir(exist_ok=True)
        found = checked(name, folder)
        (directory / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
