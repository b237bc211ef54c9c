"""A sharded training: ``train.py DIRECTORY OPTIONS``, a JSON object. It leaves whole parameters and digests of shards.

Options: ``steps`` (None: until the file ``stop`` appears), ``pace_s``, ``mesh`` and ``names`` ("tp": tensor parallel
too; "pp": in stages, ``stages_each`` on each rank, with ``schedule``), ``meta``, ``micro`` (the size of micro-batches),
``more`` (rank 0 calls the model once more: "forward" alone, or in a "step" of both), ``policy`` ("fp32", "bf16" or
"reduced"), ``average``, ``scaler``, ``sgd``, ``offload`` (parameters to the CPU), ``activations`` (recomputed),
``save_every``, ``snapshot_every_s``, ``patience_s`` (of shard rank 0 for another, at a save), ``shows`` (a directory of
checkpoints: show what is resumed there, and end), ``whole_job`` (the mesh covers all nodes), ``like_nccl`` (over groups
that behave like NCCL's).
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_trainer import Session
from elastic_trainer.checkpoint import commit, manager
from elastic_trainer.checkpoint.codec import box_of, fingerprint, local
from elastic_trainer.checkpoint.manifest import tensor_part
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.comm.control import InterruptibleWaits
from elastic_trainer.worker.comm.lasting import LastingGroup
from elastic_trainer.worker.model.sharded import ShardedReplica
from elastic_trainer.worker.model.stages import StagedReplica
from elastic_trainer.worker.report import process_id
from elastic_trainer.worker.state.saver import Saver
from elastic_trainer.worker.steps.options import SavingOptions

sys.path.insert(0, str(Path(__file__).parents[3]))  # torchrun starts this file, which finds only what is beside it

from tests.drills.sharded import moe
from tests.drills.sharded.moe import MoeNet

SAMPLES, BATCH, WIDTH, BLOCKS = 96, 12, 48, 3
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "reduced": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}


def data() -> torch.utils.data.TensorDataset:
    source = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=source), torch.randn(SAMPLES, 7, generator=source)
    )


class Block(nn.Module):
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

    def stages(self, numbers: range) -> list[nn.Sequential]:
        """All layers in ``numbers.stop`` about equal parts; those of stages not in ``numbers`` lose their memory."""
        layers, count = [*self.blocks, self.head], numbers.stop
        parts = [layers[each * len(layers) // count : (each + 1) * len(layers) // count] for each in range(count)]
        for number, part in enumerate(parts):
            for layer in part if number not in numbers else []:
                layer.to("meta")
        return [nn.Sequential(*parts[number]) for number in numbers]

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.05)


def built(session: Session, options: dict[str, Any]) -> nn.Module:
    names = tuple(options.get("names", ["dp_shard"]))
    whole_job = bool(options.get("whole_job"))
    mesh = session.init_device_mesh(options.get("mesh", [-1]), mesh_dim_names=names, whole_job=whole_job)
    policy = MixedPrecisionPolicy(**POLICIES[options.get("policy", "fp32")])
    offload = CPUOffloadPolicy(pin_memory=False) if options.get("offload") else OffloadPolicy()
    torch.manual_seed(int(options.get("seed", 0)))
    with torch.device("meta" if options.get("meta") else "cpu"):
        model = MoeNet() if "ep" in names else Net()
        if options.get("double"):
            model.double()
    with session.parallelizing():
        if isinstance(model, MoeNet):
            moe.shard(model, mesh, mp_policy=policy, offload_policy=offload)
            return model
        for number, block in enumerate(model.blocks):
            if "tp" in names:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
            if options.get("activations"):
                block = model.blocks[number] = checkpoint_wrapper(block)
            if "dp_shard" in names:
                fully_shard(block, mesh=mesh["dp_shard"], mp_policy=policy, offload_policy=offload)
        if "tp" in names and "dp_shard" not in names:
            parallelize_module(model.head, mesh["tp"], ColwiseParallel(output_layouts=None), src_data_rank=None)
        if "dp_shard" in names:
            fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
    if options.get("meta"):
        model.to_empty(device=session.device)
        model.init_weights()
    return model


def staged(session: Session, options: dict[str, Any]) -> tuple[nn.Module, list[PipelineStage]]:
    """The whole model, of which this rank has memory for its stages; each of them is sharded."""
    mesh = session.init_device_mesh(options["mesh"], mesh_dim_names=tuple(options["names"]))
    torch.manual_seed(int(options.get("seed", 0)))
    model, ranks = Net(), mesh["pp"].size()
    count = ranks * options.get("stages_each", 1)
    with session.parallelizing():
        numbers = range(mesh["pp"].get_local_rank(), count, ranks)
        stages = model.stages(numbers)
        for mine in stages:
            for block in mine:
                fully_shard(block, mesh=mesh["dp_shard"])
            fully_shard(mine, mesh=mesh["dp_shard"])
        group = mesh.get_group("pp")
        made = [
            PipelineStage(mine, number, count, session.device, group=group)
            for number, mine in zip(numbers, stages, strict=True)
        ]
    return model, made


def optimized(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW divides small gradients by themselves: without its ``eps`` the last bit of a sum grows until nothing can be
    compared (5e-6 to 2e-5 after some hundred steps, with it 3e-7). Of a 16-bit type even that is too much."""
    if options.get("sgd"):
        return torch.optim.SGD(model.parameters(), lr=0.02)
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3)


