"""What the Prometheus operator and Grafana get on Kubernetes is what deploy/ has, and finds the pods."""

from __future__ import annotations

import yaml

from tests.support.deployment import DEPLOY, load
from tests.support.manifests import container, of_kind, pods, rendered, settings_of
from tests.support.prometheusrule import FILE as RULES_FILE
from tests.support.prometheusrule import text as rules_text


def test_the_prometheus_rule_is_what_the_rule_files_say() -> None:
    """`python -m tests.support.prometheusrule` was run after the last change of the rules."""
    assert RULES_FILE.read_text(encoding="utf-8") == rules_text()
    groups = [group for name in ("rules.yml", "alerts.yml") for group in load(DEPLOY / "prometheus" / name)["groups"]]
    assert yaml.safe_load(rules_text())["spec"]["groups"] == groups


def test_dashboards_are_in_maps_that_kubectl_can_apply() -> None:
    """Both of them, below what an annotation may hold: kubectl apply keeps a copy there."""
    maps = [
        each
        for each in of_kind(rendered("overlays/production"), "ConfigMap")
        if "dashboard" in each["metadata"]["name"]
    ]
    files = {name: text for each in maps for name, text in each["data"].items()}
    assert files == {
        path.name: path.read_text(encoding="utf-8") for path in (DEPLOY / "grafana/dashboards").glob("*.json")
    }
    for each in maps:
        assert len(yaml.safe_dump(each)) < 200_000
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_finds_the_ports_that_pods_have() -> None:
    """Each PodMonitor selects pods with a port of that name, keeps what they say of themselves, and names its job."""
    objects = [*rendered("overlays/production"), *rendered("overlays/production-gpt")]
    settings = settings_of(objects)
    labelled = [(pod["metadata"]["labels"], container(pod, settings)) for _, pod in pods(objects)]
    jobs_named = set()
    for each in of_kind(objects, "PodMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"]
        selected = [started for labels, started in labelled if wanted.items() <= labels.items()]
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        assert len(selected) == 1
        assert endpoint["port"] in selected[0].ports
        (relabeling,) = endpoint["relabelings"]
        assert (relabeling["targetLabel"], relabeling["replacement"]) == ("job", each["metadata"]["name"])
        jobs_named.add(relabeling["replacement"])
        assert endpoint.get("honorLabels", False) is (selected[0].name != "etcd")
    scraped = {each["job_name"] for each in load(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]}
    assert jobs_named == scraped | {"elastic-trainer-etcd"}
