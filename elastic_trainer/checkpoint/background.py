"""Saves that go on beside training: a thread writes one snapshot to storage, while a second may wait behind it.

*Runs in* a thread of its own with low priority; ``submit`` and ``finished`` belong to the thread that trains.
*Owns* the arena and the thread, until :meth:`BackgroundSaves.close`.
*Fails by* what the commit raises, as the save's ``error``; the next one is tried all the same.
*Invariant*: snapshots are committed in the order in which they were taken.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from elastic_trainer.checkpoint.arena import Arena, Held
from elastic_trainer.checkpoint.image import Image
from elastic_trainer.checkpoint.manager import CheckpointManager, Committed
from elastic_trainer.checkpoint.manifest import Manifest

_NICENESS = 10


@dataclass(slots=True)
class Save:
    """A snapshot on its way to storage. When ``done`` is set, it is ``committed``, or there is an ``error``."""

    manifest: Manifest
    committed: Committed | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class BackgroundSaves:
    """See the module. ``manager`` commits, in the thread."""

    def __init__(self, manager: CheckpointManager, arena: Arena | None = None) -> None:
        self._manager, self._arena = manager, arena if arena is not None else Arena()
        self._changed = threading.Condition()
        self._waiting: list[tuple[Save, Held]] = []
        self._unread: list[Save] = []
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether another snapshot would have to wait."""
        return self._arena.full

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, or waits for it."""
        with self._changed:
            return not self._busy and not self._waiting

    def submit(self, image: Image, manifest: Manifest) -> Save:
        """Copy ``image`` now, and write it later. Waits while there is no free slot.

        NoRoomError if there is no memory for the copy.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._arena.full)
        held = self._arena.hold(image)
        save = Save(manifest)
        with self._changed:
            self._waiting.append((save, held))
            self._start()
            self._changed.notify_all()
        return save

    def at_once(self, image: Image, manifest: Manifest) -> Save:
        """Write ``image`` in this thread, behind all that waits: there is no memory for a copy."""
        self.wait()
        save = Save(manifest)
        self._write(save, image)
        return save

    def give_up_waiting(self) -> Save | None:
        """Take back the snapshot that waits behind the one being written, if there is one; nobody gets it any more."""
        with self._changed:
            if not self._waiting:
                return None
            save, held = self._waiting.pop()
            self._arena.release(held)
        return save

    def finished(self) -> Sequence[Save]:
        """Those that have ended since this was asked last."""
        if not self._unread:
            return ()
        with self._changed:
            ended, self._unread = self._unread, []
        return ended

    def wait(self) -> None:
        """Until nothing is left to be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._waiting)

    def close(self, limit_s: float | None = None) -> None:
        """Write what waits, then end the thread and give the memory back; after ``limit_s`` the process may just end.

        A commit that is cut short leaves a temporary directory, which the next process sweeps.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._thread is None or not self._thread.is_alive():
            self._arena.close()

    def _start(self) -> None:
        if self._thread is None:
            context = contextvars.copy_context()  # what each log line says of this process
            self._thread = threading.Thread(target=context.run, args=(self._run,), name="checkpoint-save", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                save, held = self._waiting.pop(0)
                self._busy = True
            self._write(save, held.image)
            with self._changed:
                self._arena.release(held)
                self._busy = False
                self._changed.notify_all()

    def _write(self, save: Save, image: Image) -> None:
        try:
            save.committed = self._manager.commit(image, save.manifest)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever saves gets it
            save.error = error
        with self._changed:
            self._unread.append(save)
        save.done.set()
