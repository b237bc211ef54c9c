"""Small collectives, the waits for them, their errors, and ranks that have gone another way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.torch_internals import HashStore
from elastic_trainer.worker.comm.control import (
    Control,
    InterruptibleWaits,
    Purpose,
    Stand,
    Whereabouts,
    collective,
    is_collective_failure,
    origin,
    summary,
    trail,
    tried,
)


class Operation:
    """A collective that ends, or fails, on command. ``then`` happens in the third moment of a wait for it."""

    def __init__(self) -> None:
        self.ended = False
        self.error: str | None = None
        self.waits = 0
        self.then: Callable[[], None] = lambda: None

    def end(self, error: str | None = None) -> None:
        self.error, self.ended = error, True

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 3 or timeout is None:
            self.then()
        if not self.ended:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_operations_that_nobody_waits_for_are_dropped_once_they_have_ended() -> None:
    works, lasting = InterruptibleWaits(interruptible=True), Operation()
    lasting.then = lasting.end
    works.begun(lasting)
    for _ in range(1000):
        works.begun(unread := Operation())
        unread.end()
    assert 1 <= works.outlive() <= 100
    assert lasting.ended


def test_the_end_of_the_round_interrupts_a_wait_whose_operation_is_outlived() -> None:
    """In the moment in which the round is over. The operation is held until it has ended, however it ends."""
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    operation.then = lambda: works.end("the round is over")
    with pytest.raises(RoundBrokenError):
        works.wait(operation)
    assert operation.waits == 3
    assert not operation.is_completed()
    operation.then = lambda: operation.end("Connection closed by peer")
    assert works.outlive() == 1
    assert operation.is_completed()
    assert works.outlive() == 0


def test_what_an_operation_raises_passes_through_and_after_the_end_of_its_round_counts_as_that() -> None:
    """Whatever it says itself: it may have failed in the moment that the wait was busy with."""
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    operation.then = lambda: operation.end("Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed"):
        works.wait(operation)
    works.end("the round is over")
    with pytest.raises(RoundBrokenError, match="the round is over") as caught:
        works.wait(operation)
    assert "Connection closed" in str(caught.value.__cause__)


PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538]"


def test_errors_of_torch_count_also_behind_others() -> None:
    """By their type, or by the place in gloo's source that each of gloo's names; not if they are no RuntimeErrors, nor
    by the words of a script."""
    assert is_collective_failure(RuntimeError(f"{PLACE} Connection closed by peer [127.0.0.1]:1"))
    assert is_collective_failure(RuntimeError("[enforce fail at ../third_party/gloo/gloo/a.cc:83] x != nullptr"))
    assert is_collective_failure(dist.DistBackendError("anything"))
    assert is_collective_failure(RoundBrokenError("over"))
    outer = ValueError("my loop failed")
    outer.__cause__ = RuntimeError(f"{PLACE} Connection closed by peer")
    assert is_collective_failure(outer)
    assert not is_collective_failure(ConfigError(f"{PLACE} is in the text"))
    for words in ("S3 GET: socket timeout", "connection reset by peer", "gloo is not what I wanted", "nccl: timed out"):
        assert not is_collective_failure(RuntimeError(words))


def test_a_rank_whose_own_device_fails_has_lost_no_peer() -> None:
    """NCCL raises one type of error for both. What a step caught before it lost a peer changes nothing."""
    full = dist.DistBackendError("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'")
    assert not is_collective_failure(full)
    lost = dist.DistBackendError("NCCL error: remote process exited")
    lost.__context__ = MemoryError("out of memory")
    assert is_collective_failure(lost)


def test_the_origin_of_an_error_has_its_innermost_cause() -> None:
    error = RuntimeError("DataLoader worker exited unexpectedly")
    assert origin(error)["because"] == ""
    error.__cause__ = RuntimeError("Bus error. It is possible that workers are out of shared memory.")
    assert origin(error)["because"] == f"RuntimeError: {error.__cause__}"
    error.__cause__.__cause__ = KeyError()
    assert origin(error)["because"].startswith("RuntimeError: Bus"), "nothing is said of a cause without words"
    handler = NameError("logg")
    handler.__context__ = ConnectionRefusedError("while a handler ran")
    assert origin(handler)["because"] == ""


def test_people_see_no_numbers_of_gloo() -> None:
    """The port is one that the peer had for this attempt alone."""
    error = RuntimeError(f"{PLACE} timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:25001$1")
    assert summary(error) == "timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]"
    assert tried(error) == "10.0.0.2"


def test_where_a_collective_is_called_only_peers_can_be_the_reason() -> None:
    """Whatever the text; errors of other kinds pass through. The log gets all that lies behind it, with the calls."""
    with pytest.raises(RoundBrokenError, match="a peer was lost") as raised, collective("all_reduce"):
        raise RuntimeError("Operation timed out!")
    first, second = trail(raised.value)
    assert "test_control.py" in first
    assert second.startswith("RuntimeError: Operation timed out! (")
    with suppress(KeyError), collective("all_reduce"):
        raise KeyError("other")


class Rank:
    """Stays somewhere for long; ``look`` is what it does then."""

    def __init__(self, number: int, store: Any) -> None:
        control: Any = SimpleNamespace(rank=number, alone=True, begun=0)
        self._it = Whereabouts(store, control, f"n{number}", self._stand, lambda: 0.0, lambda: None)

    def _stand(self) -> Stand:
        raise AssertionError("its thread does not run")

    def look(self, collectives: int, stand: Stand) -> str:
        return self._it._compared(stand, collectives)


@pytest.mark.parametrize(
    ("begun", "collectives", "found"),
    [
        (7, 3, "rank 1 (node n1) evaluates after step 26, and rank 0 (node n0) is inside step 27"),
        (7, 4, ""),  # it has come by there: the other one is late
        (6, 3, ""),  # the same step, which the other one has given up
    ],
)
def test_a_rank_inside_a_later_step_that_has_made_fewer_calls_has_gone_another_way(
    begun: int, collectives: int, found: str
) -> None:
    """Then the other one is told the same, though it began first."""
    store = HashStore()
    outside, inside = Rank(1, store), Rank(0, store)
    assert outside.look(4, Stand(False, 6, 26, "evaluates")) == ""
    assert inside.look(collectives, Stand(True, begun, 26, "")) == found
    assert outside.look(4, Stand(False, 6, 26, "evaluates")) == found


def test_purposes_cannot_be_confused_by_a_coincidence_of_sums() -> None:
    """1 + 3 = 2 + 2: the squares distinguish different purposes with the same sum."""
    control = Control(None, 0, 2)
    with pytest.raises(ConfigError):
        control.checked([4.0, 10.0, 0.0], Purpose.LOSS)
    assert control.checked([4.0, 8.0, 7.0], Purpose.LOSS) == [7.0]
