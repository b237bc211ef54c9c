"""Checkpoints: stall, time lost, durable save, four ranks and loads, against raw I/O and torch's.

The state is that of a transformer with AdamW (parameters and two moments, tensors of many sizes). Raw is one file with
as many bytes: written from memory in pieces and synced, or read into fresh memory. Cold means that the file's pages
were dropped from the page cache before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from elastic_trainer.checkpoint import BackgroundSaves, CheckpointManager, LoadInto, Retention, SaveInfo
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import StoredStates, restore
from tests.bench.checkpoint_training import measure_training
from tests.bench.report import Must, Options, Report, alternate, at_least, at_most, emit, median, parse, ratio
from tests.support.throttled import ThrottledStorage
from tests.unit.checkpoint.states import records
from tests.unit.worker.ranks import run_ranks

MB = 1 << 20
PIECE = 8 * MB
WIDTH = 512
LEAST_REPEATS = 5
SIZES, QUICK_SIZES = (100, 1200), (8,)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("checkpoint", __doc__, argv, repeats=LEAST_REPEATS, quick_repeats=1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as directory:
        place = Path(directory)
        sizes = {f"{size}_MB": _at_size(place, size, options.repeats) for size in sizes_of(options)}
        shared = measure_writers(place / "writers", training_state(sizes_of(options)[0]), options.repeats)
        loading = measure_loading(place / "loading", training_state(sizes_of(options)[0]), options.repeats)
    figures = {"sizes": sizes, "writers": shared, "loading": loading}
    musts = [
        *(must for size, figures_of_it in sizes.items() for must in _musts(size, figures_of_it)),
        at_least("four writers on slow disks: one writer's durable time over theirs", shared["faster"], 3.0),
        at_least(
            "four ranks on slow links: one reader's load over that of all", loading["slow_links"]["one_over_all"], 2.5
        ),
    ]
    return emit(Report(options, figures, musts))


def sizes_of(options: Options) -> Sequence[int]:
    return QUICK_SIZES if options.quick else SIZES


def _at_size(place: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    training = measure_training(place / "training", megabytes, repeats)
    return {"training": training, **measure_speed(place / "speed", megabytes, repeats)}


def _musts(size: str, figures: dict[str, Any]) -> list[Must]:
    training = figures["training"]
    over_raw = {what: found["elastic_trainer"] for what, found in figures["over_raw"].items()}
    return [
        at_most(f"{size}: session.save() over memcpy", training["stall_over_memcpy"]["elastic_trainer"], 1.1),
        at_most(
            f"{size}: training time lost to a save over memcpy", training["lost_over_memcpy"]["elastic_trainer"], 1.3
        ),
        at_most(f"{size}: durable save over raw write and fsync", over_raw["durable_save"], 1.2),
        at_most(f"{size}: cold load over cold raw read", over_raw["cold_load"], 1.1),
        at_most(f"{size}: warm load over warm raw read", over_raw["warm_load"], 1.1),
        at_most(f"{size}: memory for copies over the state", figures["copies_over_state"], 2.05),
        at_most(f"{size}: memory of a load beyond the state over it", figures["load_beyond_state"], 0.05),
        at_most(f"{size}: memory of a load into live tensors over the state", figures["live_load_beyond_state"], 0.05),
    ]


def training_state(megabytes: int) -> dict[str, Any]:
    """Parameters and moments of a transformer, ``megabytes`` MB in all."""
    layer: dict[str, tuple[int, ...]] = {"norm1": (WIDTH,), "norm2": (WIDTH,), "bias": (4 * WIDTH,)}
    layer |= {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    elements = sum(int(np.prod(shape)) for shape in layer.values())
    layers = max(1, megabytes * MB // (3 * 4 * elements))
    parameters = {f"{index}.{name}": torch.randn(shape) for index in range(layers) for name, shape in layer.items()}
    moments = {
        index: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(value), "exp_avg_sq": torch.rand_like(value)}
        for index, value in enumerate(parameters.values())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(moments)}]
    return {"model": parameters, "optimizer": {"state": moments, "param_groups": groups}, "step": 7}


def measure_speed(place: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    place.mkdir()
    state = training_state(megabytes)
    checkpoints = CheckpointManager(place / "ours", Retention(keep_last=1))
    entry = checkpoints.save(state, SaveInfo(0)).entry
    size = entry.manifest.size
    raw = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    beside = BackgroundSaves(CheckpointManager(place / "save", Retention(keep_last=1)))
    saves: dict[str, Callable[[], float]] = {
        "elastic_trainer": lambda: _timed_save(beside, checkpoints, state),
        "raw_write_fsync": lambda: _timed(lambda: _write(place / "raw", raw), place / "raw", size),
        "torch_save_fsync": lambda: _timed(lambda: _torch_save(place / "torch.pt", state), place / "torch.pt", size),
    }
    saves["elastic_trainer"]()  # makes the arena
    saved = alternate(saves, repeats)
    copies = beside.memory / size
    beside.close()
    _write(place / "raw", raw)
    _torch_save(place / "torch.pt", state)
    live = LoadInto(training_state(megabytes))
    loads: dict[str, Callable[[], object]] = {
        "elastic_trainer": lambda: checkpoints.load(entry),
        "elastic_trainer_live": lambda: checkpoints.load(entry, live),
        "raw_read": lambda: _read(place / "raw", size),
        "torch_load": lambda: torch.load(place / "torch.pt", weights_only=True),
    }
    files = [*entry.path.iterdir(), place / "raw", place / "torch.pt"]
    cold = alternate({name: partial(_cold, act, size, files) for name, act in loads.items()}, repeats)
    for act in loads.values():
        act()
    warm = alternate({name: partial(_clocked, act, size) for name, act in loads.items()}, repeats)
    copied = alternate({"memcpy": _memcpy(raw)}, repeats)
    more = _peak(lambda: checkpoints.load(entry)) / size - 1.0
    more_live = _peak(lambda: checkpoints.load(entry, live)) / size
    shutil.rmtree(place)
    return {
        "bytes": size,
        "copies_over_state": copies,
        "load_beyond_state": more,
        "live_load_beyond_state": more_live,
        **_summary({"copy": copied, "durable_save": saved, "cold_load": cold, "warm_load": warm}),
    }


def _memcpy(raw: Any) -> Callable[[], float]:
    copy = np.ones_like(raw)

    def copied() -> float:
        began = time.perf_counter()
        np.copyto(copy, raw)
        return time.perf_counter() - began

    return copied


def _peak(act: Callable[[], object]) -> float:
    """Bytes by which this process is larger at most during ``act``."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, unnoticed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = _status("VmRSS")
    result = act()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


