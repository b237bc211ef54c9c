"""What is known of a local run, which incidents are shown, and how: line by line, or redrawn in place."""

from __future__ import annotations

import io

from rich.console import Console

from elastic_trainer.drills.display import (
    SETTLE_S,
    IncidentKind,
    LiveDisplay,
    NodePhase,
    Picture,
    PlainDisplay,
    ShownIncident,
    display,
    progress_line,
    readable,
    render,
)
from elastic_trainer.drills.faults import FaultKind
from elastic_trainer.local.ledger import Line, LineKind
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState, RunResult
from tests.support.story import committed, opened, struck


def document(number: int, state: RoundState, reason: str = "", result: RunResult | None = None) -> RoundDocument:
    members = tuple(
        RoundMember(node=f"n{i}", create_revision=1, life=1, first_rank=i, local_world_size=1) for i in range(2)
    )
    return RoundDocument(number=number, nonce="x", state=state, members=members, reason=reason, result=result)


def texts(incidents: list[ShownIncident]) -> list[str]:
    return [incident.text for incident in incidents]


def started() -> Picture:
    picture = Picture("local-1", started_at=100.0)
    for name in ("n0", "n1"):
        picture.node_started(name, 100.0)
    return picture


def test_a_round_is_shown_once_with_where_it_begins() -> None:
    """However many ranks open it; one that nobody opened in the ledger, by its first step. Late lines of an old round
    do not turn the picture back."""
    picture = started()
    first = Line(event=LineKind.OPENED, t=101.0, node="n0", world=2, round=1, step=20, resumed_from="step-000000020")
    assert texts(picture.observe([first, opened(1, 101.1, step=20, rank=1, node="n1")])) == [
        "round 1 trains with 2 ranks from step 20 of step-000000020"
    ]
    assert picture.observe([committed(21, 1, 102.0, world=2)]) == []
    assert (picture.step, picture.round, picture.first) == (21, 1, "n0")
    told = picture.observe([committed(22, 2, 102.0, loss=0.5), committed(26, 1, 102.1, loss=7.0, node="n1")])
    assert texts(told) == ["round 2 trains with 1 rank from step 21"]
    assert (picture.round, picture.loss, picture.step) == (2, 0.5, 26)


def test_fault_and_recovery_are_shown_with_what_they_cost() -> None:
    """The recovery names seconds, step, round and what was repeated."""
    picture = started()
    picture.observe([committed(step, 1, 100.0 + step, world=2) for step in (1, 2, 3)])
    told = texts(picture.fault(struck(FaultKind.KILL_WORKER, t=103.5, step=3)))
    assert told == ["worker 0 of n1 killed (pid 4711), at step 3"]
    assert picture.nodes["n1"].phase is NodePhase.REGROUPING
    told = texts(picture.observe([committed(3, 2, 104.0, world=2)]))
    assert told[-1] == "recovered 0.50 s after kill-worker of n1: step 3 in round 2 with 2 ranks, 1 step repeated"


def test_the_job_can_lose_a_node_while_enough_train_or_nobody_is_away() -> None:
    """A killed node is not waited for, nor a spare, nor anybody where the job takes no more. Lines that a killed worker
    had written come late: it does not train before a later round."""
    picture = started()
    picture.node_started("n2", 100.0)
    picture.node_started("spare", 100.0)
    names = ("n0", "n1", "n2")
    picture.observe([committed(1, 1, 101.0, rank=rank, world=3, node=name) for rank, name in enumerate(names)])
    assert (picture.training, picture.can_lose_one(3, 4)) == (["n0", "n1", "n2"], True)
    picture.fault(struck(FaultKind.KILL_WORKER, node="n2", t=102.0))
    picture.observe([committed(2, 1, 101.9, rank=2, world=3, node="n2")])
    assert picture.training == ["n0", "n1"]
    assert [picture.can_lose_one(*limits) for limits in ((1, 4), (2, 4), (2, 2))] == [True, False, True]
    picture.observe([committed(2, 3, 103.0, rank=2, world=3, node="n2")])
    assert picture.can_lose_one(3, 4)
    picture.fault(struck(FaultKind.KILL_NODE, node="n2", t=104.0))
    assert (picture.training, picture.can_lose_one(2, 4)) == (["n0", "n1"], True)


def test_a_node_killed_on_purpose_is_not_shown_again_when_it_is_gone() -> None:
    """Its end was shown as a fault; any other end has a line of its own."""
    picture = started()
    picture.fault(struck(FaultKind.KILL_NODE, node="n1", t=101.0))
    assert picture.node_ended("n1", -9, 101.0) == []
    assert picture.nodes["n1"].phase is NodePhase.KILLED
    assert texts(picture.node_ended("n0", 78, 102.0)) == ["node n0 exited with 78"]
    assert picture.nodes["n0"].phase is NodePhase.FAILED


def test_changes_of_the_round_document_are_shown_with_their_reason_once() -> None:
    """Rewriting a document without a change of state is silent."""
    picture = started()
    assert texts(picture.document(document(1, RoundState.ACTIVE), 101.0)) == ["round 1 formed of n0 n1 (2 ranks)"]
    assert picture.document(document(1, RoundState.ACTIVE), 102.0) == []
    assert texts(picture.document(document(1, RoundState.BROKEN, "node n1 left"), 103.0)) == [
        "round 1 broken: node n1 left"
    ]
    closed = document(1, RoundState.CLOSED, "all done", RunResult.SUCCEEDED)
    assert texts(picture.document(closed, 104.0)) == ["run closed, succeeded: all done"]


