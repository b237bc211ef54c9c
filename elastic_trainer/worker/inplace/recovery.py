"""Carries the training of this process from one round into the next, in place: the process and its loop go on.

A step that was not committed when its round ended is undone, and its batch comes again; what was committed stays.
Before a rank trains on in the next round it holds the state that all its ranks hold.

*Runs in* the worker's main thread.
*Fails by* whatever error was no end of a round; NonFiniteError for a state that must not go on; SystemExit where the
process leaves by a planned change.
*Invariant*: only a state that is whole is ever reported or given to another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from elastic_trainer.errors import CheckpointError, RejoinError
from elastic_trainer.ipc.messages import StateReport
from elastic_trainer.model import Phase
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.link import Formation
from elastic_trainer.worker.inplace.call_replay import JSON, NEWCOMER, CallReplay, Codec
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.state.heal import heal, identity
from elastic_trainer.worker.state.restore import Origin
from elastic_trainer.worker.steps.rank_context import RankContext, Trained
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.step import Step

_LASTING = (Phase.CHECKPOINT, Phase.EVALUATION)
"""Phases of the script's that go on behind the end of a round in the middle of them."""
Result = TypeVar("Result")


class Recovery:
    """See the module. ``evaluating`` is set while the script evaluates: no planned change is agreed on then."""

    def __init__(self, rounds: Rounds, part: RankContext, signals: Signals) -> None:
        self._rounds, self._part, self._signals = rounds, part, signals
        part.knows_change = self.knows_change
        self.evaluating = False
        self._calls = CallReplay()
        self._valid = False
        """Whether the state held here may be given to others."""
        self._given_up: Step | None = None
        """The step that this rank had to give up when the last round ended."""
        self._change_due = False
        part.feed.change = self.change

    @property
    def _trained(self) -> Trained:
        trained = self._part.trained
        if trained is None:
            raise RuntimeError("a round is entered only when there is a model")
        return trained

    # ---- entering a round

    def enter(self, *, planned: bool = False, joinable: bool = True, following: Formation | None = None) -> None:
        """Come into the next round with the state that is held here, or get it from those who hold it."""
        tracker = self._part.tracker
        before = tracker.change(Phase.RENDEZVOUS)
        self._rounds.enter(
            self._part.placement,
            self._report,
            self._settle,
            planned=planned,
            joinable=joinable,
            newcomer=self._calls.count == NEWCOMER,
            following=following,
            idle=self._while_waiting,
            step_time_s=self._part.span_s,
            forming=lambda: tracker.change(Phase.RENDEZVOUS),
        )
        tracker.change(before if before in _LASTING else Phase.TRAINING)

    def _report(self) -> StateReport | None:
        if not self._valid:
            return None
        position = self._part.position
        return StateReport(
            round=position.lineage,
            step=position.step,
            epoch=position.cursor.epoch,
            samples=position.cursor.samples,
            batch=self._part.feed.next_size,
        )

    def _settle(self, group: groups.Group) -> None:
        """A round has been formed: all ranks come to one state."""
        part, position = self._part, self._part.position
        part.tracker.change(Phase.HEALING)
        part.enter(group, self._signals)
        if part.placement.device.type == "cuda":
            device = part.placement.device
            self._trained.steps.check_gradients = lambda: self._rounds.check_device(device)
        mine = None
        if self._valid:
            mine = identity(self._trained.state.committed(), position.lineage, position.step)
        least = max(group.formation.round, position.generation + 1)
        attempted = self._given_up.number if self._given_up is not None else 0
        trainable, cut = self._trained.steps.trainable, part.feed.fields
        fields = cut or dict(part.origin.fields)
        notes = {"fields": fields, "cut": cut, "attempted": attempted, "frozen": trainable.frozen}
        healed = heal(part.control, mine, least, self, notes, self._calls.count)
        behind = part.rank in healed.behind
        if behind:
            part.origin = Origin(None, healed.notes["fields"])
            trainable.freeze(frozenset(healed.notes["frozen"]))
            if self._given_up is not None:
                self._count(self._given_up, attempted_since=healed.notes["attempted"] > attempted)
        self._calls.meet(part.control, healed.done)
        if healed.source is None:
            self._valid = False
            part.check_storage()
            part.resume(self._unfit())
            self._trained.steps.dirty, self._valid = False, True
        else:
            part.take_part(healed.generation, part.origin.fields, healed.notes.get("cut") if behind else None)
        self._given_up = None

    def _unfit(self) -> CheckpointError | None:
        """Why this rank's state is none to begin with."""
        if not self._trained.steps.dirty:
            return None
        return CheckpointError(
            "no rank holds a whole state any more: the round ended while the optimizer was at work, and there is no"
            " checkpoint",
            hint="give Session a checkpoint_dir",
        )

    def collect(self) -> dict[str, Any]:
        """The whole training state, for a rank that needs it (its tensors are the live ones)."""
        return self._trained.state.collect()

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` of another rank this rank's own. It is no valid source while that goes on."""
        self._valid = False
        self._trained.take_over(state)
        self._valid = True

    def _count(self, step: Step, *, attempted_since: bool) -> None:
        """This rank got its state from a peer that may have committed the very step that was given up here.

        Then its samples count. What the script does behind a step it does here too, unless that is in the peer's state
        already because the peer was inside the next step (``attempted_since``).
        """
        position = self._part.position
        if (position.step, position.lineage) != (step.number, step.generation):
            return
        step.committed = not attempted_since
        if step.committed and step.batch is not None:
            step.batch.used = True
        if self._part.ledger.enabled:
            self._part.record(step, round=step.generation, rank=step.rank, world=step.world_size)

    def _while_waiting(self) -> None:
        """No round for a second: too few nodes, or no store. What is only in memory is made durable."""
        self._part.tracker.change(Phase.WAITING)
        if self._valid:
            self._part.save_alone()

    # ---- the end of a round

    def absorb(self, step: Step, error: BaseException) -> bool:
        """If ``error`` is the end of the round: come into the next one, and let the batch come again."""
        if not self._rounds.confirms(error):
            return False
        if not step.committed:
            self._trained.steps.undo()
            self._given_up = step
        elif self._part.ledger.enabled and not step.recorded:
            self._part.record(step)
        self._valid = self._valid and not self._trained.steps.dirty
        # Who comes new cannot follow what the script does behind a step.
        self._regroup(joinable=not step.committed)
        if step.committed:
            self._part.boundaries.save_due(step.number)
        return True

    def repeated(self, attempt: Callable[[], Result], codec: Codec = JSON) -> Result:
        """``attempt()``, again after each round that ends in the middle of it.

        A peer may have completed the very call, and gone on: then its result counts here too (``codec`` brings it).
        """
        while True:
            try:
                return self._calls.completed(attempt(), codec)  # type: ignore[no-any-return]
            except (RejoinError, RuntimeError) as error:
                if self._part.trained is None or not self._rounds.confirms(error):
                    raise
                self._regroup(joinable=False)
                if self._calls.has_answer:
                    return self._calls.answer(codec)  # type: ignore[no-any-return]

    def _regroup(self, *, joinable: bool) -> None:
        self._change_due = False
        self._trained.replica.release()
        self._rounds.abandon()
        self._part.boundaries.refuse_nonfinite()
        self.enter(joinable=joinable)
        self._part.feed.redraw()  # the script may hold the batch, and open a step about it again

    # ---- planned changes

    def knows_change(self) -> bool:
        """Whether a planned change of the present round is known here."""
        return not self.evaluating and self._rounds.link.drain(self._rounds.number) is not None

    def agreed(self) -> None:
        """All ranks know of the planned change, and are behind the same step."""
        self._change_due = True

    def change(self) -> bool:
        """Make the change that was agreed on, if any; whether the ranks may be others now.

        It is made before the next batch is drawn: what the script does behind a step is done then, on all ranks alike,
        and whoever comes new begins where they are.
        """
        if not self._change_due:
            return False
        self._change_due = False
        self._switch()
        return True

    def _switch(self) -> None:
        """Leave, or go on in the next round."""
        rounds = self._rounds
        drain = rounds.link.drain(rounds.number)
        if drain is None:
            raise RuntimeError("a planned change was agreed on that this rank does not know")
        if drain.waits:
            self._part.save_before_waiting()
        if drain.next is None and self._signals.requested is not None:
            self._part.stopped = True
            self._part.write_closed("stopped")
            raise SystemExit(self._signals.exit_code)
        self._trained.replica.release()
        rounds.abandon(planned=True)
        following = rounds.link.place(drain.next) if drain.next is not None else None
        self.enter(planned=True, following=following)
