"""Findings, and whether a node is fit to train with these others."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.preflight import comparison as coordination
from elastic_trainer.preflight.collective import devices
from elastic_trainer.preflight.comparison import round_trip
from elastic_trainer.preflight.examination import understood
from elastic_trainer.preflight.judge import (
    MOST_TURNS,
    Anchor,
    Finding,
    FitLimits,
    Measured,
    NodeReport,
    Pair,
    Published,
    Status,
    agreed,
    amount,
    bad,
    clock_finding,
    judge,
    judge_pairs,
    kind_of,
    least_offset,
    sentence,
    size_text,
    slow_nodes,
    slow_pairs,
    together_finding,
    turns,
)
from elastic_trainer.settings import Endpoint, StoreSettings
from tests.support.memory_store import ManualClock


def test_only_what_is_bad_speaks_against_a_node() -> None:
    findings = [Finding(str(status), status, f"text {status}") for status in Status]
    assert [finding.name for finding in bad(findings)] == ["bad"]
    assert sentence(findings[1:3]) == "warn: text warn; bad: text bad"


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(20.0, 4.0), (150.0, 15.0)])
def test_an_endpoint_gets_a_tenth_of_the_time(
    timeout_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no less than four seconds; the rest of the time is for what comes after it."""

    def silent(_: StoreSettings, deadline: Deadline, **__: object) -> NoReturn:
        assert deadline.remaining_s() == pytest.approx(limit_s, abs=1e-6)
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(coordination, "connect_checked", silent)
    settings, clock = StoreSettings(endpoints=(Endpoint(host="h", port=1),)), ManualClock()
    found = coordination.endpoints(settings, None, FitLimits(), Deadline.after(timeout_s, clock))
    assert [(each.status, each.text) for each in found] == [(Status.BAD, "no answer")]


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("0, NVIDIA H100 80GB HBM3, 570.1, 0, 0x0000000000000000", Status.OK, "NVIDIA H100 80GB HBM3"),
        ("0, NVIDIA H100, 570.1, 0, 0x0000000000000005", Status.OK, "NVIDIA H100"),  # idle, at its power cap
        ("0, NVIDIA H100, 570.1, 3, 0x0", Status.BAD, "NVIDIA H100: 3 uncorrected memory errors"),
        (
            "0, NVIDIA H100, 570.1, 0, 0x0000000000000048",
            Status.WARN,
            "NVIDIA H100 is throttled: hardware slowdown, too hot (hardware)",
        ),
        ("0, T4, 550.2, [N/A], [N/A]", Status.OK, "T4, memory errors are not counted"),
    ],
)
def test_what_the_driver_says(line: str, status: Status, text: str) -> None:
    """Errors of memory are bad, heat is a warning, an idle device is well."""
    versions: dict[str, str] = {}
    (found,) = understood([line], versions)
    assert (found.name, found.status, found.text) == ("gpu0", status, text)
    assert versions["driver"] == line.split(", ")[2]


def test_an_unknown_answer_of_the_driver_is_skipped() -> None:
    """It proves nothing."""
    assert [finding.status for finding in understood(["No devices were found"], {})] == [Status.SKIPPED]


def test_a_slow_store_is_a_warning() -> None:
    """By the median of its answers."""
    clock = ManualClock()
    for took_s, status in (([0.001] * 4 + [3.0] * 3, Status.OK), ([0.001] * 3 + [0.3] * 4, Status.WARN)):
        left = iter(took_s)
        store: Any = SimpleNamespace(get=lambda *_, left=left: clock.advance(next(left)))
        found = round_trip(store, "key", FitLimits(), Deadline.after(60.0, clock), clock)
        assert (found.status, found.unit) == (status, "ms")
        assert found.value == pytest.approx(1e3 * sorted(took_s)[3])


def test_numbers_are_short() -> None:
    """Three digits, no exponents."""
    assert [amount(value) for value in (0.123456, 1.5, 99.95, 1234567.8)] == ["0.123", "1.5", "100", "1234568"]
    assert [size_text(size) for size in (0, 1023, 1536, 5 << 50)] == ["0 B", "1023 B", "1.5 KiB", "5120 TiB"]


FIRST = Anchor(revision=100, before=1000.0, after=1000.1)
LAST = Anchor(revision=200, before=1010.0, after=1010.1)


