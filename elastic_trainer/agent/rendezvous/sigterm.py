"""SIGTERM and SIGHUP where torchrun does not handle them correctly: before its first workers, a second time, after a
success, and when the process that started it ignores SIGHUP.

Before its workers start, SIGTERM has its default action, and none at all for process 1 of a container: a pod that is
evicted while it waits for etcd or other nodes would join later, and be killed in the middle of its work. The exception
that ends this process can be swallowed: it is raised wherever the main thread is, and Python only reports exceptions
of destructors and callbacks. So it is raised again until the process ends. Where its end itself hangs, it exits at once
after a while.

torchrun's own handler raises each time, even while torchrun ends its workers because of the previous signal: the second
signal then leaves workers behind that no process ends. Two come at once when the process that started torchrun dies
with several threads (prctl(2), PR_SET_PDEATHSIG), or when a terminal and a service manager both send one.

When the run has succeeded, the first pod of a Kubernetes Job to exit makes the controller end the others: these are
about to exit with 0, and must still do so.

SIGHUP, the end of a terminal, makes a node leave as SIGTERM does. Under ``nohup`` it is ignored at the start: torchrun
would handle it all the same, and pass it on to workers that ignore it, which are killed then. So it stays ignored.

*Runs in* torchrun's main thread. *Owns* the process's handlers for both before and after torchrun's own, which it
replaces, and after an early signal its real-time timer and SIGALRM.
*Fails by* SystemExit with the exit code of a node that left on request, from wherever the main thread is.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException, api

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_LEFT

Handler = Callable[[int, FrameType | None], None]
_TORCHRUNS = "_terminate_process_handler"
"""torchrun's handler for SIGTERM, SIGINT, SIGHUP and SIGQUIT once it starts workers (torch 2.10 to 2.13)."""
LEAVING = (signal.SIGTERM, signal.SIGHUP)
"""What asks a node to leave by plan, with exit code 143."""
_AGAIN_S, _LIMIT_S = 1.0, 20.0


def listen() -> None:
    """Handle SIGTERM and SIGHUP from now on, unless the process already does or ignores SIGHUP; a second signal cannot
    disturb the first."""
    for each in LEAVING:
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, unless_leaving(_leave))
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")  # torchrun's --signals-to-handle (torch 2.10 to 2.13)
    if handled is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        kept = [name for name in handled.split(",") if name.strip() != "SIGHUP"]
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(kept)
    torchruns: Handler | None = getattr(api, _TORCHRUNS, None)
    if torchruns is not None:
        setattr(api, _TORCHRUNS, unless_leaving(torchruns))


def unless_leaving(handler: Handler) -> Handler:
    """``handler``, but ignored while this thread still handles the exception of an earlier signal.

    A swallowed exception is no longer being handled: the next signal raises again.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not _leaving(sys.exception()):
            handler(number, frame)

    return handle


def _leaving(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SignalException) or (isinstance(error, SystemExit) and error.code == EXIT_LEFT):
            return True
        error = error.__context__
    return False


def ignore_sigterm() -> None:
    """The run has succeeded: this process is about to exit with 0, so ignore what asks it to leave."""
    if threading.current_thread() is threading.main_thread():
        for each in LEAVING:
            signal.signal(each, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Uses neither a logger nor a stream: the main thread may be inside one.
    sent = signal.Signals(number)
    told = f"elastic-trainer: {sent.name} came before the workers were started: this node leaves\n".encode()
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, told)
    limit, again = Deadline.after(_LIMIT_S), unless_leaving(_leave_again)

    def remind(number: int, frame: FrameType | None) -> None:
        if limit.expired:
            os._exit(EXIT_LEFT)
        again(number, frame)

    signal.signal(signal.SIGALRM, remind)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, _LIMIT_S)  # not before: Python itself is exiting
    raise SystemExit(EXIT_LEFT) from SignalException(f"{sent.name} came early", sent)


def _leave_again(number: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "__main__":  # otherwise Python itself is exiting
        raise SystemExit(EXIT_LEFT)
