"""The files in ``deploy/`` as tests read them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RUNBOOKS = DEPLOY / "runbooks"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
RUNBOOK_URL = "https://github.com/elastic-trainer/elastic_trainer/blob/main/deploy/runbooks"


def ran(*words: str | Path, limit_s: float = 100.0, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, well or not, with what it said."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=limit_s, check=False, **more)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / name)["groups"] for rule in group["rules"]]


def recorded() -> frozenset[str]:
    return frozenset(rule["record"] for rule in rules("rules.yml"))


def asked_in(template: str) -> Iterator[str]:
    for found in re.finditer(r'printf "((?:[^"\\]|\\.)*)"[^}]*\| query', template):
        yield found[1].replace("%s", "x")
