"""What a check in a child process sends to its parent: what it does and finds, one JSON object a line.

*Runs in* the main thread of that process. *Owns* its standard output; what libraries write goes to standard error.
*Invariant*: the process ends by itself, even if a device or a file system never answers and its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, TextIO

from elastic_trainer.preflight.finding import Finding

_REPRIEVE_S = 10.0
"""The parent acts first, since it can say what happened."""


class Messages:
    """See the module; made once, at the start of the process, which lives ``limit_s`` seconds at most."""

    def __init__(self, limit_s: float) -> None:
        # The default action ends the process wherever it is; a Python handler would wait for C code to return.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _REPRIEVE_S)
        self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def doing(self, what: str) -> None:
        """What begins now; where it ends there, this names the culprit."""
        self.send(doing=what)

    def found(self, finding: Finding) -> None:
        self.send(finding=finding.as_json())

    def version(self, name: str, text: str) -> None:
        """The version of something that nodes should agree on."""
        self.send(version=[name, text])

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out, flush=True)
