"""What ``session.wrap`` makes: a model with its optimizer, its steps and its checkpoints, as one value.

What the script has given decides the mode of the training here, and nowhere else: the type of the replica, who writes
its states (:class:`WholeStates`, :class:`ShardedStates`), when ranks come to one state (:class:`LocalSgdSync`, or in
every step). Each round binds it anew: other ranks share gradients, another rank saves, the data is cut differently.

*Runs in* the worker's main thread. *Owns* in place a hook that torch calls before each step of any optimizer.
*Fails by* ConfigError for what does not go together, CheckpointError for what cannot be resumed, RoundBrokenError when
a peer is lost.
"""

from __future__ import annotations

import copy
import gc
import json
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from elastic_trainer.checkpoint import CheckpointManager, Save, ShardGroup
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.data import seeds
from elastic_trainer.errors import CheckpointError, ConfigError, NonFiniteError, StepGivenUpError, StorageError
from elastic_trainer.model import Cursor, Phase
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.comm.control import (
    JSON,
    CallsDifferError,
    Codec,
    Control,
    Purpose,
    Stand,
    Whereabouts,
    chain,
    is_collective_failure,
)
from elastic_trainer.worker.comm.groups import Group
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.model.local import LocalReplica, LocalSgd
from elastic_trainer.worker.model.replica import (
    DdpReplica,
    Reduction,
    Replica,
    Use,
    check_optimizer,
    check_options,
    is_sharded,
)
from elastic_trainer.worker.model.several import MultiOptimizerReplica
from elastic_trainer.worker.model.tree import TreeReplica
from elastic_trainer.worker.recovery import Recovery
from elastic_trainer.worker.state.restore import Origin, StoredStates, give, joined_copies, restore
from elastic_trainer.worker.state.saver import (
    Memory,
    Saver,
    ShardPart,
    Shares,
    WhenBehind,
    Writers,
    check_storage,
    find_neighbour,
)
from elastic_trainer.worker.state.training_state import (
    OptimizerSet,
    Position,
    SchedulerSet,
    Stateful,
    TrainingState,
    members_of,
    parameters_of,
)
from elastic_trainer.worker.steps.audit import PassAudit, check_auditable
from elastic_trainer.worker.steps.engine import (
    Comparison,
    Difference,
    EveryStep,
    MultiOptimizerSteps,
    RankContext,
    Step,
    StepBoundaries,
    Steps,
    WorkerContext,
)
from elastic_trainer.worker.steps.feed import CUT
from elastic_trainer.worker.steps.options import OnChanged, OnDifference, OnMismatch, OnShortage

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What a script trains. ``user`` are its registered objects, ``pending`` states of those not registered yet."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    sync_batchnorm: bool
    reduction: Reduction
    local_sgd: LocalSgd | None
    average: float | AveragedModel | None
    ddp_options: Mapping[str, Any]
    layout: ShardLayout | None
    stages: Sequence[Any]
    user: dict[str, Stateful]
    pending: dict[str, Any]


def _check_optimizers(wrapped: Wrapped) -> None:
    """ConfigError for a scheduler or an optimizer that a session cannot drive."""
    schedulers = wrapped.scheduler.members.values() if isinstance(wrapped.scheduler, SchedulerSet) else ()
    if any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in (wrapped.scheduler, *schedulers)):
        raise ConfigError("ReduceLROnPlateau needs a metric", hint="register() it and step it yourself")
    for each in members_of(wrapped.optimizer):
        check_optimizer(each, wrapped.model)


def replica_of(context: WorkerContext, wrapped: Wrapped) -> Replica:
    """The replica for what was ``wrapped``: the mode of this training, chosen here alone."""
    model, placement, in_place = wrapped.model, context.placement, context.environment.in_place
    options, sync, tree = wrapped.ddp_options, wrapped.sync_batchnorm, wrapped.reduction is Reduction.TREE
    if wrapped.local_sgd is not None:
        _check_local_sgd(context, wrapped, wrapped.local_sgd)
        return LocalReplica(model, placement, wrapped.local_sgd, in_place=in_place)
    if isinstance(wrapped.optimizer, OptimizerSet):
        _refuse(
            ("a sharded model", is_sharded(model)),
            ("reduction='tree'", tree),
            ("ddp_options", bool(options)),
            ("sync_batchnorm", sync),
            ("a GradScaler", wrapped.scaler is not None and wrapped.scaler.is_enabled()),
            to="several models or optimizers",
            hint="train one model with one optimizer, whose parameter groups can differ, or leave it out",
        )
        return MultiOptimizerReplica(model, placement, in_place=in_place)
    if is_sharded(model) or wrapped.stages:
        return _sharded_replica_of(context, wrapped)
    if tree:
        hint = "leave it out: the tree does not use DistributedDataParallel"
        check_options(options)
        _refuse(("reduction='tree'", sync), to="sync_batchnorm", hint=hint)
        _refuse(("reduction='tree'", bool(options)), to="ddp_options", hint=hint)
        return TreeReplica(model, placement, in_place=in_place)
    return DdpReplica(model, placement, context.tracker, options, sync_batchnorm=sync, in_place=in_place)


