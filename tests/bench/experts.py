"""A mixture of experts in place: random workers are killed, over and over, amid all-to-alls of tokens.

Two nodes share this machine; in each experts lie along two ranks (tests/drills/sharded/moe.py), and with ``--mesh 2 2``
each of these is sharded over two. All figures are of one job, which ends after the last kill and is compared with one
process after equally many steps. The survivors' pause is the time between the last step of a round and the first one
of the next, a whole step included: after a kill their node goes on alone, and when the other is back they go on
together.

Thousands of steps of AdamW magnify the last bits of a sum, which depend on the number of ranks; and which experts are
chosen depends on them too. So the job computes in float64; with ``--single`` in float32, by SGD.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.etcd import EtcdServer
from tests.bench.report import Report, at_least, at_most, at_most_time, calibrate, emit, median, note, parse
from tests.drills.sharded.test_sharded import CLOSE, MIXTURE, Sharded
from tests.support import seeds

KILLS, QUICK_KILLS = 200, 2
CALIBRATED_EVERY = 20
"""Kills between two looks at how fast the machine is."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("experts", __doc__, argv, repeats=1, extend=_own_options)
    kills = options.extra.kills or (QUICK_KILLS if options.quick else KILLS)
    calibrations, seed = [], seeds.seed(soak=True)
    chance, pauses = random.Random(seed), dict[str, list[float]](killed=[], back=[])
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer(Path(place, "etcd")) as etcd:
        mesh, single = options.extra.mesh, options.extra.single
        how: dict[str, Any] = MIXTURE | {"mesh": mesh, "double": not single, "sgd": single, "pace_s": 0.0}
        sharded = Sharded(Path(place), etcd.endpoint, "experts", shards=math.prod(mesh), **how)
        began = struck = SYSTEM.monotonic()
        with sharded.job as job:
            job.start(2)
            sharded.await_together()
            for number in range(kills):
                pause(chance.uniform(0.0, 0.5))
                since, struck = struck, SYSTEM.monotonic()
                survivor = sharded.kill(chance, "worker")
                for name, taken in zip(pauses, _pauses(sharded, survivor, struck, since), strict=True):
                    pauses[name].append(taken)
                note(f"kill {number + 1} of {kills}: {pauses['killed'][-1]:.3f} s, back {pauses['back'][-1]:.3f} s")
                if number % CALIBRATED_EVERY == 0:
                    calibrations.append(calibrate())
            error = sharded.ended(Path(place))
            steps = job.newest()
    known = {f"{name}_s": {"median": median(each), "max": max(each)} for name, each in pauses.items()}
    figures = {
        "kills": len(pauses["killed"]),
        "seed": seed,
        "steps": steps,
        "samples_exact": True,  # or ended() would have raised
        "survivors_kept_their_processes": True,  # or kill() would have
        "from_one_process": error,
        "pauses": known,
        "all_pauses_s": pauses,
        "took_s": SYSTEM.monotonic() - began,
    }
    musts = [
        at_least("kills", len(pauses["killed"]), kills),
        at_most("parameters from those of one process", error, CLOSE),
        at_most_time("survivors' pause, s", known["killed_s"]["median"], 0.3),
    ]
    return emit(Report(options, figures, musts, calibrations=calibrations))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help=f"workers to kill ({KILLS}; quick: {QUICK_KILLS})")
    parser.add_argument("--mesh", type=int, nargs=2, default=[1, 2], help="dp_shard_mod_ep and ep of a node (1 2)")
    parser.add_argument("--single", action="store_true", help="compute in float32, by SGD")


def _pauses(sharded: Sharded, survivor: Node, struck: float, since: float) -> list[float]:
    """Between the last step of a round and the first one of the next, at the first two changes after ``struck``.

    Of the ranks that had made a step before, the one that stood still longest. ``since`` the kill before: the system
    may have given a process's number to an earlier one.
    """
    steps = [line for line in sharded.job.steps(survivor.name) if line.t > since]
    lives = [[line for line in steps if line.pid == pid] for pid in sharded.workers(survivor)]
    changes = [[b.t - a.t for a, b in pairwise(life) if b.round > a.round and b.t > struck] for life in lives]
    return [max(each) for each in zip(*(each for each in changes if len(each) > 1), strict=False)][:2]


if __name__ == "__main__":
    raise SystemExit(main())
