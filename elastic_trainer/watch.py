"""``python -m elastic_trainer.watch SCRIPT ...``: lets the agent follow the progress of a script without a Session.

For restart mode: ``torchrun ... -m elastic_trainer.watch train.py``. The script runs as it is. Each update of the first
optimizer that makes one is a step; so the status page, metrics and incidents show ranks and steps, and a worker without
an update for longer than ``step_timeout`` is ended, with the stacks of its threads in the log.

*Runs in* the worker's main thread, in a hook that torch calls behind each ``optimizer.step()``.
*Fails by* nothing of its own: the script's exit code and exception are as without.
*Invariant*: a script that opens a Session reports by that alone.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_trainer.errors import EXIT_CONFIG, last_line
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment, worker_environment
from elastic_trainer.telemetry import logs
from elastic_trainer.warm.template import PythonCommand, run
from elastic_trainer.worker.report import HeartbeatReporter

if TYPE_CHECKING:
    import torch

USAGE = "usage: python -m elastic_trainer.watch [-m] SCRIPT [ARGUMENTS]"


class UpdateWatch:
    """Reports updates of the first optimizer. Steps are counted on from the newest that the run is known to have made:
    those that a script repeats after a restart count again."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._environment = environment
        self._tracker = HeartbeatReporter.open(environment)
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._step, self._process = environment.reached, os.getpid()
        self._hook = register_optimizer_step_post_hook(self._updated)

    @property
    def _counts(self) -> bool:
        """Not in a child that the script has forked, nor once the script has opened a Session."""
        return os.getpid() == self._process and self._tracker.is_newest

    def _updated(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        if not self._counts:
            return
        first = self._first() if self._first is not None else None
        if first is None:
            self._first = weakref.ref(optimizer)
            self._begin(optimizer)
        elif first is not optimizer:
            return
        self._step += 1
        self._tracker.note_step(self._step, 0)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        environment, tracker = self._environment, self._tracker
        device = optimizer.param_groups[0]["params"][0].device
        tracker.set_rank(environment.rank, environment.world_size, environment.round, device)
        tracker.enter_now(Phase.TRAINING)

    def end(self) -> None:
        """The script has ended."""
        self._hook.remove()
        if not self._counts:
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._tracker.set_notes(error=last_line(error))
        self._tracker.enter_now(Phase.ENDING)
        self._tracker.close()


def main() -> None:
    """See the module."""
    words = sys.argv[1:]
    module = words[:1] == ["-m"]
    if not words[module:] or words[module].startswith("-"):
        print(f"error: no script is named; {USAGE}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG)
    target, *arguments = words[module:]
    environment = worker_environment()
    logs.configure()
    watch = None if environment.in_place else UpdateWatch(environment)  # there a script opens a Session, or none trains
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: the script gets an entry of its own
    installed = sys.path[0]
    try:
        run(PythonCommand(sys.executable, (), module, target, tuple(arguments)), sys.orig_argv, installed)
    finally:
        if watch is not None:
            watch.end()


if __name__ == "__main__":
    main()
