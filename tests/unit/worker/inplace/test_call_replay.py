"""Ranks that are one completed call apart are brought level with the result that the others have."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from elastic_trainer.worker.comm.control import JSON, Control, bytes_of
from elastic_trainer.worker.recovery import NEWCOMER, CallReplay
from tests.unit.worker.ranks import run_ranks


def test_a_rank_that_is_one_call_behind_gets_the_result_of_the_others() -> None:
    """Rank 1 lost its peers before the call ended for it; ranks 0 and 2 had gone on."""

    def body(control: Control) -> tuple[bool, object, int]:
        calls = CallReplay()
        calls.count = 4
        if control.rank != 1:
            calls.completed({"accuracy": 0.5 + control.rank}, JSON)
        with calls.interrupted() if control.rank == 1 else nullcontext():
            calls.meet(control, [5, 4, 5])
        given = calls.answer(JSON) if calls.has_answer else None
        return control.rank == 1, given, calls.count

    for behind, given, count in run_ranks(3, body):
        assert count == 5
        assert given == ({"accuracy": 0.5} if behind else None)


def test_level_ranks_are_given_nothing_and_newcomers_take_over_the_count() -> None:
    """A newcomer was in no call; it counts from where the others are."""

    def body(control: Control) -> tuple[bool, int]:
        calls = CallReplay()
        if control.rank == 0:
            calls.count = 7
        calls.meet(control, [7, NEWCOMER])
        return calls.has_answer, calls.count

    assert run_ranks(2, body) == [(False, 7), (False, 7)]


def test_a_rank_that_stood_by_goes_on_from_where_the_others_are() -> None:
    """It has missed calls that it was not in, so there is no answer that a later call could take for its own."""

    def body(control: Control) -> tuple[bool, int]:
        calls = CallReplay()
        calls.count = 3
        for _ in range(4 if control.rank == 0 else 0):
            calls.completed(0.5, JSON)
        calls.meet(control, [7, 3])
        return calls.has_answer, calls.count

    assert run_ranks(2, body) == [(False, 7), (False, 7)]


def test_a_rank_that_stood_by_in_a_call_gets_the_newest_result() -> None:
    """Its script goes on as that of the others, though they have made more such calls."""

    def body(control: Control) -> tuple[object, int]:
        calls = CallReplay()
        calls.count = 3
        for value in range(4 if control.rank == 0 else 0):
            calls.completed(value, JSON)
        with calls.interrupted() if control.rank == 1 else nullcontext():
            calls.meet(control, [7, 3])
        return calls.answer(JSON) if calls.has_answer else None, calls.count

    assert run_ranks(2, body) == [(None, 7), (3, 7)]


def test_a_tensor_result_is_written_into_the_tensor_of_the_rank_behind() -> None:
    """What ``all_reduce`` gave elsewhere arrives bit by bit."""
    for value in (torch.tensor([[1.5, -2.0]], dtype=torch.float64), torch.tensor(3), torch.zeros(0)):
        mine = torch.zeros_like(value)
        assert bytes_of(mine).decode(bytes_of(value).encode(value)) is mine
        assert torch.equal(mine, value)