def test_nodes_of_a_broken_round_regroup_until_they_train_in_a_later_one() -> None:
    """Late lines of the broken round change nothing, nor does a document that comes after its round's first lines."""
    picture = started()
    picture.observe([committed(7, 1, 101.0, world=2)])
    picture.document(document(1, RoundState.ACTIVE), 101.0)
    phases = [picture.nodes["n0"].phase]
    picture.document(document(1, RoundState.BROKEN), 102.0)
    picture.observe([committed(8, 1, 102.1, world=2)])
    phases.append(picture.nodes["n0"].phase)
    picture.observe([committed(8, 2, 103.0, world=2)])
    picture.document(document(2, RoundState.ACTIVE), 103.1)
    phases.append(picture.nodes["n0"].phase)
    assert phases == [NodePhase.TRAINING, NodePhase.REGROUPING, NodePhase.TRAINING]


def test_log_lines_and_metrics_are_shown_as_people_read_them() -> None:
    """Structured ones as event and values, anything else as it is; all metrics of one step on one line."""
    assert readable('{"round": 3, "step": 20, "event": "checkpoint.committed", "level": "info"}') == (
        "checkpoint.committed step=20"
    )
    assert [readable(line) for line in ('{"torn": ', "epoch 3 done")] == ['{"torn": ', "epoch 3 done"]
    values = {"accuracy": 0.98765, "loss": 0.5}
    lines = [Line(event=LineKind.METRIC, t=101.0, step=40, epoch=2, name=k, value=v) for k, v in values.items()]
    assert texts(started().observe(lines)) == ["epoch 2, step 40: accuracy 0.9877, loss 0.5"]


def test_progress_shows_what_the_round_document_knows_and_the_ledger_does_not() -> None:
    """A broken round, and the next one that has been formed and has not trained yet."""
    picture = started()
    assert progress_line(picture) == "no step yet (2 starting)"
    picture.observe([committed(7, 1, 101.0, world=2)])
    picture.document(document(1, RoundState.ACTIVE), 101.0)
    assert progress_line(picture) == "step 7, epoch 0, round 1, 2 ranks"
    picture.document(document(1, RoundState.BROKEN), 102.0)
    assert progress_line(picture) == "step 7, epoch 0, round 1 (broken), 2 ranks"
    picture.document(document(2, RoundState.ACTIVE), 103.0)
    assert progress_line(picture) == "step 7, epoch 0, round 1 (round 2 is starting), 2 ranks"


def test_without_a_terminal_each_incident_is_a_line_and_progress_comes_every_few_seconds() -> None:
    """Nothing is redrawn, and nothing is printed while nothing happens."""
    output = io.StringIO()
    picture, shown = started(), display(Console(file=output, width=40))
    assert isinstance(shown, PlainDisplay)
    shown.update(picture, picture.incidents, 100.0)
    shown.update(picture, picture.observe([committed(7, 1, 101.25, loss=0.25, epoch=1)]), 101.3)
    shown.update(picture, [], 104.9)
    shown.update(picture, [], 105.1)
    shown.close()
    assert output.getvalue().splitlines() == [
        "[   0.00 s] node n0 started",
        "[   0.00 s] node n1 started",
        "[   1.25 s] round 1 trains with 1 rank from step 6",
        "[   5.10 s] step 7, epoch 1, loss 0.2500, round 1, 1 rank",
    ]


def test_the_live_view_shows_every_node_and_the_timeline() -> None:
    """State, round, rank, step, loss and last line of each node; text of logs is never taken for markup."""
    picture = started()
    picture.observe([committed(7, 1, 101.0, loss=0.25), committed(7, 1, 101.0, rank=1, node="n1", world=2)])
    picture.node_said("n0", "[bold]epoch 0[/] done")
    picture.fault(struck(FaultKind.KILL_NODE, node="n1", t=102.0, step=7))
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(render(picture, 103.0))
    shown = console.export_text()
    for part in ("n0", "training", "killed", "0.2500", "[bold]epoch 0[/] done", "node n1 killed"):
        assert part in shown


def test_on_a_terminal_the_view_is_redrawn_and_the_cursor_given_back() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, height=30)
    shown = display(console)
    assert isinstance(shown, LiveDisplay)
    shown.update(started(), [], 100.0)
    shown.close()
    assert "\x1b[?25l" in output.getvalue()
    assert output.getvalue().rstrip().endswith("\x1b[?25h")


def test_lines_come_in_the_order_of_their_times() -> None:
    """Whichever source tells first: a line waits a moment for those of before, and none is lost at the end."""
    out, picture = io.StringIO(), Picture("r", 0.0)
    shown = PlainDisplay(Console(file=out, width=80))
    for now, t, text in ((1.0, 1.0, "round 1 trains"), (1.1, 0.9, "round 1 formed"), (9.0, 8.9, "done")):
        shown.update(picture, [ShownIncident(t, IncidentKind.ROUND, text)], now)
        assert (text in out.getvalue()) == (now - t >= SETTLE_S)
    shown.close()
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["round 1 formed", "round 1 trains", "done", "no step yet (no node)"]


def test_the_newest_lines_are_whole_on_a_terminal_of_80_columns() -> None:
    """Older ones go: a line that is cut, or one below the screen, may be the one that matters."""
    out, picture = io.StringIO(), Picture("local-1234abcd", 0.0)
    why = "its workers failed: worker 0 (rank 1) ended with exit code 1: ValueError: there are 1000 classes"
    picture.incidents = [ShownIncident(float(at), IncidentKind.ROUND, f"round {at} broken: {why}") for at in range(20)]
    console = Console(file=out, width=80, height=24, force_terminal=True, no_color=True)
    console.print(render(picture, 20.0, *console.size))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24
    assert " ".join(" ".join(lines).split()).endswith(f"round 19 broken: {why}")
