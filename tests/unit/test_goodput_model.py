"""The model of goodput: its formulas at known limits, and its sum of what the report recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_trainer.worker.state.cadence import Experience, best_interval_s
from tests.bench.goodput_model import (
    ERROR_LIMIT,
    HEADING,
    MODES,
    Assumptions,
    Mode,
    goodput,
    optimum_s,
    recorded,
    section,
    with_saves,
    without_loss,
    write,
)
from tests.bench.page import with_section

REPORT = Path(__file__).parents[2] / "deploy" / "report.md"
MODE = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))


@MODE
def test_without_failures_only_the_steady_costs_are_left(mode: Mode) -> None:
    """The session's part of each step, and the saves of modes that save by the hour."""
    known = replace(Assumptions(), failures_per_node_s=0.0)
    hourly = 1.0 if mode.loses_work else known.durable_every_s / (known.durable_every_s + mode.saves * known.copy_s)
    steady = (1.0 - known.session_s / known.step_s * mode.session) * hourly
    assert goodput(mode, 1000, given=known) == pytest.approx(steady)
    seldom = replace(known, failures_per_node_s=1e-18)
    assert goodput(mode, 1000, given=seldom) == pytest.approx(steady, abs=1e-5)


def test_the_interval_is_the_one_that_loses_least() -> None:
    """None twice or half as long does better, it is what a session chooses itself, and it begins as Young's does."""
    for cost_s, mean_s in ((1.0, 3000.0), (39.0, 2300.0), (39.0, 230.0)):
        best_s = optimum_s(cost_s, mean_s)
        best = with_saves(best_s, cost_s, 10.0, mean_s)
        assert all(with_saves(best_s * factor, cost_s, 10.0, mean_s) <= best for factor in (0.5, 0.8, 1.25, 2.0))
    assert optimum_s(2.0, 21_600.0) == pytest.approx(best_interval_s(Experience(2.0)))
    assert optimum_s(1e-3, 1e6) == pytest.approx(math.sqrt(2.0 * 1e-3 * 1e6), rel=1e-3)


def test_saving_ever_more_often_for_nothing_loses_no_work() -> None:
    """Daly's equation then comes to the time that standing still leaves; of short stalls that is 1 - R / M."""
    assert with_saves(1e-6, 0.0, 10.0, 200.0) == pytest.approx(without_loss(10.0, 200.0))
    assert without_loss(1.0, 1e4) == pytest.approx(1.0 - 1e-4, abs=1e-7)


@MODE
def test_more_failures_and_more_nodes_never_help(mode: Mode) -> None:
    """And all of it stays between 0 and 1."""
    by_rate = [goodput(mode, 2000, rate) for rate in (0.0, 0.1, 1.0, 3.0, 10.0)]
    by_size = [goodput(mode, nodes) for nodes in (8, 100, 2000, 10_000)]
    for found in (by_rate, by_size):
        assert found == sorted(found, reverse=True)
        assert all(0.0 < value < 1.0 or value == pytest.approx(1.0) for value in found)


def test_llama_s_own_rate_and_size_come_out_as_it_says() -> None:
    """Checkpoints and restarts on 16,384 GPUs: more than 90 % of effective training time (arXiv:2407.21783, 3.3.4)."""
    assert 0.88 < goodput(MODES["c10d"], 2048) < 0.95


def test_what_the_report_recorded_adds_up_to_its_goodput() -> None:
    """Within the limit, but for ranks that share cores in a report without their step in the storm."""
    storms = recorded(REPORT.read_text(encoding="utf-8"))
    assert set(storms) == set(MODES)
    for name, storm in storms.items():
        if storm.slower is not None or name != "in_place_sharded":
            assert storm.predicted(MODES[name]) == pytest.approx(storm.goodput, abs=ERROR_LIMIT), name


def test_a_step_that_was_slower_in_the_storm_is_read_and_counted(tmp_path: Path) -> None:
    """Twice the step halves what is predicted; without a storm nothing is written."""
    text = REPORT.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| step undisturbed, ms |"))
    twice = " | ".join(f"{2 * float(cell):g}" for cell in row.split("|")[2:-1])
    told = "\n".join(line for line in text.splitlines() if not line.startswith("| step in the storm"))
    storm, mode = recorded(told)["in_place"], MODES["in_place"]
    slow = recorded(told.replace(row, f"{row}\n| step in the storm, ms | {twice} |"))["in_place"]
    assert slow.predicted(mode) == pytest.approx(storm.predicted(mode) / 2.0)
    (tmp_path / "report.md").write_text("# Report\n\n## Recovery\n\nnone\n")
    assert not write(tmp_path)


def test_the_report_s_section_is_what_the_model_says() -> None:
    """Not changed by hand; putting it there again changes nothing."""
    text = REPORT.read_text(encoding="utf-8")
    assert with_section(text, HEADING, section(recorded(text))) == text
    assert text.index("## Goodput\n") < text.index(HEADING) < text.index("## Recovery")
