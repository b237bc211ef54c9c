"""A local run drawn over time."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CANNOT_WRITE
from elastic_trainer.local.ledger import Line, LineKind
from elastic_trainer.local.timeline import Bar, bars

FAULT = {
    "what": "worker 0 of n1 killed (pid 7)",
    "node": "n1",
    "step": 2,
    "t": 103.0,
    "recovery": {"recovery_s": 0.25, "pause_s": 0.2, "round": 2, "step": 3, "steps_repeated": 0, "world": 1},
}
JOIN = {"what": "node n2 started", "node": "n2", "step": 3, "t": 104.0, "recovery": None}


def line(event: LineKind, t: float, node: str, pid: int, round_: int, step: int = 0) -> Line:
    return Line(event=event, t=t, node=node, pid=pid, round=round_, step=step, samples=(step,), global_samples=1)


LINES = [
    line(LineKind.OPENED, 100.0, "n0", 5, 1),
    line(LineKind.OPENED, 100.5, "n1", 7, 1),
    line(LineKind.STEP, 102.0, "n0", 5, 1, 1),
    line(LineKind.STEP, 102.0, "n1", 7, 1, 1),
    line(LineKind.STEP, 103.0, "n0", 5, 1, 2),
    line(LineKind.STEP, 103.25, "n0", 5, 2, 3),
    line(LineKind.STEP, 106.0, "n0", 5, 2, 4),
]


def test_a_process_has_a_bar_until_its_first_step_and_one_for_each_round() -> None:
    """Between two rounds there is a gap; a process that died ends with its last line."""
    assert bars(LINES) == (
        Bar("n0", 5, 0, 0.0, 2.0),
        Bar("n0", 5, 1, 2.0, 3.0),
        Bar("n0", 5, 2, 3.25, 6.0),
        Bar("n1", 7, 0, 0.5, 2.0),
        Bar("n1", 7, 1, 2.0, 2.0),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "n0.jsonl").write_text("".join(each.model_dump_json() + "\n" for each in LINES))
    (tmp_path / "summary.json").write_text(json.dumps({"faults": [FAULT, JOIN]}))
    return tmp_path


def test_the_command_draws_a_local_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture has each node, and each fault with the time until the next step, in words."""
    output = run / "timeline.svg"
    assert main(["plot", str(run), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    ElementTree.parse(output)
    words = output.read_text()
    for expected in ("n0", "n1", "n2", "worker 0 of n1 killed: next step after 0.25 s", "node n2 started", "seconds"):
        assert f"<!-- {expected} -->" in words


def test_of_many_faults_none_is_named_and_one_may_strike_no_node(run: Path) -> None:
    """Their words would lie upon each other; an outage of etcd has no row of its own."""
    faults = [FAULT, {**FAULT, "node": "", "what": "etcd-outage"}] * 5
    (run / "summary.json").write_text(json.dumps({"faults": faults}))
    assert main(["plot", str(run), "--output", str(run / "timeline.svg")]) == 0
    words = (run / "timeline.svg").read_text()
    assert "<!-- n1 -->" in words
    assert "killed" not in words
    assert "etcd-outage" not in words


@pytest.mark.parametrize("broken", ["summary", "ledger"])
def test_a_run_that_cannot_be_read_is_one_sentence(run: Path, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    if broken == "summary":
        (run / "summary.json").write_text("{")
    else:
        (run / "ledger" / "n0.jsonl").write_text("")
    assert main(["plot", str(run)]) == EXIT_CANNOT_WRITE
    said = capsys.readouterr().err
    assert said.count("\n") <= 2
    assert str(run) in said
