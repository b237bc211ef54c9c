"""What happens to a training when its round ends: the port, and its form for processes with a single round.

There the end of the round ends the process; the launcher starts another one, which resumes.

*Runs in* the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from elastic_trainer.worker.comm.codecs import Codec
from elastic_trainer.worker.steps.step import Step

Result = TypeVar("Result")


class RoundEnd(Protocol):
    """The port; in place it is :class:`~elastic_trainer.worker.inplace.recovery.InPlaceRecovery`.

    ``led``: the node's agent decides on rounds and on signals to workers. ``repeated`` makes a call of all ranks,
    through as many rounds as it takes. ``absorb`` says whether an error was the end of the round and training goes on
    in another; ``check_gradients`` raises unless gradients are of all ranks. A planned change is known first, agreed on
    after a step, then made; ``change`` says whether the ranks may have changed.
    """

    @property
    def led(self) -> bool: ...

    def begin(self) -> None: ...

    def repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result: ...

    def evaluating(self) -> AbstractContextManager[None]: ...

    def absorb(self, step: Step, error: BaseException) -> bool: ...

    def check_gradients(self) -> None: ...

    def knows_change(self) -> bool: ...

    def agreed(self) -> None: ...

    def change(self) -> bool: ...


class OneRound:
    """See the module. ``resume()`` brings all ranks to one state."""

    led = False

    def __init__(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def begin(self) -> None:
        self._resume()

    def repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        return attempt()

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def absorb(self, step: Step, error: BaseException) -> bool:
        return False

    def check_gradients(self) -> None:
        return

    def knows_change(self) -> bool:
        return False

    def agreed(self) -> None:
        return

    def change(self) -> bool:
        return False
