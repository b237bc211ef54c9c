"""The progress of the job in the store: rare, newest, and never that of a round that is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_trainer.agent.rendezvous.progress import ProgressWriter
from elastic_trainer.clock import SYSTEM
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.store.api import Put
from tests.support.crew import KEYS, Gate, GatedStore, eventually, soon
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore


def at(step: int) -> Progress:
    return Progress(round=1, step=step, epoch=0, samples=0)


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(ManualClock())


@pytest.fixture
def store(backend: MemoryBackend) -> GatedStore:
    return GatedStore(backend, Gate())


@pytest.fixture
def writer(store: GatedStore) -> Iterator[ProgressWriter]:
    writer = ProgressWriter(store, KEYS)
    yield writer
    writer.close()


def begin_round(store: GatedStore) -> int:
    """Write a round document; its revision."""
    return store.transact([], [Put(KEYS.round, b"{}")], deadline=soon()).revision


def written(backend: MemoryBackend) -> int | None:
    found = MemoryStore(backend).get(KEYS.progress, soon()).first
    return Progress.model_validate_json(found.value).step if found is not None else None


def test_progress_is_written_at_most_once_a_second(
    writer: ProgressWriter, store: GatedStore, backend: MemoryBackend
) -> None:
    """The first at once, then the newest of each second; the last one when it ends."""
    revision, began = begin_round(store), SYSTEM.monotonic()
    step = 0
    while SYSTEM.monotonic() - began < 1.5:
        step += 1
        writer.offer(at(step), revision)
        SYSTEM.wait(writer._closed, 0.01)
        if step == 1:
            eventually(lambda: written(backend) == 1, "the first is not written")
    assert store.calls.count("transact") <= 3
    writer.offer(at(9999), revision)
    writer.close()
    assert written(backend) == 9999


def test_progress_of_a_round_that_is_over_is_not_written(
    writer: ProgressWriter, store: GatedStore, backend: MemoryBackend
) -> None:
    """A rank 0 that was left behind must not undo what its successor reports."""
    old = begin_round(store)
    writer.offer(at(7), begin_round(store))
    eventually(lambda: written(backend) == 7, "nothing is written")
    writer.offer(at(8), old)
    writer.close()
    assert written(backend) == 7


def test_an_outage_loses_nothing_but_old_progress(
    writer: ProgressWriter, store: GatedStore, backend: MemoryBackend
) -> None:
    """The writer outlives it."""
    revision = begin_round(store)
    backend.outage(True)
    writer.offer(at(1), revision)
    eventually(lambda: "transact" in store.calls[1:], "nothing is tried")
    backend.outage(False)
    writer.offer(at(2), revision)
    eventually(lambda: written(backend) == 2, "nothing is written afterwards")
