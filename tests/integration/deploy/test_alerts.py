"""Alerts, rules and dashboards name what exists, fire in their scenes, and lead to a page that helps."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from elastic_trainer.telemetry.families import FAMILIES, MetricKind
from tests.support.deployment import (
    DASHBOARDS,
    DEPLOY,
    PROMETHEUS,
    RUNBOOK_URL,
    RUNBOOKS,
    asked_in,
    load,
    ran,
    recorded,
    rules,
)
from tests.support.requirements import needs
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.writing import FILES, NAMES, write

ALERTS = rules("alerts.yml")


def short(alert: dict[str, Any]) -> str:
    return str(alert["alert"]).removeprefix(NAMES)


def test_rules_ask_for_what_exists_and_keep_runs_of_one_name_apart() -> None:
    """A misspelled metric or state would make an alert that never fires. What is grouped or matched by run is so by
    cluster and namespace too, in what an alert asks for as well."""
    for rule in rules("rules.yml") + ALERTS:
        annotations = rule.get("annotations", {}).values()
        expressions = [rule["expr"], *(each for text in annotations for each in asked_in(text))]
        assert [problem for each in expressions for problem in mistakes(each, recorded())] == [], rule
        text = " ".join((rule["expr"], *annotations))
        by_run = [found for found in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) if "run" in found.split(", ")]
        assert [each for each in by_run if not each.startswith("cluster, namespace, run")] == []
        assert len(re.findall(r"run='%s'", text)) == text.count("cluster='%s',namespace='%s',run='%s'")


def test_each_alert_leads_to_its_page() -> None:
    """The page is there, listed, and names the commands that need no Prometheus; receivers sort by family. Pages of
    alerts that are gone would mislead."""
    for alert in ALERTS:
        assert alert["alert"].startswith(NAMES)
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOK_URL}/{alert['alert']}.md"
        assert alert["labels"]["family"]
        page = (RUNBOOKS / f"{alert['alert']}.md").read_text(encoding="utf-8")
        assert f"]({alert['alert']}.md)" in (RUNBOOKS / "README.md").read_text(encoding="utf-8")
        assert short(alert) == "MonitorDown" or "elastic-trainer" in page
    assert {page.stem for page in RUNBOOKS.glob("ElasticTrainer*.md")} == {alert["alert"] for alert in ALERTS}


def test_every_alert_is_shown_to_fire() -> None:
    """Each one, with each of its severities, fires in a scene."""
    fired = {(each.alert, each.severity) for scene in FIRING for each in scene.fires}
    assert fired == {(short(alert), alert["labels"]["severity"]) for alert in ALERTS}


def test_a_real_etcd_exports_what_the_alerts_read(etcd_endpoint: str) -> None:
    """By name, in its own /metrics."""
    with urllib.request.urlopen(f"http://{etcd_endpoint}/metrics", timeout=30) as answer:
        exported = set(re.findall(r"^(\w+)[{ ]", answer.read().decode(), re.MULTILINE))
    assert exported >= ETCD


UIDS = {"job-overview": "elastic-trainer-job", "rank-drill-down": "elastic-trainer-ranks"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_exists_of_one_run_where_the_reader_says(path: Path, tmp_path: Path) -> None:
    """Metrics, labels and values are those of the families and the recording rules; only monitors are of no run. Each
    panel, query, variable and annotation asks the source that the reader has chosen. Links and bookmarks hold on to the
    uid. Prometheus understands each query, with variables replaced by what Grafana would put there."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["uid"] == UIDS[path.stem]
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert list(variables)[:2] == ["datasource", "run"]
    assert ("rank" in variables) == (path.stem == "rank-drill-down")
    targets = [target for panel in panels for target in panel["targets"]]
    annotations = [each for each in content["annotations"]["list"] if not each.get("builtIn")]
    asking = [*panels, *targets, *annotations, *(each for each in variables.values() if each["type"] == "query")]
    assert [each for each in asking if each["datasource"] != SOURCE] == []
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    expressions = [each["expr"] for each in (*targets, *annotations) if "expr" in each]
    for expression in expressions:
        assert mistakes(expression, recorded()) == []
        assert 'run="$run"' in expression or "monitor_store" in expression
    shown = [re.sub(r"\$__\w+", "5m", each).replace("$run", "a").replace("$rank", ".*") for each in expressions]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(shown)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    assert f"{len(expressions)} rules found" in promtool("check", "rules", file)


