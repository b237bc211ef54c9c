"""Carries the training of this process from one round into the next, in place: the process and its loop continue.

A step that was uncommitted when its round ended is undone, and its batch is repeated; committed steps stay. In the next
round training continues only when all ranks hold one state.

*Runs in* the worker's main thread.
*Fails by* any error that does not come from the end of a round; NonFiniteError for a state that must not continue;
SystemExit if the process leaves by a planned change.
*Invariant*: only a whole state is ever reported or sent to another rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError, RejoinError, TransientError
from elastic_trainer.ipc.messages import Ready, StateReport
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.codecs import Codec
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.groups import Group
from elastic_trainer.worker.comm.round_place import RoundPlace
from elastic_trainer.worker.inplace.call_replay import NEWCOMER, CallReplay
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.inplace.shortage import MemoryShortage
from elastic_trainer.worker.state.heal import heal, identity
from elastic_trainer.worker.state.restore import Origin
from elastic_trainer.worker.state.storage_check import check_storage
from elastic_trainer.worker.steps.engine import Step
from elastic_trainer.worker.steps.training import Training

_LASTING = (Phase.CHECKPOINT, Phase.EVALUATION)
"""Phases of the script that continue after a round ended in the middle of them."""
Result = TypeVar("Result")


class InPlaceRecovery:
    """See the module."""

    led = True

    def __init__(self, rounds: Rounds, training: Training) -> None:
        self._rounds, self._training, self._place = rounds, training, training.place
        self._calls = CallReplay()
        self._shortage = MemoryShortage(training)
        self._valid = False
        """Whether other ranks may receive the state held here."""
        self._first_rank = False
        """In the round that is being entered."""
        self._given_up: Step | None = None
        """The step that was undone when the last round ended."""
        self._change_due = False
        self._evaluates = False
        """Whether an evaluation runs, during which no planned change is agreed on."""

    # ---- entering a round

    def begin(self) -> None:
        self._enter()

    def _enter(self, *, planned: bool = False, joinable: bool = True, following: RoundPlace | None = None) -> None:
        """Join the next round with the state held here, or receive the state from a rank that holds it."""
        tracker = self._place.tracker
        before, forming = tracker.change(Phase.RENDEZVOUS), partial(tracker.change, Phase.RENDEZVOUS)
        while True:
            offer = self._offer(planned=planned, joinable=joinable)
            formed = self._rounds.enter(offer, self._while_waiting, forming, following)
            planned, following, began = False, None, SYSTEM.monotonic()
            formation = formed.group.formation
            try:
                self._settle(formed.group)
            except (RejoinError, TransientError, RuntimeError) as error:
                self._rounds.give_up(formation.round, error)
                continue
            logger().info(
                "round.entered",
                round=formation.round,
                rank=formation.rank,
                world_size=formation.world_size,
                form_s=round(formed.took_s, 4),
                settle_s=round(SYSTEM.monotonic() - began, 4),
            )
            break
        tracker.change(before if before in _LASTING else Phase.TRAINING)

    def _offer(self, *, planned: bool, joinable: bool) -> Ready:
        """The announcement to the agent; the round's number is filled in when it is sent."""
        return Ready(
            number=0,
            state=self._report(),
            planned=planned,
            joinable=joinable,
            in_call=self._calls.inside,
            newcomer=self._calls.count == NEWCOMER,
            step_time_s=self._place.span_s,
        )

    def _report(self) -> StateReport | None:
        if not self._valid:
            return None
        position = self._place.position
        return StateReport(
            round=position.lineage,
            step=position.step,
            epoch=position.cursor.epoch,
            samples=position.cursor.samples,
            batch=self._place.feed.next_size,
        )

    def _settle(self, group: Group) -> None:
        """After a round was formed: bring all ranks to one state."""
        place, training, position, control = self._place, self._training, self._place.position, group.control
        place.tracker.change(Phase.HEALING)
        place.arrive(group)
        training.replica.join(group)
        self._meet_peers(control)
        mine = identity(training.state.committed(), position.lineage, position.step) if self._valid else None
        least = max(group.formation.round, position.generation + 1)
        attempted = self._given_up.number if self._given_up is not None else 0
        notes = {"fields": training.fields(), "cut": place.feed.fields, "attempted": attempted}
        alike = training.replica.alike(control) if training.replica.layout is not None else None
        self._first_rank = control.rank == 0
        healed = heal(control, mine, least, self, notes, self._calls.count, alike)
        behind = control.rank in healed.behind
        if behind:
            if training.outer is not None:
                training.outer.healed()
            training.origin = Origin(None, healed.notes["fields"])
            if self._given_up is not None:
                self._count(self._given_up, attempted_since=healed.notes["attempted"] > attempted)
        self._calls.meet(control, healed.done)
        if healed.source is None:
            self._valid = False
            check_storage(place.manager, control, place.environment)
            training.resume(group, self._unfit(torn=healed.torn))
            training.steps.dirty, self._valid = False, True
        else:
            given = healed.notes.get("cut") if behind else None
            training.take_part(group, healed.generation, training.origin.fields, given)
        self._shortage.agree(control)
        self._given_up = None

    def _meet_peers(self, control: Control) -> None:
        """Shards of one group commit together: a prepared rank whose peer has committed the step commits it too.

        All sums of a prepared rank are complete, so what it commits has the bits of its replicas.
        """
        training, position = self._training, self._place.position
        if training.replica.layout is None:
            return
        rows = control.gather([position.lineage, position.step] if self._valid else [-1, -1])
        committed = [position.generation, training.steps.prepared] in rows
        step = training.steps.settle(committed=committed)
        if step is not None:
            self._place.record(step, round=step.generation, rank=step.rank, world=step.world_size)
            self._given_up = None

    def _unfit(self, *, torn: bool) -> CheckpointError | None:
        """Why training cannot start from this rank's state, if so."""
        if torn:
            return CheckpointError(
                "no shards are left that make one whole state, and there is no checkpoint",
                hint="give Session a checkpoint_dir",
            )
        if not self._training.steps.dirty:
            return None
        return CheckpointError(
            "no rank holds a whole state any more: the round ended while the optimizer was at work, and there is no"
            " checkpoint",
            hint="give Session a checkpoint_dir",
        )

    def collect(self) -> dict[str, Any]:
        return self._training.collect()

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Adopt the ``state`` of another rank. Until that is done this rank must not send its state to others."""
        self._valid = False
        self._training.take_over(state, first_rank=self._first_rank)
        self._valid = True

    def _count(self, step: Step, *, attempted_since: bool) -> None:
        """This rank was healed by a peer that may have committed the step that was undone here.

        Then its samples count as used. The script's code after the step runs here too, unless the peer's state already
        includes its effect because the peer was inside the next step (``attempted_since``).
        """
        position = self._place.position
        if (position.step, position.lineage) != (step.number, step.generation):
            return
        step.committed = not attempted_since
        if step.committed and step.batch is not None:
            step.batch.used = True
        self._place.record(step, round=step.generation, rank=step.rank, world=step.world_size)

    def _while_waiting(self) -> None:
        """Without a round for a second (too few nodes, or no store): save the state that is only in memory."""
        self._place.tracker.change(Phase.WAITING)
        if self._valid:
            self._training.save_alone()

    # ---- the end of a round

    def _confirms(self, error: BaseException) -> bool:
        """Whether ``error`` is the end of the round; ConfigError if the ranks could not go on in the next one."""
        parted = self._training.parted_by(error)
        if parted is not None:
            raise parted from error
        return self._rounds.confirms(error)

    def absorb(self, step: Step, error: BaseException) -> bool:
        """If ``error`` is the end of the round: join the next one, where the batch is repeated."""
        error = self._shortage.seen(step, error)
        if not self._confirms(error):
            return False
        if not step.committed or self._training.apart:
            self._give_up(step)
        else:
            self._place.record(step)
        self._valid = self._valid and not self._training.steps.dirty
        was, stood = step.committed, self._stands
        # Newcomers cannot repeat the script's code after a step.
        self._regroup(joinable=not was)
        if was and stood != self._stands:
            step.committed = False  # the others went on, and this rank continues where they are
        if step.committed:
            self._place.present.boundaries.save_due(step.number)
        return True

    @property
    def _stands(self) -> tuple[int, int, int]:
        """Where this rank is in the script."""
        position = self._place.position
        return position.lineage, position.step, self._calls.count

    def _give_up(self, step: Step) -> None:
        """Undo ``step``; where ranks train apart, its batch and those before it come again if it was made."""
        if not step.committed:
            self._training.steps.undo()
        elif step.batch is not None:
            step.batch.used = False
        step.committed = False
        self._given_up = step

    def repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """``attempt()``, repeated after each round that ends in the middle of it.

        If a peer completed the same call, its result is used instead (``codec`` transfers it).
        """
        while True:
            try:
                return self._calls.completed(attempt(), codec)  # type: ignore[no-any-return]
            except (RejoinError, RuntimeError) as error:
                if not self._confirms(error):
                    raise
                with self._calls.interrupted():
                    self._regroup(joinable=False)
                if self._calls.has_answer:
                    return self._calls.answer(codec)  # type: ignore[no-any-return]

    def _regroup(self, *, joinable: bool) -> None:
        self._change_due = False
        self._training.replica.release()
        self._rounds.abandon()
        if self._training.outer is not None:
            self._training.outer.undo()
        self._place.present.boundaries.refuse_nonfinite()
        self._enter(joinable=joinable)
        self._place.feed.redraw()  # the script may open another step with the same batch

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def check_gradients(self) -> None:
        """RoundBrokenError if the gradients may lack those of other ranks, or if no sum would say that one is gone."""
        device = self._place.placement.device
        if device.type == "cuda" or self._training.apart:
            self._rounds.check_device(device)

    # ---- planned changes

    def knows_change(self) -> bool:
        return not self._evaluates and self._rounds.drain() is not None

    def agreed(self) -> None:
        self._change_due = True

    def change(self) -> bool:
        """Perform the agreed planned change, if any; returns whether the ranks may have changed.

        This happens before the next batch is drawn: the script's code after the step has run on all ranks by then, so
        newcomers start where the others are.
        """
        if not self._change_due:
            return False
        self._change_due = False
        self._switch()
        return True

    def _saved_together(self) -> bool:
        """Save before too few nodes remain; False if the round has ended in the middle of it."""
        try:
            self._training.save_before_waiting()
        except (RejoinError, RuntimeError) as error:
            if not self._confirms(error):
                raise
            return False
        return True

    def _switch(self) -> None:
        rounds = self._rounds
        drain = rounds.drain()
        if drain is None:
            raise RuntimeError("a planned change was agreed on that this rank does not know")
        leaves = drain.next is None and self._place.signals.requested is not None
        if drain.waits and not self._saved_together():
            if not leaves:
                self._regroup(joinable=True)
                return
            self._training.save_alone()
        if leaves:
            self._place.stopped = True
            self._place.closed("stopped")
            raise SystemExit(self._place.signals.exit_code)
        self._training.replica.release()
        rounds.abandon(planned=True)
        self._enter(planned=True, following=rounds.following(drain))
