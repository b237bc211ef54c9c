"""Who meets whom, and which node slow pairs share."""

from __future__ import annotations

from itertools import combinations

import pytest

from elastic_trainer.preflight.collective import devices
from elastic_trainer.preflight.finding import Finding, FitLimits, Status
from elastic_trainer.preflight.judge import (
    MOST_TURNS,
    Measured,
    Pair,
    judge_pairs,
    slow_nodes,
    slow_pairs,
    together_finding,
    turns,
)

LIMITS = FitLimits()
SIZE = 16 << 20


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 15, 32])
def test_everybody_meets_everybody_once(count: int) -> None:
    drawn = turns(count)
    for turn in drawn:
        busy = [rank for pair in turn for rank in pair]
        assert len(busy) == len(set(busy))
    assert sorted(pair for turn in drawn for pair in turn) == list(combinations(range(count), 2))


def test_many_nodes_meet_some() -> None:
    """A thousand nodes take no longer than 32."""
    drawn = turns(1000)
    pairs = [pair for turn in drawn for pair in turn]
    assert len(drawn) == MOST_TURNS
    assert len(pairs) == len(set(pairs)) == 500 * MOST_TURNS


def measured(rates: dict[Pair, float]) -> dict[Pair, Measured]:
    """Pairs with these rates in MB/s; 0: failed."""
    return {
        pair: Measured({SIZE: SIZE / (rate * 1e6)}) if rate else Measured(error="RuntimeError: timed out")
        for pair, rate in rates.items()
    }


def with_slow(count: int, *slow: int, rate: float = 100.0) -> dict[Pair, Measured]:
    """All pairs are equal, but those of the nodes ``slow``."""
    return measured({pair: rate if set(pair) & set(slow) else 1000.0 for pair in combinations(range(count), 2)})


def said(rank: int, pairs: dict[Pair, Measured], count: int) -> dict[str, list[Finding]]:
    """What node ``rank`` is told, by name."""
    names: dict[str, list[Finding]] = {}
    for finding in judge_pairs([f"n{number}" for number in range(count)], rank, pairs, LIMITS):
        names.setdefault(finding.name, []).append(finding)
    return names


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_equal_pairs_name_nobody(count: int) -> None:
    for rank in range(count):
        found = said(rank, with_slow(count), count)
        assert set(found) == {"allreduce.pairs"}
        assert found["allreduce.pairs"][0].value == pytest.approx(1000.0)


@pytest.mark.parametrize("count", [3, 4, 5, 9])
@pytest.mark.parametrize("slow", [0, 2])
def test_the_node_that_slow_pairs_share_is_named(count: int, slow: int) -> None:
    """By all; only to itself it is bad, to others a warning."""
    for rank in range(count):
        found = said(rank, with_slow(count, slow), count)["allreduce.node"]
        assert len(found) == 1
        assert ("this node" if rank == slow else f"n{slow}") in found[0].text
        assert found[0].status is (Status.BAD if rank == slow else Status.WARN)
        assert found[0].value == pytest.approx(0.1)


def test_of_two_nodes_none_is_named() -> None:
    assert set(said(0, with_slow(2, 1), 2)) == {"allreduce.pairs"}


def test_one_slow_way_names_the_pair_and_no_node() -> None:
    """Both are quick with others."""
    pairs = with_slow(4) | measured({(1, 3): 50.0})
    found = said(0, pairs, 4)
    assert "allreduce.node" not in found
    assert "n1 and n3 are slow together" in found["allreduce.pair"][0].text
    rates = {pair: each.rate for pair, each in pairs.items() if each.rate is not None}
    assert list(slow_nodes(rates, 0.5)) == []
    assert [pair for pair, _, _ in slow_pairs(rates, {}, 0.5)] == [(1, 3)]


def test_a_node_that_reaches_nobody_is_named_once() -> None:
    """With the reason, and the others go on being judged."""
    pairs = with_slow(4) | measured({(0, 2): 0, (1, 2): 0, (2, 3): 0})
    mine, others = said(2, pairs, 4), said(0, pairs, 4)
    assert [(each.status, each.text) for each in mine["allreduce.node"]] == [
        (Status.BAD, "this node reached none of 3: RuntimeError: timed out")
    ]
    assert others["allreduce.node"][0].status is Status.WARN
    assert others["allreduce.pairs"][0].value == pytest.approx(1000.0)
    assert "allreduce.pair" not in others


def test_one_failed_pair_is_bad_for_its_members() -> None:
    """A job of these nodes could not form a group."""
    pairs = with_slow(3) | measured({(0, 1): 0})
    assert [said(rank, pairs, 3)["allreduce.pair"][0].status for rank in range(3)] == [
        Status.BAD,
        Status.BAD,
        Status.WARN,
    ]


def test_the_common_all_reduce_must_work() -> None:
    good = together_finding(Measured({4096: 0.001, 1 << 20: 0.004}), 3)
    assert (good.status, good.text) == (Status.OK, "1 ms for 4 KiB, 4 ms for 1 MiB")
    assert together_finding(Measured(error="x"), 3).status is Status.BAD


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([("x", 1), ("y", 8)], ["cuda:0", "cuda:0"]),
        ([("x", 2), ("x", 2), ("y", 1)], ["cuda:0", "cuda:1", "cuda:0"]),
        ([("x", 1), ("x", 1)], ["cpu", "cpu"]),  # NCCL takes no device twice
        ([("x", 1), ("y", 0)], ["cpu", "cpu"]),
        ([("x", 1), None, ("y", 1)], ["cuda:0", "cuda:0", "cuda:0"]),  # whoever did not come uses none
        ([("x", 0), None], ["cpu", "cpu"]),
    ],
)
def test_devices_are_used_where_everybody_has_one(told: list[tuple[str, int] | None], expected: list[str]) -> None:
    """All use the same kind, and ranks of one host each their own."""
    assert devices(told) == expected
