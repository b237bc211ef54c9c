"""Python imports this before a program: it writes down each optimizer step, and lets the CPU stand in for a GPU.

The program itself is as it is. Each step of its first optimizer is a line ``time round rank world number pid`` in
``$BENCH_STEPS/NODE-0.txt``. A number is that of the parameters: a process that finds those which number 40 left
behind makes number 41, so that what a restart has lost or repeated shows. Parameters that nobody has had are number 0.

*Runs in* every Python process of the job, agents and templates included. *Owns* the lines, and ``states.txt`` beside.
*Fails by* nothing of its own: without its variables it does nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls ``then`` whenever the module ``name`` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._looking = name, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        loader: Any = found.loader if found is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then()

            loader.exec_module = exec_module
        return found


class Steps:
    """The steps of this process; what it needs of the environment it reads at the first one, since forks share this."""

    def __init__(self) -> None:
        self._optimizer: object = None
        self._number, self._state = 0, ""

    def before(self, optimizer: Any, *_: object) -> None:
        """Look which step the parameters are from, unless this process has made them."""
        if self._optimizer is None:
            self._optimizer, self._directory = optimizer, Path(os.environ["BENCH_STEPS"])
        if optimizer is self._optimizer and (state := digest(optimizer)) != self._state:
            (states := self._directory / "states.txt").touch()
            known = (line.split() for line in states.read_text().splitlines())
            self._number = ([0] + [int(pair[1]) for pair in known if len(pair) == 2 and pair[0] == state])[-1]
            self._write("states.txt", state, self._number)

    def after(self, optimizer: Any, *_: object) -> None:
        """Write the line."""
        if optimizer is self._optimizer:
            self._state, self._number = digest(optimizer), self._number + 1
            self._write("states.txt", self._state, self._number)
            name = f"{os.environ['ELASTIC_TRAINER_NODE']}-0.txt"
            self._write(name, time.monotonic(), *place(), self._number, os.getpid())

    def _write(self, name: str, *words: object) -> None:
        with (self._directory / name).open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")


def place() -> tuple[int, int, int]:
    """Round, rank and world; of the session where there is one, since that changes in place."""
    module: Any = sys.modules.get("elastic_trainer.worker.session")
    session = module._OPEN[-1] if module is not None and module._OPEN else None
    if session is not None:
        return session.round, session.rank, session.world_size
    said = os.environ
    return int(said.get("ELASTIC_TRAINER_ROUND", "0")), int(said["RANK"]), int(said["WORLD_SIZE"])


def digest(optimizer: Any) -> str:
    """Of all parameters; models are tiny here."""
    found = hashlib.blake2b(digest_size=12)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def observe() -> None:
    """Once torch is there."""
    from torch.optim import optimizer

    steps = Steps()
    optimizer.register_optimizer_step_pre_hook(steps.before)
    optimizer.register_optimizer_step_post_hook(steps.after)


def without_gpu() -> None:
    """Programs that know only CUDA and nccl train on the CPU with gloo."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def cpu(device: Any) -> Any:
        named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
        return "cpu" if named or type(device) is int else device

    def onto_cpu(call: Any) -> Any:
        @wraps(call)
        def called(*args: Any, **named: Any) -> Any:
            return call(*[cpu(each) for each in args], **{name: cpu(each) for name, each in named.items()})

        return called

    begin, parallel = dist.init_process_group, DistributedDataParallel.__init__
    patched: Any = torch
    patched.Tensor.to, patched.nn.Module.to = onto_cpu(torch.Tensor.to), onto_cpu(torch.nn.Module.to)
    patched.load, patched.Tensor.pin_memory = onto_cpu(torch.load), lambda tensor: tensor
    patched.cuda.set_device = lambda device: None
    patched.distributed.init_process_group = lambda backend=None, **named: begin("gloo", **named)
    patched.nn.parallel.DistributedDataParallel.__init__ = lambda self, module, device_ids=None, **named: parallel(
        self, module, **named
    )


if "BENCH_WORK" in os.environ:
    os.chdir(os.environ["BENCH_WORK"])
if "BENCH_WITHOUT_GPU" in os.environ:
    sys.meta_path.insert(0, AfterImport("torch", without_gpu))
if "BENCH_STEPS" in os.environ:
    sys.meta_path.insert(0, AfterImport("torch", observe))
