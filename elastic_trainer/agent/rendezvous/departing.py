"""Why this node's process ends, read from the error that ends it. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_LEFT, ElasticTrainerError, last_line


@dataclass(frozen=True, slots=True)
class Parting:
    """``planned``: somebody asked it to go; else it gave up."""

    planned: bool
    reason: str
    exit_code: int


def parting_of(error: BaseException | None, *, made_steps: bool, died: str = "") -> Parting | None:
    """What ``error`` means for the run; None for a process that ends well. ``died``: how its worker did."""
    if isinstance(error, SignalException):
        name = signal.Signals(error.sigval).name
        return Parting(True, name, EXIT_LEFT if error.sigval == signal.SIGTERM else EXIT_FAILURE)
    if isinstance(error, KeyboardInterrupt):
        return Parting(True, "SIGINT", EXIT_FAILURE)
    if isinstance(error, SystemExit):
        return _of_exit(error)
    if isinstance(error, ElasticTrainerError):
        return Parting(False, error.message, error.exit_code)
    if error is None:
        return None
    code = exit_code_after(error, made_steps=made_steps)
    reason = f"{died}, and no --max-restarts is left" if isinstance(error, ChildFailedError) else last_line(error)
    return Parting(False, reason, EXIT_FAILURE if code is None else code)


def _of_exit(error: SystemExit) -> Parting | None:
    code = error.code if isinstance(error.code, int) else EXIT_FAILURE if error.code else 0
    if code == 0:
        return None
    if code == EXIT_LEFT:
        return Parting(True, "SIGTERM", code)
    why = error.__cause__ or error.__context__
    return Parting(False, why.message if isinstance(why, ElasticTrainerError) else "it cannot go on", code)


def exit_code_after(error: BaseException | None, *, made_steps: bool) -> int | None:
    """What this process must exit with, where torchrun's own exit code does not say it.

    ``made_steps``: whether its workers have, so that their configuration was right.
    """
    if was_terminated(error):
        return EXIT_LEFT
    if made_steps:
        return None
    if isinstance(error, ChildFailedError) and any(each.exitcode == EXIT_CONFIG for each in error.failures.values()):
        return EXIT_CONFIG
    return None


def was_terminated(error: BaseException | None) -> bool:
    """Whether ``error``, which ended this process, is how torchrun takes a SIGTERM."""
    return isinstance(error, SignalException) and error.sigval == signal.SIGTERM
