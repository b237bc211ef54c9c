"""Data worker processes: the same samples as without them, fetched once, and what happens when they fail."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from elastic_trainer.clock import SYSTEM
from elastic_trainer.data import workers
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Batch, Fetcher, Sampler
from elastic_trainer.data.workers import Loading, Workers
from elastic_trainer.errors import DataError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import is_collective_failure
from tests.integration.data.datasets import (
    Collecting,
    Counted,
    Cycle,
    Inherited,
    Large,
    Noisy,
    Raising,
    Words,
    connected,
)

CPU = torch.device("cpu")


@contextmanager
def fetcher(dataset: Any, workers: int = 2, collate: Any = None, **options: Any) -> Iterator[Fetcher]:
    before = multiprocessing.active_children()
    source = Fetcher(dataset, CPU, collate, seed=7, loading=Loading(workers=workers, **options))
    try:
        yield source
    finally:
        source.close()
        assert multiprocessing.active_children() == before


def rows(batch: Batch) -> list[tuple[float, ...]]:
    return [
        tuple(map(float, row)) for part in batch.micro_batches if part.weight for row in zip(*part.data, strict=True)
    ]


def epochs(source: Fetcher, plan: EpochPlan, worlds: list[int], until: int = 2) -> list[list[tuple[float, ...]]]:
    """All ranks' samples of each epoch, where the number of ranks is another one at each step."""
    sampler = Sampler(source, plan, until=until)
    found: list[list[tuple[float, ...]]] = []
    step = 0
    for epoch in range(until):
        found.append([])
        cursor = Cursor(epoch, 0)
        while not plan.is_over(cursor):
            world = worlds[step % len(worlds)]
            parts = [sampler.draw(cursor, rank, world) for rank in range(world)]
            for part in parts:
                found[-1] += rows(part)
            cursor, step = parts[0].following or cursor, step + 1
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 10), st.one_of(st.none(), st.integers(1, 10))),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    prefetch=st.integers(1, 4),
)
def test_with_workers_the_samples_are_those_without_them(
    sizes: tuple[int, int, int | None], worlds: list[int], prefetch: int
) -> None:
    """Each sample of an epoch once, in the same order and with the same augmentation, whatever is fetched ahead."""
    length, size, micro = sizes
    plan = EpochPlan(length, size, min(micro, size) if micro else None, seed=1)
    with fetcher(Noisy(length), 0) as direct, fetcher(Noisy(length), prefetch=prefetch) as ahead:
        found = epochs(ahead, plan, worlds)
        assert found == epochs(direct, plan, worlds) == epochs(direct, plan, [1])
    assert [sorted(int(row[0]) for row in each) for each in found] == [list(range(length))] * 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes_give_the_same_samples(method: str) -> None:
    plan = EpochPlan(8, 4, 2, seed=1)
    with fetcher(Noisy(8), 0) as direct, fetcher(Noisy(8), 1, multiprocessing_context=method) as ahead:
        assert epochs(ahead, plan, [1]) == epochs(direct, plan, [1])


def test_nothing_is_fetched_twice_although_batches_are_drawn_again() -> None:
    """A repeated step gets what its first attempt got, also its released micro-batches; epochs follow each other. Data
    that the step changed in place are fetched again: it must not begin with what the lost one left. And what is kept is
    bounded, however many micro-batches a step has: shared memory and descriptors are not without end."""
    dataset = Counted(24)
    with fetcher(dataset) as source:
        sampler = Sampler(source, EpochPlan(24, 8, 4), until=2)
        for epoch in range(2):
            for start in (0, 8, 16):
                first, again = (
                    [part.data.tolist() for part in sampler.draw(Cursor(epoch, start), 0, 1).micro_batches]
                    for _ in "ab"
                )
                assert first == again
        assert dataset.fetched.tolist() == [2] * 24
    with fetcher(Counted(400), prefetch=2) as source:
        sampler = Sampler(source, EpochPlan(400, 4, shuffle=False))
        sampler.draw(Cursor(), 0, 1).x.mul_(100.0)
        assert sampler.draw(Cursor(), 0, 1).x.tolist() == [0, 1, 2, 3]
        assert sampler.draw(Cursor(0, 4), 0, 1).x.tolist() == [4, 5, 6, 7]
        for part in Sampler(source, EpochPlan(400, 400, 2), until=1).draw(Cursor(0, 0), 0, 1).micro_batches:
            assert len(part.x) == 2
            part.release()
        assert source._workers is not None
        assert 0 < len(source._workers._kept) <= 4


