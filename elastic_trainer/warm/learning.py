"""Notes what a worker imports, so that the next one's template has it.

*Runs in* a forked worker, wherever it imports. *Owns* one descriptor there.
*Fails by* nothing: what cannot be sent is not learned, and a template that is gone costs a worker nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from types import ModuleType


class ImportRecorder:
    """A finder at the head of ``sys.meta_path`` that finds nothing, and sends the names that were found behind it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._asked = ""
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        """The worker's own children learn nothing, and have nothing of its template."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Send the name before: by now it is loaded, or was only looked for."""
        before, self._asked = self._asked, name
        if before in sys.modules and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, self._descriptor)
                try:
                    link.send(before.encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                finally:
                    link.detach()
