"""The names in PromQL: metrics, and what their label matchers ask for. Enough for the project's own expressions.

No parser: strings and comments are cut out first, then what remains is told apart by what stands before and behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import Family, Kind

_SELECTOR = re.compile(r"(?<![\w:$.])([a-zA-Z_][\w:]*)\s*(\{[^{}]*\})?(?=[^\w]|$)")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_WORDS = frozenset(
    re.findall(
        r"\w+",
        """and or unless by without on ignoring group_left group_right offset bool sum min max avg count quantile topk
        bottomk group stddev time rate increase deriv delta changes clamp_min clamp_max absent round scalar vector
        histogram_quantile last_over_time max_over_time min_over_time avg_over_time label_replace label_values
        label_join count_values sort sort_desc inf nan timestamp""",
    )
)
"""What looks like a metric and is none, where no parenthesis follows."""
ADDED = frozenset({"job", "instance", "node", "le"})
"""Labels that Prometheus, the list of nodes, or the form of a histogram adds."""


OF_PROMETHEUS = frozenset({"up", "ALERTS"})


@dataclass(frozen=True)
class Selector:
    """One metric in an expression, with the matchers behind it: label, operator, value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()


def selectors(expression: str) -> Iterator[Selector]:
    """All metrics that ``expression`` asks for."""
    text = re.sub(r"#[^\n]*", " ", expression)
    text = _GROUPING.sub(lambda found: f"{found[1]} ", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)  # ranges
    for found in _SELECTOR.finditer(text):
        name, braces = found[1], found[2]
        if braces is None and (name.lower() in _WORDS or text[found.end() :].lstrip().startswith("(")):
            continue
        matchers = tuple((label, how, value[1:-1]) for label, how, value in _MATCHER.findall(braces or ""))
        yield Selector(name, matchers)


def grouped(expression: str) -> set[str]:
    """The labels that ``expression`` groups or matches by."""
    found = _GROUPING.findall(expression)
    return {label.strip() for _, labels in found for label in labels.split(",") if label.strip()}


def family_of(name: str) -> Family | None:
    """The family that the series ``name`` belongs to."""
    for family in families.FAMILIES:
        ends = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
        if name in {family.full_name + end for end in ends}:
            return family
    return None


def mistakes(
    expression: str, recorded: frozenset[str], also: frozenset[str] = frozenset({"up", "ALERTS"})
) -> list[str]:
    """What ``expression`` asks for that no family and no recording rule offers, in words."""
    wrong = []
    for selector in selectors(expression):
        if selector.name in recorded | OF_PROMETHEUS:
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
