"""Alerts and their rules name what exists, and lead to a page that helps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.deployment import PROMETHEUS, RUNBOOK_URL, RUNBOOKS, asked_in, load, recorded, rules
from tests.support.promql import mistakes
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.writing import NAMES

ALERTS = rules("alerts.yml")
EXPECTED = {
    *("Stalled", "RanksMissing", "BelowMinNodes", "RendezvousSlow", "RestartLoop", "RestartsExhausting"),
    *("MembershipFlapping", "Straggler", "CheckpointStale", "CheckpointFailing", "NonFiniteLoss", "GoodputLow"),
    *("StoreUnreachable", "MonitorDown", "RunFailed", "RunStopped", "NodesLost", "SparesUsedUp"),
    *("CheckpointSpaceLow", "EtcdNoLeader", "EtcdMemberDown", "EtcdSpaceLow", "EtcdSlow", "DeadMansSwitch"),
}
CRITICAL = {
    *("Stalled", "BelowMinNodes", "RestartLoop", "CheckpointStale", "CheckpointFailing", "NonFiniteLoss"),
    *("StoreUnreachable", "RunFailed", "EtcdNoLeader"),
}
AT_ONCE = {"NonFiniteLoss", "RunFailed", "RestartLoop", "RestartsExhausting", "MembershipFlapping", "CheckpointFailing"}
AT_ONCE |= {"DeadMansSwitch"}
"""They look at what was counted in a window, so the window is their patience."""
NOT_KEPT = {"MonitorDown", "NonFiniteLoss", "RunFailed", "RunStopped", "DeadMansSwitch"}
HEADINGS = [
    *("Meaning", "What the system did by itself", "What to look at", "What to do"),
    "When it is not what it seems",
]


def short(alert: dict[str, Any]) -> str:
    return str(alert["alert"]).removeprefix(NAMES)


def identity(alert: dict[str, Any]) -> str:
    return f"{short(alert)}-{alert['labels']['severity']}"


def test_all_alerts_are_there_with_their_severity() -> None:
    """Each alert of the design exists, and those that wake people are critical."""
    assert {short(alert) for alert in ALERTS} == EXPECTED
    assert {short(alert) for alert in ALERTS if alert["labels"]["severity"] == "critical"} == CRITICAL
    assert {alert["labels"]["severity"] for alert in ALERTS} == {"critical", "warning", "info", "none"}
    assert {alert["labels"]["window"] for alert in ALERTS if short(alert) == "GoodputLow"} == {"1h", "6h"}


@pytest.mark.parametrize("rule", rules("rules.yml") + ALERTS, ids=lambda rule: rule.get("record") or identity(rule))
def test_rules_ask_for_metrics_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    """A misspelled metric or state would make an alert that never fires."""
    assert mistakes(rule["expr"], recorded()) == []
    for annotation in rule.get("annotations", {}).values():
        for expression in asked_in(annotation):
            assert mistakes(expression, recorded()) == []


@pytest.mark.parametrize("rule", rules("rules.yml") + ALERTS, ids=lambda rule: rule.get("record") or identity(rule))
def test_two_runs_of_one_name_stay_two(rule: dict[str, Any]) -> None:
    """What is grouped or matched by run is so by cluster and namespace too, in what an alert asks for as well."""
    text = " ".join((rule["expr"], *rule.get("annotations", {}).values()))
    by_run = [found for found in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) if "run" in found.split(", ")]
    assert [each for each in by_run if not each.startswith("cluster, namespace, run")] == []
    assert len(re.findall(r"run='%s'", text)) == text.count("cluster='%s',namespace='%s',run='%s'")


@pytest.mark.parametrize("alert", ALERTS, ids=identity)
def test_an_alert_says_what_how_bad_and_where_to_read_on(alert: dict[str, Any]) -> None:
    """Summary, description with values, page, family; and patience, by ``for`` or by its window."""
    annotations = alert["annotations"]
    assert alert["alert"].startswith(NAMES)
    assert set(annotations) == {"summary", "description", "cost", "page", "logs", "runbook_url"}
    assert "{{" in annotations["description"] or short(alert).startswith(("Etcd", "Dead"))
    assert len(annotations["summary"]) < 150
    assert annotations["runbook_url"] == f"{RUNBOOK_URL}/{alert['alert']}.md"
    assert alert["labels"]["family"]
    assert ("for" not in alert) == (short(alert) in AT_ONCE)
    assert "keep_firing_for" in alert or short(alert) in NOT_KEPT


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_alert_has_a_page_for_whoever_is_woken(name: str) -> None:
    """The page has the five parts, is listed, short, and names the commands that need no Prometheus."""
    page = (RUNBOOKS / f"{NAMES}{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == HEADINGS
    assert all(part.strip() for part in re.split(r"^## .+$", page, flags=re.MULTILINE))
    assert len(page.splitlines()) < 60
    assert f"]({NAMES}{name}.md)" in (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    assert name == "MonitorDown" or "elastic-trainer" in page


def test_there_is_no_page_without_an_alert() -> None:
    """Pages of alerts that are gone would mislead."""
    assert {page.stem.removeprefix(NAMES) for page in RUNBOOKS.glob("ElasticTrainer*.md")} == EXPECTED


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
