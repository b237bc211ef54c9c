"""Checks in processes of their own: they may hang and crash; a slow machine is found by real measurements."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.preflight.child import Child, findings_of
from elastic_trainer.preflight.comparison import report_of
from elastic_trainer.preflight.judge import Finding, FitLimits, Published, Status, bad, judge, judge_pairs, sentence
from elastic_trainer.preflight.together import Heard, port_of
from tests.support.memory_store import ManualClock

ILL = "tests.integration.preflight.illness"
LIMIT_S = 120.0


def ill(how: str) -> tuple[list[Finding], list[str], dict[str, str]]:
    said, versions = list[str](), dict[str, str]()
    return findings_of("check", ILL, [how], Deadline.after(LIMIT_S), said.append, versions), said, versions


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_a_check_that_ends_well_tells_all() -> None:
    """What libraries print in between does no harm."""
    found, said, versions = ill("nothing")
    assert [(finding.name, finding.status) for finding in found] == [("first", Status.OK)]
    assert said == ["doing nothing"]
    assert versions == {"torch": "2.13.0"}


def test_a_check_that_hangs_is_killed_and_named() -> None:
    """What it had found before counts; nothing is left of it."""
    clock, before, begun = ManualClock(), {each.pid for each in children()}, SYSTEM.monotonic()
    deadline = Deadline.after(LIMIT_S, clock)
    found = findings_of("check", ILL, ["hang"], deadline, lambda _: clock.advance(LIMIT_S), {})
    assert SYSTEM.monotonic() - begun < 60.0
    assert [finding.status for finding in found] == [Status.OK, Status.BAD]
    assert re.search(r"no answer in [\d.]+ s while doing hang", found[1].text), found[1].text
    assert {each.pid for each in children()} <= before


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "exited (exit code 1) while doing raise: RuntimeError: CUDA error: uncorrectable ECC error"),
        ("die", "exited (killed by SIGSEGV) while doing die"),
    ],
)
def test_a_check_that_crashes_is_named_with_its_last_words(how: str, text: str) -> None:
    """The exception, or the signal."""
    found, _, _ = ill(how)
    assert (found[-1].name, found[-1].status) == ("check", Status.BAD)
    assert text in found[-1].text


# ---- real measurements


def measured(node: str) -> Published:
    versions: dict[str, str] = {}
    module = "elastic_trainer.preflight.compute"
    found = findings_of("compute", module, [f"{LIMIT_S}"], Deadline.after(LIMIT_S), lambda _: None, versions)
    assert [finding for finding in found if finding.status is not Status.OK] == []
    return Published(report_of(node, "127.0.0.1", found, versions, 0.0), 1, 1)


def faster(measured: Published, node: str, times: float) -> Published:
    """A node like ``measured`` that is so many times as fast."""
    values = {name: value * times for name, value in measured.report.values.items()}
    return Published(measured.report.model_copy(update={"node": node, "values": values}), 1, 1)


def test_a_machine_that_is_slower_than_the_others_is_unfit() -> None:
    """It measures memory and matrices for real. The others are made of that: a second measurement would tell how busy
    this machine is by then."""
    slow = measured("slow")
    assert set(slow.report.values) == {"memory.cpu", "matmul.cpu.fp32"}
    assert slow.report.versions["torch"]
    good = [faster(slow, "a", 4.0), faster(slow, "b", 5.0)]
    verdict = judge(slow, good, FitLimits())
    assert "matmul.cpu.fp32" in sentence(bad(verdict))
    assert "of the median of 2 other nodes" in sentence(bad(verdict))
    assert not bad(judge(good[0], [good[1], slow], FitLimits()))
    assert not bad(judge(slow, [faster(slow, "a", 1.2), faster(slow, "b", 0.9)], FitLimits()))


# ---- all-reduces


def part(rank: int, port: int, limit_s: float) -> dict[str, Any]:
    names = ["a", "b", "c"]
    return {
        "host": "127.0.0.1",
        "port": port,
        "nonce": "n",
        "rank": rank,
        "names": names,
        "limit_s": limit_s,
        "wait_s": 4.0,
    }


def test_a_node_that_dies_before_it_measures_is_named_by_the_others() -> None:
    """They measure each other, and wait for it once."""
    deadline = Deadline.after(LIMIT_S)
    with ExitStack() as stack:
        started = [
            stack.enter_context(Child("elastic_trainer.preflight.collective", [f"{LIMIT_S}", "127.0.0.1"]))
            for _ in range(3)
        ]
        ports = [port_of(child, deadline, lambda _: None) for child in started]
        started[2].end()
        for rank, child in enumerate(started[:2]):
            child.send(part(rank, ports[0], LIMIT_S))
        for rank, child in enumerate(started[:2]):
            heard = Heard()
            for message in child.messages(deadline):
                heard.take(message)
            assert (heard.pairs[0, 1].rate or 0) > 0
            assert "c did not join" in heard.pairs[0, 2].error
            assert "c did not join" in heard.all.error
            found = {finding.name: finding for finding in judge_pairs(["a", "b", "c"], rank, heard.pairs, FitLimits())}
            assert "c reached none of 2" in found["allreduce.node"].text
