"""A lease whose keeper cannot be started."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.support.threadless import no_new_threads
from tests.unit.agent.stage import Jumping

LIMIT_S = 60.0


class KeptStore(MemoryStore):
    """Knows which lease was refreshed last."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend(Jumping()))
        self.kept, self.refreshed = 0, threading.Event()

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        left_s = super().keep_alive(lease_id, deadline)
        self.kept = lease_id
        self.refreshed.set()
        return left_s


def test_a_lease_that_no_thread_keeps_alive_counts_as_lost() -> None:
    """Its key would vanish amid a healthy round. The next renewal grants another one, and keeps that."""
    store = KeptStore()
    session = LeaseSession(store, 3600.0, Deadline.after(LIMIT_S), Jumping())
    session.lost.set()
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        session.renew(Deadline.after(LIMIT_S))
    unkept = session.lease_id
    assert session.lost.is_set()
    renewed = session.renew(Deadline.after(LIMIT_S))
    assert renewed != unkept
    assert not session.lost.is_set()
    store.refreshed.clear()
    assert store.refreshed.wait(LIMIT_S)
    assert store.kept == renewed
    session.close()