def test_prometheus_and_grafana_find_each_other_and_what_they_watch() -> None:
    """Nodes come from the monitor's list and keep the labels that they tell; what is provisioned fits compose.yaml."""
    config = load(PROMETHEUS / "prometheus.yml")
    monitor, nodes, etcd = config["scrape_configs"]
    assert monitor["static_configs"] == [{"targets": ["monitor:9470"]}]
    assert nodes["http_sd_configs"][0]["url"] == "http://monitor:9470/sd/nodes"
    assert etcd["job_name"] == "elastic-trainer-etcd"
    assert monitor["honor_labels"]
    assert nodes["honor_labels"]
    services = load(DEPLOY / "compose.yaml")["services"]
    (source,) = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = load(DEPLOY / "grafana/provisioning/dashboards/elastic-trainer.yaml")["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    mounts = [mount["target"] for mount in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
    assert "/etc/grafana/provisioning" in mounts


ALERTMANAGER = DEPLOY / "alertmanager/alertmanager.yml"


def promtool(*arguments: str | Path) -> str:
    """What it says; it must end well."""
    seldom = {**os.environ, "GOGC": "400"}  # a fifth of its time would go into collecting garbage
    return _well(needs("promtool", "checks and tests the alerting rules (Debian: prometheus)"), *arguments, env=seldom)


def amtool(*arguments: str | Path) -> str:
    return _well(needs("amtool", "checks the routes of alerts (Debian: prometheus-alertmanager)"), *arguments)


def _well(*words: str | Path, **more: Any) -> str:
    done = ran(*words, limit_s=500, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_its_configuration_and_all_rules() -> None:
    """``promtool check config`` reads prometheus.yml with the rules that it names."""
    assert "2 rule files found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("name", FILES)
def test_each_fault_fires_its_alerts_and_all_else_is_silent(name: str, tmp_path: Path) -> None:
    """All scenes, as ``promtool test rules`` plays them."""
    write(tmp_path, name)
    promtool("test", "rules", tmp_path / name)


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
    amtool("check-config", ALERTMANAGER)
    assert amtool("config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels).split() == [receiver]


_PARTS = ("lhs", "rhs", "expr", "param", "args", "vector_selector")
ADDED = {"job", "instance", "node", "le", "cluster", "namespace"}
"""Labels that Prometheus, the list of nodes, or the form of a histogram adds."""
ETCD = {
    "etcd_server_has_leader",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_server_quota_backend_bytes",
    "etcd_disk_wal_fsync_duration_seconds_bucket",
}
"""Series of etcd 3.4 and newer; a test asks a real one."""
SERIES = {
    family.full_name + end: family
    for family in FAMILIES
    for end in (("_bucket", "_sum", "_count") if family.kind is MetricKind.HISTOGRAM else ("",))
}


def parts(expression: str) -> Iterator[Any]:
    """The expression and all within it; Grafana's variables for ranges stand for five minutes."""
    waiting: list[Any] = [promql_parser.parse(re.sub(r"\[\$\w+\]", "[5m]", expression))]
    while waiting:
        part = waiting.pop()
        yield part
        for name in _PARTS:
            inner = getattr(part, name, None)
            waiting += inner if isinstance(inner, list) else [inner] if inner is not None else []


def mistakes(expression: str, recorded: frozenset[str]) -> list[str]:
    """What ``expression`` asks for that no family and no recording rule offers, in words; of a recorded metric the
    values of any family count. ValueError if it is no PromQL."""
    wrong, labels = list[str](), {label for family in FAMILIES for label in family.labels} | ADDED
    for part in parts(expression):
        modifier = getattr(part, "modifier", None)
        for each in (modifier, getattr(modifier, "matching", None)):
            grouped = {*(getattr(each, "labels", None) or ()), *(getattr(each, "group_labels", None) or ())}
            wrong += [f"grouped by {label}, which no metric has" for label in grouped - labels]
        if not isinstance(part, promql_parser.VectorSelector):
            continue
        family = SERIES.get(part.name or "")
        if family is None and part.name not in recorded | ETCD | {"up", "ALERTS"}:
            wrong.append(f"no metric {part.name}")
            continue
        for each in part.matchers.matchers:
            if family is not None and each.name not in {*family.labels, *ADDED}:
                wrong.append(f"{part.name} has no label {each.name}")
            closed = {value for of in ([family] if family else FAMILIES) for value in of.values.get(each.name, ())}
            if closed and "$" not in each.value and "%s" not in each.value:
                asked = each.value.split("|") if str(each.op).endswith("Re") else [each.value]
                wrong += [f'{part.name} has no {each.name}="{one}"' for one in asked if one not in {*closed, ".*"}]
    return wrong