def _sharded_replica_of(context: WorkerContext, wrapped: Wrapped) -> Replica:
    _refuse(
        ("reduction='tree'", wrapped.reduction is Reduction.TREE),
        ("ddp_options", bool(wrapped.ddp_options)),
        ("sync_batchnorm", wrapped.sync_batchnorm),
        to="a sharded model",
        hint="leave it out: FSDP sums the gradients there",
    )
    if wrapped.layout is None:
        raise ConfigError(
            "the model is sharded, and not over a mesh of the session's",
            hint="shard it with mesh=session.init_device_mesh(...), inside `with session.parallelizing():`",
        )
    model, placement, layout, timeouts = wrapped.model, context.placement, wrapped.layout, context.timeouts
    in_place = context.environment.in_place
    # slow to import, and what most jobs do not need
    if wrapped.stages:
        if wrapped.average is not None:
            raise ConfigError("average does not go with stages", hint="leave it out")
        from elastic_trainer.worker.model.stages import StagedReplica

        return StagedReplica(model, placement, layout, timeouts, wrapped.stages, in_place=in_place)
    from elastic_trainer.worker.model.sharded import ShardedReplica

    return ShardedReplica(model, placement, layout, timeouts, in_place=in_place)


def _check_local_sgd(context: WorkerContext, wrapped: Wrapped, how: LocalSgd) -> None:
    name, options = f"reduction={wrapped.reduction.value!r}", context.options
    _refuse(
        ("a sharded model", is_sharded(wrapped.model) or bool(wrapped.stages)),
        ("several models or optimizers", isinstance(wrapped.optimizer, OptimizerSet)),
        ("ddp_options", bool(wrapped.ddp_options)),
        ("sync_batchnorm", wrapped.sync_batchnorm),
        ("average", wrapped.average is not None),
        ("a GradScaler (use bfloat16)", wrapped.scaler is not None and wrapped.scaler.is_enabled()),
        ("out_of_memory", options.checks.out_of_memory != OnShortage.RAISE),
        to=name,
        hint="leave it out, or average in every step with reduction='ddp'",
    )
    every = options.cadence.every_steps
    if every is not None and every % how.sync_every:
        raise ConfigError(
            f"checkpoint_every_steps is {every}, and {name} has one state of all ranks after each"
            f" {how.sync_every} steps",
            hint="give a multiple of sync_every",
        )


def _refuse(*options: tuple[str, bool], to: str, hint: str) -> None:
    """ConfigError for the first option that is given."""
    for option, given in options:
        if given:
            raise ConfigError(f"{option} does not go with {to}", hint=hint)


class WholeStates:
    """Who keeps the states of this rank's replica, where each rank holds a whole one: rank 0 writes for all."""

    sharding: Any = None
    """What tells a whole state from a shard of one."""

    def __init__(self, context: WorkerContext, replica: Replica) -> None:
        self._context, self._replica, self.manager = context, replica, context.manager

    def memory(self) -> Memory:
        """Each local rank has memory files of its own; whole states are those of the first."""
        environment = self._context.environment
        first = SLOTS * environment.local_rank
        return Memory(environment.memory[first : first + SLOTS], self._context.options.saving.snapshot_every_s)

    def meet(self, saver: Saver) -> None:
        """A round begins with these ranks of the shard group."""

    def serve(self, saver: Saver, group: Group) -> None:
        """From now on ``saver`` keeps the states of the ranks of this round."""
        rank, world = group.formation.rank, group.formation.world_size
        shares = Shares()
        if not self._replica.own_optimizer:  # what a rank holds of its own is written by one rank
            shares = Shares.among(group.formation, Writers(self._context.options.saving.writers))
        saver.serve(saves=rank == 0, world_size=world, shares=shares)

    def serve_alone(self, saver: Saver) -> bool:
        """Without a round: whether this rank can save."""
        saver.serve(saves=True)
        return True


