"""What must hold after all faults, and that its violation is found."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.drills.checks import (
    Digest,
    Moment,
    compared,
    read_digest,
    round_problems,
    sample_problems,
    state_problems,
)
from elastic_trainer.local.ledger import Line, LineKind


def digest(node: str, step: int, value: str, event: Moment = Moment.STEP, round_: int = 1) -> Digest:
    pid = ord(node)
    return Digest(event=event, node=node, pid=pid, round=round_, step=step, digest=value)


def ends(**values: str) -> list[Digest]:
    return [digest(node, 20, value, Moment.END) for node, value in values.items()]


def test_equal_states_are_no_problem() -> None:
    """Every member left a digest at the end, and wherever two ranks left one they agree."""
    told = [digest("a", 10, "x"), digest("b", 10, "x"), *ends(a="y", b="y")]
    assert state_problems(told, ["a", "b"]) == []
    assert compared(told) == 2


def test_ranks_that_differ_on_the_way_are_found() -> None:
    """Also if they end equal. The same step of another round may differ: it was done again."""
    told = [digest("a", 10, "x"), digest("b", 10, "z"), *ends(a="y", b="y")]
    assert state_problems(told, ["a", "b"]) == ["the parameters of ranks differ at step 10 of round 1 (1 such steps)"]
    again = [digest("a", 10, "x"), digest("b", 10, "z", round_=2), *ends(a="y", b="y")]
    assert state_problems(again, ["a", "b"]) == []


def test_members_that_end_apart_are_found() -> None:
    """In their parameters, or at different steps."""
    assert "ended with different parameters" in state_problems(ends(a="x", b="y"), ["a", "b"])[-1]
    late = [*ends(a="x"), digest("b", 21, "x", Moment.END)]
    assert "ended with different parameters" in state_problems(late, ["a", "b"])[-1]


def test_a_member_without_an_end_is_found() -> None:
    """Nothing to compare is no success."""
    assert state_problems(ends(a="x"), ["a", "b"]) == ["no parameters were left by b"]


def test_a_torn_line_is_passed_over() -> None:
    """As a killed process leaves it."""
    whole = digest("a", 1, "x").model_dump_json()
    assert read_digest(whole) == digest("a", 1, "x")
    assert read_digest(whole[:-5]) is None


@dataclass(frozen=True)
class Seen:
    number: int
    nonce: str
    state: str = "active"


def test_rounds_that_grow_are_no_problem() -> None:
    """The document of one round changes its state several times."""
    assert round_problems([Seen(1, "a"), Seen(1, "a", "draining"), Seen(2, "b"), Seen(2, "b", "broken")]) == []


def test_a_round_that_comes_back_or_exists_twice_is_found() -> None:
    """Both are what the membership protocol rules out."""
    assert round_problems([Seen(2, "b"), Seen(1, "a")]) == ["round numbers went back: [2, 1]"]
    assert round_problems([Seen(1, "a"), Seen(1, "b")]) == ["there were two rounds of one number: [1]"]


def test_a_repeated_sample_is_found() -> None:
    """And exact ones are not."""

    def step(number: int, *samples: int) -> Line:
        return Line(event=LineKind.STEP, t=number, step=number, samples=samples, global_samples=len(samples))

    assert sample_problems([step(1, 0, 1), step(2, 2, 3)], 4) == []
    (problem,) = sample_problems([step(1, 0, 1), step(2, 1, 3)], 4)
    assert "repeated" in problem
