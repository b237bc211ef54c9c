"""Alerts and their rules name what exists, and lead to a page that helps."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest

from tests.support.deployment import PROMETHEUS, RUNBOOK_URL, RUNBOOKS, asked_in, load, recorded, rules
from tests.support.promql import ETCD, mistakes
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.writing import NAMES

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