@pytest.mark.parametrize(
    ("revision", "wall", "offset"),
    [
        (50, 990.0, 0.0),  # written at some time before: it may be right
        (50, 1003.1, 3.0),  # written before we began, but tells a later time: ahead
        (50, -1e6, 0.0),  # may just be old
        (150, 1005.0, 0.0),  # between
        (150, 1000.05, 0.0),
        (150, 1015.1, 5.0),  # tells a time after the end: ahead
        (150, 995.0, -5.0),  # tells a time before the beginning: behind
        (250, 1020.0, 0.0),  # written after the end
        (250, 1004.0, -6.0),  # after the end, but tells an earlier time: behind
    ],
)
def test_the_least_error_that_is_proved(revision: int, wall: float, offset: float) -> None:
    """Nothing is concluded where a right clock could have told the same."""
    assert least_offset(revision, wall, FIRST, LAST) == pytest.approx(offset)


def test_the_worst_clock_is_a_warning() -> None:
    """Never more: nothing in the protocol relies on clocks."""
    told = {"b": (150, 1005.0), "c": (150, 950.0), "d": (150, 1012.0)}
    found = clock_finding(told, FIRST, LAST, FitLimits())
    assert found.status is Status.WARN
    assert found.text == "the clock of c is at least 50 s behind this node's"

    assert clock_finding({"b": (150, 1010.9)}, FIRST, LAST, FitLimits()).status is Status.OK
    assert clock_finding({}, FIRST, LAST, FitLimits()).status is Status.SKIPPED


LIMITS = FitLimits()
SIZE = 16 << 20


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 15, 32, 1000])
def test_everybody_meets_everybody_once(count: int) -> None:
    """In a turn nobody is in two pairs. A thousand nodes take no longer than 32: each meets some."""
    drawn = turns(count)
    for turn in drawn:
        busy = [rank for pair in turn for rank in pair]
        assert len(busy) == len(set(busy))
    pairs = sorted(pair for turn in drawn for pair in turn)
    if count <= 32:
        assert pairs == list(combinations(range(count), 2))
    assert len(drawn) <= MOST_TURNS
    assert len(pairs) == len(set(pairs)) == count * min(count - 1, MOST_TURNS) // 2


def measured(rates: dict[Pair, float]) -> dict[Pair, Measured]:
    return {
        pair: Measured({SIZE: SIZE / (rate * 1e6)}) if rate else Measured(error="RuntimeError: timed out")
        for pair, rate in rates.items()
    }


def with_slow(count: int, *slow: int) -> dict[Pair, Measured]:
    """All pairs are equal, but those of the nodes ``slow``."""
    return measured({pair: 100.0 if set(pair) & set(slow) else 1000.0 for pair in combinations(range(count), 2)})


def said(rank: int, pairs: dict[Pair, Measured], count: int) -> dict[str, list[Finding]]:
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
    assert set(said(0, with_slow(2, 1), 2)) == {"allreduce.pairs"}


@pytest.mark.parametrize("count", [3, 4, 5, 9])
@pytest.mark.parametrize("slow", [0, 2])
def test_the_node_that_slow_pairs_share_is_named(count: int, slow: int) -> None:
    """By all; only to itself it is bad, to others a warning."""
    for rank in range(count):
        (found,) = said(rank, with_slow(count, slow), count)["allreduce.node"]
        assert ("this node" if rank == slow else f"n{slow}") in found.text
        assert found.status is (Status.BAD if rank == slow else Status.WARN)
        assert found.value == pytest.approx(0.1)


def test_one_slow_way_names_the_pair_and_no_node() -> None:
    """Both are quick with others."""
    pairs = with_slow(4) | measured({(1, 3): 50.0})
    found = said(0, pairs, 4)
    assert "allreduce.node" not in found
    assert "n1 and n3 are slow together" in found["allreduce.pair"][0].text
    rates = {pair: each.rate for pair, each in pairs.items() if each.rate is not None}
    assert list(slow_nodes(rates, 0.5)) == []
    assert [pair for pair, _, _ in slow_pairs(rates, {}, 0.5)] == [(1, 3)]


def test_pairs_that_fail_are_bad_for_their_members() -> None:
    """A job of these nodes could not form a group. A node that reaches nobody is named once, with the reason, and the
    others go on being judged."""
    pairs = with_slow(3) | measured({(0, 1): 0})
    found = [said(rank, pairs, 3)["allreduce.pair"][0].status for rank in range(3)]
    assert found == [Status.BAD, Status.BAD, Status.WARN]
    pairs = with_slow(4) | measured({(0, 2): 0, (1, 2): 0, (2, 3): 0})
    (mine,), others = said(2, pairs, 4)["allreduce.node"], said(0, pairs, 4)
    assert (mine.status, mine.text) == (Status.BAD, "this node reached none of 3: RuntimeError: timed out")
    assert others["allreduce.node"][0].status is Status.WARN
    assert others["allreduce.pairs"][0].value == pytest.approx(1000.0)
    assert "allreduce.pair" not in others


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


