"""What a process has from the opening of its session to the end, across rounds.

*Runs in* the worker's main thread; the signals' thread reads the present round. *Owns* the ledger, the feed and the
manager of the checkpoints.
*Fails by* ConfigError when there is no rank yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from elastic_trainer.checkpoint import CheckpointManager, Committed, Owner
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.report.ledger import Ledger
from elastic_trainer.worker.state import rng
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.boundary import Boundaries
from elastic_trainer.worker.steps.feed import DataFeed
from elastic_trainer.worker.steps.options import SessionOptions
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.step import Step

Report = Callable[[Position, float], None]
"""Gets the position and the smoothed seconds per step at each step; must not block."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A process as one rank of one round; made for each round, never changed."""

    group: groups.Group
    boundaries: Boundaries

    @property
    def control(self) -> Control:
        return self.group.control


class Workplace:
    """See the module. ``context`` is that of the present round: the only thing here that rounds change."""

    def __init__(
        self,
        options: SessionOptions,
        environment: WorkerEnvironment,
        report: Report,
        placement: Placement,
        position: Position,
        tracker: HeartbeatReporter,
        signals: Signals,
        timeouts: groups.FormTimeouts,
        free: Callable[[int], object],
    ) -> None:
        self.timeouts, self.free = timeouts, free
        self.options, self.environment, self.placement, self.position = options, environment, placement, position
        self.tracker, self.signals, self._report = tracker, signals, report
        self.context: RankContext | None = None
        """None before the first round."""
        self.stopped = False
        """Whether this process leaves on request."""
        self.watching: list[Callable[[], object]] = []
        """What the script wants called in each new round, when the state is whole."""
        # Only this package's agents ensure that one name is one job.
        job = environment.run_id if environment.memory else None
        self.owner = Owner(environment.run_name, job)
        self.manager = self._manager()
        self.ledger = Ledger(environment)
        self.feed = DataFeed(position, placement.device, options.allow_changed, tracker, environment.node)
        logs.bind(run=environment.run_id, node=environment.node, role="worker")
        rng.seeder(placement.device)(rng.key(rng.START, options.seed))

    def _manager(self) -> CheckpointManager | None:
        """One rank per node looks for checkpoints, and rank 0 writes them."""
        environment, options = self.environment, self.options
        looks = environment.local_rank == 0 or (environment.rank == 0 and not environment.in_place)
        if options.directory is None or not looks:
            return None
        return CheckpointManager(options.directory, options.retention, options.saving.on_event, owner=self.owner)

    def shards_manager(self) -> CheckpointManager | None:
        """For a rank that holds shards: it writes and reads them itself, and looks for no checkpoints."""
        if self.manager is not None or self.options.directory is None:
            return self.manager
        return CheckpointManager(self.options.directory, owner=self.owner)

    @property
    def present(self) -> RankContext:
        if self.context is None:
            raise ConfigError(
                "in place a process has no rank before its model is ready", hint="ask after session.wrap()"
            )
        return self.context

    @property
    def span_s(self) -> float:
        """Smoothed seconds per step; 0 before the first."""
        return self.context.boundaries.span_s if self.context is not None else 0.0

    def arrive(self, group: groups.Group) -> None:
        """A round has been formed: show this process's rank in it."""
        formation = group.formation
        self.tracker.place(formation.rank, formation.world_size, formation.round, self.placement.device)
        logs.bind(rank=formation.rank)

    def leave(self) -> None:
        self.feed.close()
        self.ledger.close()
        if self.manager is not None:
            self.manager.close()
        if self.context is not None:
            groups.leave(self.context.group)

    def stop(self, first: Callable[[], None] = lambda: None) -> NoReturn:
        """All ranks leave here, after ``first()``."""
        self.signals.agreed()
        logs.logger().info("session.stopping", step=self.position.step)
        first()
        self.stopped = True
        raise SystemExit(self.signals.exit_code)

    # ---- reports

    def report(self) -> None:
        """Report progress to the agent."""
        self._report(self.position, self.span_s)

    def record(self, step: Step, **place: int) -> None:
        """Write a committed step to the ledger, once: its round may end before the boundary after it."""
        if step.recorded or not self.ledger.enabled:
            return
        step.recorded = True
        self.ledger.write("step", **place, **self.entry(step))

    def entry(self, step: Step) -> dict[str, Any]:
        """What the ledger says of a committed step."""
        batch = step.batch
        return {
            "step": step.number,
            "epoch": batch.epoch if batch is not None else self.position.cursor.epoch,
            "samples": [int(each) for each in batch.ids] if batch is not None and step.counts else [],
            "global_samples": batch.global_size if batch is not None else 0,
            "loss": step.local_mean(),
        }

    def saved(self, committed: Committed) -> None:
        step = committed.entry.step
        self.ledger.write("checkpoint", step=step, name=committed.name, duration_s=committed.duration_s)

    def closed(self, status: str) -> None:
        self.ledger.write("closed", step=self.position.step, status=status, skipped_samples=self.feed.tally.total)