class ShardedStates(WholeStates):
    """Where each rank holds a shard: the ranks of one shard group write together, each its own."""

    def __init__(self, context: WorkerContext, replica: Replica, layout: ShardLayout) -> None:
        super().__init__(context, replica)
        self._layout = layout
        if self.manager is None and context.options.directory is not None:  # it writes its shards, and looks for none
            self.manager = CheckpointManager(context.options.directory, owner=context.owner)
        self.sharding = import_module("elastic_trainer.worker.state.shards")  # slow to import

    def memory(self) -> Memory:
        files, first = self._context.environment.memory, SLOTS * self._context.environment.local_rank
        return replace(super().memory(), beside=(*files[:first], *files[first + SLOTS :]))

    def meet(self, saver: Saver) -> None:
        if self._replica.peers is not None:
            saver.meet(self._replica.peers)

    def serve(self, saver: Saver, group: Group) -> None:
        rank, world = group.formation.rank, group.formation.world_size
        self.meet(saver)
        part = self._part(self._replica.peers, writes=rank < self._layout.size)
        neighbour, environment = None, self._context.environment
        if self._layout.size == world:
            neighbour = find_neighbour(group.control, environment.copies_here, environment.local_rank)
        saver.serve(saves=rank == 0, world_size=world, shares=Shares(), part=part, neighbour=neighbour)

    def serve_alone(self, saver: Saver) -> bool:
        part = self._part(None, writes=True)
        if part is None:
            return False
        saver.serve(saves=part.leads, part=part)
        return True

    def _part(self, peers: Control | None, *, writes: bool) -> ShardPart | None:
        """What this rank copies: in the first shard group of its node."""
        if self._context.environment.local_rank >= self._layout.size:
            return None
        return ShardPart(ShardGroup(self._layout.mesh, self._layout.stages), peers, writes)


def check_run(checkpoint: str, saved_by: str | None, mine: str | None, allow_changed: Collection[str]) -> None:
    """ConfigError if another run has saved ``checkpoint``, unless that is allowed.

    Any run may continue a checkpoint saved without a run's name (by a script alone, or an earlier version).
    """
    if saved_by is None or saved_by == mine or "run" in allow_changed:
        return
    here = f"is run {mine!r}" if mine is not None else "is a run without a name"
    raise ConfigError(
        f"the newest checkpoint, {checkpoint}, was saved by run {saved_by!r}, and this {here}",
        hint="give each run a checkpoint directory of its own; to go on with that one's state under another name, say"
        " allow_changed=['run'] (--allow-changed run for a ready-made job)",
    )


_DOING = {
    Phase.ENDING: "has left its training loop",
    Phase.EVALUATION: "evaluates",
    Phase.CHECKPOINT: "saves",
}
EPOCH_CLOSED = "epoch_closed"
"""In the fields of a checkpoint that the script has saved behind the batches of an epoch."""


