"""The dashboards stay where bookmarks look for them, and their queries name what exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import DASHBOARDS, DEPLOY, load, recorded
from tests.support.promql import mistakes

UIDS = {"job-overview": "elastic-trainer-job", "rank-drill-down": "elastic-trainer-ranks"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def board(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in board(path)["panels"] if panel["type"] != "row"]


def test_the_two_dashboards_are_there_under_uids_that_stay() -> None:
    """Links and bookmarks hold on to the uid."""
    assert {path.stem: board(path)["uid"] for path in DASHBOARDS} == UIDS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_data_source_is_written_in(path: Path) -> None:
    """Each panel, query, variable and annotation asks the one that the reader has chosen."""
    content = board(path)
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert list(variables)[:2] == ["datasource", "run"]
    assert ("rank" in variables) == (path.stem == "rank-drill-down")
    asking = [
        *panels(path),
        *(target for panel in panels(path) for target in panel["targets"]),
        *(each for each in content["annotations"]["list"] if not each.get("builtIn")),
        *(each for each in variables.values() if each["type"] == "query"),
    ]
    assert [each for each in asking if each["datasource"] != SOURCE] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_name_what_exists_and_keep_to_the_run(path: Path) -> None:
    """Metrics, labels and values are those of the families and the recording rules; only monitors are of no run."""
    expressions = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    expressions += [each["expr"] for each in board(path)["annotations"]["list"] if "expr" in each]
    for expression in expressions:
        assert mistakes(expression, recorded()) == []
        assert 'run="$run"' in expression or "monitor_store" in expression
    for panel in panels(path):
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_grafana_knows_where_dashboards_and_prometheus_are() -> None:
    """What is provisioned fits the names and mounts of compose.yaml."""
    services = load(DEPLOY / "compose.yaml")["services"]
    (source,) = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = load(DEPLOY / "grafana/provisioning/dashboards/elastic-trainer.yaml")["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    mounts = [mount["target"] for mount in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
    assert "/etc/grafana/provisioning" in mounts
