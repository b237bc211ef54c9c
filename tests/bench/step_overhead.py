"""What a session costs per step, against bare DDP loops with the same model in the same processes, taking turns.

Once with steps of about 20 ms on two ranks, where the whole difference counts; once alone with a tiny model, where the
main thread's processor time shows what the session itself takes outside collectives; and once with an audit in each
step, of which a hundredth is the cost of one in a hundred steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from elastic_trainer.clock import Deadline
from elastic_trainer.drills.stage import IN_PLACE
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from elastic_trainer.local.etcd import EtcdServer
from tests.bench.calibration import Calibration, calibrate
from tests.bench.machine import STEADY
from tests.bench.report import Options, Report, at_most, at_most_time, emit, median, note, parse

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("step_overhead_job.py")
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: nodes of one rank, the width of its model, samples a rank and step, blocks of each loop, steps a block.

    ``audit_every``: as in CheckOptions; 0: no audits.
    """

    nodes: int
    width: int
    batch: int
    alternations: int
    steps: int
    audit_every: int = 0


AT_20_MS = Shape(nodes=2, width=512, batch=512, alternations=40, steps=10)
TINY = Shape(nodes=1, width=8, batch=8, alternations=40, steps=200)
SHAPES = {"20 ms": AT_20_MS, "tiny": TINY, "audited": replace(AT_20_MS, audit_every=1)}
QUICK = {"20 ms": Shape(2, 256, 8, 4, 5), "tiny": Shape(1, 8, 8, 4, 20), "audited": Shape(2, 256, 8, 4, 5, 1)}
MODES = {"restart": {}, "in_place": IN_PLACE}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("step_overhead", __doc__, argv, repeats=3)
    shapes = QUICK if options.quick else SHAPES
    figures: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    calibrations: list[Calibration] = []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer(Path(place, "etcd")) as etcd:
        for mode, name in product(MODES, shapes):
            if name == "audited" and mode != "restart":
                continue  # the same passes
            figures[mode][name] = measured(options, Path(place), etcd, mode, name, shapes[name])
            calibrations.append(calibrate())
    audited = figures["restart"]["audited"]["longer_by_percent"] - figures["restart"]["20 ms"]["longer_by_percent"]
    musts = [at_most("an audit in 100 steps: longer by, % of a 20 ms step", audited / 100.0, 1.5)]
    for mode in MODES:
        musts += [
            at_most(f"{mode}: longer by, % of a 20 ms step", figures[mode]["20 ms"]["longer_by_percent"], 1.0),
            at_most_time(
                f"{mode}: main thread's time for a step alone, us", figures[mode]["tiny"]["thread_us_more"], 60
            ),
        ]
    return emit(Report(options, figures, musts, calibrations=calibrations))


def measured(options: Options, place: Path, etcd: EtcdServer, mode: str, name: str, shape: Shape) -> dict[str, Any]:
    """Medians over the repeats; each repeat's figures are medians over its blocks."""
    repeats = []
    for repeat in range(options.repeats):
        note(f"{mode}, {name}: {repeat + 1} of {options.repeats}")
        directory = place / f"{mode}-{name.replace(' ', '')}-{repeat}"
        repeats.append(compared(trained(directory, etcd.endpoint, mode, shape)))
    return {key: median([each[key] for each in repeats]) for key in repeats[0]} | {"repeats": repeats}


def compared(taken: dict[str, list[list[float]]]) -> dict[str, float]:
    """Blocks next to each other form groups: what slows the machine for a while meets all.

    The two bare loops differ from each other only by where their tensors lie: that much is noise.
    """
    turns = list(zip(taken["session"], taken["bare"], taken["bare again"], strict=True))
    wall, used = ([[loop[kind] for loop in turn] for turn in turns] for kind in (0, 1))
    bare_s = median([(one + other) / 2 for _, one, other in wall])
    more_s = median([mine - (one + other) / 2 for mine, one, other in wall])
    return {
        "bare_step_ms": 1e3 * bare_s,
        "more_us": 1e6 * more_s,
        "longer_by_percent": 100.0 * more_s / bare_s,
        "noise_percent": 100.0 * abs(median([one - other for _, one, other in wall])) / bare_s,
        "thread_us_more": 1e6 * median([mine - (one + other) / 2 for mine, one, other in used]),
    }


def trained(
    directory: Path, endpoint: str, mode: str, shape: Shape, *, job: Path = JOB, workers: int = 1
) -> dict[str, list[list[float]]]:
    directory.mkdir()
    result = directory / "result.json"
    numbers = (shape.width, shape.batch, shape.alternations, shape.steps, shape.audit_every)
    spec = ClusterSpec(
        run=directory.name,
        directory=directory,
        endpoint=endpoint,
        entry=[str(job), str(result), *map(str, numbers)],
        min_nodes=shape.nodes,
        max_nodes=shape.nodes,
        workers=workers,
        options={"last_call": "1", **MODES[mode]},
        environment=STEADY | {"PYTHONPATH": str(ROOT)},
    )
    with LocalCluster(spec) as cluster:
        cluster.start(shape.nodes)
        if not cluster.wait(Deadline.after(LIMIT_S)) or not result.exists():
            logs = "\n".join(node.log.read_text(errors="replace")[-2000:] for node in cluster.nodes)
            raise RuntimeError(f"the job did not end well:\n{logs}")
    taken: dict[str, list[list[float]]] = json.loads(result.read_text())
    return taken


if __name__ == "__main__":
    sys.exit(main())
