"""The announcer: the newest record, in order, over outages of the store, without making anybody wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from elastic_trainer.agent.workers.record_writer import RecordWriter
from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import Ghost, NodeRecord, NodeState, RoundDocument, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.presence import Presence
from elastic_trainer.store.api import Put
from elastic_trainer.store.session import LeaseSession
from tests.support.crew import KEYS, LIMIT_S, QUICK, Gate, GatedStore, eventually, soon
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.unit.agent.channel import BASE


class Announcing(Member):
    """A member that keeps what it was asked to show. (It shows a record again by itself when its feed has changed.)"""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.announced: list[NodeRecord] = []

    def announce(self, record: NodeRecord, deadline: Deadline) -> None:
        self.announced.append(record)
        super().announce(record, deadline)


@dataclass
class Desk:
    """One member on a store that can be shut, and its announcer."""

    backend: MemoryBackend
    store: GatedStore
    gate: Gate
    member: Announcing
    announcer: RecordWriter

    def record(self) -> NodeRecord | None:
        found = MemoryStore(self.backend).get(KEYS.node("me"), soon()).first
        return NodeRecord.decode(found.value, found.key) if found is not None else None

    def document(self) -> RoundDocument:
        found = MemoryStore(self.backend).get(KEYS.round, soon()).first
        assert found is not None
        return RoundDocument.decode(found.value, found.key)

    def await_steps(self, time_s: float) -> None:
        """Wait until the shown record is the one with this step time."""

        def shown() -> bool:
            record = self.record()
            return record is not None and record.step_time_s == time_s

        eventually(shown, lambda: f"{self.record()}")


@pytest.fixture
def desk() -> Iterator[Desk]:
    backend, gate = MemoryBackend(ManualClock()), Gate()
    store = GatedStore(backend, gate)
    session = LeaseSession(store, 2.0, soon(), clock=backend.clock)
    member = Announcing(store, KEYS, Presence(store, KEYS, "me", session), QUICK)
    member.start(soon())
    announcer = RecordWriter(member)
    try:
        yield Desk(backend, store, gate, member, announcer)
    finally:
        gate.open()
        backend.outage(False)
        announcer.close()
        member.leave()


def numbered(number: float, **more: object) -> NodeRecord:
    return BASE.model_copy(update={"step_time_s": float(number), **more})


def test_a_record_is_written_and_an_equal_one_is_not_written_again(desk: Desk) -> None:
    """The store hears of changes only."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    desk.announcer.announce(numbered(1))
    desk.announcer.announce(numbered(2))
    desk.await_steps(2)
    assert desk.member.announced == [numbered(1), numbered(2)]


def test_what_waits_is_replaced_by_what_is_newer(desk: Desk) -> None:
    """A slow store is not sent every record of the past, and never an older one after a newer one."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    desk.gate.shut()
    desk.announcer.announce(numbered(2))
    eventually(lambda: desk.gate.waiting > 0, "nothing is being written")
    for number in range(3, 20):
        desk.announcer.announce(numbered(number))
    desk.gate.open()
    desk.await_steps(19)
    assert len(desk.member.announced) <= 3


def test_an_outage_is_waited_out(desk: Desk) -> None:
    """Nobody who announces waits for it; afterwards the newest record is there."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    desk.backend.outage(True)
    desk.announcer.announce(numbered(2))
    desk.announcer.announce(numbered(3))
    desk.backend.outage(False)
    desk.await_steps(3)


def test_a_broken_round_and_the_record_are_one_write(desk: Desk) -> None:
    """Whoever sees the round broken sees the acknowledgement with it."""
    ready = {"state": NodeState.READY, "reported": 1, "acknowledged": 1}
    desk.announcer.announce(numbered(1, **ready))
    desk.await_steps(1)
    member = {"node": "me", "create_revision": 1, "life": 0, "first_rank": 0, "local_world_size": 1}
    on = RoundDocument.model_validate({"number": 4, "nonce": "x", "state": "active", "members": [member]})
    _write(desk, on)
    eventually(lambda: (seen := desk.member.look().round) is not None and seen.number == 4, "not seen")
    desk.announcer.break_round(4, "a worker died", numbered(2, **ready), worker_failed=True)
    desk.await_steps(2)
    broken = desk.document()
    assert (broken.number, broken.state, broken.reason) == (4, RoundState.BROKEN, "a worker died")
    assert broken.worker_failed
    assert [written & set(_PAIR) for written in desk.store.round_writes] == [set(_PAIR)]


_PAIR = (KEYS.round, KEYS.node("me"))


def test_a_round_that_is_over_already_is_left_alone_but_the_record_is_written(desk: Desk) -> None:
    """Somebody else was faster."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    _write(desk, RoundDocument(number=5, nonce="x", state=RoundState.ACTIVE, members=()))
    eventually(lambda: desk.member.look().round is not None, "not seen")
    desk.announcer.break_round(4, "late", numbered(2), worker_failed=False)
    desk.await_steps(2)
    assert desk.document().state is RoundState.ACTIVE


def test_a_suspicion_that_cannot_be_written_in_time_is_dropped(desk: Desk) -> None:
    """Whoever was suspected may have come back while the store was away. The record is written all the same."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    _write(desk, RoundDocument(number=4, nonce="x", state=RoundState.ACTIVE, members=()))
    eventually(lambda: desk.member.look().round is not None, "not seen")
    suspects = (Ghost(node="other", mod_revision=3),)
    desk.announcer.break_round(4, "silent", numbered(2), worker_failed=False, suspects=suspects, within_s=0.0)
    desk.await_steps(2)
    assert desk.document().state is RoundState.ACTIVE
    desk.announcer.break_round(4, "silent", numbered(3), worker_failed=False, suspects=suspects, within_s=LIMIT_S)
    desk.await_steps(3)
    assert (desk.document().state, desk.document().ghosts) == (RoundState.BROKEN, suspects)


def test_closing_ends_the_thread_and_drops_what_waits(desk: Desk) -> None:
    """The node's last word is written by whoever closes it."""
    desk.announcer.announce(numbered(1))
    desk.await_steps(1)
    desk.announcer.close()
    assert not desk.announcer._thread.is_alive()
    desk.announcer.announce(numbered(2))
    assert desk.record() == numbered(1)


def _write(desk: Desk, document: RoundDocument) -> None:
    MemoryStore(desk.backend).transact([], [Put(KEYS.round, document.encode())], deadline=soon())
