"""Rules with shorter times are the same rules."""

from __future__ import annotations

import re

import pytest

from tests.support.deployment import DEPLOY, PROMETHEUS, load
from tests.support.shortened import duration, redirected, seconds, shortened_expression, shortened_rules


@pytest.mark.parametrize(("text", "value_s"), [("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25)])
def test_durations_are_read_as_prometheus_reads_them(text: str, value_s: float) -> None:
    """Also those of several parts; and what is written is read again."""
    assert seconds(text) == value_s
    assert seconds(duration(value_s)) == value_s


def test_all_three_ways_to_write_a_time_are_shortened() -> None:
    """Ranges, offsets and lengths shrink; factors, thresholds and the least range stay."""
    text = "3 * rate(x[5m] offset 1h) > 2 * 60 and clamp_min(10 * y, 1 * 3600) > 0.5"
    assert (
        shortened_expression(text, 0.1) == "3 * rate(x[30000ms] offset 360000ms) > 12 and clamp_min(10 * y, 360) > 0.5"
    )
    assert "[60000ms]" in shortened_expression(text, 0.1, least_range_s=60.0)


@pytest.mark.parametrize("name", ["rules.yml", "alerts.yml"])
def test_shipped_rules_keep_everything_but_their_times(name: str) -> None:
    """No time of a shipped rule is overlooked, and labels, words and order stay."""
    shipped = load(PROMETHEUS / name)
    short = shortened_rules(shipped, 0.01)
    assert shortened_rules(shipped, 1.0) != short
    for old_group, new_group in zip(shipped["groups"], short["groups"], strict=True):
        for old, new in zip(old_group["rules"], new_group["rules"], strict=True):
            changed = {"expr": 0, "for": 0, "keep_firing_for": 0, "annotations": 0}
            assert {**new, **changed} == {**old, **changed}
            for word, text in old.get("annotations", {}).items():
                assert new["annotations"][word] == shortened_expression(text, 0.01)
            for times in ("for", "keep_firing_for"):
                assert (times in old) == (times in new)
                assert times not in old or seconds(new[times]) == pytest.approx(seconds(old[times]) / 100)
            assert re.findall(r"(?<![\w.])\d+[mhd]\b", new["expr"]) == []


def test_a_rule_with_a_scale_of_its_own_keeps_its_place() -> None:
    """Of two alerts of one name the store's is due first, also where both wait longer: it inhibits the run's."""
    name = "ElasticTrainerStoreUnreachable"
    short = shortened_rules(load(PROMETHEUS / "alerts.yml"), 0.05, scales={name: 0.25})
    waits = [seconds(rule["for"]) for group in short["groups"] for rule in group["rules"] if rule.get("alert") == name]
    shipped = [
        seconds(rule["for"])
        for group in load(PROMETHEUS / "alerts.yml")["groups"]
        for rule in group["rules"]
        if rule["alert"] == name
    ]
    assert waits == [pytest.approx(each / 4) for each in shipped]
    assert waits == sorted(set(waits))
    assert len(waits) == 2


def test_alertmanagers_routes_stay_and_lead_to_the_test() -> None:
    """Matchers, receivers and inhibitions are the shipped ones; nobody outside is told."""
    shipped = load(DEPLOY / "alertmanager/alertmanager.yml")
    config = redirected(shipped, "http://127.0.0.1:1", 0.2)
    assert config["inhibit_rules"] == shipped["inhibit_rules"]
    assert [each["matchers"] for each in config["route"]["routes"]] == [
        each["matchers"] for each in shipped["route"]["routes"]
    ]
    assert [each["name"] for each in config["receivers"]] == [
        *("on-call", "team", "nobody", "dead-mans-switch"),
    ]
    assert config["route"]["group_wait"] == "200ms"
    assert "secrets" not in str(config)