class Training:
    """What a script trains, from ``session.wrap`` on; ``recovery`` makes what carries it across rounds."""

    def __init__(self, context: WorkerContext, wrapped: Wrapped, recovery: Callable[[Training], Recovery]) -> None:
        _check_optimizers(wrapped)
        self.context, options = context, context.options
        self.origin = Origin()
        self._claims: dict[str, Any] = {}
        """Further fields of checkpoints, beside the cut of the data."""
        self._whereabouts: Whereabouts | None = None
        self.replica = replica = replica_of(context, wrapped)
        layout = replica.layout
        self._states = WholeStates(context, replica) if layout is None else ShardedStates(context, replica, layout)
        self.state = TrainingState(
            module=replica.module,
            optimizer=wrapped.optimizer,
            scheduler=wrapped.scheduler,
            scaler=wrapped.scaler,
            position=context.position,
            user=wrapped.user,
            pending=wrapped.pending,
            device=context.placement.device,
            average=replica.averaged(wrapped.average),
            sharding=self._states.sharding,
            own_optimizer=replica.own_optimizer,
            records=context.records,
        )
        self.state.made.check(options.allow_changed)
        self.saver = Saver(
            self._states.manager,
            options.cadence,
            self.state,
            self.fields,
            context.report_save,
            context.tracker,
            WhenBehind(options.saving.when_behind),
            self._states.memory(),
        )
        optimizers, sync = [*members_of(wrapped.optimizer)], EveryStep()
        if isinstance(replica, LocalReplica) and wrapped.local_sgd is not None:
            sync = LocalSgdSync(context, replica, wrapped.local_sgd.sync_every, self.collect, self.take_over)
            if replica.outer is not None:
                optimizers.append(replica.outer)
                self.state.register("outer_optimizer", replica.outer)
        kind = MultiOptimizerSteps if isinstance(wrapped.optimizer, OptimizerSet) else Steps
        audit = self._audit(wrapped.optimizer)  # its hook comes before those of the steps
        self.steps = kind(context, replica, self.state, sync, audit)
        self._shortage = MemoryShortage(context, self.steps)
        in_place = context.environment.in_place
        self._second = SecondOptimizers(replica.module, optimizers, wrapped.user, self.steps) if in_place else None
        self.recovery = recovery(self)

    def _audit(self, optimizer: torch.optim.Optimizer) -> PassAudit | None:
        context, checks, device = self.context, self.context.options.checks, self.context.placement.device
        repeats = checks.on_mismatch == OnMismatch.REPEAT
        if checks.audit_every is None:
            return None
        check_auditable(self.replica, repeats=repeats, device=device)
        node = context.environment.node
        return PassAudit(checks.audit_every, self.replica, optimizer, device, node, context.tracker, repeats=repeats)

    def close(self, limit_s: float | None) -> None:
        """The session ends. Pending saves may take ``limit_s``; None: as long as they take."""
        if self._whereabouts is not None:
            self._whereabouts.close()
            self._whereabouts.join()
        self.saver.close(limit_s)
        if self._second is not None:
            self._second.close()

    def fields(self) -> dict[str, Any]:
        """What a checkpoint says of this training, and a rank that is healed from this one learns."""
        kept = self.origin.fields
        cut = self.context.feed.fields or {name: kept[name] for name in CUT if name in kept}
        closed = {EPOCH_CLOSED: True} if self.context.feed.closing else {}
        return {**cut, **self._claims, **closed}

    # ---- the state, as recovery sees it (worker.recovery.State)

    @property
    def position(self) -> Position:
        return self.context.position

    @property
    def whole(self) -> bool:
        return not self.steps.dirty

    @property
    def sharded(self) -> bool:
        return self.replica.layout is not None

    @property
    def apart(self) -> bool:
        return self.steps.sync.open

    @property
    def prepared(self) -> int:
        return self.replica.prepared

    @property
    def next_size(self) -> int:
        return self.context.feed.next_size

    @property
    def span_s(self) -> float:
        return self.context.span_s

    @property
    def leaves(self) -> bool:
        return self.context.signals.requested is not None

    def show(self, phase: Phase) -> Phase:
        return self.context.tracker.enter_now(phase)

    def collect(self) -> dict[str, Any]:
        return self.state.collect()

    def committed(self) -> dict[str, Any]:
        return self.state.committed()

    def take_over(self, state: Mapping[str, Any], *, first_rank: bool = False) -> None:
        """Adopt the ``state`` of another rank; the ``first_rank`` with its random generators, as when it resumes."""
        self.steps.dirty = True
        self.state.apply(state, first_rank=first_rank)
        self.steps.dirty = False

    def record(self, step: Step) -> None:
        self.context.record(step, round=step.generation, rank=step.rank, world=step.world_size)

    # ---- the end of a round

    def gives_up(self, step: Step, error: BaseException) -> BaseException:
        return self._shortage.seen(step, error)

    def undo(self) -> None:
        self.steps.undo()

    def release(self) -> None:
        self.replica.release()

    def rewind(self) -> None:
        self.steps.sync.undo()
        self.context.present.boundaries.refuse_nonfinite()

    def doubts_gradients(self) -> bool:
        device = self.context.placement.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return device.type == "cuda" or self.apart

    # ---- rounds

    def join(self, group: Group) -> None:
        self.context.arrive(group)
        self.replica.join(group)

    def alike(self, control: Control) -> Control:
        return self.replica.alike(control)

    def settle(self, *, committed: bool) -> Step | None:
        return self.steps.settle(committed=committed)

    def notes(self) -> dict[str, Any]:
        return {"fields": self.fields(), "cut": self.context.feed.fields}

    def healed(self, notes: Mapping[str, Any]) -> None:
        self.steps.sync.healed()
        self.origin = Origin(None, notes["fields"])

    def agree_on_batch(self, control: Control) -> None:
        self._shortage.act_together(control)

    def redraw(self) -> None:
        self.context.feed.redraw()

    def save_due(self, step: int) -> None:
        self.context.present.boundaries.save_due(step)

    def leave_now(self) -> NoReturn:
        """Leave the job by a planned change."""
        self.context.left_as = "stopped"
        self.context.report_end("stopped")
        raise SystemExit(self.context.signals.exit_code)

    def resume_alone(self) -> None:
        present = self.context.present
        present.boundaries.end()
        with self.context.tracker.during(Phase.HEALING):
            self.resume(present.group)

    def resume(self, group: Group, unfit: CheckpointError | None = None) -> None:
        """Bring all ranks of ``group`` to one state from storage, and let them train together.

        Without a checkpoint they start from rank 0's state, unless a rank says that it is ``unfit``.
        """
        context, control, formation = self.context, group.control, group.formation
        if context.environment.in_place:  # else it was checked when the ranks met
            check_storage(context.manager, control, context.environment)

        def take_over(tree: Mapping[str, Any]) -> None:
            self.state.apply(tree, first_rank=formation.rank == 0)

        def check(origin: Origin) -> None:
            check_run(str(origin.name), origin.run, context.owner.run, context.options.allow_changed)
            self.steps.dirty = self.steps.dirty or origin.name is not None  # it is read into the live tensors

        self.replica.join(group)
        self.replica.level()
        self._states.meet(self.saver)
        self.saver.wait(control)
        left, alike = self.saver.left_in_memory(), self.replica.alike(control)
        with joined_copies(control, self.saver.parts_in_memory(), context.environment.copies_here) as joined:
            left = max(filter(None, (joined, left)), key=lambda each: each.order, default=None)
            stored = StoredStates(self._states.manager, context.tracker, left, looks=context.manager is not None)
            live = self.state.targets()
            self.origin = restore(control, alike, stored, self.collect, take_over, check, unfit, live)
        self.steps.dirty = False
        if self.origin.fields.get(EPOCH_CLOSED):
            context.position.cursor = Cursor(context.position.cursor.epoch + 1, 0)
        if self.origin.name is not None:
            strict = context.options.checks.on_changed == OnChanged.RAISE
            allowed, state = context.options.allow_changed, self.state
            state.settings = state.made.adopt(state.settings, allowed, strict=strict, says=formation.rank == 0)
        first = context.position.generation + 1 if self.origin.name is not None else 0
        read = context.position.generation, context.position.step
        newest = max(row[0] for row in control.gather([max(formation.round, first)]))
        self.take_part(group, newest)
        if self.origin.name is not None:
            self.saver.note_resume(self.origin.name, read, self.origin.fields, stored=self.origin.stored)

    def take_part(self, group: Group, generation: int, given: Mapping[str, Any] | None = None) -> None:
        """All ranks of ``group`` hold one state: bind everything to the round, and begin.

        ``given``: the notes of the rank that this one was healed from, with its data plan if it has one.
        """
        context, control, rank, world = self.context, group.control, group.formation.rank, group.formation.world_size
        position = context.position
        self._claims = self.replica.claims(control, self.origin.fields, context.options.allow_changed)
        position.generation = generation
        context.tracker.holds(position.step, position.cursor)
        if rank != 0:
            streams = seeds.key(seeds.START, context.options.seed, position.generation, position.step, rank)
            seeds.seeder(context.placement.device)(streams)
        self.replica.bind(control)
        self.steps.bind(control, self.recovery)
        context.feed.bind(control, self.steps.part, self.origin.fields, (given or {}).get("cut") or {})
        context.records.begin_round(control, self.steps.part, position.step, generation)
        self._states.serve(self.saver, group)
        context.rank_context = RankContext(group, self._boundaries(control))
        self._watch(group)
        context.ledger.identify(rank=rank, local_rank=context.environment.local_rank, world=world, round=generation)
        where = {"epoch": position.cursor.epoch, "resumed_from": self.origin.name}
        context.ledger.write("opened", step=position.step, **where)
        logs.logger().info("session.opened", world=world, round=generation, step=position.step, **where)
        for each in context.watching:
            each()

    def _watch(self, group: Group) -> None:
        """Find out if ranks come to different points of the script."""
        context = self.context
        if self._whereabouts is not None:
            self._whereabouts.close()

        def stand() -> Stand:
            phase, newest = context.tracker.phase, group.control.newest
            doing = _DOING.get(phase, f"has come to '{newest}'")
            return Stand(self.steps.inside, self.steps.begun, context.position.step, doing)

        free = partial(context.free, group.formation.round)
        node, control = context.environment.node, group.control
        self._whereabouts = Whereabouts(group.fresh, control, node, stand, lambda: context.span_s, free)

    def parted_by(self, error: BaseException | None) -> ConfigError | None:
        """Why the ranks cannot go on, if ``error`` is due to their being at different points of the script."""
        if self._whereabouts is None or error is None:
            return None
        if isinstance(error, CallsDifferError):
            return self._whereabouts.compared(error)
        return self._whereabouts.error if is_collective_failure(error) else None

    def _boundaries(self, control: Control) -> StepBoundaries:
        context, alike = self.context, self.replica.alike(control)

        def heal(found: Difference) -> None:
            give(alike, found.source, found.others, self.collect, self.take_over, {})
            step = context.position.step
            logs.logger().info("ranks.healed", step=step, ranks=list(found.others), source=found.source)

        mend = heal if context.options.checks.on_difference == OnDifference.HEAL else None
        whole = alike.world_size == control.world_size
        comparison = Comparison(alike, self.steps.trainable, context, mend, whole=whole)
        return StepBoundaries(control, context, self.saver, self.steps, comparison, self.recovery)

    # ---- calls of all ranks

    def repeated(self, attempt: Callable[[], Result], codec: Codec = JSON) -> Result:
        """``attempt()``; in place again after each round that ends in the middle of it.

        ConfigError between two synchronisations of ranks that train apart: those that have made fewer steps would not
        come here after such an end.
        """
        self.steps.sync.require_closed()
        return self.recovery.call(attempt, codec)

    def refuse_inside(self, call: str) -> None:
        """ConfigError while a step is open."""
        if self.steps.inside:
            raise ConfigError(f"session.{call} inside a step", hint="call it after the step has ended")

    def save(self, metrics: Mapping[str, float] | None, *, best: bool, wait: bool) -> str | None:
        """Save now; the checkpoint's name on all ranks. None where nothing is saved, or the storage refuses.

        CheckpointError and NonFiniteError on all ranks for a state that cannot be saved. A refusal by storage is not
        an error: it may accept a later save.
        """
        position, feed, before = self.position, self.context.feed, self.saver.newest
        best_before, feed.closing = position.best, feed.behind_batches
        try:
            with self.context.tracker.during(Phase.CHECKPOINT):
                refused, name = self.repeated(lambda: self._save(metrics, before, best=best, wait=wait))
        finally:
            feed.closing = False
        if refused:
            position.best = best_before
        return name or None

    def _save(
        self, metrics: Mapping[str, float] | None, before: Save | None, *, best: bool, wait: bool
    ) -> tuple[bool, str]:
        """Whether the storage refused, and the checkpoint's name.

        ``before``: rank 0's newest save before the first attempt. One begun in an earlier attempt is not begun again.
        """
        context, saver, position = self.context, self.saver, self.position
        control = context.present.control
        self.refuse_inside("save()")
        values = {name: float(value) for name, value in (metrics or {}).items()}
        context.tracker.enter_now(Phase.CHECKPOINT)
        newest, mine = saver.newest, control.rank == 0
        begun = newest if mine and newest is not before and newest is not None and newest.may_succeed else None
        goes_on, *_ = control.sum(Purpose.SAVE, [float(begun is not None)])
        if best:
            position.best = values
        saved: str | None = None
        problem: CheckpointError | NonFiniteError | None = None
        if mine:
            for name, value in values.items() if begun is None else ():
                context.ledger.write("metric", step=position.step, epoch=position.cursor.epoch, name=name, value=value)
            try:  # after a failure the caller learns whether this one was durable
                saved = saver.save(values, best=best, wait=wait or saver.has_failed, begun=begun)
            except (CheckpointError, NonFiniteError) as error:
                problem = error
        elif not goes_on:
            saver.write_share()
        refused = isinstance(problem, StorageError)
        control.agree(None if refused else problem)
        refused, name = json.loads(control.broadcast_bytes(json.dumps([refused, saved or ""]).encode(), 0))
        return refused, name

    # ---- the last checkpoints

    def save_before_waiting(self) -> None:
        """Too few nodes will remain: save what is only in memory while all ranks wait."""
        with self.context.tracker.during(Phase.CHECKPOINT):
            self.saver.make_durable()
            self.context.present.control.sum(Purpose.STOP)

    def save_alone(self) -> None:
        """Save what is only in memory, without a round: one rank of each node can, or its ranks together.

        Where neighbours keep copies the next round resumes one of those; one of this rank alone would take its memory.
        """
        if not self.saver.copied and self._states.serve_alone(self.saver):
            self.saver.make_durable()


