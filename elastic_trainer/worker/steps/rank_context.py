"""This process's part in the present round: its group, its duties beside computing, and the state it begins from.

A rank looks for checkpoints, saves them, passes boundaries, records what it committed, and tells its agent. The duties
depend on the rank, so they are taken up anew in each round.

*Runs in* the worker's main thread. *Owns* the ledger and the process group at hand.
*Fails by* ConfigError when a rank is asked for where there is none; CheckpointError for what cannot be resumed,
RoundBrokenError when a peer is lost, SystemExit 73 from :meth:`RankContext.save_last`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, Committed, EventSink, Owner, Retention
from elastic_trainer.errors import EXIT_CANNOT_WRITE, CheckpointError, ConfigError, StorageError
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.comm.link import Link, Progress
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.arithmetic import FIELD, arithmetic, check_ranks, check_resumed
from elastic_trainer.worker.model.replica import Replica
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.report.ledger import Ledger
from elastic_trainer.worker.state import rng
from elastic_trainer.worker.state.fields import check_run
from elastic_trainer.worker.state.heal import give
from elastic_trainer.worker.state.restore import Origin, restore
from elastic_trainer.worker.state.saver import Cadence, Saver, check_storage
from elastic_trainer.worker.state.training_state import Position, TrainingState, reseed
from elastic_trainer.worker.steps.boundary import Boundaries
from elastic_trainer.worker.steps.commit import Steps
from elastic_trainer.worker.steps.comparison import Comparison, Difference
from elastic_trainer.worker.steps.feed import Feed
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.step import Step

_UNSAVED = "the last checkpoint could not be saved: what was trained since the newest one is lost"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the script asked of its session, as far as every round needs it. See ``Session``."""

    directory: Path | None
    retention: Retention
    cadence: Cadence
    seed: int
    allow_changed: Collection[str]
    fatal: bool
    require_last_save: bool
    compare_every_steps: int | None
    heals_differences: bool
    on_checkpoint_event: EventSink | None


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, and with what."""

    state: TrainingState
    replica: Replica
    steps: Steps

    def collect(self) -> dict[str, Any]:
        """The whole training state (its tensors are the live ones)."""
        return self.state.collect()

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` of another rank this rank's own."""
        self.steps.dirty = True
        self.state.apply(state, first_rank=False)
        self.steps.dirty = False


