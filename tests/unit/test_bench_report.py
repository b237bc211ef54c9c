"""The frame that all benchmarks share: options, fair repeats, the report's shape, discovery."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.calibration import Calibration, typical
from tests.bench.page import BEGIN, END, Measured, block, page, with_block
from tests.bench.report import Must, Options, Report, alternate, at_least, at_most, at_most_time, emit, parse, ratio
from tests.bench.themes import Theme, themes

ROOT = Path(__file__).parents[2]


REFERENCE = Calibration(sum_us=100.0, memcpy_us=90.0, product_us=10.0)
SLOW = Calibration(sum_us=380.0, memcpy_us=200.0, product_us=40.0)


def written(
    options: Options, figures: dict[str, Any], musts: Sequence[Must] = (), machine: Calibration = REFERENCE
) -> str:
    out = io.StringIO()
    report = Report(
        replace(options, calibration=machine), figures=figures, musts=musts, calibrations=[machine, machine]
    )
    assert emit(report, out) == 0
    return out.getvalue()


def test_variants_take_turns_and_swap_places() -> None:
    """A drift of the machine meets all variants alike: A B, B A, A B."""
    calls: list[str] = []

    def variant(name: str, value: float) -> float:
        calls.append(name)
        return value

    results = alternate({"a": lambda: variant("a", 1.0), "b": lambda: variant("b", 2.0)}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_ratio_compares_medians() -> None:
    """One outlier on either side does not move the ratio; nothing to compare with is infinitely worse."""
    assert ratio([1.0, 1.0, 90.0], [2.0, 2.0, 0.1]) == 0.5
    assert ratio([1.0], [0.0]) == math.inf


@pytest.mark.parametrize(
    ("must", "ok"),
    [
        (at_most("pause, s", 0.2, 0.2), True),
        (at_most("pause, s", 0.21, 0.2), False),
        (at_least("steps kept", 10, 10), True),
        (at_least("steps kept", 9, 10), False),
        (at_most("never measured", math.nan, 1.0), False),
        (at_least("never measured", math.nan, 1.0), False),
        (at_most("never came", math.inf, 1.0), False),
    ],
)
def test_a_must_is_kept_at_its_limit_and_missed_beyond_it(must: Must, ok: bool) -> None:
    """The verdict follows from value and limit alone, and a value that never came about keeps nothing."""
    assert must.ok is ok


def test_json_ends_with_one_object_of_the_published_shape() -> None:
    """The last line is the whole report: six keys, and four for each must."""
    options = parse("recovery", "Doc.", ["--json"])
    shape = json.loads(
        written(options, {"median_s": 0.08}, [at_most("killed to next step, s", 0.08, 0.2)]).splitlines()[-1]
    )
    assert list(shape) == ["benchmark", "machine", "versions", "command", "figures", "musts"]
    assert shape["benchmark"] == "recovery"
    assert shape["figures"] == {"median_s": 0.08}
    assert shape["musts"] == [{"name": "killed to next step, s", "value": 0.08, "limit": 0.2, "ok": True}]


def test_json_stays_valid_when_a_number_is_not_finite() -> None:
    """Infinity and NaN are no JSON: they become null, in figures however deep and in musts."""
    options = parse("recovery", "Doc.", ["--json"])
    shape = json.loads(written(options, {"runs": [{"s": math.inf}, 1.5]}, [at_most("pause, s", math.nan, 1.0)]))
    assert shape["figures"] == {"runs": [{"s": None}, 1.5]}
    assert shape["musts"][0]["value"] is None
    assert shape["musts"][0]["ok"] is False


def test_people_see_which_must_was_missed_and_the_benchmark_still_ran() -> None:
    """A missed must is marked in the text; the exit status stays 0."""
    text = written(parse("recovery", "Doc.", []), {}, [at_most("pause, s", 0.5, 0.2), at_least("kept", 1, 1)])
    assert "MISSED pause, s: 0.5 (must: at most 0.2)" in text
    assert "ok     kept: 1 (must: at least 1)" in text


@pytest.mark.parametrize(
    ("machine", "limit"), [(REFERENCE, 60.0), (SLOW, 228.0), (replace(REFERENCE, sum_us=50.0), 30.0)]
)
def test_a_promised_time_is_scaled_by_the_speed_of_the_machine(machine: Calibration, limit: float) -> None:
    """60 us are promised where the sum takes 100 us; where it takes 380 us they are 228 us, in JSON and in text."""
    must = at_most_time("main thread, us", limit, 60.0)
    shape = json.loads(written(parse("recovery", "Doc.", ["--json"]), {}, [must], machine))
    assert shape["musts"] == [{"name": "main thread, us", "value": limit, "limit": limit, "ok": True}]
    above = replace(must, value=limit * 1.001)
    assert f"(must: at most {limit:g})" in (text := written(parse("recovery", "Doc.", []), {}, [above], machine))
    assert "MISSED main thread, us" in text


def test_only_times_are_scaled_and_of_those_no_timers() -> None:
    """A ratio, a count and the part of a time that a lease takes are promised alike on every machine."""
    musts = [
        at_most("longer by, %", 1.0, 1.0),
        at_least("kept", 10, 10),
        at_most_time("node killed, s", 3.0, 1.0, timers=2.0),
    ]
    shape = json.loads(written(parse("recovery", "Doc.", ["--json"]), {}, musts, SLOW))
    assert [must["limit"] for must in shape["musts"]] == pytest.approx([1.0, 10.0, 2.0 + 3.8])


def test_a_report_says_how_fast_the_machine_was() -> None:
    """The median of the calibrations taken from the beginning to the end, and the scale that follows from it."""
    report = Report(replace(parse("recovery", "Doc.", []), calibration=SLOW), {}, calibrations=[REFERENCE, SLOW])
    assert report.as_json()["machine"]["calibration"] == {
        "sum_us": 380.0,
        "memcpy_us": 200.0,
        "product_us": 40.0,
        "scale": pytest.approx(3.8),
    }
    assert typical([REFERENCE, SLOW]).sum_us == 240.0


def test_benchmarks_are_found_by_their_main_without_being_run(tmp_path: Path) -> None:
    """A module is a benchmark if it defines ``main``; finding it executes nothing of it."""
    (tmp_path / "pause.py").write_text('"""How long.\n\nMore."""\nraise SystemExit(9)\ndef main(argv): ...\n')
    (tmp_path / "shared_parts.py").write_text('"""No benchmark."""\n')
    (tmp_path / "test_pause.py").write_text("def main(): ...\n")
    assert themes(tmp_path) == (Theme("pause", "How long."),)


STORM = {"seed": 1, "mean_s": 20.0, "length_s": 600.0, "faster_than_llama3": 556.8}
FOUND = {
    "goodput": 0.9812,
    "steps_repeated": 3,
    "samples_lost": 0,
    "samples_repeated": 0,
    "lost_s_per_fault": 0.376,
    "median_stall_s": {"worker-kill": 0.1234},
    "step_ms": 110.2,
    "storm_step_ms": 112.0,
    "checkpoints_cost_percent": 0.9,
    "final_loss": 0.25,
    "operator": {"whole restarts": 2},
}
GOODPUT = {
    "benchmark": "goodput",
    "command": "python -m tests.bench.goodput",
    "machine": {"processor": "P", "load_1m": 0.5, "calibration": {"scale": 1.25}},
    "versions": {"torch": "2"},
    "figures": {"storm": STORM, "found": {"in_place": FOUND, "torchft": {"failed": "it did not start"}}},
    "musts": [{"name": "in_place: goodput", "value": 0.9812, "limit": 0.95, "ok": True}],
}
RECOVERY = GOODPUT | {
    "benchmark": "recovery",
    "figures": {
        "columns": {"ours": {}, "theirs": {}},
        "rows": {"node_kill": {"ours": {"seconds": [0.3, 0.1, 0.2]}, "theirs": {"seconds": [1.0, None]}}},
    },
    "musts": [{"name": "a time", "value": None, "limit": 0.2, "ok": False}],
}


def test_the_page_has_what_was_measured_with_its_spread_and_what_was_not() -> None:
    """A peer that did not start has no column; a job that never came back is counted, not averaged."""
    text = page(
        [Measured(GOODPUT, 61.4), Measured(RECOVERY, 9.0)], {"sever": "the time was over"}, {"in_place": "a/in.svg"}
    )
    for line in (
        "|  | in place |",
        "| goodput | 0.981 |",
        "| worker kill: stall, s | 0.1234 |",
        "| node kill: stall, s |  |",
        "| started again by hand | 2 |",
        "![Ranks and steps over time, in_place](a/in.svg)",
        "| node_kill | 0.20 (0.10 to 0.30) | never in 1 of 2 |",
        "| goodput | in_place: goodput | 0.9812 | 0.95 | kept |",
        "| recovery | a time |  | 0.2 | missed |",
        "| `python -m tests.bench.goodput` | 61 | 0.5 | 1.25 |",
        "| torch | 2 |",
        "- `sever`: the time was over",
    ):
        assert line in text.splitlines(), line


def test_a_readme_takes_its_figures_from_the_page() -> None:
    """The part between the marks is replaced, again and again; the rest stays, and a text without marks as it is."""
    text = page([Measured(GOODPUT, 1.0)], {}, {})
    once = with_block(f"head\n{BEGIN}\nold\n{END}\ntail", block(text))
    assert block(once) == block(text) != ""
    assert with_block(once, block(text)) == once
    assert once.startswith("head\n")
    assert once.endswith("\ntail")
    assert "old" not in once
    assert with_block("none", "new") == "none"


def test_the_readme_s_figures_are_those_of_the_report() -> None:
    """Neither is changed by hand. Before the first report there are none."""
    report, readme = ROOT / "deploy" / "report.md", (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count(BEGIN) == readme.count(END) == 1
    assert block(readme) == (block(report.read_text(encoding="utf-8")) if report.exists() else "")
