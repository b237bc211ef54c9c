"""Several ranks as threads of one process, with real gloo groups between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from elastic_trainer.ipc import gloo
from elastic_trainer.worker.comm.control import Control

T = TypeVar("T")
TIMEOUT_S = 60.0


def run_ranks(
    world: int, body: Callable[[Control], T], timeout_s: float = TIMEOUT_S, forming_s: float | None = None
) -> list[T]:
    """What ``body(control)`` returns on each of ``world`` ranks; the first exception is raised.

    ``forming_s``: the timeout that the group is made with.
    """
    if world == 1:
        return [body(Control())]
    store, formed = HashStore(), Barrier(world, timeout=timeout_s)

    def one(rank: int) -> T:
        group = gloo.group(store, rank, world, timedelta(seconds=forming_s or timeout_s), gloo.ONE_HOST)
        formed.wait()  # a body that waits for nobody would close its group while others still connect to it
        return body(Control(group, rank, world))

    with ThreadPoolExecutor(world) as pool:
        return [future.result(timeout_s) for future in [pool.submit(one, rank) for rank in range(world)]]


def outcome(call: Callable[[], object]) -> str:
    """What ``call`` raised, in words, or an empty text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return f"{type(error).__name__}: {error}"
    return ""
