"""Writes what this node has to say to the store, newest first, from a thread of its own.

*Runs in* the agent: a thread named ``announcer``.
*Owns* that thread and what is waiting to be written.
*Fails by* nothing: an outage of the store is waited out; a refused write is logged.
*Invariant*: a record is never written after a newer one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.membership.documents import Ghost, NodeRecord
from elastic_trainer.membership.member import Member
from elastic_trainer.model import Cause
from elastic_trainer.telemetry.logs import logger

ATTEMPT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Break:
    number: int
    reason: str
    worker_failed: bool
    cause: Cause | None
    suspects: tuple[Ghost, ...]
    until: Deadline | None


class RecordWriter:
    """See the module."""

    def __init__(self, member: Member, clock: Clock = SYSTEM) -> None:
        self._member, self._clock = member, clock
        self._changed = threading.Condition()
        self._record: NodeRecord | None = None
        self._break: _Break | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def announce(self, record: NodeRecord) -> None:
        """Show ``record`` as soon as possible; a newer one replaces it if it is still waiting."""
        with self._changed:
            self._record = record
            self._changed.notify_all()

    def break_round(
        self,
        number: int,
        reason: str,
        record: NodeRecord,
        *,
        worker_failed: bool,
        cause: Cause | None = None,
        suspects: tuple[Ghost, ...] = (),
        within_s: float | None = None,
    ) -> None:
        """Show ``record``, and mark round ``number`` broken, in one write where that is possible.

        What is not done ``within_s`` seconds is not done at all: a suspicion is old by then.
        """
        until = Deadline.after(within_s, self._clock) if within_s is not None else None
        with self._changed:
            self._record = record
            self._break = _Break(number, reason, worker_failed, cause, suspects, until)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what is waiting is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=ATTEMPT_S + 1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._record is not None or self._break is not None)
                if self._closed:
                    return
                record, self._record = self._record, None
                broken, self._break = self._break, None
            try:
                self._write(record, broken)
            except ConfigError as error:
                logger().error("record.refused", error=str(error))
            except ElasticTrainerError as error:
                logger().warning("record.delayed", error=str(error))
                self._keep(record, broken)
                pause(0.1, clock=self._clock)
            except Exception:  # noqa: BLE001 - the edge of a thread: a silent announcer would freeze the node
                logger().exception("announcer.failed")
                self._keep(record, broken)
                pause(0.5, clock=self._clock)

    def _write(self, record: NodeRecord | None, broken: _Break | None) -> None:
        deadline = Deadline.after(ATTEMPT_S, self._clock)
        if broken is not None:
            self._member.break_round(
                broken.number,
                broken.reason,
                broken.until or deadline,
                worker_failed=broken.worker_failed,
                cause=broken.cause,
                record=record,
                suspects=broken.suspects,
            )
        if record is not None and record != self._member.shown():
            self._member.announce(record, deadline)

    def _keep(self, record: NodeRecord | None, broken: _Break | None) -> None:
        """Try again later, unless something newer has come."""
        with self._changed:
            if self._record is None:
                self._record = record
            if self._break is None and (broken is None or broken.until is None or not broken.until.expired):
                self._break = broken
