"""The dashboards are whole: ids, places, variables, units, and queries that name what exists."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import DASHBOARDS, DEPLOY, load, recorded
from tests.support.promql import mistakes

UIDS = {"job-overview": "elastic-trainer-job", "rank-drill-down": "elastic-trainer-ranks"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 39
"""Of Grafana 11, which deploy/compose.yaml brings; newer ones read it too."""


def board(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in board(path)["panels"] if panel["type"] != "row"]


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_the_two_dashboards_are_there_under_uids_that_stay() -> None:
    """Links and bookmarks hold on to the uid."""
    assert {path.stem: board(path)["uid"] for path in DASHBOARDS} == UIDS
    assert {board(path)["schemaVersion"] for path in DASHBOARDS} == {SCHEMA}


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
def test_panels_have_ids_and_places_of_their_own(path: Path) -> None:
    """No two share an id or a spot, and none reaches over the edge."""
    content = board(path)["panels"]
    ids = [panel["id"] for panel in content]
    assert len(set(ids)) == len(ids)
    for one, other in itertools.combinations(content, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in content) == 24


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_explain_themselves(path: Path) -> None:
    """Each has a title, a sentence that says what it shows, a unit, and its thresholds in order."""
    for panel in panels(path):
        assert panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        limits = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert limits[0] is None
        assert limits[1:] == sorted(limits[1:])
    titles = [panel["title"] for panel in panels(path)]
    assert len(set(titles)) == len(titles)


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


def test_faults_and_planned_changes_are_drawn_into_the_curves() -> None:
    """Annotations tell, by color, a round that ended by a fault from one that was changed as planned."""
    for path in DASHBOARDS:
        named = {each["name"]: each for each in board(path)["annotations"]["list"]}
        assert "node_lost" in named["Fault"]["expr"]
        assert "node_joined" in named["Planned change"]["expr"]
        assert named["Fault"]["iconColor"] != named["Planned change"]["iconColor"]


def test_dashboards_lead_to_each_other() -> None:
    """From the job to its ranks and back, with the same run and time."""
    for path, other in itertools.permutations(DASHBOARDS, 2):
        (link,) = board(path)["links"]
        assert re.match(r"/d/([\w-]+)\?", link["url"]).group(1) == UIDS[other.stem]  # type: ignore[union-attr]
        assert "var-run=${run}" in link["url"]
        assert link["keepTime"]


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