# ---- reports

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
    return not bad(judge(mine, others, limits))


OTHERS = [report("b"), report("c")]


def test_a_node_below_half_of_the_median_is_unfit() -> None:
    """The reason names the value, the median and the ratio; at just above half it is fit. The fast ones beside it find
    nothing wrong with themselves."""
    names = {finding.name for finding in judge(report("a"), OTHERS, LIMITS)}
    assert names == {"peers.matmul.cpu.fp32", "peers.memory.cpu", "peers.disk.write"}
    for value in ("matmul.cpu.fp32", "memory.cpu"):
        others = [report("b", {value: 90.0}), report("c", {value: 110.0})]
        slow = report("a", {value: 49.0})
        text = sentence(bad(judge(slow, others, LIMITS)))
        assert value in text
        assert "is 0.49 of the median of 2 other nodes, 100" in text
        assert fit(report("a", {value: 51.0}), others)
        assert fit(report("a", {value: 30.0}), others, FitLimits(ratio=0.2))
        assert fit(others[0], [others[1], slow])


def test_a_slow_disk_is_only_a_warning() -> None:
    """It delays checkpoints, not the steps of the others."""
    verdict = judge(report("a", {"disk.write": 10.0}), OTHERS, LIMITS)
    assert not bad(verdict)
    assert status(verdict, "peers.disk.write") is Status.WARN


def test_who_is_no_measure() -> None:
    """Nodes that were refused for being slow do not make another one look normal. Which of two is the slow one is not
    known; a node's own report is not one of the others."""
    slow = [report(name, {"memory.cpu": 4.0}, fit=False) for name in ("x", "y", "z")]
    assert not fit(report("a", {"memory.cpu": 4.0}), [*slow, *OTHERS])
    mine = report("a", {"memory.cpu": 1.0})
    for others in ([report("b")], [mine, report("b")]):
        verdict = judge(mine, others, LIMITS)
        assert not bad(verdict)
        assert status(verdict, "peers.speed") is Status.SKIPPED


def test_devices_are_compared_with_devices_of_their_kind() -> None:
    """One slow device of many is found, against other nodes and against its own node's."""
    speeds = {f"matmul.cuda{index}.bf16": 700.0 for index in range(4)}
    mine = report("a", {**speeds, "matmul.cuda2.bf16": 200.0})
    for others in ([report("b", speeds), report("c", speeds)], []):
        verdict = judge(mine, others, LIMITS)
        assert [each.name for each in verdict if each.status is Status.BAD] == ["peers.matmul.cuda2.bf16"]
    assert kind_of("matmul.cuda12.bf16") == "matmul.cuda.bf16"


@pytest.mark.parametrize(
    ("what", "expected"), [("cuda", Status.BAD), ("nccl", Status.BAD), ("driver", Status.WARN), ("python", Status.WARN)]
)
def test_what_must_agree_and_what_should(what: str, expected: Status) -> None:
    """CUDA and NCCL talk to each other over the network; a driver or Python may differ. A version that others do not
    have is not compared: a node without a GPU has no NCCL."""
    others = [report("b", versions={what: "1.2.4"}), report("c", versions={what: "1.2.4"})]
    assert status(judge(report("a", versions={what: "1.2.3"}), others, LIMITS), f"peers.{what}") is expected
    assert fit(report("a", versions={"nccl": "2.27.3"}), OTHERS)


def test_another_torch_is_unfit_and_another_patch_is_not() -> None:
    """Only major and minor numbers of torch count. Of two that differ the first is right, else both would be refused;
    most nodes are right whoever came first: one with an old image does not keep all others out."""
    text = sentence(bad(judge(report("a", versions={"torch": "2.12.1"}), OTHERS, LIMITS)))
    assert "torch 2.12 here, 2.13 on 2 of 2 other nodes" in text
    assert fit(report("a", versions={"torch": "2.13.1+cu126"}), OTHERS)
    first, second = report("a", created=5), report("b", created=7, versions={"torch": "2.12.0"})
    assert fit(first, [second])
    assert not fit(second, [first])
    old, new = report("a", created=1, versions={"torch": "2.12.0"}), [report("b", created=2), report("c", created=3)]
    assert not fit(old, new)
    assert fit(new[0], [old, new[1]])
    assert agreed([(1, "x"), (2, "y"), (3, "y"), (4, "x")]) == "x"
