"""Goodput in a storm: one seeded schedule of faults over one real job, in place, restarted, and as others do it.

Goodput is the time of the steps that count over the time of the storm: the number of steps in it that were not thrown
away later, times the median step of the same job just before, undisturbed. A step takes as long on two nodes as on
three. Checkpoints, standing still, and steps made again all lower it; the capacity of lost nodes does not.

Nodes of all peers start at a low priority (as root, and not with ``--quick``), since each would have a machine of its
own: their imports take no core from those that train. From when a job begins to join it has the usual priority.

Faults come as a Poisson process, one every ``--mean`` seconds. Llama 3 had one every 3.1 h on 16,384 GPUs (419 in 54
days, arXiv:2407.21783): by ``--gpus`` the mean is scaled from that. A step waits most of its time, as a process does
for its accelerator, so that starting processes do not take the training's cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import StatisticsError
from typing import Any

import pytest
import structlog
import torch

from elastic_trainer.jobs.digits import shipped_digits, split
from elastic_trainer.jobs.mnist import as_tensors
from elastic_trainer.local import timeline
from elastic_trainer.local.ledger import Commit, Line, LineKind, audit, lineage
from tests.bench.goodput_job import CHECKPOINTS, DATA
from tests.bench.goodput_peers import Peer, Span, Struck, Trial, peers, running
from tests.bench.recovery_torchft import look
from tests.bench.report import (
    Calibration,
    Must,
    Report,
    alternate,
    at_least,
    at_most,
    calibrate,
    emit,
    median,
    note,
    parse,
)
from tests.drills.cluster.schedule import STORM, Blow, Timed, poisson
from tests.support.small_disk import mounted

LLAMA3_MEAN_S, LLAMA3_GPUS = 54 * 86_400 / 419, 16_384
LENGTH_S, QUICK_LENGTH_S = 600.0, 14.0
MEAN_S, QUICK_MEAN_S = 20.0, 2.0
CALM_S, QUICK_CALM_S = 30.0, 3.0
STEP_S, SAVE_EVERY_S, DISK_BYTES = 0.1, 5.0, 64 << 20
SETTLED_STEPS, LAST_STEPS = 20, 100
AGAIN_S = 1.0
"""Ranks write the line of one step sooner after each other, and make it again later."""
QUICK_PEERS = ("in_place", "restart_warm")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("goodput", __doc__, argv, repeats=1, extend=_own_options)
    extra, quick = options.extra, options.quick
    length_s = extra.length or (QUICK_LENGTH_S if quick else LENGTH_S)
    mean_s = extra.mean or (QUICK_MEAN_S if quick else MEAN_S)
    if extra.gpus is not None:
        mean_s = LLAMA3_MEAN_S * LLAMA3_GPUS / extra.gpus
    torchft = look(extra.torchft_python)
    chosen = peers(None if torchft.skipped else extra.torchft_python)
    names = extra.peers or [name for name in chosen if not quick or name in QUICK_PEERS]
    if absent := [name for name in names if name not in chosen]:
        why = torchft.skipped if absent[0] == "torchft" else f"the peers are {', '.join(chosen)}"
        raise SystemExit(f"goodput: --peers {absent[0]} cannot run here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no disk mounted, no node running
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, small_disk(Path(place)) as disk:
        kinds = {blow: weight for blow, weight in STORM.items() if blow is not Blow.FULL_DISK or disk is not None}
        schedule = poisson(extra.seed, length_s, max(len(kinds), round(length_s / mean_s)), kinds)
        low = os.geteuid() == 0 and not quick
        play = Play(Path(place), disk, schedule, length_s, QUICK_CALM_S if quick else CALM_S, extra.pictures, low=low)
        calls = {name: partial(play.of, chosen[name]) for name in names}
        found = {name: together(runs) for name, runs in alternate(calls, options.repeats).items()}
    figures = {
        "storm": {
            "seed": extra.seed,
            "length_s": length_s,
            "mean_s": length_s / len(schedule),
            "faster_than_llama3": LLAMA3_MEAN_S / (length_s / len(schedule)),
            "faults": Counter(str(each.blow) for each in schedule),
            "nodes_start_at_low_priority": low,
            "disk": "full" if disk is not None else "left out: a small disk takes root",
        },
        "torchft": torchft.as_json(),
        "peers": {name: chosen[name].as_json() for name in names},
        "found": found,
    }
    return emit(Report(options, figures, musts(found, chosen, len(schedule)), calibrations=play.calibrations))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=float, help=f"seconds of storm for each peer ({LENGTH_S:g})")
    parser.add_argument("--mean", type=float, help=f"mean seconds between two faults ({MEAN_S:g})")
    parser.add_argument("--gpus", type=float, help="take the mean from Llama 3's rate, on that many GPUs")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (1)")
    parser.add_argument("--peers", nargs="+", metavar="PEER", help="only these")
    parser.add_argument("--pictures", type=Path, help="a directory for PEER.svg, ranks and steps over time")
    parser.add_argument("--torchft-python", type=Path, help="the python of an environment with torch and torchft")


class Play:
    """Plays one schedule to one peer after another. ``disk`` is one that can be filled, if there is any."""

    def __init__(
        self,
        place: Path,
        disk: Path | None,
        schedule: tuple[Timed, ...],
        length_s: float,
        calm_s: float,
        pictures: Path | None,
        *,
        low: bool,
    ) -> None:
        self._place, self._disk, self._schedule, self._pictures = place, disk, schedule, pictures
        self._length_s, self._calm_s, self._low = length_s, calm_s, low
        images, labels, _ = as_tensors(split(shipped_digits(), 1000, seed=0)[0]).tensors
        self._data = images / 255.0, labels
        self.calibrations: list[Calibration] = []

    def of(self, peer: Peer) -> dict[str, Any]:
        """What ``peer`` made of it; of another project's also that it did not start."""
        directory = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=self._place))
        torch.save(self._data, directory / DATA)
        checkpoints = self._disk if self._disk is not None else directory / f"{CHECKPOINTS}-of-its-own"
        checkpoints.mkdir(exist_ok=True)
        (directory / CHECKPOINTS).symlink_to(checkpoints)
        try:
            with running(peer, directory, STEP_S, SAVE_EVERY_S, low=self._low) as trial:
                found = measured(trial, self._schedule, self._length_s, self._calm_s, len(self._data[1]))
        except (RuntimeError, StatisticsError) as error:
            if peer.ours:
                raise
            note(f"{peer.name}: {error}")
            return {"failed": str(error)}
        finally:
            for entry in checkpoints.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self.calibrations.append(calibrate())
        note(f"  goodput {found['goodput']:.3f}, stalls, s: {json.dumps(found['median_stall_s'])}, {found['samples']}")
        picture(trial, directory, self._pictures)
        return found


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median goodput, the goodput of each, and the samples lost or repeated in all of them."""
    whole = sorted((run for run in runs if "failed" not in run), key=lambda run: float(run["goodput"]))
    if not whole:
        return runs[0]
    sums = {name: sum(run[name] for run in whole) for name in ("samples_lost", "samples_repeated")}
    return whole[len(whole) // 2] | sums | {"goodputs": [run["goodput"] for run in whole], "of": len(runs)}


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """A disk that can be filled; None where that takes more rights than there are."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        yield None
        return
    manager = mounted(place / "disk", DISK_BYTES)
    try:
        disk = manager.__enter__()
    except pytest.skip.Exception:
        yield None
        return
    try:
        yield disk
    finally:
        manager.__exit__(None, None, None)


