"""Agreeing on a store prefix that was never used before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import TransientError
from elastic_trainer.worker.comm.groups import meet


def together(store: HashStore, world: int) -> set[str]:
    with ThreadPoolExecutor(world) as pool:
        meetings = [pool.submit(meet, store, rank, world, Deadline.after(60.0)) for rank in range(world)]
        return {each.result(60.0) for each in meetings}


def test_all_ranks_get_one_prefix_and_each_round_another() -> None:
    """A store that holds the remains of earlier rounds, also larger and smaller ones, misleads no rank."""
    store = HashStore()
    seen: set[str] = set()
    for world in (3, 3, 5, 2, 1, 4, 4):
        prefixes = together(store, world)
        assert len(prefixes) == 1
        assert not prefixes & seen
        seen |= prefixes


def test_the_remains_of_ranks_that_died_while_meeting_are_passed_over() -> None:
    store = HashStore()
    for rank in (1, 2):
        store.set(f"meeting/hello/{rank}", "stale")
    store.set("meeting/offer/dead", '{"world": 3, "tokens": {"1": "stale", "2": "stale"}}')
    store.set("meeting/offer", "dead")
    store.set("meeting/go/dead", "1")
    prefixes = together(store, 3)
    assert len(prefixes) == 1
    assert "dead" not in prefixes


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TransientError, match="rank 0 waits for ranks 1, 2"):
        meet(HashStore(), 0, 3, Deadline.after(0.05))
    with pytest.raises(TransientError, match="rank 1 waits for rank 0"):
        meet(HashStore(), 1, 3, Deadline.after(0.05))