class RankContext:
    """See the module."""

    def __init__(
        self,
        plan: Plan,
        environment: WorkerEnvironment,
        link: Link,
        placement: Placement,
        position: Position,
        tracker: HeartbeatReporter,
    ) -> None:
        self.plan, self.environment, self.placement, self.position = plan, environment, placement, position
        self.tracker = tracker
        self.origin = Origin()
        self.stopped = False
        """Whether this process leaves because it was asked to."""
        self.knows_change: Callable[[], bool] | None = None
        """In place: whether a planned change of the ranks is known here."""
        # Only this package's agents see to it that one name is one job.
        job = environment.run_id if environment.channel is not None else None
        self._owner = Owner(environment.run_name, job)
        self.ledger = Ledger(environment)
        self.feed = Feed(position, plan.seed, placement.device, plan.allow_changed, tracker, environment.node)
        self._link = link
        self._group: groups.Group | None = None
        self._trained: Trained | None = None
        self._manager: CheckpointManager | None = None
        self._saver: Saver | None = None
        self._boundaries: Boundaries | None = None
        logs.bind(run=environment.run_id, node=environment.node, role="worker")
        rng.seed_all(rng.key(rng.START, plan.seed), placement.device)

    # ---- where this process is

    @property
    def formed(self) -> groups.Group:
        """The group of the present round."""
        if self._group is None:
            raise ConfigError(
                "in place a process has no rank before its model is ready", hint="ask after session.wrap()"
            )
        return self._group

    @property
    def entered(self) -> groups.Group | None:
        """The group of the present round, or None before the first."""
        return self._group

    @property
    def control(self) -> Control:
        """The collectives of the present round."""
        return self.formed.control

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.formed.formation.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.environment.local_rank if self._group is None else self._group.formation.local_rank

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that saves and reports."""
        return self.rank == 0

    @property
    def saver(self) -> Saver:
        """What saves here."""
        if self._saver is None:
            raise RuntimeError("no round has been entered")
        return self._saver

    @property
    def boundaries(self) -> Boundaries:
        """What happens between steps."""
        if self._boundaries is None:
            raise RuntimeError("no round has been entered")
        return self._boundaries

    @property
    def span_s(self) -> float:
        """The time that a step takes, smoothed; 0 before the first."""
        return self._boundaries.span_s if self._boundaries is not None else 0.0

    def slowest_stop_s(self) -> float:
        """How long the ranks may need to agree to stop."""
        return self._boundaries.slowest_stop_s() if self._boundaries is not None else 0.0

    @property
    def trained(self) -> Trained | None:
        """What is trained; None before the script has said so."""
        return self._trained

    # ---- rounds

    def enter(self, group: groups.Group, signals: Signals) -> None:
        """Take up this rank's duties in the round just formed."""
        self._group = group
        self.control.works.tracker = self.tracker
        formation = group.formation
        self.tracker.place(formation.rank, formation.world_size, formation.round, self.placement.device)
        logs.bind(rank=self.rank)
        plan = self.plan
        if self._saver is None:
            # One rank of each node looks for checkpoints.
            if plan.directory is not None and (self.is_rank0 or self.local_rank == 0):
                self._manager = CheckpointManager(
                    plan.directory, plan.retention, plan.on_checkpoint_event, owner=self._owner
                )
            self._saver = Saver(None, plan.cadence, self._on_saved, self.tracker)
        self._saver.serve(self._manager if self.is_rank0 else None)
        self._boundaries = Boundaries(
            self.control, signals, self._saver, self.tracker, fatal=plan.fatal, in_place=self.knows_change
        )

    def check_storage(self) -> None:
        """Rank 0 must be able to write checkpoints. Raises on all ranks if it cannot."""
        check_storage(self._manager, self.control, self.environment)

    def train(self, trained: Trained) -> None:
        """From now on this is what is trained."""
        self._trained = trained
        trained.steps.tracker = trained.replica.tracker = self.tracker
        trained.steps.lr_factor = self.feed.lr_factor
        trained.steps.accord = self.feed.accord

    def resume(self, unfit: CheckpointError | None = None) -> None:
        """Bring all ranks of the present round to one state, out of storage, and let them train together.

        Where there is nothing in storage they begin with that of rank 0, unless one rank says that it is ``unfit``.
        """
        state = self._training.state
        formation = self.formed.formation

        def take_over(tree: Mapping[str, Any]) -> None:
            state.apply(tree, first_rank=self.is_rank0)

        def check(origin: Origin) -> None:
            check_run(str(origin.name), origin.run, self._owner.run, self.plan.allow_changed)

        self.origin = restore(self.control, self._manager, state.collect, take_over, unfit, self.tracker, check)
        first = self.position.generation + 1 if self.origin.name is not None else 0
        newest = max(row[0] for row in self.control.gather([max(formation.round, first)]))
        self.take_part(newest, self.origin.fields)
        if self.origin.name is not None:
            self.saver.resumed()

    def take_part(self, generation: int, fields: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> None:
        """All ranks hold one state: bind everything to the round, and begin.

        ``given``: how the rank cuts the data whose state was taken over, if it has begun to.
        """
        trained, control, world = self._training, self.control, self.formed.formation.world_size
        claims: dict[str, Any] = {}
        if trained.replica.tree is not None:
            claims[FIELD] = mine = arithmetic(self.placement.device)
            check_ranks(control, mine)
            check_resumed(mine, fields.get(FIELD), self.plan.allow_changed)
        self.position.generation = generation
        self.tracker.holds(self.position.step, self.position.cursor)
        if not self.is_rank0:
            reseed(self.plan.seed, self.position, self.rank, self.placement.device)
        trained.replica.bind(control)
        trained.steps.bind(control)
        self.feed.bind(control, fields, given or {}, even=trained.replica.even, fixed=trained.replica.tree is not None)
        self.saver.bind(trained.state, world, lambda: {**self.feed.fields, **claims})
        self.boundaries.watch(trained.steps, self._comparison(trained))
        self.ledger.identify(rank=self.rank, local_rank=self.local_rank, world=world, round=generation)
        where = {"epoch": self.position.cursor.epoch, "resumed_from": self.origin.name}
        self.ledger.write("opened", step=self.position.step, **where)
        logs.logger().info("session.opened", world=world, round=generation, step=self.position.step, **where)

    def _comparison(self, trained: Trained) -> Comparison:
        def heal(found: Difference) -> None:
            give(self.control, found.source, found.others, trained, {})
            logs.logger().info("ranks.healed", step=self.position.step, ranks=list(found.others), source=found.source)

        plan = self.plan
        mend = heal if plan.heals_differences else None
        return Comparison(self.control, trained.steps.trainable, plan.compare_every_steps, self.tracker, mend)

    @property
    def _training(self) -> Trained:
        if self._trained is None:
            raise RuntimeError("nothing is trained yet")
        return self._trained

    # ---- telling

    def report(self, phase: str) -> None:
        """Tell the agent how far this rank is, if that is due."""
        if not self._link.report_due():
            return
        cursor = self.position.cursor
        self._link.report(Progress(phase, self.position.step, cursor.epoch, cursor.samples, self.span_s))

    def record(self, step: Step, **place: int) -> None:
        """Write a committed step to the ledger, once: its round may end before the boundary behind it."""
        if step.recorded:
            return
        batch = step.batch
        step.recorded = True
        self.ledger.write(
            "step",
            **place,
            step=step.number,
            epoch=batch.epoch if batch is not None else self.position.cursor.epoch,
            samples=[int(each) for each in batch.ids] if batch is not None else [],
            global_samples=batch.global_size if batch is not None else 0,
            loss=step.local_mean(),
        )

    def _on_saved(self, committed: Committed) -> None:
        self.ledger.write("checkpoint", step=self.position.step, name=committed.name, duration_s=committed.duration_s)

    # ---- the last checkpoints

    def save_last(self, status: str) -> None:
        """Save what is not saved, all ranks together, before they leave.

        SystemExit 73 on all if rank 0 cannot: where that was asked for, or where the fault is not the storage's.
        """
        problem = self.saver.attempt() if self.saver.unsaved else None
        refused = isinstance(problem, StorageError)
        flags = [float(problem is not None), float(problem is not None and not refused)]
        unsaved, unsound = map(bool, self.control.sum(Purpose.STOP, flags)[:2])
        if unsaved:
            fails = unsound or self.plan.require_last_save
            logs.logger().error("session.unsaved", step=self.position.step, reason=_UNSAVED, fails=fails)
            if fails:
                raise SystemExit(EXIT_CANNOT_WRITE) from problem
        self.write_closed(status)

    def write_closed(self, status: str) -> None:
        """The last line of this rank's ledger."""
        self.ledger.write("closed", step=self.position.step, status=status, skipped_samples=self.feed.tally.total)

    def save_before_waiting(self) -> None:
        """Too few nodes will be left: what is only in memory is made durable first, while all wait."""
        with self.tracker.during(Phase.CHECKPOINT):
            if self.saver.unsaved:
                self.saver.attempt()
            self.control.sum(Purpose.STOP)

    def leave(self) -> None:
        """The session ends."""
        self.feed.close()
        self.ledger.close()
        if self._manager is not None:
            self._manager.close()
        if self._group is not None:
            groups.leave(self._group)

    def save_alone(self) -> None:
        """Make durable what is only in memory, in no round; one rank of each node can."""
        if self._manager is None or self._saver is None:
            return
        self._saver.serve(self._manager)
        if self._saver.unsaved:
            self._saver.attempt()