RAW = {"durable_save": "raw_write_fsync", "cold_load": "raw_read", "warm_load": "raw_read"}
"""What each is compared with."""


def _summary(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "median_s": {what: {who: median(each) for who, each in times.items()} for what, times in seconds.items()},
        "over_raw": {
            what: {who: ratio(each, seconds[what][raw]) for who, each in seconds[what].items() if who != raw}
            for what, raw in RAW.items()
        },
    }


def _clocked(act: Callable[[], object], size: int) -> float:
    """Seconds that ``act`` takes, which moves ``size`` bytes; what it returns is released after the clock has stopped.

    A virtual machine may have given free memory back to its host, and the next to touch it pays for that (several
    times the cost of the copy itself: measured). So all memory that the action can need is touched just before.
    """
    np.ones(3 * size, np.uint8)
    began = time.perf_counter()
    result = act()
    took = time.perf_counter() - began
    del result
    return took


def _timed(act: Callable[[], object], written: Path, size: int) -> float:
    """Seconds to write a file that is not there yet; it is removed and the disk left quiet afterwards."""
    took = _clocked(act, size)
    written.unlink()
    os.sync()
    return took


def _timed_save(saves: BackgroundSaves, manager: CheckpointManager, state: dict[str, Any]) -> float:
    """Seconds from the call of a save until its checkpoint is durable; what retention then removes is not in it."""
    info = SaveInfo(time.monotonic_ns())
    began = time.perf_counter()
    save = saves.submit(manager.encode(state, info), manager.draft(info))
    stood_s = time.perf_counter() - began
    saves.wait()
    os.sync()
    if save.committed is None:
        raise RuntimeError(f"the save failed: {save.error}")
    return stood_s + save.committed.duration_s


def _write(path: Path, content: Any) -> None:
    view = content.data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while view:
            view = view[os.write(descriptor, view[:PIECE]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _torch_save(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, size: int) -> Any:
    content = np.empty(size, np.uint8)
    view = content.data
    with path.open("rb", buffering=0) as file:
        while view:
            view = view[file.readinto(view[:PIECE]) :]
    return content


def _cold(act: Callable[[], object], size: int, files: Iterable[Path]) -> float:
    """Seconds of ``act`` after the pages of ``files`` were dropped from the page cache."""
    os.sync()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return _clocked(act, size)


# ---- four writers

WRITERS = 4
WHOLE_S = 8.0
"""Seconds that one disk or link takes for the whole state: far more than checksums, for which all share the cores."""


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


# ---- four readers

RANKS = 4
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
        self._lives = [deepcopy(state) for _ in range(RANKS)]

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


if __name__ == "__main__":
    sys.exit(main())
