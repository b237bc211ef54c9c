"""The newest reading of the store, for the answering threads: each body is rendered once, however many request it.

*Runs in* the polling thread (``publish``) and the answering ones. *Owns* the newest reading and its rendered bodies.
*Fails by* nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.monitor import page
from elastic_trainer.monitor.model.snapshot import Listing, RunSnapshot, as_json, as_values, listing, snapshot, summary
from elastic_trainer.monitor.read.reading import StoreReading
from elastic_trainer.web.answers import Body


class Board:
    """See the module."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._reading = StoreReading()
        self._published_at = clock.monotonic()
        self._making = threading.Lock()
        self._bodies: dict[str, Body] = {}
        self._updates: dict[str, page.Update | None] = {}
        self._bodies_of = -1
        self._closed = False

    @property
    def reading(self) -> StoreReading:
        """The newest reading."""
        return self._reading

    @property
    def closed(self) -> bool:
        """Whether no other reading will follow."""
        return self._closed

    @property
    def published_s(self) -> float:
        """Seconds since the newest reading was published."""
        return self._clock.monotonic() - self._published_at

    @property
    def unread_s(self) -> float | None:
        """Seconds since the store was last read; None: never."""
        read_at = self._reading.read_at
        return None if read_at is None else self._clock.monotonic() - read_at

    def publish(self, reading: StoreReading) -> None:
        """Make ``reading`` the newest."""
        with self._changed:
            self._reading, self._published_at = reading, self._clock.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; no other reading will follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, serial: int, timeout_s: float) -> StoreReading:
        """The newest reading, as soon as its serial differs from ``serial`` or ``timeout_s`` seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading.serial != serial or self._closed, timeout_s)
            return self._reading

    def snapshot(self, run: str) -> RunSnapshot | None:
        """The run of this name; None if there is none."""
        reading = self._reading
        found = reading.runs.get(run)
        return None if found is None else snapshot(found.documents, found.seen, reading.store)

    def listing(self) -> Listing:
        """All runs."""
        reading = self._reading
        rows = [summary(each.documents, each.seen) for each in reading.runs.values()]
        return listing(rows, reading.store, reading.wall)

    def run_body(self, run: str) -> Body | None:
        """The JSON of a run."""
        return self.body(f"run/{run}", lambda: _encoded(self.snapshot(run)))

    def list_body(self) -> Body | None:
        """The JSON of the list."""
        return self.body("list", lambda: _encoded(self.listing()))

    def runs_update(self) -> page.Update:
        """The page of the list."""
        return page.runs_update(as_values(self.listing()))

    def run_update(self, run: str, choice: page.Choice) -> page.Update | None:
        """The page of the run for a reader's ``choice``; the default one is rendered once for all."""
        if choice != page.Choice():
            return self._update(run, choice)
        with self._making:
            self._forget_older()
            if run not in self._updates:
                self._updates[run] = self._update(run, choice)
            return self._updates[run]

    def _update(self, run: str, choice: page.Choice) -> page.Update | None:
        found = self.snapshot(run)
        return None if found is None else page.run_update(as_values(found), choice)

    def body(self, key: str, make: Callable[[], bytes | None]) -> Body | None:
        """The result of ``make()`` for the newest reading, computed once; None is not cached."""
        with self._making:
            self._forget_older()
            if key not in self._bodies:
                content = make()
                if content is None:
                    return None
                self._bodies[key] = Body.of(content)
            return self._bodies[key]

    def _forget_older(self) -> None:
        """Drop the bodies of the previous reading."""
        serial = self._reading.serial
        if serial != self._bodies_of:
            self._bodies, self._updates, self._bodies_of = {}, {}, serial


def _encoded(value: object | None) -> bytes | None:
    return None if value is None else as_json(value)
