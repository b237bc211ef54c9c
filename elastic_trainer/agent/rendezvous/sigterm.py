"""SIGTERM while torchrun does not handle it: before its first workers, and when the run has succeeded.

Before them it would have its default action, and none at all on process 1 of a container: a pod that is evicted
while it waits for etcd or for other nodes would join later, and be killed in the middle of its work.

When the run has succeeded, the first pod of a Kubernetes Job to exit makes the controller end the others: they are
about to exit with 0, and should.

*Runs in* torchrun's main thread. *Owns* the process's handler for SIGTERM before and after torchrun's own.
*Fails by* SystemExit with the exit code of a node that left on request, from wherever the main thread is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from elastic_trainer.errors import EXIT_LEFT

_SENTENCE = b"elastic-trainer: SIGTERM came before the workers were started: this node leaves\n"


def listen() -> None:
    """Take SIGTERM from now on, unless somebody does already."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def too_late() -> None:
    """The run has succeeded: this process is about to exit with 0, so ignore SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Neither a logger nor a stream: the main thread may just be inside of one.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, _SENTENCE)
    raise SystemExit(EXIT_LEFT)
