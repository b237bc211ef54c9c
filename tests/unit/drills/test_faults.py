"""Faults: how they are written, which are refused, when they are due and whom they strike."""

from __future__ import annotations

import pytest

from elastic_trainer.drills.faults import Fault, FaultKind, check, due, parse_fault, victim
from elastic_trainer.errors import ConfigError

NODE, WORKER, JOIN = FaultKind.KILL_NODE, FaultKind.KILL_WORKER, FaultKind.JOIN


def test_a_fault_is_read_as_it_is_written_or_refused_with_its_text() -> None:
    assert parse_fault(NODE, "60") == Fault(NODE, 60)
    assert parse_fault(NODE, "60:n1") == Fault(NODE, 60, "n1")
    assert parse_fault(WORKER, "7:n2:1") == Fault(WORKER, 7, "n2", 1)
    assert parse_fault(JOIN, "12") == Fault(JOIN, 12)
    wrong = {NODE: ("", "soon", "0", "-3", "5:", "5:n1:0", "²"), WORKER: ("5:n1:x", "5:n1:0:0"), JOIN: ("5:n3",)}
    for kind, texts in wrong.items():
        for text in texts:
            with pytest.raises(ConfigError, match=rf"--{kind}-at"):
                parse_fault(kind, text)


def test_faults_that_the_job_lives_through_are_accepted() -> None:
    """A worker's death costs no node; a node that joins first makes room for a death."""
    check([Fault(WORKER, 5), Fault(WORKER, 6)], start=2, min_nodes=2, workers=1)
    check([Fault(JOIN, 5), Fault(NODE, 9, "n2")], start=2, min_nodes=2, workers=1)


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ([Fault(NODE, 5)], "leaves 1 of at least 2 nodes"),
        ([Fault(NODE, 5), Fault(JOIN, 6)], "leaves 1 of at least 2 nodes"),
        ([Fault(WORKER, 5, "n7")], "there is no node n7"),
        ([Fault(JOIN, 9), Fault(WORKER, 5, "n2")], "there is no node n2 by then"),
        ([Fault(JOIN, 1), Fault(NODE, 2, "n1"), Fault(WORKER, 3, "n1")], "n1 has been killed before"),
        ([Fault(WORKER, 5, "n1", 3)], "there is no local rank 3"),
    ],
)
def test_faults_that_could_never_happen_are_refused_before_the_run(faults: list[Fault], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(faults, start=2, min_nodes=2, workers=2)


def test_faults_are_due_when_their_step_is_committed_earliest_first() -> None:
    faults = [Fault(NODE, 9), Fault(WORKER, 3), Fault(JOIN, 10)]
    assert due(faults, 2) == ()
    assert due(faults, 9) == (faults[1], faults[0])


@pytest.mark.parametrize(
    ("named", "running", "training", "first", "found"),
    [
        (None, "n0 n1 n2", "n0 n1 n2", "n0", "n2"), (None, "n0 n1 n2", "n0 n1 n2", "n2", "n1"),
        (None, "n1", "n1", "n1", "n1"), (None, "", "", "n0", None), ("n0", "n0 n1", "n0", "n0", "n0"),
        ("n2", "n0 n1", "n0 n1", "n0", None), (None, "n0 n1 n2", "n0 n1", "n0", "n1"),
        (None, "n0 n1 n2", "n0", "n0", "n0"), (None, "n0 n1 n2", "", "n0", "n2"),
        ("n2", "n0 n1 n2", "n0 n1", "n0", "n2"),
    ],
)  # fmt: skip
def test_the_victim_is_the_last_node_that_trains_and_does_not_host_rank_0(
    named: str | None, running: str, training: str, first: str, found: str | None
) -> None:
    """A named node is struck only while it runs; one that does not train only if none does, or it is named."""
    assert victim(Fault(NODE, 1, named), running.split(), training.split(), first) == found
