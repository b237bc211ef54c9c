"""The summary: its arithmetic, its verdict, its two forms."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from elastic_trainer.drills import report
from elastic_trainer.drills.faults import Fault, FaultKind, Injected
from elastic_trainer.drills.report import Ending, Summary, summarize
from elastic_trainer.errors import StorageError
from elastic_trainer.local.ledger import Line, LineKind
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from tests.support.story import committed, struck


def job() -> list[Line]:
    """Two ranks for three steps, a failure, then one rank that repeats the third and ends the epoch of ten samples."""
    lines = []
    for step in (1, 2, 3):
        for rank, node in enumerate(("n0", "n1")):
            samples = [4 * (step - 1) + 2 * rank, 4 * (step - 1) + 2 * rank + 1]
            samples = [sample for sample in samples if sample < 10]
            line = committed(step, 1, step + rank / 10, samples=samples, of=4 if step < 3 else 2, rank=rank, world=2)
            lines.append(line.model_copy(update={"node": node}))
    lines.append(committed(3, 2, 5.0, samples=[8, 9], loss=0.125))
    lines.append(Line(event=LineKind.CHECKPOINT, t=5.1, step=3, name="step-000000003-r2-x", duration_s=0.1))
    lines += [
        Line(event=LineKind.METRIC, t=t, step=3, name="accuracy", value=value) for t, value in ((4, 0.5), (6, 0.75))
    ]
    return lines


def told(
    lines: list[Line] | None = None,
    injected: tuple[Injected, ...] = (),
    documents: dict[int, RoundDocument] | None = None,
    **ending: object,
) -> Summary:
    codes = {"n0": 0, "n1": -9}
    end = Ending(**{"exit_codes": codes, **ending})  # type: ignore[arg-type]
    return summarize(
        "local-1", ("train.py", "x"), 7.0, job() if lines is None else lines, documents or {}, injected, end
    )


def test_a_run_that_lost_a_node_and_finished_is_a_success() -> None:
    """Rounds, recovery, repeated steps, data, last metric and exit status come from the ledger."""
    summary = told(injected=(struck(t=3.5, step=3),))
    assert [(r.number, r.world, r.nodes, r.first_step, r.last_step) for r in summary.rounds] == [
        (1, 2, ("n0", "n1"), 1, 3),
        (2, 1, ("n0",), 3, 3),
    ]
    fault = summary.faults[0]
    assert fault.recovery is not None
    assert fault.recovery.recovery_s == pytest.approx(1.5)
    assert fault.recovery.steps_repeated == 1
    assert (summary.audit.exact, summary.audit.steps, summary.audit.steps_rolled_back) == (True, 3, 1)
    assert (summary.metrics, summary.loss, summary.checkpoints) == ({"accuracy": 0.75}, 0.125, 1)
    assert [node.why for node in summary.nodes] == ["exited with 0", "killed on purpose at step 3"]
    assert (summary.verdict.exit_code, summary.verdict.reason) == (0, "1 node finished the job")


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ({"exit_codes": {"n0": 0, "n1": 0}}, 0, "2 nodes finished the job"),
        ({}, 1, "node n1 ended by signal 9"),
        ({"exit_codes": {"n0": 78, "n1": 78}}, 78, "nodes n0 and n1 exited with 78"),
        (
            {"exit_codes": {"n0": 1, "n1": 78}, "errors": {"n0": "ValueError: no"}},
            1,
            "node n0 exited with 1: ValueError: no; node n1 exited with 78",
        ),
        ({"exit_codes": {"n0": None}}, 1, "node n0 did not end"),
        ({"exit_codes": {"n0": 143, "n1": 143}}, 143, "the run was stopped as it was asked to"),
        ({"signal": 2}, 130, "stopped by SIGINT"),
        ({"exit_codes": {"n0": 143}, "signal": 15}, 143, "stopped by SIGTERM"),
        ({"timed_out": True}, 1, "the job did not end within --timeout"),
        (
            {"exit_codes": {"n0": 0}, "unmet": (Fault(FaultKind.JOIN, 900),)},
            1,
            "join at step 900 was never carried out",
        ),
        (
            {"exit_codes": {"n0": 0}, "unmet": (Fault(FaultKind.KILL_NODE, 2), Fault(FaultKind.KILL_NODE, 900))},
            1,
            "kill-node at step 2 was never carried out: too few nodes trained, until the job was over;"
            " kill-node at step 900 was never carried out",
        ),
    ],
)
def test_the_exit_status_says_what_became_of_the_job(ending: dict[str, object], code: int, reason: str) -> None:
    """0 only if all that was not killed on purpose exited 0 and all that was asked for happened."""
    verdict = told(**ending).verdict  # type: ignore[arg-type]
    assert (verdict.exit_code, verdict.reason) == (code, reason)


def test_without_survivors_or_steps_the_reason_is_another() -> None:
    """All nodes killed on purpose are no success; a script without steps is not called too short."""
    all_struck = told(injected=(struck(node="n0"), struck(node="n1"))).verdict
    assert (all_struck.exit_code, all_struck.reason) == (1, "no node survived")
    no_steps = told([], exit_codes={"n0": 0}, unmet=(Fault(FaultKind.KILL_NODE, 5),)).verdict
    reason = "kill-node at step 5 never came: train.py opens no Session, so it has no steps"
    assert (no_steps.exit_code, no_steps.reason) == (1, reason)
    over = Line(event=LineKind.OPENED, t=1.0, step=125)
    finished = told([over], exit_codes={"n0": 0}, unmet=(Fault(FaultKind.KILL_NODE, 20),)).verdict
    assert finished.reason == (
        "kill-node at step 20 never came: train.py made no step after step 125; for a new run give it another"
        " checkpoint directory"
    )


def test_rounds_that_committed_nothing_are_listed_from_their_documents() -> None:
    """A round that broke while forming explains a long recovery."""
    member = RoundMember(node="n0", create_revision=1, life=1, first_rank=0, local_world_size=3)
    document = RoundDocument(number=3, nonce="x", state=RoundState.BROKEN, members=(member,), reason="node n1 left")
    last = told(documents={3: document}).rounds[-1]
    assert (last.number, last.world, last.nodes, last.first_step) == (3, 3, ("n0",), None)
    assert last.reason == "node n1 left"


def test_the_summary_is_written_whole_as_json(tmp_path: Path) -> None:
    """A program finds the numbers that the tables show."""
    report.write(told(injected=(struck(t=3.5, step=3),)), tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["verdict"] == {"exit_code": 0, "reason": "1 node finished the job"}
    assert read["faults"][0]["recovery"]["recovery_s"] == pytest.approx(1.5)
    assert (read["audit"]["exact"], read["audit"]["repeated"], read["audit"]["missing"]) == (True, 0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(StorageError, match="cannot write"):
        report.write(told(), tmp_path / "gone" / "summary.json")


def test_the_tables_say_what_the_user_wants_to_know() -> None:
    """Whether data was exact, what the fault cost, the metric, the exit status."""
    console = Console(file=io.StringIO(), width=120, record=True)
    report.show_summary(told(injected=(struck(t=3.5, step=3),)), console)
    shown = console.export_text()
    for part in (
        *("1.50 s", "step 3 of round 2", "exact: each of 10 samples exactly once in 1 epoch"),
        *("3 committed, 1 rolled back and repeated; 1 checkpoint", "training loss 0.125, accuracy 0.75"),
        "0 after 7.0 s: 1 node finished the job",
    ):
        assert part in shown
    lines = [*job(), committed(4, 2, 6.0, samples=[8])]
    assert report.facts(told(lines))["data"] == "NOT exact: epoch 0: 1 repeated"
