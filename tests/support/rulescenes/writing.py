"""Writes scenes as tests for ``promtool test rules``: ``python -m tests.support.rulescenes.writing DIRECTORY``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elastic_trainer.telemetry import families
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.job import TICK_S, Key, PlayedJob
from tests.support.rulescenes.notation import series, values
from tests.support.rulescenes.scene import Scene
from tests.support.rulescenes.silent import SILENT
from tests.support.rulescenes.told import TOLD, Alert

NAMES = "ElasticTrainer"
"""What the names of all alerts begin with."""
RULES = Path(__file__).parents[3] / "deploy/prometheus"
RUNBOOKS = "https://github.com/elastic-trainer/elastic_trainer/blob/main/deploy/runbooks"
GROUPS = [
    f"elastic_trainer_{name}"
    for name in ("runs", "ranks", "rates", "progress", "membership", "checkpoints", "services")
]
"""Records before alerts: Prometheus does not promise it, and what alerts say would depend on chance."""
FILES: Mapping[str, Sequence[Scene]] = {"silent.yml": SILENT, "firing.yml": FIRING}
_HEAD = """\
# {title}
# Written from the scenes in tests/support/rulescenes. Run with: promtool test rules {name}
"""
_ENUMERATED = ("phase", "reason", "op", "state")
_ALWAYS = ("evaluation", "worker_lost", "save", "training", "ready")
_UNUSED = {each.full_name for each in (families.STEP, families.SAMPLES)}
_TITLES = {
    "silent.yml": "What must wake nobody: planned changes, ends, and what only takes long.",
    "firing.yml": "What must be told: each fault fires the alerts that are named, and no others.",
}


def text(name: str, scenes: Sequence[Scene]) -> str:
    """The file ``name`` with a test for each of ``scenes``."""
    lines = [
        _HEAD.format(title=_TITLES[name], name=name),
        "rule_files: [rules.yml, alerts.yml]",
        f"group_eval_order: [{', '.join(GROUPS)}]",
        f"evaluation_interval: {TICK_S:.0f}s",
        "tests:",
    ]
    for scene in scenes:
        lines += list(_test(scene))
    return "\n".join(lines) + "\n"


def _test(scene: Scene) -> Iterator[str]:
    yield f"  # {scene.says}"
    yield f"  - name: {scene.name}"
    yield f"    interval: {TICK_S:.0f}s"
    yield "    input_series:"
    for key, samples in sorted(_told(scene.play()).items()):
        yield f"      - {{series: '{series(key)}', values: '{values(samples)}'}}"
    yield from _indented({"promql_expr_test": _looks(scene)})
    told = [_alert_test(minute, alert) for minute, alert in TOLD.get(scene.name, ())]
    if told:
        yield from _indented({"alert_rule_test": told})


def _told(job: PlayedJob) -> dict[Key, dict[int, float | None]]:
    """The samples that matter to alerts: not those of values of enumerated labels that are 0 all the time."""
    kept: dict[Key, dict[int, float | None]] = {}
    for key, samples in job.samples.items():
        enumerated = any(label in _ENUMERATED for label, _ in key[1])
        always = any(value in _ALWAYS for _, value in key[1])
        if key[0] not in _UNUSED and (always or not enumerated or any(samples.values())):
            kept[key] = samples
    return kept


def _looks(scene: Scene) -> list[dict[str, Any]]:
    """At the end, on all that has fired; and before the fault, on nothing having done so."""

    def look(minutes: float, fired: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        expected = [
            "{"
            + ", ".join(
                f'{name}="{value}"'
                for name, value in zip(("alertname", "run", "severity"), (alert, run, severity), strict=True)
                if value
            )
            + "}"
            for alert, severity, run in fired
        ]
        since = f"{minutes:.1f}".rstrip("0").rstrip(".")
        return {
            "expr": 'group by (alertname, run, severity) (last_over_time(ALERTS{alertstate="firing"}[12h]))',
            "eval_time": f"{int(minutes * 60)}s" if "." in since else f"{since}m",
            "exp_samples": [{"labels": labels, "value": 1} for labels in expected],
        }

    looks = [look(scene.minutes, scene.fires)]
    return [look(scene.not_before, ()), *looks] if scene.not_before else looks


def _alert_test(minute: float, alert: Alert) -> dict[str, Any]:
    return {
        "alertname": NAMES + alert.name,
        "eval_time": f"{minute:g}m",
        "exp_alerts": [
            {
                "exp_labels": {"severity": alert.severity, "family": alert.family, **alert.labels},
                "exp_annotations": {
                    "summary": alert.summary,
                    "description": alert.description,
                    "runbook_url": f"{RUNBOOKS}/{NAMES}{alert.name}.md",
                },
            }
        ],
    }


def _indented(content: dict[str, Any]) -> Iterator[str]:
    for line in yaml.safe_dump(content, sort_keys=False, width=1000).splitlines():
        yield f"    {line}"


def write(directory: Path, files: Mapping[str, Sequence[Scene]] = FILES) -> None:
    """Put the rules and the tests ``files`` of them into ``directory``."""
    for rules in ("rules.yml", "alerts.yml"):
        shutil.copy(RULES / rules, directory)
    for name, scenes in files.items():
        (directory / name).write_text(text(name, scenes), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
