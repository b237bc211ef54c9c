"""Prometheus' rules and Alertmanager's routes with all times made shorter, so that a test can wait for them. Pure.

Rules write lengths of time in three ways: as durations of ``for`` and ``keep_firing_for``, as ranges and offsets, and,
to compare values with, as ``N * 60`` or ``N * 3600``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_RANGE = re.compile(rf"\[({_DURATION})\]")
_OFFSET = re.compile(rf"\boffset ({_DURATION})")
_LENGTH = re.compile(r"\b(\d+) \* (60|3600)\b")
_WAITS = ("group_wait", "group_interval", "repeat_interval")


def seconds(duration: str) -> float:
    """A duration of Prometheus in seconds."""
    if not re.fullmatch(_DURATION, duration):
        raise ValueError(f"{duration!r} is not a duration")
    return sum(int(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def duration(value_s: float) -> str:
    """``value_s`` as a duration of Prometheus, to the millisecond."""
    return f"{max(1, round(value_s * 1000))}ms"


def shortened_expression(
    expression: str, scale: float, range_scale: float | None = None, least_range_s: float = 0.0
) -> str:
    """All times multiplied by ``scale``, ranges by ``range_scale`` if it is given.

    Ranges stay at least ``least_range_s``, or rates would find no two samples.
    """
    range_scale = scale if range_scale is None else range_scale
    text = _LENGTH.sub(lambda found: f"{int(found[1]) * int(found[2]) * scale:.6g}", expression)
    text = _RANGE.sub(lambda found: f"[{duration(max(seconds(found[1]) * range_scale, least_range_s))}]", text)
    return _OFFSET.sub(lambda found: f"offset {duration(seconds(found[1]) * scale)}", text)


def shortened_rules(
    rules: dict[str, Any], scale: float, least_range_s: float = 0.0, scales: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The content of a file of rules, with all times times ``scale``, those of queries in annotations too.

    ``scales``: for some rules, by what they record or alert, by what their ranges and their ``for`` are multiplied
    instead. Rules of one name keep their order: the one that is due first inhibits the others.
    """
    groups = []
    for group in rules["groups"]:
        changed = []
        for rule in group["rules"]:
            own_scale = (scales or {}).get(rule.get("record") or rule["alert"], scale)
            new = {**rule, "expr": shortened_expression(rule["expr"], scale, own_scale, least_range_s)}
            if "annotations" in rule:
                new["annotations"] = {
                    name: shortened_expression(text, scale, own_scale, least_range_s)
                    for name, text in rule["annotations"].items()
                }
            wait_scales = {"for": own_scale, "keep_firing_for": scale}
            new |= {
                name: duration(seconds(rule[name]) * wait_scale)
                for name, wait_scale in wait_scales.items()
                if name in rule
            }
            changed.append(new)
        groups.append({**group, "rules": changed})
    return {**rules, "groups": groups}


def redirected(config: dict[str, Any], url: str, wait_s: float) -> dict[str, Any]:
    """The same routes, with ``url/<name>`` in the place of each receiver, told within some ``wait_s``."""
    receivers = [
        {"name": each["name"], "webhook_configs": [{"url": f"{url}/{each['name']}", "send_resolved": True}]}
        for each in config["receivers"]
    ]
    return {**config, "route": _hurried(config["route"], wait_s), "receivers": receivers}


def _hurried(route: dict[str, Any], wait_s: float) -> dict[str, Any]:
    new = {name: value for name, value in route.items() if name not in _WAITS}
    if "receiver" in route and "group_by" in route:  # the root, from which all others inherit
        new |= {"group_wait": duration(wait_s), "group_interval": duration(2 * wait_s), "repeat_interval": "1h"}
    if "routes" in route:
        new["routes"] = [_hurried(each, wait_s) for each in route["routes"]]
    return new