def test_a_position_that_jumps_is_followed_without_what_lies_between() -> None:
    """Healing or a resumed checkpoint moves the cursor: fetching begins there."""
    dataset = Counted(2000)
    with fetcher(dataset, 1, prefetch=1) as source:
        sampler = Sampler(source, EpochPlan(2000, 4, shuffle=False))
        assert sampler.draw(Cursor(0, 0), 0, 1).x.tolist() == [0, 1, 2, 3]
        assert sampler.draw(Cursor(0, 1000), 1, 2).x.tolist() == [1002, 1003]
        assert sampler.draw(Cursor(0, 40), 0, 1).x.tolist() == [40, 41, 42, 43]
        assert sampler.draw(Cursor(0, 44), 0, 1).x.tolist() == [44, 45, 46, 47]
    assert int(dataset.fetched.sum()) < 60


def test_whole_parts_are_foreseen_once_a_step_uses_them() -> None:
    """A step may take all its micro-batches at once. Of a stream they are read in the processes too."""
    dataset = Counted(64)
    with fetcher(dataset, 1, prefetch=1) as source:
        sampler = Sampler(source, EpochPlan(64, 8, 2, shuffle=False))
        for start in range(0, 64, 8):
            assert sampler.draw(Cursor(0, start), 0, 1).x.tolist() == list(range(start, start + 8))
    assert int(dataset.fetched.sum()) <= 64 + 4
    with fetcher(Words()) as source:
        sampler = Sampler(source, EpochPlan(20, 4, 2, shuffle=False))
        read = [row for start in range(0, 20, 4) for row in rows(sampler.draw(Cursor(0, start), 0, 1))]
    assert [int(row[0]) for row in read] == list(range(20))
    assert {int(row[1]) for row in read} == {0, 1}


def draw_one(source: Fetcher, number: int) -> Batch:
    return Sampler(source, EpochPlan(20, 1, shuffle=False)).draw(Cursor(0, number), 0, 1)


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (0, LookupError, "zero"),
        (1, DataError, r"one \(advice\)"),
        (2, DataError, "OddError: two"),
        (3, DataError, "gives a lock, which cannot go to another process"),
    ],
)
def test_an_error_in_a_worker_comes_out_as_it_was_raised(number: int, kind: type[Exception], says: str) -> None:
    """With the sample's number and the worker's trace; what cannot travel comes as a DataError. The workers go on."""
    with fetcher(Raising(), 1, collate=list if number == 3 else None) as source:
        for _ in range(2):
            with pytest.raises(kind, match=says) as caught:
                _ = draw_one(source, number).data
        if number < 3:
            assert f"sample {number}, in epoch 0" in str(caught.value.__notes__) + str(caught.value)
        assert "raised in a data worker process" in str(caught.value.__notes__)
        assert list(draw_one(source, 8).x if number != 3 else draw_one(source, 8).data) == [8]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_is_a_clear_error_and_no_failed_collective() -> None:
    """It says by which signal, soon; in-place recovery must not take it for a lost peer.

    torch's handler of SIGCHLD raises wherever the main thread is: also in a callback of hypothesis to the garbage
    collector, where Python drops it. The next look then finds the dead process.
    """
    with fetcher(Raising()) as source:
        with pytest.raises(DataError, match=r"was killed \(signal 9\).*out of memory") as caught:
            _ = draw_one(source, 13).data
        assert not is_collective_failure(caught.value)
        assert draw_one(source, 8).x.tolist() == [8]


def test_a_worker_that_is_killed_while_nobody_asks_is_noticed_at_the_next_batch() -> None:
    """Nothing is raised in between: the main thread may be in the middle of an optimizer step."""
    with fetcher(Noisy()) as source:
        _ = draw_one(source, 0).data
        child = multiprocessing.active_children()[-1]
        child.kill()
        child.join(10)
        with pytest.raises(DataError, match="signal 9"):
            _ = draw_one(source, 15).data


