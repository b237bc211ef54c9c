"""The job that drills break: trains until a file tells it to end, writes digests of its state, gets stuck if asked.

*Runs in* the main thread of a worker. *Owns* its digests' file; a worker that is asked to get stuck removes that file.
*Fails by* Session's errors; one that is stuck never comes back: somebody else has to end it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer.checkpoint import Event
from elastic_trainer.checkpoint.codec import local
from elastic_trainer.clock import pause
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.model.replica import Reduction
from elastic_trainer.worker.report import process_id
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import GroupOptions, SavingOptions


class Wedge(StrEnum):
    """What the worker is stuck in."""

    LOCK = "lock"
    """C code that holds the interpreter's lock: no other thread of the process runs."""
    LOOP = "loop"
    """A loop in Python that never ends; other threads run."""
    DATA = "data"
    """A data set that never gives its next sample."""
    COLLECTIVE = "collective"
    """A collective that the other ranks are not in: all wait for each other. Once: the step comes again without it."""
    SLOW = "slow"
    """None, but each step takes a tenth of a second longer from now on."""
    NAN = "nan"
    """None, but the loss is NaN for as long as the file is there."""


STUCK = (Wedge.LOCK, Wedge.LOOP, Wedge.DATA, Wedge.COLLECTIVE)
PACE = "pace"
_SLOWER_S = 0.1
_MUTEX_BYTES = 256
"""More than a pthread_mutex_t takes anywhere (40 on Linux, 64 on macOS)."""