def measured(trial: Trial, schedule: tuple[Timed, ...], length_s: float, calm_s: float, size: int) -> dict[str, Any]:
    """Train undisturbed, then in the storm; what came of it."""
    trial.settle(SETTLED_STEPS)
    calm = trial.calm(calm_s)
    storm = trial.storm(schedule, length_s)
    trial.end()
    lines = numbered(trial.lines) if trial.peer.way == "torchft" else trial.lines
    return judged(lines, trial.done, calm, storm, size) | {"operator": trial.helped}


def numbered(lines: Sequence[Line]) -> list[Line]:
    """With a round for each time at which new processes began at a step that was already made, a checkpoint's.

    torchft has no number for that. A process that stood still may write its line late: it is not a new one.
    """
    told, number, began, known = [], 1, dict[int, float](), set[int]()
    for line in sorted(lines, key=lambda each: each.t):
        if line.event is LineKind.STEP:
            if line.pid not in known and line.t - began.get(line.step, line.t) > AGAIN_S:
                number, began, known = number + 1, {}, set()
            began.setdefault(line.step, line.t)
            known.add(line.pid)
        told.append(line.model_copy(update={"round": number}))
    return told


def judged(lines: Sequence[Line], done: Sequence[Struck], calm: Span, storm: Span, size: int) -> dict[str, Any]:
    """The figures of a job with ``size`` samples, from its whole ledger and the faults that happened. Pure."""
    surviving, exactness = lineage(lines), audit(lines, size)
    steps = intervals(within(surviving, calm))
    step_s, length_s = median(steps), storm[1] - storm[0]
    counting = within(surviving, storm)
    goodput = len(counting) * step_s / length_s
    lost_s = (1.0 - goodput) * length_s / max(1, len(done))
    losses = [commit.loss for commit in counting[-LAST_STEPS:] if commit.loss is not None]
    return {
        "goodput": goodput,
        "lost_s_per_fault": lost_s,
        "goodput_at_llama3_rate": 1.0 - lost_s / LLAMA3_MEAN_S,
        "step_ms": 1e3 * step_s,
        "storm_step_ms": 1e3 * median(intervals(counting)) if len(counting) > 1 else None,
        "checkpoints_cost_percent": 100.0 * (sum(steps) / len(steps) / step_s - 1.0),
        "steps": len(counting),
        "steps_repeated": exactness.steps_rolled_back,
        "samples_lost": exactness.missing,
        "samples_repeated": exactness.repeated,
        "exact": exactness.exact,
        "samples": exactness.reason,
        "final_loss": sum(losses) / len(losses) if losses else None,
        "median_stall_s": stalls(done, [commit.t for commit in surviving], step_s, storm[1]),
        "faults": Counter(str(struck.blow) for struck in done),
    }


