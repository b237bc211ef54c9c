"""Runs a command that gets a signal when the process that started it dies.

``python -m elastic_trainer.local.parent_death PARENT_PID HOST command...`` requests SIGTERM at the death of its parent
from the kernel, then executes the command. torchrun ends its workers on SIGTERM, so a killed cluster leaves nothing
behind. HOST is the first process of the host that the command runs on (see hosts.py), or 0 for the parent's own.

*Runs in* the child, before the command. *Fails by* exit code 75 if the parent is already dead.
*Invariant*: the signal survives exec. It is tied to the parent's *thread* that started the child, which must live on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

from elastic_trainer.warm.template import enter_host

PR_SET_PDEATHSIG = 1
EXIT_ORPHAN = 75


def main(argv: list[str]) -> NoReturn:
    """Request SIGTERM at the death of the process ``argv[0]``, and execute ``argv[1:]``."""
    parent, host, command = int(argv[0]), int(argv[1]), argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        print(f"no parent-death signal: prctl failed with {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != (0 if host else parent):  # it died before the call above, which then never signals
        sys.exit(EXIT_ORPHAN)
    if host:
        enter_host(host)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
