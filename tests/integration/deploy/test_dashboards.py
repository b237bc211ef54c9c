"""Dashboards, rules and routes: they name what exists, Prometheus' own tools accept them, and do what scenes say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployment import DASHBOARDS, DEPLOY, PROMETHEUS, load, recorded
from tests.support.promql import mistakes
from tests.support.requirements import needs
from tests.support.rulescenes.writing import FILES, write

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


ALERTMANAGER = DEPLOY / "alertmanager/alertmanager.yml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = needs("promtool", "checks and tests the alerting rules (Debian: prometheus)")
    seldom = {**os.environ, "GOGC": "400"}  # a fifth of its time would go into collecting garbage
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=500, env=seldom)


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = needs("amtool", "checks the routes of alerts (Debian: prometheus-alertmanager)")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False)


def said(ran: subprocess.CompletedProcess[str]) -> str:
    return ran.stdout + ran.stderr


def test_prometheus_accepts_its_configuration_and_all_rules() -> None:
    """``promtool check config`` reads prometheus.yml with the rules that it names."""
    ran = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert ran.returncode == 0, said(ran)
    assert "2 rule files found" in said(ran)


@pytest.mark.parametrize("name", FILES)
def test_each_fault_fires_its_alerts_and_all_else_is_silent(name: str, tmp_path: Path) -> None:
    """All scenes, as ``promtool test rules`` plays them."""
    write(tmp_path, {name: FILES[name]})
    ran = promtool("test", "rules", tmp_path / name)
    assert ran.returncode == 0, said(ran)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_prometheus_understands_each_query_of_a_dashboard(path: Path, tmp_path: Path) -> None:
    """As rules, with variables replaced by what Grafana would put there."""
    board = json.loads(path.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [each["expr"] for each in board["annotations"]["list"] if "expr" in each]
    shown = [re.sub(r"\$__\w+", "5m", each).replace("$run", "a").replace("$rank", ".*") for each in asked]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(shown)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    ran = promtool("check", "rules", file)
    assert ran.returncode == 0, said(ran)
    assert f"{len(asked)} rules found" in said(ran)


def test_alertmanager_accepts_its_configuration() -> None:
    """``amtool check-config`` reads it, with its receivers and inhibitions."""
    ran = amtool("check-config", ALERTMANAGER)
    assert ran.returncode == 0, said(ran)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["severity=critical", "run=a"], "on-call"),
        (["severity=warning", "run=a"], "team"),
        (["severity=critical", "component=store"], "on-call"),
        (["severity=info", "run=a"], "nobody"),
        (["severity=none", "alertname=ElasticTrainerDeadMansSwitch"], "dead-mans-switch"),
        (["alertname=OfSomebodyElse"], "team"),
    ],
)
def test_an_alert_goes_to_whom_its_severity_asks_for(labels: list[str], receiver: str) -> None:
    """Critical alerts wake somebody, all others are for the team."""
    ran = amtool("config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels)
    assert ran.returncode == 0, said(ran)
    assert ran.stdout.split() == [receiver]
