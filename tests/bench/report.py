"""What all benchmarks share: their options, fair repeats, and the report in one JSON shape.

A benchmark is a module ``tests/bench/<theme>.py`` with ``main(argv) -> int``::

    def main(argv: Sequence[str] | None = None) -> int:
        options = parse("recovery", __doc__, argv)
        seconds = alternate({"in_place": in_place, "torchrun": torchrun}, options.repeats)
        typical = {name: median(values) for name, values in seconds.items()}
        musts = [at_most_time("worker killed to next step, s", typical["in_place"], 0.2)]
        return emit(Report(options, figures={"seconds": seconds, "median_s": typical}, musts=musts))

A promise of a time is made for a machine on which ``sum(range(10_000))`` takes 100 us. Each report says what that takes
here and now, and scales those promises by it; counts, sizes and ratios stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median as median  # benchmarks take it from here
from typing import Any, TypeVar

import numpy as np

from elastic_trainer.local import agents
from tests.support.requirements import find

REFERENCE_SUM_US = 100.0
"""``sum(range(10_000))`` on the machine for which promises in seconds are made."""
MEGABYTE = 1_000_000
SIDE = 64


@dataclass(frozen=True, slots=True)
class Calibration:
    """Microseconds of ``sum(range(10_000))``, of a copy of 1 MB, and of the product of two small float32 matrices."""

    sum_us: float
    memcpy_us: float
    product_us: float

    @property
    def scale(self) -> float:
        """How much longer than on the reference machine the interpreter's work takes here."""
        return self.sum_us / REFERENCE_SUM_US


def calibrate() -> Calibration:
    """Medians of 51 measurements of each; takes some 30 ms."""
    source, target = memoryview(bytes(MEGABYTE)), memoryview(bytearray(MEGABYTE))
    factor = np.ones((SIDE, SIDE), np.float32)
    product = np.empty_like(factor)

    def copy() -> None:
        target[:] = source

    work: tuple[Callable[[], object], ...] = (
        lambda: sum(range(10_000)),
        copy,
        lambda: np.matmul(factor, factor, out=product),
    )
    taken = [[_us(each) for each in work] for _ in range(51)]
    return Calibration(*map(median, zip(*taken, strict=True)))


def typical(calibrations: Iterable[Calibration]) -> Calibration:
    """The median of each figure: the speed over the whole of a benchmark, when it was taken now and then."""
    return Calibration(*map(median, zip(*map(astuple, calibrations), strict=True)))


