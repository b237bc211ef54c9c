"""A machine on which no thread can be started, since the limit of processes is reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_new_threads() -> Iterator[None]:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
