"""What the error that ends a node's process means for its run."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from elastic_trainer.agent.rendezvous.launcher import ExitReason, exit_reason_of
from elastic_trainer.errors import EXIT_LEFT, JoinTimeoutError


def exiting(code: int, cause: BaseException | None = None) -> SystemExit:
    error = SystemExit(code)
    error.__cause__ = cause
    return error


def failed(exitcode: int) -> ChildFailedError:
    first: Any = SimpleNamespace(exitcode=exitcode, timestamp=1, signal_name=lambda: "SIGKILL", local_rank=0)
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = cast("Any", {3: first})
    return error


@pytest.mark.parametrize(
    ("error", "parting"),
    [
        (None, None),
        (exiting(0), None),
        (SignalException("", signal.SIGTERM), ExitReason(True, "SIGTERM", EXIT_LEFT)),
        (SignalException("", signal.SIGHUP), ExitReason(True, "SIGHUP", EXIT_LEFT)),
        (SignalException("", signal.SIGINT), ExitReason(True, "SIGINT", 1)),
        (KeyboardInterrupt(), ExitReason(True, "SIGINT", 1)),
        (exiting(EXIT_LEFT), ExitReason(True, "SIGTERM", EXIT_LEFT)),
        (exiting(EXIT_LEFT, SignalException("", signal.SIGHUP)), ExitReason(True, "SIGHUP", EXIT_LEFT)),
        (exiting(1, JoinTimeoutError("fewer than 2 nodes")), ExitReason(False, "fewer than 2 nodes", 1)),
        (JoinTimeoutError("fewer than 2 nodes", hint="start more"), ExitReason(False, "fewer than 2 nodes", 1)),
        (RuntimeError("a\nb"), ExitReason(False, "RuntimeError: a b", 1)),
        (
            failed(-9),
            ExitReason(False, "worker 0 died, and no --max-restarts is left", 1),
        ),
        (
            failed(78),
            ExitReason(False, "worker 0 died, and no --max-restarts is left", 78),
        ),
    ],
)
def test_who_was_asked_to_go_did_not_give_up(error: BaseException | None, parting: ExitReason | None) -> None:
    """A signal is a request, a clean exit is neither, and all else is given up for a reason."""
    assert exit_reason_of(error, made_steps=False, died="worker 0 died") == parting
