"""A store that counts its failures passes everything on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, PermanentError, StoreUnavailableError
from elastic_trainer.store.api import Order, Put, Read, Store, absent
from elastic_trainer.store.metered import MeteredStore
from tests.support.listeners import Recorder
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore


def soon() -> Deadline:
    return Deadline.after(60.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MeteredStore:
    return MeteredStore(MemoryStore(MemoryBackend(clock)), clock)


def backend(store: MeteredStore) -> MemoryBackend:
    inner = store._store
    assert isinstance(inner, MemoryStore)
    return inner.backend


CALLS: list[Callable[[Store], object]] = [
    lambda store: store.get("/k", soon()),
    lambda store: store.range("/", soon()),
    lambda store: store.transact([], [Put("/k", b"v")], deadline=soon()),
    lambda store: store.grant(10.0, soon()),
    lambda store: store.revoke(1, soon()),
    lambda store: store.version(soon()),
]


@pytest.mark.parametrize("call", CALLS)
def test_requests_that_fail_are_counted_and_answers_are_dated(
    store: MeteredStore, clock: ManualClock, call: Callable[[Store], object]
) -> None:
    """Of all kinds; the error comes out as it is."""
    assert (store.errors, store.last_success_wall) == (0, clock.wall())
    clock.advance(5.0)
    call(store)
    assert (store.errors, store.last_success_wall) == (0, clock.wall())
    answered = clock.wall()
    clock.advance(5.0)
    backend(store).outage(True)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            call(store)
    assert (store.errors, store.last_success_wall) == (2, answered)


def test_a_refusal_is_an_answer(store: MeteredStore, clock: ManualClock) -> None:
    """A lease that is gone, or a request that etcd refuses: the store is there."""
    clock.advance(5.0)
    with pytest.raises(LeaseLostError):
        store.keep_alive(12345, soon())
    with pytest.raises(PermanentError):
        store.transact([], [Put("/k", b""), Put("/k", b"")], deadline=soon())
    assert (store.errors, store.last_success_wall) == (0, clock.wall())


def test_a_guard_that_does_not_hold_is_an_answer(store: MeteredStore) -> None:
    """With the reads of the other branch."""
    store.transact([], [Put("/k", b"v")], deadline=soon())
    done = store.transact([absent("/k")], [], [Read("/k")], deadline=soon())
    assert not done.succeeded
    assert done.reads[0].first is not None
    assert store.errors == 0


def test_arguments_go_through(store: MeteredStore) -> None:
    """Limit, order, keys only, watches, leases, and the end."""
    for key in ("/k/b", "/k/a", "/k/c"):
        store.transact([], [Put(key, b"v")], deadline=soon())
    found = store.range("/k/", soon(), limit=2, order=Order.CREATE_REVISION, keys_only=True)
    assert [(item.key, item.value) for item in found.items] == [("/k/b", b""), ("/k/a", b"")]
    recorder = Recorder()
    watch = store.watch("/k/a", recorder, exact=True)
    recorder.wait_snapshots(1)
    watch.close()
    lease = store.grant(10.0, soon())
    assert store.keep_alive(lease.id, soon()) == 10.0
    store.revoke(lease.id, soon())
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.get("/k", soon())


def test_a_store_that_takes_no_writes_counts_as_away() -> None:
    """An etcd without space answers reads and keep-alives: for the alert it has been away since it took its last write,
    until it takes one again. It is logged once."""
    clock = ManualClock()
    inner = MemoryStore()
    metered = MeteredStore(inner, clock)
    transact, full = inner.transact, True

    def refused(*args: Any, **named: Any) -> Any:
        if full and any(isinstance(each, Put) for each in args[1]):
            raise StoreUnavailableError("etcd has no space left")
        return transact(*args, **named)

    inner.transact = refused  # type: ignore[method-assign]
    taken_at = metered.last_success_wall
    with structlog.testing.capture_logs() as told:
        for _ in range(3):
            clock.advance(10.0)
            with pytest.raises(StoreUnavailableError):
                metered.transact([], [Put("/k", b"v")], deadline=soon())
            metered.get("/k", soon())
            metered.transact([], [Read("/k")], deadline=soon())
            assert metered.last_success_wall == taken_at
        full = False
        metered.transact([], [Put("/k", b"v")], deadline=soon())
        assert metered.last_success_wall == clock.wall()
    assert [line["event"] for line in told] == ["store.write_failed", "store.write_taken"]
    assert metered.errors == 3


def test_each_reason_why_writes_fail_is_reported_once() -> None:
    """The first refusal of a full etcd may come out as a write whose time was over, which says nothing of space."""
    inner = MemoryStore()
    metered = MeteredStore(inner, ManualClock())
    transact, reasons = (
        inner.transact,
        iter(["no answer in time", "no space left", "no answer in time", "no space left"]),
    )

    def refused(*args: Any, **named: Any) -> Any:
        if (reason := next(reasons, None)) is not None:
            raise OutcomeUnknownError(reason)
        return transact(*args, **named)

    inner.transact = refused  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as told:
        for _ in range(4):
            with pytest.raises(OutcomeUnknownError):
                metered.transact([], [Put("/k", b"v")], deadline=soon())
        metered.transact([], [Put("/k", b"v")], deadline=soon())
    said = [(line["event"], line.get("error")) for line in told]
    failed = [("store.write_failed", reason) for reason in ("no answer in time", "no space left")]
    assert said == [*failed, ("store.write_taken", None)]
