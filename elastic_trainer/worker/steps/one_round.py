"""What becomes of a training when its round ends: the port, and the answer where a process has one round for good.

There the end of the round is the end of the process; its launcher starts another one, which resumes.

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
    """The port; in place it is :class:`~elastic_trainer.worker.inplace.recovery.InPlaceRecovery`."""

    @property
    def led(self) -> bool:
        """Whether the node's agent decides on rounds, and on what a signal to a worker means."""
        ...

    def begin(self) -> None:
        """Come into the first round with a model, all ranks in one state."""
        ...

    def repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """``attempt()``, a call that all ranks make, through whatever rounds it takes."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """The script evaluates in the body."""
        ...

    def absorb(self, step: Step, error: BaseException) -> bool:
        """Whether ``error`` was the end of the round, and the training goes on in another."""
        ...

    def check_gradients(self) -> None:
        """Raise if the gradients at hand are not those of all ranks."""
        ...

    def knows_change(self) -> bool:
        """Whether a planned change of the present round is known here."""
        ...

    def agreed(self) -> None:
        """All ranks know of the planned change, and are behind the same step."""
        ...

    def change(self) -> bool:
        """Make the change that was agreed on, if any; whether the ranks may be others now."""
        ...


class OneRound:
    """See the module. ``resume()`` brings all ranks to one state."""

    led = False

    def __init__(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def begin(self) -> None:
        """Resume with the ranks that are there already."""
        self._resume()

    def repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """``attempt()``."""
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
