"""The page that ``make report`` writes: what each benchmark measured, as Markdown. Pure.

README repeats the part between ``BEGIN`` and ``END``; a test holds the two equal.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- from deploy/report.md -->", "<!-- end -->"
_KINDS = ("worker-kill", "node-kill", "node-freeze", "join", "etcd-outage", "full-disk")


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark's report in its published shape, and the seconds that it took."""

    shape: Mapping[str, Any]
    took_s: float

    @property
    def theme(self) -> str:
        return str(self.shape["benchmark"])


def page(measured: Sequence[Measured], missing: Mapping[str, str], pictures: Mapping[str, str]) -> str:
    """All of it. ``missing``: why a benchmark is not there; ``pictures``: paths by peer, relative to the page."""
    by_theme = {each.theme: each.shape for each in measured}
    parts = [
        "# Report",
        "For whoever wants the raw figures. `make report` wrote this page: what the benchmarks measured on one machine"
        " in one\nrun, beside their peers. What was run with `--quick` is at toy size: that a promise is kept or missed"
        " there says little.",
        "## Machine",
        _machine(measured),
        *(_goodput(by_theme["goodput"]["figures"]) if "goodput" in by_theme else []),
        *(f"![Ranks and steps over time, {peer}]({path})" for peer, path in pictures.items()),
        *(["## Recovery", _recovery(by_theme["recovery"]["figures"])] if "recovery" in by_theme else []),
        "## Promises",
        _promises(measured),
        "## Commands",
        _commands(measured),
        *(["## Not measured", "\n".join(f"- `{theme}`: {why}" for theme, why in missing.items())] if missing else []),
    ]
    return "\n\n".join(parts) + "\n"


def block(text: str) -> str:
    """The part of ``text`` that README and the page have in common; empty before the first report."""
    _, begun, rest = text.partition(BEGIN)
    return rest.partition(END)[0].strip() if begun else ""


def with_block(text: str, new: str) -> str:
    head, begun, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{new}\n\n{END}{rest.partition(END)[2]}" if begun else text


def with_section(text: str, heading: str, section: str) -> str:
    """``text`` with this section in place of that with its ``heading``, or behind goodput's."""
    parts = re.split(r"(?m)^(?=## )", text)
    kept = [part for part in parts if not part.startswith(heading + "\n")]
    place = 1 + next((n for n, part in enumerate(kept) if part.startswith("## Goodput\n")), len(kept) - 1)
    return "".join([*kept[:place], section + "\n\n", *kept[place:]])


def _goodput(figures: Mapping[str, Any]) -> list[str]:
    storm, found = figures["storm"], {name: each for name, each in figures["found"].items() if "failed" not in each}
    head, first = ["", *(name.replace("_", " ") for name in found)], 4
    rows: list[tuple[str, list[str]]] = [
        ("goodput", [f"{each['goodput']:.3f}" for each in found.values()]),
        ("steps made again", [str(each["steps_repeated"]) for each in found.values()]),
        ("samples lost or repeated", [str(each["samples_lost"] + each["samples_repeated"]) for each in found.values()]),
        ("lost for each fault, s", [f"{each['lost_s_per_fault']:.2f}" for each in found.values()]),
        *((f"{kind.replace('-', ' ')}: stall, s", [_stall(each, kind) for each in found.values()]) for kind in _KINDS),
        ("step undisturbed, ms", [f"{each['step_ms']:.0f}" for each in found.values()]),
        ("step in the storm, ms", [_number(each["storm_step_ms"]) for each in found.values()]),
        ("beyond the median step, %", [f"{each['checkpoints_cost_percent']:.1f}" for each in found.values()]),
        ("final loss", [_number(each["final_loss"]) for each in found.values()]),
        ("started again by hand", [str(each["operator"].get("whole restarts", 0)) for each in found.values()]),
    ]
    told = textwrap.fill(
        f"A fault every {storm['mean_s']:.0f} s for {storm['length_s']:.0f} s (seed {storm['seed']}),"
        f" {storm['faster_than_llama3']:.0f} times as often as in Llama 3's training, on this machine:",
        width=118,
    )
    details = (
        "A stall is the longest time without a step that counts, from a fault to the next one; faults that overlap\n"
        "share it."
    )
    short = f"{told}\n\n{table(head, rows[:first])}"
    return ["## Goodput", BEGIN, short, END, details, table(head, rows[first:])]


def _stall(found: Mapping[str, Any], kind: str) -> str:
    return _number(found["median_stall_s"].get(kind))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(measured: Sequence[Measured]) -> str:
    shape = measured[0].shape if measured else {"machine": {}, "versions": {}}
    hidden = ("load_1m", "calibration")  # which each benchmark has of its own
    rows = [
        *((name, value) for name, value in shape["machine"].items() if name not in hidden),
        *shape["versions"].items(),
    ]
    return table(["", "here"], [(str(name), [str(value)]) for name, value in rows])


def _recovery(figures: Mapping[str, Any]) -> str:
    """Medians, and the least and greatest; infinite where the job never came back."""
    columns = list(figures["columns"])
    rows = [
        (row, [_spread(by_column[name]["seconds"]) for name in columns]) for row, by_column in figures["rows"].items()
    ]
    return table(["until the next step, s", *columns], rows)


def _spread(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if len(known) < len(values):
        return f"never in {len(values) - len(known)} of {len(values)}"
    return f"{known[len(known) // 2]:.2f} ({known[0]:.2f} to {known[-1]:.2f})"


def _promises(measured: Sequence[Measured]) -> str:
    rows = [
        (each.theme, [must["name"], _number(must["value"]), _number(must["limit"]), _verdict(each, must)])
        for each in measured
        for must in each.shape["musts"]
    ]
    return table(["benchmark", "promise", "measured", "limit", ""], rows)


def _verdict(measured: Measured, must: Mapping[str, Any]) -> str:
    toy = ", at toy size" if "--quick" in measured.shape["command"].split() else ""
    return f"{'kept' if must['ok'] else 'missed'}{toy}"


def _commands(measured: Sequence[Measured]) -> str:
    rows = [
        (f"`{each.shape['command']}`", [f"{each.took_s:.0f}", *map(_number, _speed(each.shape["machine"]))])
        for each in measured
    ]
    return table(["command", "seconds", "load at its end", "times slower than the reference"], rows)


def _speed(machine: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The load of the last minute, and how much longer than the reference the machine took for the same sum."""
    return machine.get("load_1m"), machine.get("calibration", {}).get("scale")
