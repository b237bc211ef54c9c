"""Waiting for a run that is to be watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_trainer.cli import connection
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store.api import Order, Put, RunKeys, Snapshot
from tests.support.memory_store import MemoryBackend, MemoryStore

KEYS = RunKeys("/elastic_trainer", "run")


class Troubled(MemoryStore):
    """A store that is away for two reads after the first, and then has the run."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.reads: Iterator[int] = iter(range(100))

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        if prefix == KEYS.root:
            turn = next(self.reads)
            if turn in (1, 2):
                raise StoreUnavailableError("etcd does not answer")
            if turn == 3:
                self.transact([], [Put(KEYS.spec, b"{}")], deadline=Deadline.after(1.0))
        return super().range(prefix, deadline, limit=limit, order=order, keys_only=keys_only)


def test_an_outage_does_not_end_the_wait_for_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, as is that the run is not there; the wait ends when the run is."""
    monkeypatch.setattr(connection, "pause", lambda _: None)
    settings = StoreSettings(endpoints=parse_endpoints("127.0.0.1:2379"))
    connection.await_run(Troubled(), settings, KEYS)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "waiting: there is no run 'run' in the etcd at 127.0.0.1:2379",
        "waiting: etcd does not answer",
    ]
