"""Writes this node's record to the store, newest first, so that no other thread of the agent waits for the store.

*Runs in* a thread named ``record_writer``. *Owns* that thread and the pending write.
*Fails by* nothing: an outage of the store is waited out; a refused write is logged.
*Invariant*: a record is never written after a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.membership.documents import NodeRecord
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.round_write import RoundFailure
from elastic_trainer.telemetry.logs import logger

ATTEMPT_S = 5.0
AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Break:
    """A round to be broken, until the deadline if there is one."""

    failure: RoundFailure
    until: Deadline | None


Write = tuple[NodeRecord | None, Break | None]


class PendingWrites:
    """What is to be written next. ``wake()`` is called when there is something."""

    def __init__(self, wake: Callable[[], None], clock: Clock = SYSTEM) -> None:
        self._wake, self._clock = wake, clock
        self._lock = threading.Lock()
        self._record: NodeRecord | None = None
        self._break: Break | None = None

    def announce(self, record: NodeRecord) -> None:
        """Write ``record`` as soon as possible; it replaces one that is still pending."""
        with self._lock:
            self._record = record
        self._wake()

    def break_round(self, failure: RoundFailure, record: NodeRecord, within_s: float | None = None) -> None:
        """Write ``record`` and break the round of ``failure``, in one write if possible.

        After ``within_s`` seconds the break is dropped: a suspicion is outdated by then.
        """
        until = Deadline.after(within_s, self._clock) if within_s is not None else None
        with self._lock:
            self._record, self._break = record, Break(failure, until)
        self._wake()

    def take(self) -> Write:
        """The write to try now; ``keep`` it if it fails."""
        with self._lock:
            record, self._record = self._record, None
            broken, self._break = self._break, None
        return record, broken

    def keep(self, record: NodeRecord | None, broken: Break | None) -> None:
        """Keep the write for a retry, unless a newer one is pending."""
        with self._lock:
            if self._record is None:
                self._record = record
            if self._break is None and (broken is None or broken.until is None or not broken.until.expired):
                self._break = broken


class RecordWriter(PendingWrites):
    """See the module."""

    def __init__(self, member: Member, clock: Clock = SYSTEM) -> None:
        self._member = member
        self._thread = PeriodicThread("record_writer", self.turn, clock)
        super().__init__(self._thread.wake, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and drop the pending write."""
        self._thread.close()

    def turn(self) -> float:
        """Try the pending write; returns the seconds until the next attempt."""
        record, broken = self.take()
        written = False
        try:
            self._write(record, broken)
            written = True
        except ConfigError as error:
            written = True
            logger().error("record.refused", error=str(error))
        except ElasticTrainerError as error:
            logger().warning("record.delayed", error=str(error))
        finally:
            if not written:
                self.keep(record, broken)
        return IDLE_S if written else AGAIN_S

    def _write(self, record: NodeRecord | None, broken: Break | None) -> None:
        deadline = Deadline.after(ATTEMPT_S, self._clock)
        if broken is not None:
            self._member.break_round(broken.failure, broken.until or deadline, record)
        if record is not None and record != self._member.published():
            self._member.announce(record, deadline)
