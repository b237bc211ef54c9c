"""Who is fit to train with whom."""

from __future__ import annotations

import pytest

from elastic_trainer.preflight.finding import Finding, FitLimits, Status, bad, sentence
from elastic_trainer.preflight.judge import NodeReport, Published, agreed, judge, kind_of

LIMITS = FitLimits()
SPEEDS = {"matmul.cpu.fp32": 100.0, "memory.cpu": 20.0, "disk.write": 500.0}
VERSIONS = {"torch": "2.13.0+cpu", "cuda": "none", "python": "3.11.7"}


def report(
    node: str,
    speeds: dict[str, float] | None = None,
    *,
    created: int = 10,
    fit: bool = True,
    versions: dict[str, str] | None = None,
) -> Published:
    """A node's report, with the usual speeds and versions unless others are given."""
    values, named = SPEEDS | (speeds or {}), VERSIONS | (versions or {})
    return Published(NodeReport(node=node, wall=0.0, fit=fit, values=values, versions=named), created, created)


def status(found: list[Finding], name: str) -> Status | None:
    return next((finding.status for finding in found if finding.name == name), None)


def fit(mine: Published, others: list[Published], limits: FitLimits = LIMITS) -> bool:
    """Whether ``mine`` may train with the others."""
    return not bad(judge(mine, others, limits))


def test_equal_nodes_are_fit() -> None:
    verdict = judge(report("a"), [report("b"), report("c")], LIMITS)
    assert {finding.name for finding in verdict} == {"peers.matmul.cpu.fp32", "peers.memory.cpu", "peers.disk.write"}


@pytest.mark.parametrize("value", ["matmul.cpu.fp32", "memory.cpu"])
def test_a_node_below_half_of_the_median_is_unfit(value: str) -> None:
    """The reason names the value, the median and the ratio; at just above half it is fit."""
    others = [report("b", {value: 90.0}), report("c", {value: 110.0})]
    slow = judge(report("a", {value: 49.0}), others, LIMITS)
    assert bad(slow)
    assert value in sentence(slow)
    assert "is 0.49 of the median of 2 other nodes, 100" in sentence(slow)
    assert fit(report("a", {value: 51.0}), others)


def test_the_ratio_can_be_set() -> None:
    """A cluster of unequal machines may allow more."""
    mine, others = report("a", {"memory.cpu": 5.0}), [report("b"), report("c")]
    assert not fit(mine, others)
    assert fit(mine, others, FitLimits(ratio=0.2))


def test_a_slow_disk_is_only_a_warning() -> None:
    """It delays checkpoints, not the steps of the others."""
    verdict = judge(report("a", {"disk.write": 10.0}), [report("b"), report("c")], LIMITS)
    assert not bad(verdict)
    assert status(verdict, "peers.disk.write") is Status.WARN


def test_one_other_node_is_no_measure() -> None:
    """Which of two is the slow one, or the unusual one, is not known."""
    verdict = judge(report("a", {"memory.cpu": 1.0}), [report("b")], LIMITS)
    assert not bad(verdict)
    assert status(verdict, "peers.speed") is Status.SKIPPED


def test_a_fast_node_finds_nothing_wrong_with_itself_beside_a_slow_one() -> None:
    nodes = [report("a"), report("b"), report("c", {"matmul.cpu.fp32": 30.0})]
    assert [fit(node, nodes) for node in nodes] == [True, True, False]


def test_unfit_nodes_are_no_measure() -> None:
    """Two nodes that were refused for being slow do not make a third one look normal."""
    slow = [report(name, {"memory.cpu": 4.0}, fit=False) for name in ("x", "y", "z")]
    assert not fit(report("a", {"memory.cpu": 4.0}), [*slow, report("b"), report("c")])


def test_its_own_report_is_not_one_of_the_others() -> None:
    mine = report("a", {"memory.cpu": 1.0})
    assert status(judge(mine, [mine, report("b")], LIMITS), "peers.speed") is Status.SKIPPED


def test_devices_are_compared_with_devices_of_their_kind() -> None:
    """One slow device of many is found, against other nodes and against its own node's."""
    speeds = {f"matmul.cuda{index}.bf16": 700.0 for index in range(4)}
    mine = report("a", {**speeds, "matmul.cuda2.bf16": 200.0})
    for others in ([report("b", speeds), report("c", speeds)], []):
        verdict = judge(mine, others, LIMITS)
        assert [each.name for each in verdict if each.status is Status.BAD] == ["peers.matmul.cuda2.bf16"]
    assert kind_of("matmul.cuda12.bf16") == "matmul.cuda.bf16"


# ---- versions


def test_another_torch_is_unfit_and_another_patch_is_not() -> None:
    """Only major and minor numbers of torch count."""
    others = [report("b"), report("c")]
    other = judge(report("a", versions={"torch": "2.12.1"}), others, LIMITS)
    assert bad(other)
    assert "torch 2.12 here, 2.13 on 2 of 2 other nodes" in sentence(other)
    assert fit(report("a", versions={"torch": "2.13.1+cu126"}), others)


@pytest.mark.parametrize(
    ("what", "expected"), [("cuda", Status.BAD), ("nccl", Status.BAD), ("driver", Status.WARN), ("python", Status.WARN)]
)
def test_what_must_agree_and_what_should(what: str, expected: Status) -> None:
    """CUDA and NCCL talk to each other over the network; a driver or Python may differ."""
    here, there = {what: "1.2.3"}, {what: "1.2.4"}
    others = [report("b", versions=there), report("c", versions=there)]
    assert status(judge(report("a", versions=here), others, LIMITS), f"peers.{what}") is expected


def test_of_two_that_differ_the_first_is_right() -> None:
    """Else both would be refused, or neither."""
    first, second = report("a", created=5), report("b", created=7, versions={"torch": "2.12.0"})
    assert fit(first, [second])
    assert not fit(second, [first])


def test_most_nodes_are_right_whoever_came_first() -> None:
    """A first node with an old image does not keep all others out."""
    old, new = report("a", created=1, versions={"torch": "2.12.0"}), [report("b", created=2), report("c", created=3)]
    assert not fit(old, new)
    assert fit(new[0], [old, new[1]])
    assert agreed([(1, "x"), (2, "y"), (3, "y"), (4, "x")]) == "x"


def test_a_version_that_others_do_not_have_is_not_compared() -> None:
    """A node without a GPU has no NCCL."""
    mine: Published = report("a", versions={"nccl": "2.27.3"})
    assert fit(mine, [report("b"), report("c")])
