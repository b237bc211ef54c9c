"""Messages of a check in a child process to its parent: activities and findings, one JSON object per line.

*Runs in* the main thread of that process. *Owns* its standard output; output of libraries goes to standard error.
*Invariant*: the process ends by itself, even if a device or file system never answers and its parent is dead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, TextIO

from elastic_trainer.preflight.finding import Finding

_REPRIEVE_S = 10.0
"""Extra seconds, so that the parent acts first and can report what happened."""


class Messages:
    """See the module; created once, at the start of the process, which lives at most ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        # The default action kills the process anywhere; a Python handler would wait for C code to return.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _REPRIEVE_S)
        self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def doing(self, what: str) -> None:
        """Report the next activity; if the process ends in it, this names the cause."""
        self.send(doing=what)

    def found(self, finding: Finding) -> None:
        self.send(finding=finding.as_json())

    def version(self, name: str, text: str) -> None:
        """Report a version that nodes should agree on."""
        self.send(version=[name, text])

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out, flush=True)
