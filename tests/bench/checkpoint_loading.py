"""Four ranks load one checkpoint: one reads and passes it on, each does so with its part, or whichever is measured."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, LoadInto, SaveInfo
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import FIELD, restore
from tests.bench.report import alternate, median, ratio
from tests.support.throttled import ThrottledStorage
from tests.unit.worker.ranks import run_ranks

RANKS = 4
WHOLE_S = 8.0
"""Seconds that one slow link takes for the whole state."""
WAYS = ("one", "all", "measured")


def measure_loading(place: Path, state: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds until all ranks hold ``state``, from this disk and over slow links, one of each rank.

    The ranks are threads of one process.
    """
    size = CheckpointManager(place).encode(state, SaveInfo(0)).size
    found = {}
    for name, rate in (("disk", None), ("slow_links", size / WHOLE_S)):
        loads = {way: _Load(place / name / way, state, way, rate) for way in WAYS}
        seconds = alternate({way: each.load for way, each in loads.items()}, repeats)
        found[name] = {
            "seconds": seconds,
            "median_s": {way: median(times) for way, times in seconds.items()},
            "chosen": loads["measured"].chosen,
            "one_over_all": ratio(seconds["one"], seconds["all"]),
        }
    shutil.rmtree(place)
    return {"bytes": size, **found}


class _Load:
    """A checkpoint of ``state`` in ``place``, which each rank reads at ``rate`` bytes a second (None: as it can)."""

    def __init__(self, place: Path, state: dict[str, Any], way: str, rate: float | None) -> None:
        self._place, self._rate, self._state = place, rate, state
        known = {FIELD: {"way": way, "readers": RANKS, "place": str(place)}} if way != "measured" else {}
        CheckpointManager(place).save(state, SaveInfo(1, fields=known))
        self._lives = [_copied(state) for _ in range(RANKS)]
        self.chosen: list[str] = []
        """The way of each load."""

    def load(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        fields = run_ranks(RANKS, self._one, timeout_s=600.0)[0]
        took_s = time.perf_counter() - began
        self.chosen.append(str(fields.get(FIELD, {"way": "one"})["way"]))
        return took_s

    def _one(self, control: Control) -> Mapping[str, Any]:
        live = self._lives[control.rank]
        storage = ThrottledStorage(self._place, self._rate) if self._rate is not None else None
        manager = CheckpointManager(self._place, storage=storage)
        found: dict[str, Any] = {}
        return restore(
            control,
            manager,
            lambda: {"step": found["step"]},  # all of it is compared in the tests
            found.update,
            HeartbeatReporter(),
            lambda origin: None,
            live=LoadInto(live),
        ).fields


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(each) for key, each in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(_copied, node))
    return node.clone() if hasattr(node, "clone") else node
