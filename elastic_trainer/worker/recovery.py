"""Frees a worker's main thread from the collectives of a round that is over.

*Runs in* the worker's main thread, which enters and leaves; the link's thread calls :meth:`Escape.over`.
*Owns* the sockets and the waits of the present round.
*Invariant*: after a round is left, none of its sockets is severed.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import (
    CheckpointError,
    RejoinError,
    RoundBrokenError,
    StepGivenUpError,
    TransientError,
)
from elastic_trainer.ipc.messages import Drain, Ready, StateReport
from elastic_trainer.model import Cursor, Phase
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.agent_link import ChannelLink
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.abort import (
    End,
    InterruptibleWaits,
    Sockets,
    chain,
    is_collective_failure,
    summary,
    trail,
    tried,
)
from elastic_trainer.worker.comm.control import Codec, Control
from elastic_trainer.worker.comm.groups import Group, RoundPlace
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.replica import Use
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import Origin, heal, identity
from elastic_trainer.worker.state.saver import check_storage
from elastic_trainer.worker.steps.engine import Step
from elastic_trainer.worker.steps.options import OnShortage
from elastic_trainer.worker.steps.training import Training

SEVER_AGAIN_S = 0.005
SEVER_AGAIN_LONGEST_S = 0.5


class Escape:
    """See the module. ``number`` is the round that this worker is or was last in."""

    def __init__(self, tracker: HeartbeatReporter) -> None:
        self._tracker = tracker
        self.number = 0
        self.sockets = Sockets()
        self._inside = threading.Event()
        self._works = InterruptibleWaits()

    @property
    def inside(self) -> bool:
        return self._inside.is_set()

    def enter(self, number: int, store: Collection[End]) -> InterruptibleWaits:
        """Round ``number`` is being formed through ``store``; returns its waits."""
        self.number = number
        self._works = InterruptibleWaits(self._tracker, interruptible=True)
        self.sockets.forming(store, number)
        self._inside.set()
        return self._works

    def leave(self, *, planned: bool) -> None:
        """Leave the round; ``planned``: no peer waits in it either."""
        if not planned:
            self.sockets.sever()
        self._works.end("the round was left")  # a late wait returns what has arrived by now
        self._inside.clear()
        self.sockets.forget()

    def free(self, number: int, why: str) -> None:
        """Free the main thread if it still forms round ``number``."""
        works = self._works
        if self.number == number:
            works.end(why)
            self.sockets.sever(number)

    def over(self, number: int) -> None:
        """Rounds up to ``number`` are over: free the main thread if it is in one of them.

        By a planned change it may enter the next round meanwhile, whose waits and sockets are left alone.
        """
        works = self._works  # before the number: a round that begins sets its number first
        present = self.number
        if self._inside.is_set() and number >= present:
            groups.abort_nccl()
            works.abort()
            works.end("the round ended in the middle of a collective")
            self.sockets.sever(present)
            threading.Thread(target=self._sever_until_free, args=(present,), name="sever", daemon=True).start()

    def _sever_until_free(self, number: int) -> None:
        """Repeat until the main thread has left the group: a socket may have been busy the first time."""
        pause_s = SEVER_AGAIN_S
        while self._inside.is_set() and self.number == number:
            SYSTEM.wait(threading.Event(), pause_s)
            pause_s = min(2.0 * pause_s, SEVER_AGAIN_LONGEST_S)  # the main thread may be in an evaluation of an hour
            self.sockets.sever(number)


NEWCOMER = -1


class CallReplay:
    """Counts completed calls. ``count`` is NEWCOMER until this rank has met others."""

    def __init__(self) -> None:
        self.count = NEWCOMER
        self.inside = False
        """Whether the round ended here in the middle of a call."""
        self._last = b""
        self._answer: bytes | None = None

    @property
    def has_answer(self) -> bool:
        """Whether a peer has completed the call that this rank is in."""
        return self._answer is not None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """In the body this rank meets others for the call that it is in."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def completed(self, result: Any, codec: Codec) -> Any:
        """Count a call that completed here, and return its result."""
        self.count = max(0, self.count) + 1
        self._last = codec.encode(result)
        return result

    def answer(self, codec: Codec) -> Any:
        """The result that a peer sent; the call counts as completed here."""
        data, self._answer = cast("bytes", self._answer), None
        self.count += 1
        self._last = data
        return codec.decode(data)

    def meet(self, control: Control, counts: Sequence[int]) -> None:
        """At the start of a round, send the last result to the ranks that are behind."""
        most, self._answer = max(counts), None
        if any(0 <= count < most for count in counts):
            data = control.broadcast_bytes(self._last, counts.index(most))
            if self.count < most:
                self._last = data
                self._answer = data if self.inside else None
        self.count = max(0, most - self.has_answer)


@dataclass(frozen=True, slots=True)
class Formed:
    """A round that this worker has entered, and the seconds that it took to form."""

    group: groups.Group
    took_s: float


