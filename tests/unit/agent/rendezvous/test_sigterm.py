"""A signal that comes while an earlier one is being handled changes nothing."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_trainer.agent.rendezvous.sigterm import unless_leaving
from elastic_trainer.errors import EXIT_LEFT

RAISED: list[int] = []


@unless_leaving
def handler(number: int, frame: FrameType | None) -> None:
    RAISED.append(number)
    raise SignalException("", signal.Signals(number))


@pytest.fixture(autouse=True)
def nothing_raised() -> None:
    RAISED.clear()


@pytest.mark.parametrize("first", [SignalException("", signal.SIGTERM), SystemExit(EXIT_LEFT)])
def test_a_second_signal_does_not_disturb_the_end_of_the_workers(first: BaseException) -> None:
    """Neither directly, nor in the handling of another error meanwhile."""
    try:
        raise first
    except (SignalException, SystemExit):
        handler(signal.SIGTERM, None)
        try:
            raise TimeoutError
        except TimeoutError:
            handler(signal.SIGINT, None)
    assert RAISED == []


def test_a_signal_raises_again_when_its_exception_was_swallowed() -> None:
    for _ in range(2):
        with pytest.raises(SignalException):
            handler(signal.SIGTERM, None)
    assert RAISED == [signal.SIGTERM] * 2


@pytest.mark.parametrize("other", [SystemExit(1), TimeoutError()])
def test_a_signal_raises_while_another_error_is_handled(other: BaseException) -> None:
    try:
        raise other
    except (SystemExit, TimeoutError):
        with pytest.raises(SignalException):
            handler(signal.SIGTERM, None)
