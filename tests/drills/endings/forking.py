"""A small in-place training whose script has children of every kind; what became of them is written to ``children``."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.clock import pause
from elastic_trainer.ipc.gloo import open_sockets
from elastic_trainer.worker.steps.options import GroupOptions

SAMPLES, BATCH = 320, 32
FORK: Any = multiprocessing.get_context("fork")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16), torch.arange(SAMPLES) % 4)
    with Session(group=GroupOptions(stop_timeout_s=60.0)) as session:
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model = session.wrap(model, optimizer=optimizer)
        found: dict[str, Any] = {}
        for batch in session.batches(data, global_batch_size=BATCH, epochs=10_000):
            between = BETWEEN.get(session.step_number)
            if between is not None:
                found[between.__name__] = between()
            with session.step() as step:
                step.backward(nn.functional.cross_entropy(model(batch.x), batch.y))
                if session.step_number in INSIDE:
                    found[INSIDE[session.step_number].__name__] = INSIDE[session.step_number]()
                end = session.all_reduce(torch.tensor(float((directory / "stop").exists())))
                optimizer.step()
            if step.committed and end.item():
                break
            if session.step_number == LAST:
                (directory / f"children.{session.environment.node}").write_text(json.dumps(found))
            pause(0.06)


def pool() -> list[int]:
    """Leaving the block ends its processes by SIGTERM."""
    with FORK.Pool(2) as workers:
        return list(workers.map(abs, [-1, -2, -3]))


def terminated() -> list[int]:
    """At once, and in the middle of something."""
    processes = [FORK.Process(target=pause, args=(600.0,)) for _ in range(2)]
    for process in processes:
        process.start()
    processes[0].terminate()
    pause(0.2)
    processes[1].terminate()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def inherited() -> dict[str, Any]:
    read, write = os.pipe()
    status = _forked(lambda: os.write(write, json.dumps(_found()).encode()))
    os.close(write)
    with open(read) as told:
        return {**json.loads(told.read()), "status": status}


def _found() -> dict[str, Any]:
    return {
        "sockets": len(open_sockets()),
        "wakeup": signal.set_wakeup_fd(-1),
        "default": _handlers() == BEFORE,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def _handlers() -> list[Any]:
    return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]


def grandchild() -> list[int]:
    """A child's child is terminated by it."""
    return [_forked(_has_terminated)]


def _has_terminated() -> None:
    process = FORK.Process(target=pause, args=(600.0,))
    process.start()
    process.terminate()
    process.join()
    os._exit(-process.exitcode)


def loader() -> int:
    rows = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2, multiprocessing_context="fork")
    return sum(int(batch[0].sum()) for batch in loader)


def program() -> int:
    """Another program, started with code of this one in the child."""
    child = subprocess.Popen(["sleep", "600"], preexec_fn=os.setsid)
    child.terminate()
    return child.wait()


def leaves() -> int:
    """A child that ends as a program does: through the script's blocks, its session's too."""
    return _forked(lambda: sys.exit(7))


def fails() -> int:
    """One that ends with an error of the script."""
    return _forked(_fail)


def _fail() -> None:
    raise ValueError("a child's mistake")


def _forked(act: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


BETWEEN: dict[int, Callable[[], Any]] = {
    3: pool,
    4: terminated,
    5: inherited,
    6: grandchild,
    7: loader,
    8: program,
    9: leaves,
}
INSIDE: dict[int, Callable[[], Any]] = {11: leaves, 12: fails, 13: pool, 14: terminated}
LAST = 16
BEFORE = _handlers()
"""Without a session. (A shell lets the programs that it starts in the background ignore SIGINT.)"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
