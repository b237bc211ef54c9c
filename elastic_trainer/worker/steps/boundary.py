"""What happens between steps on all ranks: saves that are due or asked for, a stop, the end of a diverged training.

*Runs in* the worker's main thread.
*Fails by* NonFiniteError on all ranks at the same boundary, or where a round's end cut its agreement short; ConfigError
on ranks that have begun to cut the data differently.
*Invariant*: a scheduled save that fails does not end the training.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.errors import NonFiniteError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.saver import Saver
from elastic_trainer.worker.steps.agreement import Consensus, Flags
from elastic_trainer.worker.steps.commit import Steps
from elastic_trainer.worker.steps.comparison import Comparison
from elastic_trainer.worker.steps.one_round import RoundEnd
from elastic_trainer.worker.steps.plan_agreement import Accord
from elastic_trainer.worker.steps.signals import Signals

_STOP_BOUNDARIES = 4


class Turn(StrEnum):
    """What all ranks do after a boundary."""

    GO_ON = "go_on"
    STOP = "stop"
    SWITCH = "switch"
    """Leave the round for the one of a planned change."""


class Boundaries:
    """Boundaries of ranks without a model yet: they only stop together."""

    def __init__(self, control: Control, signals: Signals, *, rare: bool = False) -> None:
        self._consensus, self._signals = Consensus(control, at_once=rare), signals

    @property
    def span_s(self) -> float:
        return self._consensus.boundary_s

    def slowest_stop_s(self) -> float:
        """How long the ranks may take to agree to stop."""
        return _STOP_BOUNDARIES * self._consensus.boundary_s

    def after_step(self, step: int) -> Turn:
        return self.cross()

    def save_due(self, step: int) -> None:
        """Save after ``step`` if due, when the round ended between the step and its boundary."""

    def refuse_nonfinite(self) -> None:
        """After the end of a round: a state with non-finite losses must not reach the next round and other ranks.

        Ranks that learned of it at the last boundary have ended; this one did not learn it because they ended.
        """

    def cross(self, *, saved: bool = False) -> Turn:
        """Pass a boundary; what all ranks do now. ``saved``: this state has just been saved."""
        agreed = self._consensus.boundary(self._wishes, urgent=self._signals.requested is not None)
        return Turn.GO_ON if agreed is None else self._follow(agreed, saved=saved)

    def begin_phase(self) -> None:
        """Boundaries of another kind follow, on all ranks."""
        self._consensus.reset()

    def end(self) -> None:
        """The last boundary has been passed."""
        self._consensus.drain()

    def _wishes(self) -> Flags:
        return Flags(stop=self._signals.requested is not None)

    def _follow(self, agreed: Flags, *, saved: bool) -> Turn:
        return Turn.STOP if agreed.stop else Turn.GO_ON


@dataclass(frozen=True, slots=True)
class BoundaryWork:
    """What else happens at the boundaries of ranks that train. ``fatal``: a non-finite loss ends the training."""

    saver: Saver
    steps: Steps
    accord: Accord
    comparison: Comparison
    tracker: HeartbeatReporter
    fatal: bool
    round_end: RoundEnd


class StepBoundaries(Boundaries):
    """Boundaries of ranks that train, in one round. ``rare``: they follow synchronisations, not each step."""

    def __init__(self, control: Control, signals: Signals, work: BoundaryWork, *, rare: bool = False) -> None:
        super().__init__(control, signals, rare=rare)
        self._work, self._rank0, self._at_once = work, control.rank == 0, rare or control.alone
        self._refused = False
        self._crossing = self._asked_at = self._saved_at = 0
        """The number of this boundary, of the last one that wishes were collected at, of the last one that saved."""

    def after_step(self, step: int) -> Turn:
        self._work.saver.look()
        self._refused |= self._work.saver.refused()
        self._work.comparison.after_step(step)
        saved = self._work.saver.due_by_step(step)
        if saved:
            self._save()
        self._work.saver.copy_if_due()
        self._work.saver.prepare()
        return self.cross(saved=saved)

    def cross(self, *, saved: bool = False) -> Turn:
        self._crossing += 1
        before = self._asked_at
        agreed = self._consensus.boundary(self._wishes, urgent=self._signals.requested is not None)
        if agreed is None:
            return Turn.GO_ON
        asked_at = self._asked_at if self._at_once else before
        return self._follow(agreed, saved=saved or self._saved_at >= asked_at)  # a save since then has met the wish

    def save_due(self, step: int) -> None:
        if self._work.saver.alone and self._work.saver.due_by_step(step) and self._work.saver.unsaved:
            self._save()

    def end(self) -> None:
        super().end()
        self._work.comparison.end(self._work.steps.position.step)

    def refuse_nonfinite(self) -> None:
        if self._work.fatal and self._own_nonfinite():
            self._meet_nonfinite()

    def _own_nonfinite(self) -> bool:
        return self._refused or self._work.steps.nonfinite()

    def _wishes(self) -> Flags:
        round_end, saver = self._work.round_end, self._work.saver
        self._asked_at = self._crossing
        on_demand = self._rank0 and saver.due_on_demand()
        return Flags(
            stop=not round_end.led and self._signals.requested is not None,
            save=saver.due_by_time() or on_demand or self._signals.save_requested,
            nonfinite=self._own_nonfinite(),
            switch=round_end.knows_change(),
            copy=saver.wants_copy(),
            mark=self._work.accord.mark(),
        )

    def _follow(self, agreed: Flags, *, saved: bool) -> Turn:
        if agreed.differ:
            self._work.accord.compare()
        if agreed.nonfinite:
            self._meet_nonfinite()
        if agreed.stop:
            return Turn.STOP
        if agreed.save and not saved:
            if self._rank0 and not self._work.saver.possible:  # nothing is due by time then: a signal asked for it
                logger().warning("checkpoint.impossible", reason="the session has no checkpoint_dir")
            self._save()
        if agreed.copy:
            self._work.saver.copy()
        return Turn.SWITCH if agreed.switch else Turn.GO_ON

    def _save(self) -> None:
        self._saved_at = self._crossing
        self._signals.save_requested = False
        if self._rank0:
            self._refused |= isinstance(self._work.saver.attempt(), NonFiniteError)
        else:
            self._work.tracker.peer_saves()
            self._work.saver.help()

    def _meet_nonfinite(self) -> None:
        step = self._work.steps.position.step
        self._work.tracker.nonfinite()
        if self._work.fatal:
            raise NonFiniteError(
                f"the loss or a parameter became NaN or infinite by step {step}",
                hint="lower the learning rate, clip gradients, or look for bad samples; nonfinite='warn' goes on",
            )
        logger().warning("loss.nonfinite", step=step)
        self._refused = False
        self._work.steps.forgive()
