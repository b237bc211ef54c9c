"""Checks that go wrong, each in a process of its own: ``python -m tests.integration.preflight.illness HOW``."""

from __future__ import annotations

import os
import signal
import sys
import threading

from elastic_trainer.preflight.child import Messages
from elastic_trainer.preflight.judge import Finding, Status


def main(how: str) -> int:
    messages = Messages(100.0)
    print("a library says hello")
    os.system("echo and one of its children too")
    messages.found(Finding("first", Status.OK, "works"))
    messages.version("torch", "2.13.0")
    messages.doing(f"doing {how}")
    if how == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Event().wait(100.0)
    elif how == "raise":
        raise RuntimeError("CUDA error: uncorrectable ECC error")
    elif how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
