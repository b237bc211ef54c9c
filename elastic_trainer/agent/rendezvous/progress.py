"""Publishes how far the job is: rank 0's node writes it to the store, at most once a second.

*Runs in* the agent: a thread named ``progress``. *Owns* that thread.
*Fails by* nothing: progress that cannot be written is replaced by the next.
*Invariant*: progress of a round is written only while that round is the one in the store.
"""

from __future__ import annotations

import threading

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.store.api import Store, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.slot import Slot
from elastic_trainer.telemetry.logs import logger

EVERY_S = 1.0


class ProgressWriter:
    """See the module; ``seen()`` gives the number and mod-revision of the round document as this node knows it."""

    def __init__(self, store: Store, keys: RunKeys, clock: Clock = SYSTEM) -> None:
        self._keys, self._clock = keys, clock
        self._slot = Slot(store, keys.progress)
        self._changed = threading.Condition()
        self._latest: tuple[Progress, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def offer(self, progress: Progress, round_revision: int) -> None:
        """The newest progress, and the revision of the round document that it belongs to."""
        with self._changed:
            self._latest = (progress, round_revision)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; the last progress is written if it can be."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._closed.is_set())
                latest, self._latest = self._latest, None
            if latest is not None:
                self._write(*latest)
            if self._closed.is_set():
                return
            self._clock.wait(self._closed, EVERY_S)

    def _write(self, progress: Progress, round_revision: int) -> None:
        guard = unchanged(self._keys.round, round_revision)
        try:
            self._slot.replace(progress.encode().strip(), Deadline.after(2.0), [guard])
        except ElasticTrainerError as error:
            logger().debug("progress.unwritten", error=str(error))
