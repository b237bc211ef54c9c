"""Alerts, rules and dashboards name what exists, fire in their scenes, and lead to a page that helps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import Family, MetricKind
from tests.support.deployment import (
    DASHBOARDS,
    DEPLOY,
    PROMETHEUS,
    RUNBOOK_URL,
    RUNBOOKS,
    asked_in,
    load,
    recorded,
    rules,
)
from tests.support.requirements import needs
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.writing import FILES, NAMES, write

ALERTS = rules("alerts.yml")


def short(alert: dict[str, Any]) -> str:
    return str(alert["alert"]).removeprefix(NAMES)


def rule_id(rule: dict[str, Any]) -> str:
    return str(rule.get("record") or f"{short(rule)}-{rule['labels']['severity']}")


@pytest.mark.parametrize("rule", rules("rules.yml") + ALERTS, ids=rule_id)
def test_rules_ask_for_metrics_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    """A misspelled metric or state would make an alert that never fires."""
    assert mistakes(rule["expr"], recorded()) == []
    for annotation in rule.get("annotations", {}).values():
        for expression in asked_in(annotation):
            assert mistakes(expression, recorded()) == []


@pytest.mark.parametrize("rule", rules("rules.yml") + ALERTS, ids=rule_id)
def test_two_runs_of_one_name_stay_two(rule: dict[str, Any]) -> None:
    """What is grouped or matched by run is so by cluster and namespace too, in what an alert asks for as well."""
    text = " ".join((rule["expr"], *rule.get("annotations", {}).values()))
    by_run = [found for found in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) if "run" in found.split(", ")]
    assert [each for each in by_run if not each.startswith("cluster, namespace, run")] == []
    assert len(re.findall(r"run='%s'", text)) == text.count("cluster='%s',namespace='%s',run='%s'")


@pytest.mark.parametrize("alert", ALERTS, ids=rule_id)
def test_an_alert_leads_to_its_page(alert: dict[str, Any]) -> None:
    """The page is there, listed, and names the commands that need no Prometheus; receivers sort by family."""
    assert alert["alert"].startswith(NAMES)
    assert alert["annotations"]["runbook_url"] == f"{RUNBOOK_URL}/{alert['alert']}.md"
    assert alert["labels"]["family"]
    page = (RUNBOOKS / f"{alert['alert']}.md").read_text(encoding="utf-8")
    assert f"]({alert['alert']}.md)" in (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    assert short(alert) == "MonitorDown" or "elastic-trainer" in page


def test_there_is_no_page_without_an_alert() -> None:
    """Pages of alerts that are gone would mislead."""
    assert {page.stem for page in RUNBOOKS.glob("ElasticTrainer*.md")} == {alert["alert"] for alert in ALERTS}


def test_every_alert_is_shown_to_fire() -> None:
    """Each one, with each of its severities, fires in a scene."""
    fired = {(each.alert, each.severity) for scene in FIRING for each in scene.fires}
    assert fired == {(short(alert), alert["labels"]["severity"]) for alert in ALERTS}


def test_prometheus_scrapes_the_monitor_and_lists_nodes_through_it() -> None:
    """Nodes come from the monitor's list, keep the labels that they tell, and the rules are loaded."""
    config = load(PROMETHEUS / "prometheus.yml")
    monitor, nodes, etcd = config["scrape_configs"]
    assert monitor["static_configs"] == [{"targets": ["monitor:9470"]}]
    assert nodes["http_sd_configs"][0]["url"] == "http://monitor:9470/sd/nodes"
    assert etcd["job_name"] == "elastic-trainer-etcd"
    assert monitor["honor_labels"]
    assert nodes["honor_labels"]
    assert config["rule_files"] == ["rules.yml", "alerts.yml"]


def test_a_real_etcd_exports_what_the_alerts_read(etcd_endpoint: str) -> None:
    """By name, in its own /metrics."""
    with urllib.request.urlopen(f"http://{etcd_endpoint}/metrics", timeout=30) as answer:
        exported = set(re.findall(r"^(\w+)[{ ]", answer.read().decode(), re.MULTILINE))
    assert exported >= ETCD


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


_OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
_PARTS = ("lhs", "rhs", "expr", "param", "args", "vector_selector")
ADDED = frozenset({"job", "instance", "node", "le", "cluster", "namespace"})
"""Labels that Prometheus, the list of nodes, or the form of a histogram adds."""


ETCD = frozenset(
    {
        "etcd_server_has_leader",
        "etcd_mvcc_db_total_size_in_bytes",
        "etcd_server_quota_backend_bytes",
        "etcd_disk_wal_fsync_duration_seconds_bucket",
    }
)
"""Series of etcd 3.4 and newer; a test asks a real one."""
OF_OTHERS = ETCD | {"up", "ALERTS"}
"""And of Prometheus itself."""


@dataclass(frozen=True)
class Selector:
    """One metric in an expression, with the matchers behind it: label, operator, value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()


def selectors(expression: str) -> Iterator[Selector]:
    """All metrics that ``expression`` asks for; ValueError if it is no PromQL."""
    for part in _parts(expression):
        if isinstance(part, promql_parser.VectorSelector):
            asked = (
                (each.name, _OPERATORS[str(each.op).partition(".")[2]], each.value) for each in part.matchers.matchers
            )
            yield Selector(part.name or "", tuple(asked))


def grouped(expression: str) -> set[str]:
    """The labels that ``expression`` groups or matches by."""
    found: set[str] = set()
    for part in _parts(expression):
        modifier = getattr(part, "modifier", None)
        for each in (modifier, getattr(modifier, "matching", None)):
            found |= set(getattr(each, "labels", None) or ())
        found |= set(getattr(modifier, "group_labels", None) or ())
    return found


def _parts(expression: str) -> Iterator[Any]:
    """The expression and all within it; Grafana's variables for ranges stand for five minutes."""
    return _within(promql_parser.parse(re.sub(r"\[\$\w+\]", "[5m]", expression)))


def _within(part: Any) -> Iterator[Any]:
    yield part
    for name in _PARTS:
        inner = getattr(part, name, None)
        for each in inner if isinstance(inner, list) else [inner] if inner is not None else []:
            yield from _within(each)


def family_of(name: str) -> Family | None:
    for family in families.FAMILIES:
        ends = ("_bucket", "_sum", "_count") if family.kind is MetricKind.HISTOGRAM else ("",)
        if name in {family.full_name + end for end in ends}:
            return family
    return None


def mistakes(expression: str, recorded: frozenset[str]) -> list[str]:
    """What ``expression`` asks for that no family and no recording rule offers, in words."""
    wrong = []
    for selector in selectors(expression):
        if selector.name in recorded | OF_OTHERS:
            wrong += _unknown_values(selector)
            continue
        family = family_of(selector.name)
        if family is None:
            wrong.append(f"no metric {selector.name}")
            continue
        wrong += [
            f"{selector.name} has no label {label}"
            for label, _, _ in selector.matchers
            if label not in {*family.labels, *ADDED}
        ]
        wrong += _unknown_values(selector, family)
    labels = {label for family in families.FAMILIES for label in family.labels} | ADDED
    return wrong + [f"grouped by {label}, which no metric has" for label in grouped(expression) - labels]


def _unknown_values(selector: Selector, family: Family | None = None) -> list[str]:
    """Values of closed sets that do not exist; of a recorded metric those of any family count."""
    wrong = []
    for label, how, value in selector.matchers:
        closed: set[str] = set()
        for each in [family] if family is not None else families.FAMILIES:
            closed |= set(each.values.get(label, ()))
        if not closed or "$" in value or "%s" in value:
            continue
        asked = value.split("|") if how in ("=~", "!~") else [value]
        wrong += [f'{selector.name} has no {label}="{each}"' for each in asked if each not in closed and each != ".*"]
    return wrong
