"""The names in PromQL: metrics, what their label matchers ask for, and labels that results are grouped by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import Family, MetricKind

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
