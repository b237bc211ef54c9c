"""The job of the goodput benchmark: one classifier of digits, trained in the way that its first word names.

``goodput_job.py session|plain|torchft DIRECTORY OPTIONS``, a JSON object: ``step_s`` (seconds in which a step computes
nothing here: the accelerator's part of it), ``save_every_s``, ``snapshot_every_s``, ``sharded``, ``timeout_s`` (of
collectives), ``steps`` (end behind this one), ``lighthouse`` and ``manager`` (torchft's). Every rank writes lines of
a ledger; a session does so by itself. Nothing outside torch is imported before it is needed: torchft has an environment
of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LOW_PRIORITY = 19
"""At which a node starts."""
DATA, CHECKPOINTS, LIVES = "digits.pt", "disk", "lives"
BATCH, WIDTH, ENDLESS, LEAST = 40, 256, 1_000_000, 2


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def share(size: int, step: int, rank: int, world: int) -> tuple[int, Tensor]:
    """Epoch and sample numbers of one rank in ``step``: a careful script's own sampler, exact for any world."""
    epoch, place = divmod(step, size // BATCH)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
    return epoch, order[place * BATCH : (place + 1) * BATCH][rank::world]


class Lines:
    """The ledger of a process without a session."""

    def __init__(self) -> None:
        self._node, self._local = os.environ["ELASTIC_TRAINER_NODE"], int(os.environ["LOCAL_RANK"])
        name = f"{self._node}-{self._local}-{os.getpid()}.jsonl"
        self._file = (Path(os.environ["ELASTIC_TRAINER_LEDGER_DIR"]) / name).open("a", buffering=1)
        self.write("opened")

    def write(self, event: str, **fields: Any) -> None:
        known = {"node": self._node, "local_rank": self._local, "pid": os.getpid(), "t": time.monotonic()}
        self._file.write(json.dumps({"event": event, **known, **fields}) + "\n")

    def step(self, number: int, round_: int, rank: int, world: int, used: tuple[int, Tensor], loss: float) -> None:
        place = {"step": number, "round": round_, "rank": rank, "world": world, "epoch": used[0]}
        self.write("step", **place, samples=used[1].tolist(), global_samples=BATCH, loss=loss)


class Saves:
    """torch.save as often as asked, whole or not at all; a disk that refuses it does not end the training."""

    def __init__(self, directory: Path, every_s: float) -> None:
        self._path, self._every_s, self._last = directory / CHECKPOINTS / "checkpoint.pt", every_s, time.monotonic()

    def newest(self) -> dict[str, Any] | None:
        return torch.load(self._path) if self._path.exists() else None

    def due(self, state: dict[str, Any]) -> None:
        if time.monotonic() - self._last < self._every_s:
            return
        self._last, half = time.monotonic(), self._path.with_suffix(f".{os.getpid()}")
        try:
            torch.save(state, half)
            half.replace(self._path)
        except (OSError, RuntimeError) as error:
            print(f"not saved: {error}", flush=True)
            half.unlink(missing_ok=True)


def session(directory: Path, options: dict[str, Any]) -> None:
    from elastic_trainer import Session
    from elastic_trainer.worker.steps.options import SavingOptions

    at_full_priority()
    x, y = torch.load(directory / DATA)
    saving = SavingOptions(snapshot_every_s=options["snapshot_every_s"])
    checkpoints, every_s = directory / CHECKPOINTS / "checkpoints", options["save_every_s"]
    with Session(checkpoints, device="cpu", checkpoint_every_s=every_s, saving=saving) as session:
        model, optimizer = build()
        if options["sharded"]:
            from torch.distributed.fsdp import fully_shard

            mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
            with session.parallelizing():
                for layer in (*list(model)[1::2], model):
                    fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        wrapped, device = session.wrap(model, optimizer=optimizer), Event()
        data = torch.utils.data.TensorDataset(x, y)
        for batch in session.batches(data, global_batch_size=BATCH, epochs=ENDLESS):
            with session.step() as step:
                device.wait(options["step_s"])
                step.backward(cross_entropy(wrapped(batch.x), batch.y))
                optimizer.step()


def plain(directory: Path, options: dict[str, Any]) -> None:
    """DistributedDataParallel below torchrun, with a checkpoint and a sampler of the script's own."""
    import torch.distributed as dist

    at_full_priority()
    x, y = torch.load(directory / DATA)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout_s"]))
    rank, world, lines = dist.get_rank(), dist.get_world_size(), Lines()
    model, optimizer = build()
    saves = Saves(directory, options["save_every_s"])
    said: list[Any] = [None, 0]
    if rank == 0:
        lives = directory / LIVES
        said = [saves.newest(), 1 + int(lives.read_text() if lives.exists() else 0)]
        lives.write_text(str(said[1]))
    dist.broadcast_object_list(said)
    found = said[0] or {"step": 0}
    if found["step"]:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    wrapped, device = nn.parallel.DistributedDataParallel(model), Event()
    for number in range(found["step"], options.get("steps", ENDLESS)):
        optimizer.zero_grad()
        used = share(len(x), number, rank, world)
        device.wait(options["step_s"])
        loss = cross_entropy(wrapped(x[used[1]]), y[used[1]])
        (loss * len(used[1]) * world / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        lines.step(number + 1, said[1], rank, world, used, loss.item())
        if rank == 0:
            saves.due({"step": number + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


def torchft(directory: Path, options: dict[str, Any]) -> None:
    """torchft's manager, with a quorum before each step, so that a sampler knows who takes part."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    at_full_priority()
    x, y = torch.load(directory / DATA)
    lines, saves, device = Lines(), Saves(directory, options["save_every_s"]), Event()
    model, bare = build()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        bare.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": bare.state_dict()}

    waits = {name: timedelta(seconds=value) for name, value in options["manager"].items()}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=waits["timeout"]),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=LEAST,
        use_async_quorum=False,
        replica_id=os.environ["ELASTIC_TRAINER_NODE"],
        lighthouse_addr=options["lighthouse"],
        hostname="localhost",
        **waits,
    )
    if (found := saves.newest()) is not None:
        load(found)
        manager.load_state_dict(found["torchft"])
    wrapped, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, bare)
    while True:
        optimizer.zero_grad()
        rank, world, before = manager.participating_rank(), manager.num_participants(), manager.current_step()
        used = share(len(x), before, rank or 0, world)
        device.wait(options["step_s"])
        loss = cross_entropy(wrapped(x[used[1]]), y[used[1]])
        (loss * len(used[1]) * world / BATCH).backward()
        optimizer.step()
        if rank is None or manager.current_step() == before:
            continue
        lines.step(before + 1, 0, rank, world, used, loss.item())
        if rank == 0:
            saves.due({**state(), "torchft": manager.state_dict()})


def at_full_priority() -> None:
    """From now on this process, and its node above it, whose start took nothing from the training of the others."""
    pid = os.getpid()
    while os.getpriority(os.PRIO_PROCESS, pid) == LOW_PRIORITY:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"session": session, "plain": plain, "torchft": torchft}[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
