"""What the ready-made tasks reach: alone on one process, and on nodes of which one loses its worker and one joins.

The numbers are those that the heads of the job files promise; both must keep to them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Must, Report, at_least, at_most, emit, parse, repeated
from tests.integration.training.launch import Outcome, ran, records, train

WORDS = ("--nodes", "1:3", "--start", "2", "--recovery", "in_place")


@dataclass(frozen=True, slots=True)
class Promise:
    """A task, the metric that it is judged by, what that must come to, and the steps at which faults strike."""

    task: str
    metric: str
    value: float
    lower_is_better: bool = False
    kill_at: int = 40
    join_at: int = 80
    overrides: tuple[str, ...] = ()

    def must(self, name: str, value: float) -> Must:
        return (at_most if self.lower_is_better else at_least)(name, value, self.value)


PROMISES = (
    Promise("mnist", "accuracy", 0.97, kill_at=60, join_at=120),
    Promise("imagefolder", "top1", 0.965),
    Promise("keypoints", "pck", 0.92),
    Promise("gpt", "loss", 1.95, lower_is_better=True, kill_at=100, join_at=200),
)
SMALL = ("data.limit=1000", "epochs=4", "model.width=4")
QUICK = (Promise("mnist", "accuracy", 0.1, kill_at=5, join_at=10, overrides=SMALL),)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("tasks", __doc__, argv, repeats=1)
    figures: dict[str, Any] = {}
    musts = []
    for promise in QUICK if options.quick else PROMISES:
        typical = repeated(options, promise.task, lambda _, each=promise: {**alone(each), **struck(each)})  # type: ignore[misc]
        figures[promise.task] = {"metric": promise.metric, **typical}
        hows = ("alone", "with faults")
        musts += [promise.must(f"{promise.task}: {promise.metric} {how}", typical[how]) for how in hows]
        musts.append(at_most(f"{promise.task}: steps made twice", typical["steps made twice"], 0))
    return emit(Report(options, figures, musts))


def alone(promise: Promise) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        done = _whole(train(promise.task, f"checkpoint.directory={place}/run", *promise.overrides))
        return {"alone": done.report["metrics"][promise.metric], "alone, s": done.report["seconds"]}


def struck(promise: Promise) -> dict[str, float]:
    """The task on two nodes; a worker is killed, and a third node joins."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        faults = ["--kill-worker-at", str(promise.kill_at), "--join-at", str(promise.join_at)]
        words = [*WORDS, "--run-dir", f"{place}/run", *faults, "--", promise.task, *promise.overrides]
        _whole(ran(["-m", "elastic_trainer.cli.main", "local", *words]))
        summary = json.loads(Path(place, "run", "summary.json").read_text())
        struck_at = [fault for fault in summary["faults"] if "killed" in fault["what"] or "started" in fault["what"]]
        if len(struck_at) != 2 or not summary["audit"]["exact"]:
            raise RuntimeError(f"{promise.task}: {len(struck_at)} of 2 faults; {summary['audit']['reason']}")
        return {
            "with faults": records(Path(place, "run", "checkpoints"))[-1]["metrics"][promise.metric],
            "with faults, s": summary["duration_s"],
            "steps made twice": summary["audit"]["steps_rolled_back"],
            "most ranks": max(each["world"] for each in summary["rounds"]),
        }


def _whole(done: Outcome) -> Outcome:
    if done.code:
        raise RuntimeError(f"exit code {done.code}:\n{done.err[-3000:]}")
    return done


if __name__ == "__main__":
    sys.exit(main())
