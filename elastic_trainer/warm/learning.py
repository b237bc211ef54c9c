"""Records a worker's imports, so that the template of the next worker has them.

*Runs in* a forked worker, in any importing thread. *Owns* one descriptor there.
*Fails by* nothing: names that cannot be sent are not learned, and a dead template does not affect a worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from types import ModuleType


class ImportRecorder:
    """A finder at the head of ``sys.meta_path`` that finds nothing, and sends the names that later finders found."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._asked = ""
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        """In the worker's own children: stop recording and drop the link to the template."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Send the previous name: by now it is loaded, or its import has failed."""
        before, self._asked = self._asked, name
        if before in sys.modules and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, self._descriptor)
                try:
                    link.send(before.encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                finally:
                    link.detach()
