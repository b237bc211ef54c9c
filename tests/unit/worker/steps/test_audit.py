"""Who repeats whose pass, and who is wrong where results differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.audit import (
    AuditFinding,
    AuditVerdict,
    PassDigests,
    PassRecorder,
    Trial,
    together,
    trials,
    verdict,
)
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import model

A, B, C = (PassDigests(each, each) for each in (1, 2, 3))


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize(("count", "size"), [(3, 1), (4, 2), (7, 8)])
def test_checker_and_judge_are_on_two_other_nodes_and_all_work_equally(count: int, size: int, turn: int) -> None:
    nodes = [f"n{rank // size}" for rank in range(count * size)]
    found = trials(nodes, turn)
    assert [each.rank for each in found] == list(range(count * size))
    assert all(
        each.judge is not None and len({nodes[each.rank], nodes[each.checker], nodes[each.judge]}) == 3
        for each in found
    )
    assert set(Counter(each.checker for each in found).values()) == {1}


def test_each_node_checks_each_other_in_turn_and_few_nodes_do_with_other_ranks() -> None:
    """Two nodes of two have a third rank; two ranks have none; ranks of one node check each other."""
    four = ["a", "b", "c", "d"]
    assert {each.checker for turn in range(3) for each in trials(four, turn) if each.rank == 0} == {1, 2, 3}
    assert trials(["a", "a", "b", "b"], 0)[0] == Trial(0, 2, 3)
    assert trials(["a", "b"], 5) == [Trial(0, 1, None), Trial(1, 0, None)]
    assert trials(["a", "a", "a"], 0)[2] == Trial(2, 0, 1)
    assert trials(["a"], 0) == []
    assert trials(["a", "b", "b", "b"], 0)[3] == Trial(3, 0, 2)


@pytest.mark.parametrize(
    ("judge", "again", "third", "finding", "ranks"),
    [
        (2, A, A, AuditFinding.WRONG, (1,)),
        (2, A, B, AuditFinding.WRONG, (0,)),  # it errs each time
        (2, B, B, AuditFinding.WRONG, (0,)),
        (2, None, B, AuditFinding.WRONG, (0,)),
        (2, A, C, AuditFinding.UNREPEATABLE, ()),
        (2, A, None, AuditFinding.UNREPEATABLE, ()),
        (None, B, B, AuditFinding.WRONG, (0,)),
        (None, A, A, AuditFinding.WRONG, (1,)),
        (None, A, B, AuditFinding.ONE_OF_TWO, (0, 1)),
        (None, C, B, AuditFinding.ONE_OF_TWO, (0, 1)),
    ],
)
def test_most_votes_decide(
    judge: int | None,
    again: PassDigests | None,
    third: PassDigests | None,
    finding: AuditFinding,
    ranks: tuple[int, ...],
) -> None:
    """The pass of rank 0 gave A, and that of its checker, rank 1, B."""
    found = verdict(Trial(0, 1, judge), A, B, again, third)
    assert (found.finding, found.ranks) == (finding, ranks)


def test_a_wrong_rank_is_named_once_and_explains_what_else_it_took_part_in() -> None:
    wrong, pair, odd = (
        AuditVerdict(AuditFinding.WRONG, (1,), "first"),
        AuditVerdict(AuditFinding.ONE_OF_TWO, (0, 1), ""),
        AuditVerdict(AuditFinding.UNREPEATABLE, (), ""),
    )
    assert together([wrong, pair, AuditVerdict(AuditFinding.WRONG, (1,), "second"), odd]) == [wrong]
    assert together([pair, pair]) == [pair]
    assert together([odd]) == [odd]


class Tagged(nn.Module):
    """Takes and gives containers, draws random numbers of all kinds, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = model(0.5), nn.Linear(2, 2)

    def forward(self, given: dict[str, Any], *, scale: float) -> dict[str, Any]:
        found = self.inner(given["x"] * scale + torch.rand(()))
        return {"out": (found, found.detach()), "step": 1}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_recorded_pass_is_repeated_by_another_model_to_the_bit_and_leaves_no_trace(autocast: bool) -> None:
    """From packed bytes, with other random numbers and buffers there; inputs are a view of transposed memory."""
    torch.manual_seed(3)
    first, second = Tagged(), Tagged()
    second.load_state_dict(first.state_dict())
    second.inner.get_buffer("1.running_mean").add_(1.0)
    mine, theirs = (PassRecorder(each, each, torch.device("cpu")) for each in (first, second))
    x = torch.randn(4, 17).t()[1:]
    for _ in range(2):  # the second micro-batch is not the recorded one
        if not mine._inputs:
            mine.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = first({"x": x}, scale=0.5)["out"][0]
        out.float().square().mean().backward()
    found = mine.end()
    before = {name: each.clone() for name, each in second.state_dict().items()}
    generator = torch.get_rng_state()
    assert found is not None
    assert theirs.repeat(mine.packed(), mine.packed_buffers()) == found
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(each, before[name]) for name, each in second.state_dict().items())
    assert all(each.grad is None for each in second.parameters())
    with torch.no_grad():
        second.inner.get_parameter("0.weight").add_(1.0)
    assert theirs.repeat(mine.packed(), mine.packed_buffers()) != found


def test_what_cannot_be_compared_is_said() -> None:
    module = nn.Linear(4, 1)
    recorder = PassRecorder(module, module, torch.device("cpu"))

    def problem(*parts: torch.Tensor, passes: int = 1) -> str:
        recorder.begin()
        loss = sum((module(each).sum() for each in parts), torch.zeros(()))
        for _ in range(passes if parts else 0):
            loss.backward(retain_graph=True)
        assert recorder.end() is None
        return recorder.problem

    x = torch.ones(3, 4)
    assert "several times" in problem(x, x)
    assert "several backward passes" in problem(x, passes=2)
    assert "not called" in problem()


@pytest.mark.parametrize("more", [{"sync_batchnorm": True}, {"reduction": "local_sgd", "sync_every": 2}])
def test_what_does_not_go_with_audits_is_refused(more: dict[str, Any]) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    checks = CheckOptions(audit_every=5)
    with (
        pytest.raises(ConfigError, match="audit_every does not go with"),
        Session(device="cpu", checks=checks) as session,
    ):
        session.wrap(module, optimizer=optimizer, **more)


def test_findings_are_shown_on_the_page_with_their_numbers() -> None:
    tracker = HeartbeatReporter()
    for step in range(10):
        tracker.accused(step, (2,), ["c"], "it differs")
    shown = tracker._notes["audits"]
    assert [each["number"] for each in shown] == list(range(3, 11))
    assert shown[-1] == {"number": 10, "step": 9, "ranks": [2], "nodes": ["c"], "reason": "it differs"}
