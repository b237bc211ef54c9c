"""Four writers of one checkpoint, each of which writes to a slow disk of its own, against one of them alone."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, Retention, SaveInfo
from elastic_trainer.checkpoint.manifest import records
from tests.bench.report import alternate, median, ratio
from tests.support.throttled import ThrottledStorage

WRITERS = 4
WHOLE_S = 8.0
"""Seconds that one disk takes for the whole state: far more than checksums, for which all share the machine's cores."""


def measure_writers(place: Path, state: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds until a checkpoint of ``state`` is durable, and what follows from them."""
    size = CheckpointManager(place).encode(state, SaveInfo(0)).size
    rate = size / WHOLE_S
    found = {"one": _Writers(place / "one", 1, state, rate), "four": _Writers(place / "four", WRITERS, state, rate)}
    seconds = alternate({name: each.save for name, each in found.items()}, repeats)
    shutil.rmtree(place)
    return {
        "bytes": size,
        "bytes_per_second_of_each": rate,
        "seconds": seconds,
        "median_s": {name: median(times) for name, times in seconds.items()},
        "files_by_writer": found["four"].files,
        "faster": ratio(seconds["one"], seconds["four"]),
    }


class _Writers:
    """``count`` nodes that hold ``state``, see one directory, and write ``rate`` bytes a second each."""

    def __init__(self, place: Path, count: int, state: dict[str, Any], rate: float) -> None:
        place.mkdir(parents=True)
        self._managers = [
            CheckpointManager(place, Retention(keep_last=1), storage=ThrottledStorage(place, rate))
            for _ in range(count)
        ]
        self._state = state
        self.files: list[list[int]] = []
        """How many files each has written, of each save; the first is the one that saves."""

    def save(self) -> float:
        """All begin with a copy of the state, as they do at a boundary; seconds until it is durable."""
        info = SaveInfo(time.monotonic_ns())
        began = time.perf_counter()
        with ThreadPoolExecutor(len(self._managers)) as pool:
            helping = [pool.submit(self._help, turn, info) for turn in range(1, len(self._managers))]
            image = self._managers[0].encode(self._state, info, parts=len(self._managers))
            draft = self._managers[0].draft(info)
            saved = self._managers[0].commit(image, draft.with_files(records(image)) if image.shared else draft)
            took = time.perf_counter() - began
            helped = [each.result() for each in helping]
        self.files.append([len(saved.entry.manifest.files) - sum(helped), *helped])
        return took

    def _help(self, turn: int, info: SaveInfo) -> int:
        manager = self._managers[turn]
        image = manager.encode(self._state, info, parts=len(self._managers))
        return len(manager.write_share(image, manager.draft(info).with_files(records(image)), turn, threading.Event()))
