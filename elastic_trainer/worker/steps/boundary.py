"""What happens between steps on all ranks alike: saves that are due, a stop, the end of a diverged training.

*Runs in* the worker's main thread.
*Fails by* NonFiniteError on all ranks at the same boundary, or where its agreement was cut short by a round's end;
ConfigError on ranks that have begun to cut the data differently.
*Invariant*: a save that fails on schedule does not end the training.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from elastic_trainer.errors import NonFiniteError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.saver import Saver
from elastic_trainer.worker.steps.agreement import Consensus, Flags
from elastic_trainer.worker.steps.commit import Steps
from elastic_trainer.worker.steps.comparison import Comparison
from elastic_trainer.worker.steps.signals import Signals

_STOP_BOUNDARIES = 4


class Turn(StrEnum):
    """What all ranks do behind a boundary."""

    GO_ON = "go_on"
    STOP = "stop"
    SWITCH = "switch"
    """Leave the round for the one that a planned change has agreed on."""


class Boundaries:
    """Passes boundaries. ``fatal``: whether a non-finite loss ends the training.

    In place ``in_place`` says whether a planned change is known here, and a signal is the agent's business.
    """

    def __init__(
        self,
        control: Control,
        signals: Signals,
        saver: Saver,
        tracker: HeartbeatReporter,
        *,
        fatal: bool,
        in_place: Callable[[], bool] | None = None,
    ) -> None:
        self._in_place = in_place
        self._consensus = Consensus(control)
        self._rank0 = control.rank == 0
        self._signals, self._saver, self._tracker, self._fatal = signals, saver, tracker, fatal
        self._steps: Steps | None = None
        self._comparison: Comparison | None = None
        self._refused = False

    @property
    def span_s(self) -> float:
        """The time from boundary to boundary, smoothed."""
        return self._consensus.boundary_s

    def slowest_stop_s(self) -> float:
        """How long the ranks may need to agree to stop."""
        return _STOP_BOUNDARIES * self._consensus.boundary_s

    def watch(self, steps: Steps, comparison: Comparison | None = None) -> None:
        """From now on look at the losses of ``steps``, and at the parameters of all ranks."""
        self._steps, self._comparison = steps, comparison

    def after_step(self, step: int) -> Turn:
        """Pass the boundary behind ``step``; what all ranks do now."""
        if self._comparison is not None:
            self._comparison.after_step(step)
        saved = self._saver.due_by_step(step)
        if saved:
            self._save()
        return self.cross(saved=saved)

    def save_due(self, step: int) -> None:
        """Save after ``step`` if that is due, where the end of a round came between the step and its boundary."""
        if self._saver.due_by_step(step) and self._saver.unsaved:
            self._save()

    def cross(self, *, saved: bool = False) -> Turn:
        """Pass a boundary; what all ranks do now. ``saved``: this state was saved just now."""
        agreed = self._consensus.boundary(self._wishes, urgent=self._signals.requested is not None)
        if agreed is None:
            return Turn.GO_ON
        if agreed.differ and self._steps is not None:
            self._steps.accord.compare()
        if agreed.nonfinite:
            self._meet_nonfinite()
        if agreed.stop:
            return Turn.STOP
        if agreed.save and not saved:
            self._save()
        return Turn.SWITCH if agreed.switch else Turn.GO_ON

    def begin_phase(self) -> None:
        """Boundaries of another kind follow, on all ranks."""
        self._consensus.reset()

    def end(self) -> None:
        """The last boundary has been passed."""
        self._consensus.drain()
        if self._comparison is not None and self._steps is not None:
            self._comparison.end(self._steps.position.step)

    def refuse_nonfinite(self) -> None:
        """The round has ended: a state whose losses are not finite must not be carried into the next, and to others.

        Ranks that heard of it at the last boundary are gone; this one did not hear, since they went.
        """
        if self._fatal and self._own_nonfinite():
            self._meet_nonfinite()

    def _own_nonfinite(self) -> bool:
        return self._refused or (self._steps is not None and self._steps.nonfinite())

    def _wishes(self) -> Flags:
        return Flags(
            stop=self._in_place is None and self._signals.requested is not None,
            save=self._saver.due_by_time(),
            nonfinite=self._own_nonfinite(),
            switch=self._in_place is not None and self._in_place(),
            mark=self._steps.accord.mark() if self._steps is not None else 0,
        )

    def _save(self) -> None:
        if self._rank0:
            problem = self._saver.attempt()
            self._refused |= isinstance(problem, NonFiniteError)
        else:
            self._tracker.peer_saves()

    def _meet_nonfinite(self) -> None:
        step = self._steps.position.step if self._steps is not None else 0
        self._tracker.nonfinite()
        if self._fatal:
            raise NonFiniteError(
                f"the loss or a parameter became NaN or infinite by step {step}",
                hint="lower the learning rate, clip gradients, or look for bad samples; nonfinite='warn' goes on",
            )
        logger().warning("loss.nonfinite", step=step)
        self._refused = False
        if self._steps is not None:
            self._steps.forgive()
