"""Small collectives: right results, and clear errors when ranks do different things."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from elastic_trainer.errors import RoundBrokenError, StorageError
from elastic_trainer.worker.comm.control import MOMENT_S, Control, InterruptibleWaits, Purpose
from tests.unit.worker.ranks import TIMEOUT_S, outcome, run_ranks

FORMING_S = 2.0


@pytest.mark.parametrize("world", [1, 3])
def test_sums_gathers_and_broadcasts(world: int) -> None:
    """Every collective gives the same answer on all ranks, also for a process that is alone."""

    def body(control: Control) -> tuple[object, ...]:
        tensor = torch.full((2,), float(control.rank))
        control.broadcast(tensor, world - 1)
        return (
            control.sum(Purpose.BARRIER, [control.rank, 1.5])[:2],
            control.gather([control.rank, -1]),
            control.gather_bytes(b"x" * control.rank),
            control.broadcast_bytes(f"from {control.rank}".encode(), world - 1),
            tensor.tolist(),
        )

    expected = (
        [sum(range(world)), 1.5 * world],
        [[rank, -1] for rank in range(world)],
        [b"x" * rank for rank in range(world)],
        f"from {world - 1}".encode(),
        [world - 1.0] * 2,
    )
    assert run_ranks(world, body) == [expected] * world


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    """With its kind, and the rank's number on the others; without an error nothing is raised."""

    def body(control: Control) -> list[str]:
        error = StorageError("disk full") if control.rank == 1 else None
        return [outcome(lambda: control.agree(None)), outcome(lambda: control.agree(error))]

    assert run_ranks(2, body) == [["", "StorageError: rank 1: disk full"], ["", "StorageError: disk full"]]


def test_a_peer_that_is_gone_breaks_the_round() -> None:
    """Waiting ends with RoundBrokenError, in the time that the group has."""

    def body(control: Control) -> str:
        if control.rank == 1:
            return ""
        control.set_timeout(timedelta(seconds=0.2))
        return outcome(control.start(Purpose.LOSS, [1.0]).wait)

    first, _ = run_ranks(2, body)
    assert first.startswith(RoundBrokenError.__name__)
    assert "a peer of rank 0 was lost (loss" in first


def test_a_transfer_may_take_longer_than_a_moment_and_than_the_group_had_to_be_formed() -> None:
    """Waiting for it by moments does not close the connection: a state of many megabytes comes through a slow network,
    and a rank that is to get it waits until those before it have theirs.

    The receiver is there early, then the sender is; other sums go on afterwards.
    """

    def body(control: Control) -> list[float]:
        own = Control(control.group, control.rank, 2, InterruptibleWaits(interruptible=True))
        own.set_timeout(timedelta(seconds=TIMEOUT_S))
        found: list[float] = []
        for number in range(2):
            tensor = torch.full((1 << 20,), float(number + 1) * (own.rank == number))
            if own.rank == number:
                threading.Event().wait(FORMING_S + 0.5 if number else 10 * MOMENT_S)
                own.send(tensor, 1 - number)
            else:
                own.receive(tensor, number)
            found.append(float(tensor.mean()))
        return found + own.sum(Purpose.BARRIER, [1.0])[:1]

    assert run_ranks(2, body, forming_s=FORMING_S) == [[1.0, 2.0, 2.0]] * 2


def test_the_end_of_the_round_interrupts_a_transfer() -> None:
    """A rank that waits for what a peer never sends is freed at once."""

    def body(control: Control) -> str:
        works = InterruptibleWaits(interruptible=True)
        own = Control(control.group, control.rank, 2, works)
        if own.rank == 1:
            own.receive(torch.zeros(1), 0)  # the word that rank 0 has been freed
            return ""
        threading.Timer(2 * MOMENT_S, works.end, ("the round is over",)).start()
        error = outcome(lambda: own.receive(torch.zeros(1), 1))
        control.send(torch.zeros(1), 1)
        return error

    assert "RoundBrokenError" in run_ranks(2, body)[0]