MOMENTS = {"counts": moe.COUNTS, "dispatch": moe.DISPATCH, "return": moe.RETURN}


class Faults:
    """Dies, or loses the round, at the moment that the file ``fault`` names: ``{"id", "node", "step", "kind"}``.

    A worker of ``node`` kills itself in that step once a worker of the other node has come to the moment:

    ``barrier``: a shard peer is prepared and waits in the commit barrier, this one has not entered it.
    ``half``: all have passed the barrier and the peer commits; this one does not hear of it.
    ``backward``: in the middle of the backward pass, with gradients that are not sharded yet.
    ``kernel``: the same, while its shard peer is in a sum that it does not come to.
    ``schedule``: in the last stage, between two micro-batches; the first stage waits to send or to receive.
    ``counts``, ``dispatch``: the numbers of tokens, or tokens, are on their way to their experts, ``return``: gradients
    are on theirs back; peers wait for this one's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._node = directory, os.environ.get("ELASTIC_TRAINER_NODE")
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._due: dict[str, Any] = {}
        self._meet, self._reduce = ShardedReplica.commit_together, ShardedReplica._reduced
        self._lose, self._call, faults = StagedReplica._loss, LastingGroup._call, self
        self._sent, self._works = 0, InterruptibleWaits()
        StagedReplica._loss = lambda self, *given: faults.loss(self, *given)  # type: ignore[method-assign]
        ShardedReplica.commit_together = lambda self, number: faults.commit_together(self, number)  # type: ignore[method-assign]
        ShardedReplica._reduced = lambda self, *sums: faults.reduced(self, *sums)  # type: ignore[method-assign]
        LastingGroup._call = lambda self, *given: faults.called(self, *given)  # type: ignore[method-assign]

    def look(self, step: int) -> None:
        """Before step ``step``."""
        self._sent = 0
        file = self._directory / "fault"
        due = json.loads(file.read_text()) if file.exists() else {"step": 0}
        self._due = due if due["step"] == step and not self._mark(due, "struck").exists() else {}

    def _mark(self, due: dict[str, Any], what: str) -> Path:
        return self._directory / f"{what}-{due['id']}"

    def _strike(self, works: InterruptibleWaits) -> None:
        due, self._due = self._due, {}
        if due["node"] != self._node:
            self._mark(due, "came").touch()
            works.wait(works.begun(Never()))
        elif self._local_rank == 1:
            limit = time.monotonic() + 20.0
            while not self._mark(due, "came").exists() and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(0.1)
            self._mark(due, "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def commit_together(self, replica: ShardedReplica, number: int) -> None:
        """In place of the barrier."""
        self._works = replica.groups.peers.works
        kind = self._due.get("kind") if replica.groups.count > 1 and self._local_rank == 1 else None
        if kind == "barrier":
            self._strike(replica.groups.peers.works)
        self._meet(replica, number)
        if kind == "half":
            self._strike(replica.groups.peers.works)

    def reduced(self, replica: ShardedReplica, *sums: Any) -> None:
        """In place of the hook of FSDP."""
        kind = self._due.get("kind") if replica.groups.count > 1 else None
        if kind == "backward" or (kind == "kernel" and self._local_rank == 1):
            self._strike(replica.groups.peers.works)
        self._reduce(replica, *sums)

    def called(self, group: LastingGroup, name: str, *given: Any) -> Any:
        """In place of any operation of a lasting group."""
        if name == "alltoall_base" and self._local_rank == 1:
            self._sent += 1
            if self._sent == MOMENTS.get(self._due.get("kind", "")):
                self._strike(self._works)
        return self._call(group, name, *given)

    def loss(self, replica: StagedReplica, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """In place of what the schedule calls for each micro-batch."""
        if self._due.get("kind") == "schedule" and replica.groups.count > 1 and int(number) == 1:
            self._strike(replica.groups.peers.works)
        return self._lose(replica, output, number)


class SaveFaults:
    """At the next save after the file ``save-fault`` appears, ``{"kind", "shard_rank"}``, that shard rank:

    ``dies`` in the middle of its file, ``stalls`` (writes none until it is killed), or is ``absent``.

    The file is then renamed to ``save-faulted``, with the node's name. What is copied is recorded in ``copies-*``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = process_id(worker_environment().ledger_dir)
        modules: Any = (commit, manager)
        self._write, self._write_share, self._begin = modules[0].write_file, modules[1].write_share, Saver._begin
        modules[0].write_file, modules[1].write_share = self.write, self.write_share
        faults = self
        Saver._begin = lambda self, *given, **named: faults.begin(self, *given, **named)  # type: ignore[method-assign]

    def _due(self, file: str, *kinds: str) -> str:
        part, mine = tensor_part(file), self._directory / f"save-fault-{self._process}"
        with suppress(FileNotFoundError):  # there is none, or another process has taken it just now
            wanted = json.loads((self._directory / "save-fault").read_text())
            if part is not None and wanted["shard_rank"] == part[0] and wanted["kind"] in kinds:
                (self._directory / "save-fault").rename(mine)  # and not written to: others may be reading it
                told = mine.with_suffix(".told")
                told.write_text(os.environ.get("ELASTIC_TRAINER_NODE", ""))
                told.rename(self._directory / "save-faulted")
                return str(wanted["kind"])
        return ""

    def write(self, storage: Any, entry: str, file: Any, **named: Any) -> Any:
        kind = self._due(file.name, "dies", "stalls")
        if kind == "dies":
            sink = storage.sink(entry, file.name)
            sink.write(memoryview(file.head))
            os.kill(os.getpid(), signal.SIGKILL)
        while kind == "stalls":
            time.sleep(0.1)
        return self._write(storage, entry, file, **named)

    def write_share(self, storage: Any, image: Any, *given: Any, **named: Any) -> tuple[str, ...]:
        return () if self._due(image.names[0], "absent") else self._write_share(storage, image, *given, **named)

    def begin(self, saver: Saver, *given: Any, **named: Any) -> Any:
        state = saver._state
        boxes = {name: boxed(each) for name, each in named_tensors(state.for_storage())}
        where = {"round": state.position.generation, "step": state.position.step, "boxes": boxes}
        with (self._directory / f"copies-{self._process}").open("a") as file:
            file.write(json.dumps(where) + "\n")
        return self._begin(saver, *given, **named)


