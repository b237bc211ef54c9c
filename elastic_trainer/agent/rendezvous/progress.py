"""Publishes the job's progress: rank 0's node writes it to the store, at most once a second.

*Runs in* the agent: a thread named ``progress``. *Owns* that thread.
*Fails by* nothing: if a write fails, the next progress replaces it.
*Invariant*: progress of a round is written only while the store holds that round.
"""

from __future__ import annotations

import threading

from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.store.api import Store, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.slot import Slot
from elastic_trainer.telemetry.logs import logger

EVERY_S = 1.0


class ProgressWriter:
    """See the module."""

    def __init__(self, store: Store, keys: RunKeys, clock: Clock = SYSTEM) -> None:
        self._keys, self._clock = keys, clock
        self._slot = Slot(store, keys.progress)
        self._lock = threading.Lock()
        self._latest: tuple[Progress, int] | None = None
        self._not_before = 0.0
        self._thread = PeriodicThread("progress", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def offer(self, progress: Progress, round_revision: int) -> None:
        """Replace the pending progress; ``round_revision`` is that of the round document that it belongs to."""
        with self._lock:
            self._latest = (progress, round_revision)
        self._thread.wake()

    def close(self) -> None:
        """Stop the thread; tries to write the last progress."""
        self._thread.close()
        self._not_before = 0.0
        self.turn()

    def turn(self) -> float:
        """Write the newest progress if it is due; returns the seconds until the next turn."""
        now = self._clock.monotonic()
        if now < self._not_before:
            return self._not_before - now
        with self._lock:
            latest, self._latest = self._latest, None
        if latest is None:
            return IDLE_S
        self._not_before = now + EVERY_S
        progress, round_revision = latest
        guard = unchanged(self._keys.round, round_revision)
        try:
            self._slot.replace(progress.encode().strip(), Deadline.after(2.0), [guard])
        except ElasticTrainerError as error:
            logger().debug("progress.not_written", error=str(error))
        return EVERY_S
