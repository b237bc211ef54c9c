"""One rank of a sharded training that saves or loads: ``ACTION DIRECTORY SHAPE``, with RANK and STORE, a file.

SHAPE is that of the mesh: "4" for FSDP alone, "2x2" for FSDP times tensor parallel, "2+2" for two replicas of two.
``save`` trains two steps, commits, and leaves in ``reference.pt`` what all ranks together hold. ``dcp`` has torch save
a fresh model. ``load`` brings a fresh model to the newest checkpoint, and compares.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_trainer.checkpoint import CheckpointManager, LoadInto, SaveInfo, ShardGroup, commit
from elastic_trainer.clock import pause
from tests.unit.checkpoint.states import newest_of, same


class Net(nn.Module):
    """Layers that tensor parallel can cut, and those of sizes that no number of ranks divides; two names of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.first = nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 7)
        self.small = nn.Parameter(torch.randn(2))
        self.again = self.first
        self.register_buffer("seen", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.first(x)))
        result: torch.Tensor = self.head(self.down(torch.relu(self.up(x)))) * self.small.sum()
        return result


def mesh_of(shape: str, rank: int) -> DeviceMesh:
    if "+" in shape:
        size = int(shape.split("+")[0])
        groups = [DeviceMesh("cpu", list(range(at, at + size)), mesh_dim_names=("fsdp",)) for at in (0, size)]
        return groups[rank // size]
    sizes = tuple(map(int, shape.split("x")))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp")[: len(sizes)])


def build(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    assert mesh.mesh_dim_names is not None
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": ["of", 2], "bytes": b"x" * 5000}


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return cast("DTensor", value.detach()).full_tensor()
    if isinstance(value, dict):
        pairs = {key: full(each) for key, each in value.items()}
        return type(value)(pairs)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def save(directory: Path, shape: str) -> None:
    rank = dist.get_rank()
    mesh = mesh_of(shape, rank)
    model, optimizer = build(mesh, 1)
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(5, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, shard_group = collect(model, optimizer), ShardGroup(mesh)
    whole = full(state)
    dist.barrier()
    manager = CheckpointManager(directory)
    image, draft = manager.encode(state, SaveInfo(1), shard_group=shard_group), manager.draft(SaveInfo(1))
    if rank == 0:
        commit.SHARDS_LEAST_PATIENCE_S = 60.0
        torch.save(whole, directory / "reference.pt")
        print("committed", manager.commit(image, draft).name)
    elif shard_group.index:
        saved = threading.Event()  # training would set it at the next save: another replica may have written all
        threading.Thread(target=watch, args=(manager, saved), daemon=True).start()
        print("wrote", *manager.write_share(image, draft, 0, saved))
    dist.barrier()


def watch(manager: CheckpointManager, saved: threading.Event) -> None:
    while manager.newest() is None:
        pause(0.05)
    saved.set()


def load(directory: Path, shape: str) -> None:
    mesh = mesh_of(shape, dist.get_rank())
    model, optimizer = build(mesh, 99)
    held = {name: each.data_ptr() for name, each in locals_of(model).items()}
    like = {("optimizer", "state", index): each for index, each in enumerate(model.parameters())}
    loaded = newest_of(CheckpointManager(directory), LoadInto({"model": model.state_dict()}, like))
    assert {name: each.data_ptr() for name, each in locals_of(model).items()} == held
    moments = loaded.state["optimizer"]["state"][0]["exp_avg"]
    assert isinstance(moments, DTensor)
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    found = full(collect(model, optimizer))
    if dist.get_rank() == 0:
        assert same(found, torch.load(directory / "reference.pt", weights_only=False))
    torch.manual_seed(3)
    before = full(collect(model, optimizer))
    model(torch.randn(5, 12)).sum().backward()
    optimizer.step()
    assert not same(full(collect(model, optimizer)), before)
    print("equal")


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.to_local() for name, each in model.named_parameters() if isinstance(each, DTensor)}


def main() -> None:
    action, directory, shape = sys.argv[1:]
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        if action == "dcp":
            mesh = mesh_of(shape, rank)
            whole = full(state := collect(*build(mesh, 1)))
            save_dcp(state, checkpoint_id=f"{directory}/dcp")
            torch.save(whole, f"{directory}/reference.pt")
        elif action == "load":
            load(Path(directory), shape)
        else:
            save(Path(directory), shape)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