def named_tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Parameters and what the optimizer has of their shape."""
    moments = state["optimizer"]["state"]["state"].items()
    held = [(f"{number}/{name}", each) for number, one in moments for name, each in one.items() if each.dim()]
    return [(name, each) for name, each in (*state["model"].items(), *held) if not each.is_meta]


def boxed(tensor: Any) -> tuple[Any, ...]:
    """Where the shard of this rank lies in the whole tensor, and a digest of it."""
    offset, shape = box_of(tensor)
    return offset, shape, fingerprint({"": local(tensor).contiguous()})


class Never:
    """An operation that only the end of the round ends."""

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(timeout.total_seconds() if timeout is not None else 0.0)
        raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return False


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if options.get("like_nccl"):
        from tests.support import like_nccl

        like_nccl.use(directory, options["like_nccl"])
    faults = Faults(directory)
    if "save_every" in options:
        SaveFaults(directory)
    commit.SHARDS_LEAST_PATIENCE_S = options.get("patience_s", commit.SHARDS_LEAST_PATIENCE_S)
    checkpoints = options.get("shows") or (directory / "checkpoints" if options.get("save_every") else None)
    with Session(
        checkpoints,
        seed=1,
        device="cpu",
        checkpoint_every_steps=options.get("save_every"),
        checkpoint_every_s=None,
        saving=SavingOptions(snapshot_every_s=options.get("snapshot_every_s", "auto")),
        allow_changed=["run"] if "shows" in options else [],
    ) as session:
        model, stage = staged(session, options) if "pp" in options.get("names", ()) else (built(session, options), None)
        optimizer = optimized(model, options)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5) if options.get("scaler") else None
        model = session.wrap(model, optimizer=optimizer, scaler=scaler, average=options.get("average"), stage=stage)
        if "shows" in options:
            show(directory, session, optimizer)
            return
        seen, stop = -1, directory / "stop"
        batches = session.batches(
            data(), global_batch_size=BATCH, micro_batch_size=options.get("micro"), epochs=1_000_000
        )
        for batch in batches:
            faults.look(session.step_number + 1)
            with session.step() as step:
                if stage is not None:
                    step.pipeline(lambda out, part: ((out - part.y) ** 2).mean(), schedule=options.get("schedule"))
                else:
                    more = options.get("more") if session.rank == 0 else None
                    for micro in step.micro_batches(batch):
                        again = model(micro.x).mean() if more == "forward" else 0.0
                        step.backward(((model(micro.x) - micro.y) ** 2).mean() + again)
                        if more == "step":
                            step.backward(model(micro.x).mean())
                ended = "more" not in options and session.all_reduce(torch.tensor(float(stop.exists()))).item()
                step.clip(1.0)
                scaler.step(optimizer) if scaler is not None else optimizer.step()
            if not step.committed:
                continue
            if seen != session.round:
                seen = session.round
                note(directory, session, whole_job=bool(options.get("whole_job")))
            if ended or session.step_number == options.get("steps"):
                break
            time.sleep(options.get("pace_s", 0.0))
        note(directory, session, whole_job=bool(options.get("whole_job")))
        result(directory, session, options, step.loss)


def show(directory: Path, session: Session, optimizer: torch.optim.Optimizer) -> None:
    """The whole state that this rank resumed."""
    state = {"model": session.module.state_dict(), "optimizer": {"state": optimizer.state_dict()}}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named_tensors(state)}
    torch.save({"step": session.step_number, **whole}, directory / f"shown-{session.rank}")


def note(directory: Path, session: Session, *, whole_job: bool) -> None:
    """What this shard rank holds, for comparison with its replicas."""
    held = {name: local(each.detach()) for name, each in session.module.named_parameters() if not each.is_meta}
    sizes = (int(os.environ.get(name) or 1) for name in ("ELASTIC_TRAINER_SHARD_NODES", "LOCAL_WORLD_SIZE"))
    shard_rank = session.rank % (session.world_size if whole_job else math.prod(sizes))
    process = process_id(session.environment.ledger_dir)
    line = {"step": session.step_number, "round": session.round, "shard_rank": shard_rank, "pid": process}
    with (directory / f"shards-{process}").open("a") as file:
        file.write(json.dumps({**line, "digest": fingerprint(held)}) + "\n")


def result(directory: Path, session: Session, options: dict[str, Any], loss: float) -> None:
    """Whole parameters, the last ``loss``, and a metric of the model (and of its average)."""
    whole = {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach()
        for name, each in session.module.named_parameters()
        if not each.is_meta
    }

    def measure(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        return {"error": (float(((model(batch.x) - batch.y) ** 2).sum()), float(len(batch)))}

    models = [session.module, *([session.average] if options.get("average") else [])]
    metrics = [loss, *(session.evaluate(each, data(), 10, measure)["error"] for each in models)]
    rows = session.predict(session.module, data(), 10, lambda model, batch: model(batch.x))
    torch.save(
        {"step": session.step_number, "parameters": whole, "metrics": metrics, "rows": rows},
        directory / f"result-{session.rank}-{os.getpid()}",
    )


if __name__ == "__main__":
    main()
