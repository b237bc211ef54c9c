"""Four ranks load one checkpoint: one that sees it reads and passes it on, or all that see it do so in turns."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, LoadInto, SaveInfo
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import StoredStates, restore
from tests.bench.report import alternate, median, ratio
from tests.support.throttled import ThrottledStorage
from tests.unit.worker.ranks import run_ranks

RANKS = 4
WHOLE_S = 8.0
"""Seconds that one slow link takes for the whole state."""
WAYS = {"one": 1, "all": RANKS}
"""How many of the ranks see the checkpoint."""


def measure_loading(place: Path, state: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds until all ranks hold ``state``, from this disk and over slow links, one of each rank.

    The ranks are threads of one process.
    """
    size = CheckpointManager(place).encode(state, SaveInfo(0)).size
    found = {}
    for name, rate in (("disk", None), ("slow_links", size / WHOLE_S)):
        loads = {way: _Load(place / name / way, state, readers, rate) for way, readers in WAYS.items()}
        seconds = alternate({way: each.load for way, each in loads.items()}, repeats)
        found[name] = {
            "seconds": seconds,
            "median_s": {way: median(times) for way, times in seconds.items()},
            "one_over_all": ratio(seconds["one"], seconds["all"]),
        }
    shutil.rmtree(place)
    return {"bytes": size, **found}


class _Load:
    """A checkpoint of ``state`` in ``place``, which each of the ``readers`` reads at ``rate`` bytes a second (None: as
    it can)."""

    def __init__(self, place: Path, state: dict[str, Any], readers: int, rate: float | None) -> None:
        self._place, self._rate, self._readers = place, rate, readers
        CheckpointManager(place).save(state, SaveInfo(1))
        self._lives = [_copied(state) for _ in range(RANKS)]

    def load(self) -> float:
        began = time.perf_counter()
        run_ranks(RANKS, self._one, timeout_s=600.0)
        return time.perf_counter() - began

    def _one(self, control: Control) -> None:
        manager = None
        if control.rank < self._readers:
            storage = ThrottledStorage(self._place, self._rate) if self._rate is not None else None
            manager = CheckpointManager(self._place, storage=storage)
        found: dict[str, Any] = {}
        restore(
            control,
            control,
            StoredStates(manager, HeartbeatReporter()),
            lambda: {"step": found["step"]},  # all of it is compared in the tests
            found.update,
            lambda origin: None,
            live=LoadInto(self._lives[control.rank]),
        )


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(each) for key, each in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(_copied, node))
    return node.clone() if hasattr(node, "clone") else node
