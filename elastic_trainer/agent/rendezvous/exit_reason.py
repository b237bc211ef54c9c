"""Why this node's process exits, derived from its last error. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from elastic_trainer.agent.rendezvous.sigterm import LEAVING
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_LEFT, ElasticTrainerError, last_line


@dataclass(frozen=True, slots=True)
class ExitReason:
    """``planned``: the node was asked to leave; otherwise it gave up."""

    planned: bool
    reason: str
    exit_code: int


def exit_reason_of(error: BaseException | None, *, made_steps: bool, died: str = "") -> ExitReason | None:
    """What ``error`` means for the run; None for a process that succeeds. ``died``: how its worker died."""
    if isinstance(error, SignalException):
        name = signal.Signals(error.sigval).name
        return ExitReason(True, name, EXIT_LEFT if error.sigval in LEAVING else EXIT_FAILURE)
    if isinstance(error, KeyboardInterrupt):
        return ExitReason(True, "SIGINT", EXIT_FAILURE)
    if isinstance(error, SystemExit):
        return _of_exit(error)
    if isinstance(error, ElasticTrainerError):
        return ExitReason(False, error.message, error.exit_code)
    if error is None:
        return None
    code = exit_code_after(error, made_steps=made_steps)
    reason = f"{died}, and no --max-restarts is left" if isinstance(error, ChildFailedError) else last_line(error)
    return ExitReason(False, reason, EXIT_FAILURE if code is None else code)


def _of_exit(error: SystemExit) -> ExitReason | None:
    code = error.code if isinstance(error.code, int) else EXIT_FAILURE if error.code else 0
    if code == 0:
        return None
    why = error.__cause__ or error.__context__
    if code == EXIT_LEFT:
        sent = why.sigval if isinstance(why, SignalException) else signal.SIGTERM
        return ExitReason(True, signal.Signals(sent).name, code)
    return ExitReason(False, why.message if isinstance(why, ElasticTrainerError) else "it cannot continue", code)


def exit_code_after(error: BaseException | None, *, made_steps: bool) -> int | None:
    """The exit code that this process must use instead of torchrun's; None if torchrun's is right.

    ``made_steps``: its workers have made steps, so their configuration was right.
    """
    if was_terminated(error):
        return EXIT_LEFT
    if made_steps:
        return None
    if isinstance(error, ChildFailedError) and any(each.exitcode == EXIT_CONFIG for each in error.failures.values()):
        return EXIT_CONFIG
    return None


def was_terminated(error: BaseException | None) -> bool:
    """Whether ``error``, which ended this process, is the one that torchrun raises on SIGTERM or SIGHUP."""
    return isinstance(error, SignalException) and error.sigval in LEAVING
