"""What a member's thread does when an effect ends in an error."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ReplacedError
from elastic_trainer.membership import member as module
from elastic_trainer.membership.core import Return
from elastic_trainer.membership.documents import NodeRecord
from elastic_trainer.membership.member import WRITE_TIMEOUT_S, Member
from elastic_trainer.store.api import Put, RunKeys
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.unit.agent.stage import Jumping
from tests.unit.membership.scenes import LIMITS

KEYS = RunKeys("/p", "run")
RECORD = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=1)


class Session:
    """A lease that no thread keeps."""

    ttl_s = 2.0

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.renew(Deadline.after(5.0))

    def renew(self, deadline: Deadline) -> None:
        self.lease_id, self.lost = self._store.grant(3600.0, deadline).id, threading.Event()


def test_a_node_that_was_replaced_while_it_was_away_gives_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first attempt to return ends before it is known that the other one lives, the second with that."""
    monkeypatch.setattr(module, "refuses", lambda host, port, timeout_s: False)
    clock, errors = Jumping(), list[ReplacedError]()
    store = MemoryStore(MemoryBackend(clock))
    session = Session(store)
    member = Member(store, KEYS, "a", cast("LeaseSession", session), LIMITS, errors.append, clock)
    member.announce(RECORD, Deadline.after(WRITE_TIMEOUT_S, clock))
    store.revoke(session.lease_id, Deadline.after(5.0))
    session.lost.set()
    other = store.grant(3600.0, Deadline.after(5.0)).id
    store.transact([], [Put(KEYS.node("a"), RECORD.encode(), other)], deadline=Deadline.after(5.0))
    member._perform(Return())
    assert errors == []
    member._perform(Return())
    (error,) = errors
    assert str(error).startswith("another live node of this run has the id 'a'")
