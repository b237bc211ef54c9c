"""Nodes that are to measure together find each other, in a store in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.preflight.examination import Neighbor
from elastic_trainer.preflight.together import AbsentError, Attendance, Meeting, attended, found
from elastic_trainer.store.api import RunKeys
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

KEYS = RunKeys("/p", "run")
LIMIT_S = 30.0


def place(name: str) -> Neighbor:
    return Neighbor(name, "127.0.0.1", 1)


def silent(_: str) -> None:
    """Nobody looks on."""


class Ticking(ManualClock):
    """Half a second later each time somebody hears what is done."""

    def tick(self, _: str) -> None:
        self.advance(0.5)


def test_all_get_the_same_list_and_leave_nothing() -> None:
    """The ranks are one order for all; after the meeting no key is left."""
    backend, together = MemoryBackend(), threading.Barrier(3)

    def attend(name: str) -> Meeting:
        store = MemoryStore(backend)
        with attended(store, KEYS, place(name), 3, Deadline.after(LIMIT_S), silent) as meeting:
            together.wait(LIMIT_S)
            return meeting

    with ThreadPoolExecutor(3) as pool:
        meetings = list(pool.map(attend, "abc"))
    assert meetings[0] == meetings[1] == meetings[2]
    assert sorted(meetings[0].rank(name) for name in "abc") == [0, 1, 2]
    assert MemoryStore(backend).range(KEYS.preflight, Deadline.after(1.0)).items == ()


def test_a_missing_node_is_told_with_those_that_came() -> None:
    """After the time that was given, in one sentence."""
    clock = Ticking()
    with (
        pytest.raises(AbsentError, match=r"1 of 3 nodes joined within [\d.]+ s: a \(start the same command"),
        attended(MemoryStore(MemoryBackend()), KEYS, place("a"), 3, Deadline.after(0.5, clock), clock.tick),
    ):
        pytest.fail("the meeting took place")


class Slow(MemoryStore):
    """Answers the first look, and is asked for the second one when no time is left."""

    looks = 0

    def range(self, prefix: str, deadline: Deadline, **options: Any) -> Any:
        self.looks += 1
        if self.looks > 1:
            assert isinstance(deadline.clock, ManualClock)
            deadline.clock.advance(deadline.remaining_s())
            raise StoreUnavailableError("no time was left to ask etcd")
        return super().range(prefix, deadline, **options)


def test_a_missing_node_is_told_also_where_the_last_look_comes_too_late() -> None:
    """On a busy machine a pause ends when the time is over: that etcd could not be asked then is no news."""
    with (
        pytest.raises(AbsentError, match=r"1 of 3 nodes joined within [\d.]+ s: a \(start the same command"),
        attended(Slow(MemoryBackend()), KEYS, place("a"), 3, Deadline.after(1.0, ManualClock()), silent),
    ):
        pytest.fail("the meeting took place")


def test_nodes_that_expect_different_numbers_are_told() -> None:
    """They would wait for ever, or one would be left over. The first may have left when the second looks."""
    backend, clock, waits = MemoryBackend(), ManualClock(), threading.Event()
    with ThreadPoolExecutor(2) as pool:

        def attend(name: str, count: int) -> str:
            limit = Deadline.after(2.0, clock)
            try:
                with attended(MemoryStore(backend), KEYS, place(name), count, limit, lambda _: waits.set()):
                    return "met"
            except (ConfigError, AbsentError) as error:
                return str(error)

        first = pool.submit(attend, "a", 3)
        assert waits.wait(LIMIT_S)
        told = {pool.submit(attend, "b", 2).result(LIMIT_S)}
        clock.advance(2.0)
        told.add(first.result(LIMIT_S))
    assert "met" not in told
    assert any("use the same --peers everywhere" in text for text in told)


def test_a_name_that_is_taken_is_refused() -> None:
    """Two nodes of one name could not be told apart."""
    backend = MemoryBackend()
    store = MemoryStore(backend)
    ready, done, clock = threading.Event(), threading.Event(), ManualClock()

    def first() -> None:
        def seen(_: str) -> None:
            ready.set()
            done.wait(LIMIT_S)
            clock.advance(1.0)

        with (
            pytest.raises(AbsentError),
            attended(MemoryStore(backend), KEYS, place("a"), 2, Deadline.after(1.0, clock), seen),
        ):
            pytest.fail("the meeting took place")

    thread = threading.Thread(target=first)
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        with (
            pytest.raises(ConfigError, match="another node has the name 'a'"),
            attended(store, KEYS, place("a"), 2, Deadline.after(LIMIT_S), silent),
        ):
            pytest.fail("the meeting took place")
    finally:
        done.set()
        thread.join(LIMIT_S)


def test_a_meeting_is_that_of_its_members() -> None:
    """Who comes later is in none yet."""
    decided = Attendance(place=place("a"), count=2, members=(place("a"), place("b")), nonce="x")
    assert found("b", [decided]) == Meeting(decided.members, "x")
    assert found("c", [decided, Attendance(place=place("c"), count=2)]) is None
