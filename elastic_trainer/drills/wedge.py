"""Ways in which a worker gets stuck while its process lives, for drills: it does so once a file asks it to.

*Runs in* the main thread of a worker of the drill job. *Owns* nothing; the worker that it strikes removes the file.
*Fails by* never coming back: somebody else has to end it.
"""

from __future__ import annotations

import ctypes
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from elastic_trainer.clock import pause
from elastic_trainer.worker.session import Session


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
        pause(self._longer_s())
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

    def _longer_s(self) -> float:
        paced_s = float(self._pace.read_text()) if self._pace.exists() else 0.0
        return paced_s + _SLOWER_S * self._slow


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
    _place(directory / PACE, str(seconds))


def ask(directory: Path, node: str, kind: Wedge) -> Path:
    """Ask a worker of ``node`` to get stuck; the file that is gone when it does."""
    path = obstacle(directory, node)
    _place(path, kind)
    return path


def _place(path: Path, text: str) -> None:
    """Nobody sees half of it."""
    begun = path.with_suffix(".begun")
    begun.write_text(text)
    begun.rename(path)