class LocalSgdSync(EveryStep):
    """Steps that ranks make apart between two synchronisations, as one unit that all agree on or none.

    What the ranks share is the state at a synchronisation: parameters, schedule, position in the data, and the outer
    optimizer. Only there are checkpoints saved, calls of all ranks made and rounds changed by plan. A round that ends
    between two of them undoes the steps since the last one, from a copy in memory, and their samples come again; so the
    ledger gets its lines about them at the synchronisation. Each rank keeps the state of its own (inner) optimizer;
    that of the rank that saves or heals is what others begin with.

    ``collect()`` gives the state of this rank, ``take_over(state)`` makes it the present one. ConfigError for ranks
    that have made different numbers of steps.

    A synchronisation follows each multiple of ``every`` steps, and the last step of an epoch and of the run, so that
    none reaches over it.
    """

    rare = True

    def __init__(
        self,
        context: WorkerContext,
        replica: LocalReplica,
        every: int,
        collect: Callable[[], dict[str, Any]],
        take_over: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._context, self._replica, self._every = context, replica, every
        self._collect, self._take_over = collect, take_over
        self._kept: dict[str, Any] | None = None
        """The state at the last synchronisation; None until a step is begun from there."""
        self._lines: list[dict[str, Any]] = []
        """What the ledger will say of the steps since then."""
        self._made = 0
        """Steps made since then."""
        self._undone = 0
        """Those that a fault undid, until the next step begins."""
        self._attempted: tuple[int, int] | None = None
        """The step and the generation of the last synchronisation that was begun, and who this rank was then."""
        self._identity: dict[str, int] = {}

    @property
    def open(self) -> bool:  # type: ignore[override]
        return self._kept is not None

    def begin(self) -> None:
        """A step begins, behind the script's code after the one before: keep the state if it is the first one."""
        if self._kept is not None:
            return
        self._lines, self._attempted, self._made, self._undone = [], None, 0, 0
        if self._replica.in_place:
            self._kept = copy.deepcopy(self._collect())
        else:  # the end of the round ends the process
            self._kept = {"model": self._replica.anchor()}

    def made(self, step: Step, check: Callable[[], None]) -> bool:
        if self._context.ledger.enabled:
            self._lines.append(self._context.entry(step))
        step.recorded = True
        self._made += 1
        if step.number % self._every and not self._context.feed.at_end:
            return False
        self._synchronise(check)
        return True

    def _synchronise(self, check: Callable[[], None]) -> None:
        """All ranks come to one state, unless they hold it."""
        if self._kept is None or not self._made:
            return
        control, position = self._context.present.control, self._context.position
        self._attempted = position.step, position.generation
        self._identity = {"rank": control.rank, "world": control.world_size, "round": position.generation}
        if control.sum(Purpose.AVERAGE, [position.step])[0] != position.step * control.world_size:
            raise ConfigError(
                f"at step {position.step} ranks average, but other ranks have made a different number of steps",
                hint="say the same sync_every on all ranks, and let all make the same steps",
            )
        self._replica.synchronise(self._kept["model"], check)
        self._kept = None
        self._record()

    def undo(self) -> None:
        if self._kept is not None:
            kept, self._kept, self._undone = self._kept, None, self._made
            self._take_over(kept)

    def finish(self, check: Callable[[], None]) -> None:
        """ConfigError if a fault has undone the last steps: the script would not make them again."""
        if self._undone:
            raise ConfigError(
                f"a rank was lost after the script had left its loop, and {self._undone} steps since the last"
                " synchronisation were undone",
                hint="start the job again; a loop that ends where session.step_number is a multiple of sync_every"
                f" ({self._every}), or with an epoch, loses none",
            )
        self._synchronise(check)

    def healed(self) -> None:
        """If the peer's state comes from the synchronisation that failed here, the steps of this rank are in it."""
        position = self._context.position
        if self._attempted == (position.step, position.lineage):
            self._undone = 0
            self._record()

    def require_closed(self) -> None:
        if self._kept is not None and self._made:
            raise ConfigError(
                f"a call of all ranks after step {self._context.position.step}, where each holds parameters of its own",
                hint="make it at the end of an epoch, or where session.step_number is a multiple of sync_every"
                f" ({self._every})",
            )

    def _record(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            self._context.ledger.write("step", **self._identity, **line)


class MemoryShortage:
    """What all ranks do when one has too little memory for a step: they give it up, and then divide its batch, or leave
    it out.
    """

    def __init__(self, context: WorkerContext, steps: Steps) -> None:
        self._context, self._steps = context, steps
        self._policy = OnShortage(context.options.checks.out_of_memory)
        if self._policy is OnShortage.HALVE and context.environment.in_place:
            steps.replica.check(Use.HALVING)
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
        logs.logger().warning("memory.exhausted", step=step.number, rank=step.rank, then=str(self._policy))
        return StepGivenUpError(f"rank {step.rank} ran out of memory in step {step.number}")

    def act_together(self, control: Control) -> None:
        """In a new round, when all ranks hold one state: act if a rank had too little memory for the next step."""
        if self._policy is OnShortage.RAISE:
            return
        position, feed = self._context.position, self._context.feed
        rows = control.gather([self._step, feed.next_size, feed.halvings])
        short = [size for step, size, _ in rows if step == position.step + 1]
        self._step = 0
        feed.halvings = max(halvings for _, _, halvings in rows)
        if not short:
            return
        gc.collect()
        if self._context.placement.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._policy is OnShortage.HALVE:
            feed.halvings += 1
            logs.logger().warning("batch.repeated", step=position.step + 1, halvings=feed.halvings)
        else:
            cursor = Cursor(position.cursor.epoch, position.cursor.samples + short[0])
            self._steps.pass_over(cursor)
            logs.logger().warning("batch.skipped", step=position.step, samples=short[0])


class SecondOptimizers:
    """Refuses further optimizers, before they act, where a step that is given up could not undo their update.

    In place a step is undone when its round ends before the commit, which is the update by the session's own optimizer.
    Optimizers of tensors that do not outlive the step (a latent code, the inner loop of meta-learning) are allowed.
    ``own`` are the session's, ``parts`` the script's registered objects, at any time.
    """

    def __init__(
        self, module: nn.Module, own: Sequence[torch.optim.Optimizer], parts: Mapping[str, Any], steps: Steps
    ) -> None:
        self._own, self._parts, self._steps = own, parts, steps
        self._wrapped = _ids(module.parameters())
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The step in which each was first used."""
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._own or self._steps.updating:  # the session's may contain others
            return
        kind = type(optimizer).__name__
        mine = _ids(_parameters(optimizer))
        if mine & self._wrapped:
            raise ConfigError(
                f"a second optimizer, {kind}, was about to change parameters of the wrapped model; in place the session"
                " could neither undo that nor send it to other ranks",
                hint="train all of them with the optimizer given to session.wrap(), in parameter groups of their own",
            )
        number = self._steps.uncommitted
        if number is not None and (self._seen.setdefault(optimizer, number) != number or self._registered(mine)):
            raise ConfigError(
                f"a second optimizer, {kind}, was about to make an update inside session.step(); in place a step may be"
                " given up, and this update would stay",
                hint="make it after the block, under `if step.committed:`, or put all that is trained in one model",
            )

    def _registered(self, parameters: frozenset[int]) -> bool:
        """Whether a registered module has some of ``parameters``, or a registered optimizer trains them."""
        return any(parameters & _ids(_parameters(part)) for part in self._parts.values())


def _parameters(part: object) -> Iterable[torch.Tensor]:
    if isinstance(part, torch.optim.Optimizer):
        return parameters_of(part)
    return part.parameters() if isinstance(part, nn.Module) else ()


def _ids(parameters: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(map(id, parameters))
