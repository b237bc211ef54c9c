"""Prometheus' and Alertmanager's own tools accept what is shipped, and the rules do what their scenes say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.deployment import DASHBOARDS, DEPLOY, PROMETHEUS
from tests.support.requirements import needs
from tests.support.rulescenes.firing import FIRING
from tests.support.rulescenes.silent import SILENT
from tests.support.rulescenes.writing import FILES, write

SCENES = {scene.name: scene for scene in (*SILENT, *FIRING)}
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


RUN = "(cluster, namespace, run)"
SPOILED = [
    # the scene that finds it, and what somebody might write
    ("stalled", "rules.yml", ", 5 * 60)", ", 50 * 60)"),
    ("compile", "rules.yml", "30 * 60", "5 * 60"),
    ("evaluation", "rules.yml", 'phase=~"evaluation|checkpoint|ending|waiting"', 'phase=~"ending|waiting"'),
    ("evaluation", "alerts.yml",
     "run:elastic_trainer_last_step_timestamp_seconds:max\n              or",
     "(time() + 0 * run:elastic_trainer_ranks:count)\n or"),
    ("slow-steps", "rules.yml", "10 * max", "0 * max"),
    ("etcd-away", "rules.yml", "< 2 * 60", "< 2000 * 60"),
    ("end", "alerts.yml", f"run:elastic_trainer_world_size:fresh - on {RUN} run:elastic_trainer_ranks:count > 0",
     "run:elastic_trainer_ranks:count offset 10m - on (run) run:elastic_trainer_ranks:count > 0"),
    ("scale-down", "alerts.yml", f"run:elastic_trainer_world_size:fresh - on {RUN} run:elastic_trainer_ranks:count > 0",
     "run:elastic_trainer_ranks:count offset 10m - on (run) run:elastic_trainer_ranks:count > 0"),
    ("scale-up", "alerts.yml", '{reason=~"node_left|node_lost|contact_lost"}', "{}"),
    ("late-nodes", "alerts.yml", "> 15 * 60", "> 0 * 60"),
    ("given-up", "alerts.yml", f"and on {RUN} max_over_time(run:elastic_trainer_nodes:fresh[12h]) > 0", ""),
    ("after-a-pause", "alerts.yml", f"and on {RUN} run:elastic_trainer_checkpoint_due:bool == 1", ""),
    ("etcd-blink", "rules.yml", "timestamp_seconds) > 1 * 60", "timestamp_seconds) >= 0 * 60"),
    ("etcd-away-monitor-slow", "alerts.yml",
     "max_over_time(elastic_trainer_monitor_store_last_success_timestamp_seconds[1m])",
     "elastic_trainer_monitor_store_last_success_timestamp_seconds"),
    ("etcd-away-monitor-slow", "alerts.yml", ") >= 3\n", ") >= 300\n"),
    ("too-few-and-etcd-away", "rules.yml", ">= 2 * 60", ">= 2000 * 60"),
    ("failed-at-start", "alerts.yml", '{outcome="failed"}[1h]', '{outcome="failed"}[1m]'),
    ("failed-long-ago", "alerts.yml", ") < 1 * 3600", ") < 9 * 3600"),
    ("no-session", "rules.yml", "world_size:fresh > 0\n", "world_size:fresh > 9\n"),
    ("scaled-to-zero", "alerts.yml", 'fresh{state="stopped"}[15m]', 'fresh{state="failed"}[15m]'),
    ("nodes-lost", "alerts.yml", "2 * run:elastic_trainer_nodes_lost", "0 * run:elastic_trainer_nodes_lost"),
    ("spares-used-up", "alerts.yml", "fresh[6h]) > 0\n", "fresh[6h]) > 1\n"),
    ("disk-fills-up", "alerts.yml", "5 * max by", "3 * max by"),
    ("etcd-slow", "alerts.yml", ") > 0.5", ") > 1.5"),
    ("etcd-nearly-full", "alerts.yml", ") > 0.8", ") > 0.9"),
    ("nan", "alerts.yml", "(increase(elastic_trainer_nonfinite_losses_total[15m])) > 0",
     "(increase(elastic_trainer_nonfinite_losses_total[15m])) > 9"),
    ("nan-unwatched", "alerts.yml", "(increase(elastic_trainer_nonfinite_steps_total[15m])) > 0",
     "(increase(elastic_trainer_nonfinite_steps_total[15m])) > 9"),
    ("failed", "alerts.yml", 'outcome="failed"', 'outcome="succeeded"'),
    ("straggler", "alerts.yml", "> 1.5", "> 2.5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "file", "right", "wrong"), SPOILED, ids=[f"{each[0]}-{n}" for n, each in enumerate(SPOILED)]
)
def test_a_spoiled_rule_is_found(scene: str, file: str, right: str, wrong: str, tmp_path: Path) -> None:
    """The scenes can fail: with one expression made worse, the one that is about it does. (With none it does not: that
    is the test above.)"""
    write(tmp_path, {"firing.yml": [SCENES[scene]]})
    rules = (tmp_path / file).read_text(encoding="utf-8")
    assert right in rules
    (tmp_path / file).write_text(rules.replace(right, wrong), encoding="utf-8")
    ran = promtool("test", "rules", tmp_path / "firing.yml")
    assert ran.returncode == 1
    assert "FAILED" in said(ran)
    assert "parse error" not in said(ran)


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
