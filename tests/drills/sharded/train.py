"""A sharded training: ``train.py DIRECTORY OPTIONS``, a JSON object. It leaves whole parameters and digests of shards.

Options: ``steps`` (None: until the file ``stop`` appears), ``pace_s``, ``mesh`` and ``names``, ``tp`` (tensor parallel
too), ``meta``, ``micro`` (the size of micro-batches), ``policy`` ("fp32", "bf16" or "reduced"), ``average``,
``scaler``, ``activations`` (recomputed), ``save_every``, ``keeps_stale`` (the clearing of gradients is switched off),
``fault``: what happens once on a node, see Fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_trainer import Session
from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.model.sharded import ShardedReplica
from elastic_trainer.worker.model.trainable import local

SAMPLES, BATCH, WIDTH, BLOCKS = 96, 12, 48, 3
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduced": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}


class Block(nn.Module):
    """Two layers, the second of which tensor parallel cuts by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """The head stays with the root: its gradient waits unsharded through the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 7)  # does not divide by two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.05)


def built(session: Session, options: dict[str, Any]) -> nn.Module:
    """The model, sharded over the mesh of the session."""
    names = tuple(options.get("names", ["dp_shard"]))
    mesh = session.init_device_mesh(options.get("mesh", [-1]), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(**POLICIES[options.get("policy", "fp32")])
    torch.manual_seed(int(options.get("seed", 0)))
    with torch.device("meta" if options.get("meta") else "cpu"):
        model = Net()
    with session.parallelizing():
        for place, block in enumerate(model.blocks):
            if "tp" in names:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
            if options.get("activations"):
                block = model.blocks[place] = checkpoint_wrapper(block)
            if "dp_shard" in names:
                fully_shard(block, mesh=mesh["dp_shard"], mp_policy=policy)
        if "tp" in names and "dp_shard" not in names:
            parallelize_module(model.head, mesh["tp"], ColwiseParallel(output_layouts=None), src_data_rank=None)
        if "dp_shard" in names:
            fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
    if options.get("meta"):
        model.to_empty(device=session.device)
        model.init_weights()
    return model


class Fault:
    """``{"node", "step", "kind"}``: at the commit barrier of that step a worker of that node kills itself.

    ``barrier``: as it enters; its shard peer waits there for it, or has not come yet. ``half``: on other nodes the
    second worker loses the round in the barrier, though all have passed it, and its peer commits.
    """

    def __init__(self, fault: dict[str, Any], directory: Path) -> None:
        self._fault, self._mark = fault, directory / "struck"
        self._here = os.environ.get("ELASTIC_TRAINER_NODE") == fault["node"]
        self._place = int(os.environ.get("LOCAL_RANK", "0"))
        self._meet = ShardedReplica.commit_together
        ShardedReplica.commit_together = self.commit_together  # type: ignore[method-assign]

    def commit_together(self, number: int) -> None:
        """In place of the barrier."""
        replica = self.replica
        due = number == self._fault["step"] and not self._mark.exists() and replica.groups.count > 1
        if due and self._here and self._place == 1:
            if self._fault["kind"] == "half":
                self._meet(replica, number)
            time.sleep(0.3)
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if due and not self._here and self._place == 1 and self._fault["kind"] == "half":
            self._meet(replica, number)  # all are prepared, and its peer commits
            replica.groups.works.wait(replica.groups.works.begun(Never()))
            raise RoundBrokenError("unreachable")
        self._meet(replica, number)

    replica: ShardedReplica


class Never:
    """An operation that only the end of the round ends."""

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return False


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if options.get("keeps_stale"):
        ShardedReplica._clear_stale = lambda self: None  # type: ignore[method-assign]
    fault = Fault(options["fault"], directory) if options.get("fault") else None
    source = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=source), torch.randn(SAMPLES, 7, generator=source)
    )
    checkpoints = directory / "checkpoints" if options.get("save_every") else None
    with Session(
        checkpoints,
        seed=1,
        device="cpu",
        checkpoint_every_steps=options.get("save_every"),
        checkpoint_every_s=None,
    ) as session:
        model = built(session, options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5) if options.get("scaler") else None
        model = session.wrap(model, optimizer=optimizer, scaler=scaler, average=options.get("average"))
        if fault is not None:
            training = session._training
            assert training is not None
            assert isinstance(training.replica, ShardedReplica)
            fault.replica = training.replica
        seen = -1
        batches = session.batches(
            data, global_batch_size=BATCH, micro_batch_size=options.get("micro"), epochs=1_000_000
        )
        for batch in batches:
            with session.step() as step:
                for micro in step.micro_batches(batch):
                    step.backward(((model(micro.x) - micro.y) ** 2).mean())
                (ended,) = session.all_reduce(torch.tensor([float((directory / "stop").exists())])).tolist()
                step.clip(1.0)
                scaler.step(optimizer) if scaler is not None else optimizer.step()
            if not step.committed:
                continue
            if seen != session.round:
                seen = session.round
                note(directory, session)
            if ended or session.step_number == options.get("steps"):
                break
            time.sleep(options.get("pace_s", 0.0))
        note(directory, session)
        result(directory, session, options, data)


def note(directory: Path, session: Session) -> None:
    """What this place holds, for comparison with its replicas."""
    held = {name: local(each.detach()) for name, each in session.module.named_parameters()}
    line = {"step": session.step_number, "round": session.round, "place": session.local_rank, "pid": os.getpid()}
    with (directory / f"shards-{os.getpid()}").open("a") as file:
        file.write(json.dumps({**line, "digest": fingerprint(held)}) + "\n")


def result(directory: Path, session: Session, options: dict[str, Any], data: Any) -> None:
    """Whole parameters, and a metric of the model (and of its average)."""
    whole = {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach()
        for name, each in session.module.named_parameters()
    }

    def measure(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        return {"error": (float(((model(batch.x) - batch.y) ** 2).sum()), float(len(batch)))}

    models = [session.module, *([session.average] if options.get("average") else [])]
    metrics = [session.evaluate(each, data, 10, measure)["error"] for each in models]
    rows = session.predict(session.module, data, 10, lambda model, batch: model(batch.x))
    torch.save(
        {"step": session.step_number, "parameters": whole, "metrics": metrics, "rows": rows},
        directory / f"result-{session.rank}-{os.getpid()}",
    )


if __name__ == "__main__":
    main()