def _us(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1000


DISTRIBUTIONS = ("elastic-trainer", "torch", "numpy", "etcd3", "grpcio", "protobuf", "safetensors", "xxhash")

STEADY = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Environment in which loops are compared: glibc gives memory back to the system in some processes at each step and in
others never, by how their heap happens to lie. That is 12 % of a step of 60 ms, and says nothing about the loops."""


def machine() -> dict[str, object]:
    """Processor, cores (all, and those open to this process), memory in GiB, system, load, GPUs if torch sees any."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1m": round(os.getloadavg()[0], 2),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the distributions that matter here and are installed, and of etcd."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    etcd = _etcd()
    return found | ({"etcd": etcd} if etcd else {})


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # a benchmark that never loaded torch used no GPU either
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _etcd() -> str | None:
    path = find("etcd")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return said.partition("\n")[0].removeprefix("etcd Version:").strip()


Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark was called. ``extra`` holds its own options, ``calibration`` the machine's speed before it."""

    theme: str
    command: str
    quick: bool
    json: bool
    repeats: int
    extra: argparse.Namespace
    calibration: Calibration


def parse(
    theme: str,
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    quick_repeats: int = 1,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Read the command line (``argv`` None: this process's). ``extend`` may add options of the benchmark's own.

    ``--quick`` runs at toy size, so that a test can show that the benchmark works; its numbers mean little. Local nodes
    are then forked from one process that has imported torch.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        f"python -m tests.bench.{theme}", description=(description or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="toy size: shows that it runs, measures nothing well")
    parser.add_argument("--json", action="store_true", help="end the output with the report as one line of JSON")
    parser.add_argument(
        "--repeats", type=_positive, help=f"measurements of each variant ({repeats}; quick: {quick_repeats})"
    )
    if extend is not None:
        extend(parser)
    given = parser.parse_args(arguments)
    if given.quick:
        agents.preload()
    count = given.repeats or (quick_repeats if given.quick else repeats)
    command = shlex.join([*parser.prog.split(), *arguments])
    return Options(theme, command, given.quick, given.json, count, given, calibrate())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of 1 or more")
    return int(text)


def alternate(variants: Mapping[str, Callable[[], Measured]], repeats: int) -> dict[str, list[Measured]]:
    """Call each variant ``repeats`` times, taking turns and turning the order round each time.

    Whatever drifts (other load, caches, the processor's clock) then meets all variants alike.
    """
    results: dict[str, list[Measured]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in list(variants) if turn % 2 == 0 else reversed(list(variants)):
            note(f"{name}: {turn + 1} of {repeats}")
            results[name].append(variants[name]())
    return results


def repeated(options: Options, name: str, act: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure that ``act(number)`` gives over the repeats, and under ``repeats`` all of them."""
    found = []
    for number in range(options.repeats):
        note(f"{name}: {number + 1} of {options.repeats}")
        found.append(act(number))
    return {key: median([each[key] for each in found]) for key in found[0]} | {"repeats": found}


def ratio(mine: Sequence[float], peer: Sequence[float]) -> float:
    """Median of ``mine`` over the median of ``peer``; infinite where the peer's is 0."""
    base = median(peer)
    return median(mine) / base if base else math.inf


@dataclass(frozen=True, slots=True)
class Must:
    """A number that the project promises, and the one measured (inf or nan: it never came about).

    ``scaled`` is how much of the limit is time that a slower machine takes longer for.
    """

    name: str
    value: float
    limit: float
    upper: bool = True
    scaled: float = 0.0

    def at(self, scale: float) -> Must:
        """The must on a machine that takes ``scale`` times as long."""
        return replace(self, limit=self.limit + self.scaled * (scale - 1.0), scaled=self.scaled * scale)

    @property
    def ok(self) -> bool:
        """Whether the value keeps to the limit; a nan keeps to none."""
        return self.value <= self.limit if self.upper else self.value >= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.4g} (must: at {'most' if self.upper else 'least'} {self.limit:g})"


def at_most(name: str, value: float, limit: float) -> Must:
    """A must that ``value`` keeps by not exceeding ``limit``."""
    return Must(name, float(value), float(limit))


def at_most_time(name: str, value: float, limit: float, *, timers: float = 0.0) -> Must:
    """A must about a time in any unit: ``limit`` is scaled with the machine's speed.

    ``timers`` comes on top and is not scaled: a lease runs out no later on a slow machine.
    """
    return Must(name, float(value), limit + timers, scaled=float(limit))


def at_least(name: str, value: float, limit: float) -> Must:
    return Must(name, float(value), float(limit), upper=False)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark. ``figures`` is any nesting of JSON values, with units in the names.

    ``calibrations`` are those taken since the beginning; without any, one is taken now.
    """

    options: Options
    figures: Mapping[str, Any]
    musts: Sequence[Must] = ()
    calibrations: Sequence[Calibration] = field(default_factory=lambda: [calibrate()])


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def emit(report: Report) -> int:
    """Write the report for people, or as one line of JSON; returns the exit status of a benchmark that ran, 0.

    Numbers that are not finite become null. A must that is not kept is reported, never an error: a slow machine is not
    a broken benchmark.
    """
    options, speed = report.options, typical([report.options.calibration, *report.calibrations])
    kept = [must.at(speed.scale) for must in report.musts]
    shape: dict[str, Any] = _finite(
        {
            "benchmark": options.theme,
            "machine": {**machine(), "calibration": {**asdict(speed), "scale": speed.scale}},
            "versions": versions(),
            "command": options.command,
            "figures": report.figures,
            "musts": [{"name": m.name, "value": m.value, "limit": m.limit, "ok": m.ok} for m in kept],
        }
    )
    if options.json:
        print(json.dumps(shape, allow_nan=False), flush=True)
        return 0
    print(f"{shape['benchmark']}: {shape['command']}")
    for name in ("machine", "versions", "figures"):
        print(f"{name}: {json.dumps(shape[name], indent=2)}")
    for must in kept:
        print(f"{'ok    ' if must.ok else 'MISSED'} {must}", flush=True)
    return 0


def note(text: str) -> None:
    """Tell whoever watches how far the benchmark is (stderr, so that stdout ends with the report)."""
    print(text, file=sys.stderr, flush=True)


ROOT = Path(__file__).parents[2]


def taken(job: Path, world: int, *words: object, limit_s: float) -> dict[str, list[float]]:
    """Run ``job RESULT words...`` on ``world`` ranks to its end; the seconds of each block, by loop."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        result = Path(place, "result.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        done = subprocess.run(
            [*launcher, str(job), "job", str(result), *map(str, words)],
            cwd=ROOT,
            env={**os.environ, **STEADY, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"the job did not end well:\n{done.stderr[-3000:]}")
        found: dict[str, list[float]] = json.loads(result.read_text())
        return found
