"""Runs a command that gets a signal when the process that started it dies.

``python -m elastic_trainer.local.parent_death PARENT_PID command...`` requests SIGTERM at the death of its parent from
the kernel, then executes the command. torchrun ends its workers on SIGTERM, so a killed cluster leaves nothing behind.

*Runs in* the child, before the command. *Fails by* exit code 75 if the parent is already dead.
*Invariant*: the signal survives exec. It is tied to the parent's *thread* that started the child, which must live on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 75


def main(argv: list[str]) -> NoReturn:
    """Request SIGTERM at the death of the process ``argv[0]``, and execute ``argv[1:]``."""
    parent, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        print(f"no parent-death signal: prctl failed with {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != parent:  # it died before the call above, which then never signals
        sys.exit(EXIT_ORPHAN)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
