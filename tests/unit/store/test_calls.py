"""Calls to the store: retried while nothing happened, within their deadlines; counted, and dated when answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, PermanentError, StoreUnavailableError
from elastic_trainer.store import retry
from elastic_trainer.store.api import Order, Put, Read, Store, absent
from elastic_trainer.store.metered import MeteredStore
from tests.support.listeners import Recorder
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.support.waiting import soon
from tests.unit.agent.stage import Jumping


class Attempts:
    """Fails with ``error`` until there were ``failures`` attempts, and notes the seconds left at each."""

    def __init__(self, deadline: Deadline, error: Exception, failures: int = 1_000_000) -> None:
        self._deadline, self._error, self._failures = deadline, error, failures
        self.left: list[float] = []

    def __call__(self) -> int:
        self.left.append(self._deadline.remaining_s())
        if len(self.left) <= self._failures:
            raise self._error
        return len(self.left)


DOWN = StoreUnavailableError("down")


def test_an_unavailable_store_is_asked_again_until_it_answers_or_the_deadline() -> None:
    """Retrying ends before the deadline, not after it, and took most of it."""
    clock = Jumping()
    deadline = Deadline.after(10.0, clock)
    assert retry.within(deadline, Attempts(deadline, DOWN, failures=2)) == 3
    began, deadline = clock.monotonic(), Deadline.after(10.0, clock)
    attempts = Attempts(deadline, DOWN)
    with pytest.raises(StoreUnavailableError, match="down"):
        retry.within(deadline, attempts)
    assert min(attempts.left) > retry.LEAST_TRY_S
    assert len(attempts.left) > 10
    assert 10.0 - retry.LONGEST_PAUSE_S - retry.LEAST_TRY_S <= clock.monotonic() - began <= 10.0


@pytest.mark.parametrize("error", [OutcomeUnknownError("written?"), LeaseLostError("gone"), KeyError("bug")])
def test_other_errors_are_never_retried(error: Exception) -> None:
    """A write with an unknown outcome above all."""
    attempts = Attempts(deadline := Deadline.after(60.0, Jumping()), error)
    with pytest.raises(type(error)):
        retry.within(deadline, attempts)
    assert len(attempts.left) == 1


def test_stop_ends_the_retrying() -> None:
    """A store that is being closed does not hold its callers until their deadlines."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoreUnavailableError):
        retry.within(deadline := Deadline.after(1e6), Attempts(deadline, DOWN), stop)


def test_one_attempt_leaves_time_for_another() -> None:
    """A frozen server may use half of the time, but a short deadline is used whole."""
    for whole_s, attempt_s in ((20.0, 10.0), (0.5, 0.5), (1.5, retry.LEAST_ATTEMPT_S)):
        assert retry.read_attempt(Deadline.after(whole_s, ManualClock())).remaining_s() == pytest.approx(attempt_s)


def test_backoff_begins_short_and_grows_to_its_limit() -> None:
    """Pauses are jittered within half and all of a step that doubles; success begins again."""
    backoff = retry.RetryBackoff()
    for step in [0.1, 0.2, 0.4, *[0.5] * 5000]:
        assert step / 2 <= backoff.next_s() <= step
    backoff.reset()
    assert backoff.next_s() <= 0.1


# ---- counted


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def inner(clock: ManualClock) -> MemoryStore:
    return MemoryStore(MemoryBackend(clock))


@pytest.fixture
def store(inner: MemoryStore, clock: ManualClock) -> MeteredStore:
    return MeteredStore(inner, clock)


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
    store: MeteredStore, inner: MemoryStore, clock: ManualClock, call: Callable[[Store], object]
) -> None:
    """Of all kinds; the error comes out as it is."""
    assert (store.errors, store.last_success_wall) == (0, clock.wall())
    clock.advance(5.0)
    call(store)
    assert (store.errors, store.last_success_wall) == (0, answered := clock.wall())
    clock.advance(5.0)
    inner.backend.outage(True)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            call(store)
    assert (store.errors, store.last_success_wall) == (2, answered)


def test_a_refusal_is_an_answer(store: MeteredStore, clock: ManualClock) -> None:
    """A lease that is gone, a request that etcd refuses, or a guard that does not hold: the store is there."""
    clock.advance(5.0)
    with pytest.raises(LeaseLostError):
        store.keep_alive(12345, soon())
    with pytest.raises(PermanentError):
        store.transact([], [Put("/k", b""), Put("/k", b"")], deadline=soon())
    assert (store.errors, store.last_success_wall) == (0, clock.wall())
    store.transact([], [Put("/k", b"v")], deadline=soon())
    done = store.transact([absent("/k")], [], [Read("/k")], deadline=soon())
    assert (done.succeeded, len(done.reads[0].items), store.errors) == (False, 1, 0)


def test_arguments_go_through(store: MeteredStore) -> None:
    """Limit, order, keys only, watches, leases, and the end."""
    for key in ("/k/b", "/k/a", "/k/c"):
        store.transact([], [Put(key, b"v")], deadline=soon())
    found = store.range("/k/", soon(), limit=2, order=Order.CREATE_REVISION, keys_only=True)
    assert [(item.key, item.value) for item in found.items] == [("/k/b", b""), ("/k/a", b"")]
    recorder = Recorder()
    watch = store.watch("/k/a", recorder, exact=True)
    assert [item.key for item in recorder.wait_snapshots(1).items] == ["/k/a"]
    watch.close()
    lease = store.grant(10.0, soon())
    assert store.keep_alive(lease.id, soon()) == 10.0
    store.revoke(lease.id, soon())
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.get("/k", soon())


def test_a_store_that_takes_no_writes_counts_as_away(
    store: MeteredStore, inner: MemoryStore, clock: ManualClock
) -> None:
    """An etcd without space answers reads and keep-alives: for the alert it has been away since it took its last write,
    until it takes one again. Each reason is logged once: the first refusal of a full etcd may come out as a write whose
    time was over, which says nothing of space."""
    transact, taken_at = inner.transact, store.last_success_wall
    reasons = ["no answer in time", "no space left", "no answer in time", "no space left"]

    def refused(*args: Any, **named: Any) -> Any:
        if reasons and any(isinstance(each, Put) for each in args[1]):
            raise OutcomeUnknownError(reasons.pop())
        return transact(*args, **named)

    inner.transact = refused  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as told:
        while reasons:
            clock.advance(10.0)
            with pytest.raises(OutcomeUnknownError):
                store.transact([], [Put("/k", b"v")], deadline=soon())
            store.get("/k", soon())
            store.transact([], [Read("/k")], deadline=soon())
            assert store.last_success_wall == taken_at
        store.transact([], [Put("/k", b"v")], deadline=soon())
        assert store.last_success_wall == clock.wall()
    said = [(line["event"], line.get("error")) for line in told]
    failed = [("store.write_failed", reason) for reason in ("no space left", "no answer in time")]
    assert said == [*failed, ("store.write_taken", None)]
    assert store.errors == 4
