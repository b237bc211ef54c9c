"""A training script that knows nothing of this project: torchrun's variables, torch.distributed over gloo, steps.

``plain.py DIRECTORY [--alone] [--handler] [--optimizer]``. Each step is one all-reduce and one line
``time round rank world step pid`` in ``DIRECTORY/<node>-<local rank>.txt``. The files ``DIRECTORY/stop`` (all finish
together), ``DIRECTORY/finish-<node>`` and ``DIRECTORY/fail-<node>`` (that node does, or fails) tell it what to do.

``--alone`` leaves the collectives out (and with them torch's import), ``--handler`` installs a SIGTERM handler,
``--optimizer`` makes an update in each step, until ``DIRECTORY/hang-<node>`` has it stand still once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

STEP_S = 0.02


def main(directory: Path, flags: list[str]) -> int:
    node, pause = os.environ["ELASTIC_TRAINER_NODE"], threading.Event()
    told = threading.Event()
    if "--handler" in flags:
        signal.signal(signal.SIGTERM, lambda number, frame: _note(told, number, frame))
    agree = _alone if "--alone" in flags else _grouped()
    update = _update() if "--optimizer" in flags else lambda: None
    with (directory / f"{node}-{os.environ['LOCAL_RANK']}.txt").open("a") as lines:
        for step in range(1_000_000):
            if (directory / f"fail-{node}").exists():
                return 3
            if told.is_set():
                return 143
            if agree((directory / "stop").exists()) or (directory / f"finish-{node}").exists():
                return 0
            _write(lines, step)
            update()
            if (hang := directory / f"hang-{node}").exists():
                hang.unlink()
                threading.Event().wait()
            pause.wait(STEP_S)
    return 1


def _note(told: threading.Event, number: int, frame: FrameType | None) -> None:
    told.set()


def _write(lines: TextIO, step: int) -> None:
    said = os.environ
    round_ = said.get("ELASTIC_TRAINER_ROUND", "0")
    print(time.monotonic(), round_, said["RANK"], said["WORLD_SIZE"], step, _process_id(), file=lines, flush=True)


def _process_id() -> int:
    """As the test sees it, which may be on another host (see worker/report.py)."""
    try:
        return int(os.readlink(os.path.join(os.environ["ELASTIC_TRAINER_LEDGER_DIR"], "proc", "self")))
    except (KeyError, OSError):
        return os.getpid()


def _update() -> Callable[[], object]:
    import torch

    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1).step


def _alone(stop: bool) -> bool:
    return stop


def _grouped() -> Callable[[bool], bool]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def agree(stop: bool) -> bool:
        """One all-reduce: everybody is there, and everybody knows whether somebody saw the stop file."""
        votes = torch.tensor([1.0, float(stop)])
        dist.all_reduce(votes)
        if votes[0].item() != dist.get_world_size():
            raise RuntimeError(f"{votes[0].item()} of {dist.get_world_size()} ranks took part")
        return bool(votes[1])

    return agree


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