class Obstacles:
    """Looks for the file that asks this worker to get stuck."""

    def __init__(self, directory: Path, node: str) -> None:
        self._path, self._pace = obstacle(directory, node), directory / PACE
        self._slow = False

    def met(self, *kinds: Wedge) -> Wedge | None:
        """The wedge that is asked for, if it is one of ``kinds``; it is asked for once."""
        if not self._path.exists():
            return None
        kind = Wedge(self._path.read_text())
        if kind not in kinds:
            return None
        self._path.unlink()
        return kind

    def inside_step(self, session: Session) -> None:
        """Get stuck here, if that is asked for."""
        pause((float(self._pace.read_text()) if self._pace.exists() else 0.0) + _SLOWER_S * self._slow)
        kind = self.met(Wedge.LOCK, Wedge.LOOP, Wedge.COLLECTIVE, Wedge.SLOW)
        self._slow |= kind is Wedge.SLOW
        if kind is Wedge.LOCK:
            _hold_the_interpreter()
        elif kind is Wedge.LOOP:
            while True:
                pass
        elif kind is Wedge.COLLECTIVE:
            session._here.present.control.add_up(torch.zeros(1))  # nothing that a script can call does this to its job

    def spoiled(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss``, or NaN if that is asked for."""
        wanted = self._path.exists() and self._path.read_text() == Wedge.NAN
        return loss * float("nan") if wanted else loss


class Rows(TensorDataset):
    """A data set that never gives its next sample, once that is asked for."""

    def __init__(self, data: TensorDataset, obstacles: Obstacles) -> None:
        super().__init__(*data.tensors)
        self.deterministic = True
        self._obstacles = obstacles

    def __getitem__(self, index: int) -> Any:
        if self._obstacles.met(Wedge.DATA) is not None:
            threading.Event().wait()
        return tuple(tensor[index] for tensor in self.tensors)


def _hold_the_interpreter() -> None:
    """A C call that never comes back and gives no other thread its turn.

    It locks one mutex twice: ``pause`` would come back when the agent asks for stacks, which it does by a signal.
    """
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_init(mutex, None)
    while True:
        library.pthread_mutex_lock(mutex)


def obstacle(directory: Path, node: str) -> Path:
    """The file that asks the workers of ``node``."""
    return directory / f"obstacle-{node}"


def pace(directory: Path, seconds: float) -> None:
    """From its next one on, each step of all workers takes so much longer."""
    _write(directory / PACE, str(seconds))


def ask(directory: Path, node: str, kind: Wedge) -> Path:
    """Ask a worker of ``node`` to get stuck; the file that is gone when it does."""
    path = obstacle(directory, node)
    _write(path, kind)
    return path


def _write(path: Path, text: str) -> None:
    """Nobody sees half of it."""
    begun = path.with_suffix(".begun")
    begun.write_text(text)
    begun.rename(path)


# ---- the job

STOP_FILE, DIGESTS, CHECKPOINTS = "stop", "digests", "checkpoints"
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads to its output, also while it is blocked in a collective."""
FEATURES, CLASSES = 32, 8
DIGEST_EVERY = 10
_FOREVER = 1_000_000
_PARTS = 8
"""Micro-batches of a global batch."""


class Sharded(StrEnum):
    """What a model is sharded over."""

    GROUP = "group"
    JOB = "job"


class JobEnding:
    """Whether all ranks are to end behind the present step. Part of the state, so that healing carries it over."""

    def __init__(self) -> None:
        self.agreed = False

    def state_dict(self) -> dict[str, bool]:
        return {"agreed": self.agreed}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Take over another rank's. A job that is resumed from storage has not been asked to end."""
        self.agreed = state["agreed"]


class Digests:
    """Writes what this rank's state was, as a digest of all its bytes, for a comparison of the ranks."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        directory: Path,
        sharded: str | None = None,
    ) -> None:
        self._session, self._model, self._optimizer, self._sharded = session, model, optimizer, sharded
        environment = session.environment
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{environment.node}-{environment.local_rank}-{os.getpid()}.jsonl"
        self._file = path.open("a", encoding="utf-8")  # until this process ends

    def write(self, event: str) -> None:
        session, environment = self._session, self._session.environment
        who = {"event": event, "node": environment.node, "pid": process_id(environment.ledger_dir)}
        when = {"round": session.round, "step": session.step_number}
        self._file.write(json.dumps({**who, **when, "digest": self._digest(), "shard_rank": self._shard_rank()}) + "\n")
        self._file.flush()

    def _shard_rank(self) -> int:
        """Of this rank in the mesh of its model."""
        if self._sharded is None:
            return 0
        session, environment = self._session, self._session.environment
        within = environment.shard_nodes * environment.local_world_size
        return session.rank % (within if self._sharded == Sharded.GROUP else session.world_size)

    def _digest(self) -> str:
        tensors = list(self._model.state_dict().values())
        kept: dict[int, dict[str, Any]] = self._optimizer.state_dict()["state"]
        for number in sorted(kept):
            tensors += [value for _, value in sorted(kept[number].items()) if isinstance(value, torch.Tensor)]
        hasher = xxhash.xxh3_128()
        for tensor in tensors:
            hasher.update(cast("Any", local(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy()))
        return hasher.hexdigest()


def main(
    argv: list[str] | None = None,
    hear: Callable[[Event], None] | None = None,
    behind: Callable[[int, Session, nn.Module], None] | None = None,
) -> None:
    """Train until the file appears; ``hear`` is called amid saves, ``behind`` after each committed step."""
    options = _options(argv)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    torch.manual_seed(0)
    model = _model(options.width, options.reduction)
    rows = torch.randn(options.samples, FEATURES, generator=torch.Generator().manual_seed(1))
    data: TensorDataset = TensorDataset(rows, torch.arange(options.samples) % CLASSES)
    obstacles = Obstacles(options.directory, worker_environment().node)
    if options.wedges:
        data = Rows(data, obstacles)
    ending = JobEnding()
    with Session(
        checkpoint_dir=options.directory / CHECKPOINTS,
        checkpoint_every_s=options.save_every,
        saving=SavingOptions(on_event=hear),
        device=options.device,
        group=GroupOptions(backend=options.backend, timeout_s=options.group_timeout),
    ) as session:
        if options.sharded is not None:
            _shard(model, session, options.sharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        session.register("ending", ending)
        wrapped = session.wrap(model, optimizer=optimizer, reduction=options.reduction)
        digests = Digests(session, model, optimizer, options.directory / DIGESTS, options.sharded)
        micro = options.batch // _PARTS if options.reduction == Reduction.TREE else None
        for batch in session.batches(data, global_batch_size=options.batch, micro_batch_size=micro, epochs=_FOREVER):
            if ending.agreed:
                break
            pause(options.pause)
            with session.step() as step:
                if options.wedges:
                    obstacles.inside_step(session)
                for part in step.micro_batches(batch):
                    loss = nn.functional.cross_entropy(wrapped(part.x), part.y)
                    step.backward(obstacles.spoiled(loss) if options.wedges else loss)
                ending.agreed = _asked(session, options.directory / STOP_FILE)
                optimizer.step()
            if step.committed and session.step_number % DIGEST_EVERY == 0:
                digests.write("step")
            if step.committed and behind is not None:
                behind(session.step_number, session, wrapped)
            ending.agreed |= session.step_number == options.steps
            if ending.agreed:
                break
    digests.write("end")


def _asked(session: Session, stop: Path) -> bool:
    """Whether any rank has seen the file; all ranks hear the same within one step."""
    return bool(session.all_reduce(torch.tensor([float(stop.exists())])).item() > 0)


def _model(width: int, reduction: str) -> nn.Module:
    """With the tree also what depends on the micro-batch as a whole, since that has equal bits too."""
    between: list[nn.Module] = [nn.ReLU()]
    if reduction == Reduction.TREE:
        between = [nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(
        nn.Linear(FEATURES, width), *between, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def _shard(model: nn.Module, session: Session, over: str) -> None:
    """Over the nodes of a group (one if shard_nodes does not say otherwise), or over the whole job."""
    from torch.distributed.fsdp import fully_shard  # slow to import, and no other drill needs it

    mesh = session.init_device_mesh([-1], mesh_dim_names=["dp_shard"], whole_job=over == Sharded.JOB)
    with session.parallelizing():
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the job that drills break", allow_abbrev=False)
    parser.add_argument("--directory", type=Path, required=True, help="where the stop file is looked for")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--reduction", choices=list(map(str, Reduction)), default=str(Reduction.DDP))
    parser.add_argument("--sharded", choices=list(map(str, Sharded)), help="what the model is sharded over")
    parser.add_argument("--wedges", action="store_true", help="get stuck when a file asks for it")
    parser.add_argument("--steps", type=int, help="end behind this step, without being asked")
    parser.add_argument("--save-every", type=float, help="seconds from one checkpoint to the next")
    parser.add_argument("--group-timeout", type=float, help="seconds that a collective may take")
    parser.add_argument("--device", default="cpu", help="on which every worker computes")
    parser.add_argument("--backend", default="auto", help="gloo: also where workers share a CUDA device")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