def test_a_connection_that_breaks_a_moment_before_its_worker_is_seen_dead_is_no_reason_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel closes what a killed process holds one by one, the pipe by which we know of its end maybe last."""

    def reset(workers: Workers) -> None:
        threading.Timer(0.2, kill_all).start()
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with fetcher(Counted()) as source:
        _ = draw_one(source, 0).data
        monkeypatch.setattr(Workers, "_received", reset)
        monkeypatch.setattr(workers, "DYING_S", 60.0)  # the kill comes from a thread, when it gets to it
        with pytest.raises(DataError, match=r"was killed \(signal 9\)"):
            draw_all(source)


def kill_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


@contextmanager
def killed_soon() -> Iterator[None]:
    """All workers stand still, and die a second later."""
    for process in multiprocessing.active_children():
        psutil.Process(process.pid).suspend()
    killer = threading.Timer(1.0, kill_all)
    killer.start()
    yield
    killer.join()


def draw_all(source: Fetcher) -> None:
    for number in range(1, 20):
        _ = draw_one(source, number).data


def test_a_worker_that_is_killed_in_the_middle_of_sending_ends_the_wait_for_the_rest() -> None:
    """Its pipe stays open in the other processes, so the end of the data would never come."""
    with fetcher(Large(), collate=list) as source:
        assert len(draw_one(source, 0).data[0]) == 1 << 22
        with killed_soon(), pytest.raises(DataError, match="signal 9"):  # some of the next samples are in the pipe
            draw_all(source)


def test_closing_does_not_wait_for_a_sample_that_takes_long() -> None:
    """The process in the middle of it is killed."""
    with fetcher(Raising(), 1) as source:
        assert draw_one(source, 14).x.tolist() == [14]  # sample 15, which takes a minute, is under way by now
        began = SYSTEM.monotonic()
        source.close()
        assert SYSTEM.monotonic() - began < 20.0


def test_a_worker_has_neither_sockets_nor_handlers_of_its_parent() -> None:
    """A signal to it is no wish of the parent's to stop, and peers see the parent's connections end with it."""
    client, server = connected()
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        with client, server, fetcher(Inherited(), 1) as source:
            sampler = Sampler(source, EpochPlan(20, 1, shuffle=False))
            *found, pid = (int(each) for each in sampler.draw(Cursor(), 0, 1).data)
            assert found == [0, 1, 1, 1, 1, -1]
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
            assert int(sampler.draw(Cursor(0, 10), 0, 1).data[-1]) == pid
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not told


def test_what_the_parent_has_thrown_away_is_not_ended_in_a_worker(tmp_path: Path) -> None:
    """A process group of an earlier round, say, whose end waits for threads that no worker has."""
    told = tmp_path / "told"
    gc.disable()
    try:
        Cycle(told)  # no name holds it: only a collection finds it
        with fetcher(Collecting(told), workers=1) as source:
            assert float(draw_one(source, 0).data) == 0.0
            draw_all(source)
        assert not told.exists()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own half-made iterator
def test_workers_that_cannot_all_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes: a clear error, and the one that was started does not keep this process from ending."""
    start, begun = multiprocessing.process.BaseProcess.start, [0]

    def limited(self: Any) -> None:
        begun[0] += 1
        if begun[0] == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", limited)
    with fetcher(Counted(), workers=2) as source, pytest.raises(DataError, match="2 data workers cannot be started"):
        _ = draw_one(source, 0).data


def _dies(parent: int, forked: bool, theirs: None, number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_all_are_dead() -> None:
    """Their status is left to the handler of SIGCHLD, which raises here if it was told of them."""
    for process in list(multiprocessing.process._children):  # type: ignore[attr-defined]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("owner", "name"), [(signal_handling, "_set_SIGCHLD_handler"), (_MultiProcessingDataLoaderIter, "_reset")]
)
def test_workers_that_die_at_once_are_said_to_be_dead(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """While torch's handler knows of them and raises in the middle of their start, or a moment later."""
    monkeypatch.setattr(workers, "settle", _dies)
    act = getattr(owner, name)

    def later(*arguments: Any, **options: Any) -> None:
        act(*arguments, **options)
        until_all_are_dead()

    monkeypatch.setattr(owner, name, later)
    with fetcher(Counted()) as source:
        for _ in range(2):
            with pytest.raises(DataError, match=r"was killed \(signal 9\).*out of memory") as caught:
                _ = draw_one(source, 0).data
            assert not is_collective_failure(caught.value)
            assert not multiprocessing.active_children()


def test_workers_that_are_slow_to_go_on_are_waited_for_and_those_that_die_are_said_to_be_dead() -> None:
    """Behind the end of what was asked for, longer than a wait for data lasts between two looks at them."""
    with fetcher(Counted()) as source:
        sampler = Sampler(source, EpochPlan(20, 10, shuffle=False), until=1)
        for start in (0, 10):
            assert len(sampler.draw(Cursor(0, start), 0, 1).x) == 10
        children = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
        for child in children:
            child.suspend()
        again = threading.Timer(3 * workers.LOOK_S, lambda: deque(map(psutil.Process.resume, children)))
        again.start()
        for start in (0, 10):
            assert sampler.draw(Cursor(0, start), 0, 1).x.tolist() == list(range(start, start + 10))
        again.join()
        with killed_soon(), pytest.raises(DataError, match=r"was killed \(signal 9\)") as caught:
            _ = sampler.draw(Cursor(0, 0), 0, 1).x
        assert not is_collective_failure(caught.value)


def test_what_was_fetched_ahead_is_of_use_only_for_the_same_samples() -> None:
    """Another order of the same places: each sample comes where the plan says."""
    with fetcher(Counted(24)) as source:
        for shuffle in (False, True, False):
            plan = EpochPlan(24, 6, 3, 1, shuffle)
            sampler = Sampler(source, plan, until=2)
            for start in (0, 6):
                batch = sampler.draw(Cursor(0, start), 0, 1)
                found = [int(value) for part in batch.micro_batches for value in part.x.tolist()]
                assert found == batch.ids.tolist()