class Rounds:
    """See the module."""

    def __init__(
        self,
        link: ChannelLink,
        escape: Escape,
        placement: Placement,
        timeouts: groups.FormTimeouts,
        layout: ShardLayout | None = None,
    ) -> None:
        self._layout = layout
        self._link, self._escape, self._placement, self._timeouts = link, escape, placement, timeouts
        self._group: groups.Group | None = None
        """None between two rounds."""

    def enter(
        self, offer: Ready, idle: Callable[[], None], forming: Callable[[], object], place: RoundPlace | None = None
    ) -> Formed:
        """Join the next round, retrying while rounds fail to form.

        ``offer`` is this worker's announcement, ``place`` its place in a round that a planned change has already fixed.
        ``idle()`` is called about once a second while there is no round, ``forming()`` when a place is known.
        """
        if place is not None:
            self._link.ready(offer.model_copy(update={"number": place.round, "planned": True}))
        while True:
            if place is None:
                place = self._await_place(offer, idle)
            offer = offer.model_copy(update={"planned": False})
            if place is None:
                continue
            forming()
            try:
                return self._form(place)
            except (RejoinError, TransientError, RuntimeError) as error:
                self.give_up(place.round, error, place)
                place = None

    def _await_place(self, offer: Ready, idle: Callable[[], None]) -> RoundPlace | None:
        first = max(self._escape.number, self._link.over) + 1
        self._link.ready(offer.model_copy(update={"number": first}))
        return self._link.await_formation(first, idle)

    def give_up(self, number: int, error: BaseException, place: RoundPlace | None = None) -> None:
        """Give up round ``number`` because ``error`` kept its ranks from starting; raises any other error.

        ``place``: this worker's in it, if its groups were not formed. Else they were, so ranks reached each other.
        """
        if not is_collective_failure(error):
            raise error
        logger().info("round.not_entered", round=number, error=summary(error), trail=trail(error))
        if place is None:
            self._link.failed(number, summary(error))
        else:
            self._link.failed(number, summary(error), forming=True, tried=tried(error), loopback=place.misleads())
        self.abandon()
        self._link.await_over(number)

    def _form(self, formation: RoundPlace) -> Formed:
        works = self._escape.enter(formation.round, groups.store_ends(formation))
        if self._link.broken(formation.round) is not None:
            raise RejoinError(f"round {formation.round} is broken already")
        why = f"round {formation.round} was not formed within {self._timeouts.forming_s:g} s"
        limit = threading.Timer(self._timeouts.forming_s, self._escape.free, (formation.round, why))
        started = SYSTEM.monotonic()
        try:
            over = partial(self._link.broken, formation.round)
            group = groups.form_in_place(
                formation, self._placement, self._timeouts, limit.start, over, works, self._layout
            )
            self._group = group
            self._escape.sockets.formed(group.listening)
        finally:
            limit.cancel()
        return Formed(group, SYSTEM.monotonic() - started)

    def check_device(self, device: torch.device) -> None:
        """Before an update: refuse the gradients of a round that is over, on a CUDA device after a wait for them.

        CUDA runs asynchronously, so after an abort the update would use partially summed gradients.
        """
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        number = self._escape.number
        reason = self._link.broken(number)
        if reason is not None:
            raise RoundBrokenError(f"round {number} ended before its gradients were complete: {reason}")

    def confirms(self, error: BaseException) -> bool:
        """Whether ``error`` comes from the end of the present round; any other error is the script's.

        Reports a failed collective to the agent, then waits for the agent's message that the round is over.
        """
        if not self._escape.inside or not is_collective_failure(error):
            return False
        number = self._escape.number
        # Before the peers can notice: those who lose contact with a rank that gives its step up are not the cause.
        self._link.failed(number, summary(error), given_up=isinstance(error, StepGivenUpError))
        self._escape.sockets.sever()  # so that peers notice at network speed that this rank has left the round
        logger().warning("collective.failed", round=number, error=summary(error), trail=trail(error))
        return self._link.await_over(number)

    def abandon(self, *, planned: bool = False) -> None:
        """Drop the present group without waiting for peers; ``planned``: no peer waits in it either."""
        self._escape.leave(planned=planned)
        group, self._group = self._group, None
        groups.abandon(group)

    # ---- planned changes

    def drain(self) -> Drain | None:
        return self._link.drain(self._escape.number)

    def following(self, drain: Drain) -> RoundPlace | None:
        """This worker's place in the round that follows, if it has one."""
        return self._link.place(drain.next) if drain.next is not None else None


class MemoryShortage:
    """See the module."""

    def __init__(self, training: Training) -> None:
        self._training, self._place = training, training.place
        self._policy = OnShortage(self._place.options.checks.out_of_memory)
        if self._policy is OnShortage.HALVE:
            training.replica.check(Use.HALVING)
        self._step = 0
        """The step for which this rank had too little memory; 0: none."""

    def seen(self, step: Step, error: BaseException) -> BaseException:
        """``error`` itself, or StepGivenUpError for an out-of-memory error that can be handled."""
        if self._policy is OnShortage.RAISE or step.committed or step.batch is None:
            return error
        if not any(isinstance(each, torch.OutOfMemoryError) for each in chain(error)):
            return error
        if self._policy is OnShortage.HALVE and max(map(len, step.batch.micro_batches)) <= 1:
            return error
        self._step = step.number
        for each in chain(error):
            traceback.clear_frames(each.__traceback__)
        logger().warning("memory.exhausted", step=step.number, rank=step.rank, then=str(self._policy))
        return StepGivenUpError(f"rank {step.rank} ran out of memory in step {step.number}")

    def agree(self, control: Control) -> None:
        """In a new round, when all ranks hold one state: act if a rank had too little memory for the next step."""
        if self._policy is OnShortage.RAISE:
            return
        position, feed = self._place.position, self._place.feed
        rows = control.gather([self._step, feed.next_size, feed.halvings])
        short = [size for step, size, _ in rows if step == position.step + 1]
        self._step = 0
        feed.halvings = max(halvings for _, _, halvings in rows)
        if not short:
            return
        gc.collect()
        if self._place.placement.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._policy is OnShortage.HALVE:
            feed.halvings += 1
            logger().warning("batch.repeated", step=position.step + 1, halvings=feed.halvings)
        else:
            cursor = Cursor(position.cursor.epoch, position.cursor.samples + short[0])
            self._training.steps.pass_over(cursor)
            logger().warning("batch.skipped", step=position.step, samples=short[0])


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
            training.steps.sync.healed()
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
        self._training.steps.sync.undo()
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