def within(commits: Sequence[Commit], span: Span) -> list[Commit]:
    return [commit for commit in commits if span[0] <= commit.t <= span[1]]


def intervals(commits: Sequence[Commit]) -> list[float]:
    return [later.t - earlier.t for earlier, later in pairwise(commits)]


def stalls(done: Sequence[Struck], times: Sequence[float], step_s: float, ended: float) -> dict[str, float]:
    """By kind of fault: the longest time without a step that counts until the next fault, beyond a step; medians.

    What begins with the step in which the next fault struck is the next one's alone.
    """
    found: dict[str, list[float]] = defaultdict(list)
    gaps = list(pairwise([*(t for t in times if t < ended), ended]))
    for struck, until in zip(done, [*(each.t for each in done[1:]), ended], strict=True):
        last = max(struck.t, until - 1.5 * step_s)
        longest = max((b - a for a, b in gaps if a < last and b > struck.t), default=0.0)
        found[str(struck.blow)].append(max(0.0, longest - step_s))
    return {kind: median(each) for kind, each in sorted(found.items())}


def picture(trial: Trial, directory: Path, pictures: Path | None) -> None:
    if pictures is None:
        return
    faults = [{"what": name_of(each), "node": each.node, "t": each.t, "recovery": None} for each in trial.done]
    (directory / "summary.json").write_text(json.dumps({"faults": faults}))
    pictures.mkdir(parents=True, exist_ok=True)
    timeline.draw(directory, pictures / f"{trial.peer.name}.svg")


def name_of(struck: Struck) -> str:
    """As a picture has it: a node that starts is no fault."""
    return f"{struck.node} started" if struck.blow is Blow.JOIN else str(struck.blow)


def musts(found: dict[str, dict[str, Any]], chosen: dict[str, Peer], faults: int) -> list[Must]:
    """What the project promises, of the peers that were measured."""
    limits = {"in_place": 0.95, "restart_warm": 0.7}
    ours = {name: each for name, each in found.items() if chosen[name].ours}
    return [
        *(at_least(f"{name}: goodput", ours[name]["goodput"], limits[name]) for name in limits if name in ours),
        *(
            at_most(f"{name}: samples lost or repeated", each["samples_lost"] + each["samples_repeated"], 0)
            for name, each in ours.items()
        ),
        *(
            at_least(f"{name}: faults that happened", sum(each["faults"].values()), faults)
            for name, each in ours.items()
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
