"""Writes scenes as tests for ``promtool test rules``: ``python -m tests.support.rulescenes.writing DIRECTORY``.

Scenes share a Prometheus, each as a run of its own: what an evaluation costs hardly depends on the number of runs.
Files are JSON, which is YAML too. Samples are written as promtool has them: ``_`` for nothing, ``stale`` at an end.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.rulescenes.firing import FIRING, SILENT
from tests.support.rulescenes.scene import TICK_S, Fires, Key, PlayedJob, Scene

NAMES = "ElasticTrainer"
"""What the names of all alerts begin with."""
RULES = Path(__file__).parents[3] / "deploy/prometheus"
GROUPS = [
    f"elastic_trainer_{name}"
    for name in ("runs", "ranks", "rates", "progress", "membership", "checkpoints", "services")
]
"""Records before alerts: Prometheus does not promise it, and what alerts say would depend on chance."""
LONG = tuple(scene for scene in FIRING if scene.minutes > 220)
"""Rules are evaluated less often in these, which their windows of hours allow. In scenes without alerts: at each tick,
as long as an alert may last."""
FILES: Mapping[str, tuple[Sequence[Scene], float]] = {
    "silent.yml": (SILENT, TICK_S),
    "firing.yml": ([scene for scene in FIRING if scene not in LONG], 60.0),
    "long.yml": (LONG, 120.0),
}
"""Scenes, and how often the rules are evaluated in them (seconds)."""
OVER_MINUTES = 5
"""After the last minute in which an alert must fire, until which it may."""
_ENUMERATED = ("phase", "reason", "op", "state")
_ALWAYS = ("evaluation", "worker_lost", "save", "training", "ready")


def document(scenes: Sequence[Scene], every_s: float) -> dict[str, Any]:
    """The tests of ``scenes``: one of all that may share a Prometheus, and one of each that may not."""
    batches = [[scene for scene in scenes if not scene.alone], *([scene] for scene in scenes if scene.alone)]
    tests = [
        {
            "name": " ".join(scene.name for scene in batch),
            "interval": f"{TICK_S:.0f}s",
            "input_series": [
                {"series": series(key), "values": values(samples)}
                for scene in batch
                for key, samples in sorted(_that_matter(scene.play()).items())
            ],
            "promql_expr_test": list(_looks(batch, every_s)),
        }
        for batch in batches
        if batch
    ]
    known: dict[str, Any] = {"rule_files": ["rules.yml", "alerts.yml"], "group_eval_order": GROUPS}
    return {**known, "evaluation_interval": f"{every_s:.0f}s", "tests": tests}


def series(key: Key) -> str:
    name, labels = key
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels) + "}"


def values(samples: Mapping[int, float | None]) -> str:
    """The samples, by number of the scrape (None: the series ends there), one after the other."""
    return " ".join(
        "_" if number not in samples else "stale" if (sample := samples[number]) is None else f"{sample:.6f}"
        for number in range(max(samples) + 1)
    )


def _that_matter(job: PlayedJob) -> dict[Key, dict[int, float | None]]:
    """The samples but for those of values of enumerated labels that are 0 all the time; each series has an end, since
    scenes that share a Prometheus differ in length."""
    kept: dict[Key, dict[int, float | None]] = {}
    for key, samples in job.samples.items():
        enumerated = any(label in _ENUMERATED for label, _ in key[1])
        always = any(value in _ALWAYS for _, value in key[1])
        if always or not enumerated or any(samples.values()):
            kept[key] = {**samples, max(samples) + 1: None}
    return kept


def _looks(scenes: Sequence[Scene], every_s: float) -> Iterator[dict[str, Any]]:
    """At the end of each scene, on all that has fired of its run; and before its fault, on nothing having done so."""
    for scene in scenes:
        if scene.not_before:
            yield _look(scene.not_before, scene.name, ())
        if scene.lasts:
            yield from _lasting(scene, every_s, *scene.lasts)
        yield _look(scene.minutes, scene.name, [each for each in scene.fires if each.of_run])
    fired = [each for scene in scenes for each in scene.fires if not each.of_run and each.severity != "none"]
    yield _look(max(scene.minutes for scene in scenes), "", fired)


def _look(minutes: float, run: str, fired: Sequence[Fires]) -> dict[str, Any]:
    of_run = f', run="{run}"' if run else ""
    return {
        "expr": "group by (alertname, run, severity) "
        f'(last_over_time(ALERTS{{alertstate="firing", run="{run}", severity!="none"}}[12h]))',
        "eval_time": f"{minutes * 60:.0f}s",
        "exp_samples": [
            {"labels": f'{{alertname="{NAMES}{each.alert}"{of_run}, severity="{each.severity}"}}', "value": 1}
            for each in fired
        ],
    }


def _lasting(scene: Scene, every_s: float, begin: float, end: float) -> Iterator[dict[str, Any]]:
    """As many evaluations between two minutes found the scene's first alert as there were, and none later on."""
    found = f'ALERTS{{alertstate="firing", alertname="{NAMES}{scene.fires[0].alert}", run="{scene.name}"}}'
    yield {
        "expr": f"sum(count_over_time({found}[{end - begin:.0f}m])) >= bool {(end - begin) * 60 / every_s:.0f}",
        "eval_time": f"{end * 60:.0f}s",
        "exp_samples": [{"labels": "{}", "value": 1}],
    }
    later = scene.minutes - end - OVER_MINUTES
    if later > 0:
        expr = f"count_over_time({found}[{later:.0f}m])"
        yield {"expr": expr, "eval_time": f"{scene.minutes * 60:.0f}s", "exp_samples": []}


def write(directory: Path, *names: str) -> None:
    """Put the rules and these files of tests into ``directory``."""
    for file in ("rules.yml", "alerts.yml"):
        shutil.copy(RULES / file, directory)
    for name in names:
        (directory / name).write_text(json.dumps(document(*FILES[name]), indent=1), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), *FILES)
