"""A process that trains, from the opening of its session to its end: its resources and their release.

*Runs in* the main thread of a worker process. *Owns* the signal handlers, the metrics endpoint, the page.
*Fails by* ConfigError for mistakes in the script or the environment; what was opened before is closed then.
"""

from __future__ import annotations

from contextlib import ExitStack

from elastic_trainer.data.child import let_go
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker import forks
from elastic_trainer.worker.comm import placement
from elastic_trainer.worker.gathering import gathering
from elastic_trainer.worker.report.endpoint import open_endpoint
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.options import SessionOptions
from elastic_trainer.worker.steps.replicas import Wrapped
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.training import Training
from elastic_trainer.worker.steps.workplace import Workplace


class Process:
    """See the module. ``place`` is what the session works with."""

    def __init__(self, options: SessionOptions, environment: WorkerEnvironment, position: Position) -> None:
        group = options.group
        with ExitStack() as undo:
            tracker = HeartbeatReporter.open(environment)
            undo.callback(tracker.close)
            self._endpoint = open_endpoint(environment, tracker)
            if self._endpoint is not None:
                undo.callback(self._endpoint.close)
            self._gathering = gathering(environment, group.timeout_s, tracker)
            undo.callback(self._gathering.close, "failed")
            asked = placement.take(options.device, environment.local_rank, self._gathering.world_size, group.backend)
            signals = Signals(
                self._patience_s,
                self._gathering.broken,
                lambda: tracker.saving,
                self._gathering.stop_requested,
                leave_within_s=environment.leave_within,
            )
            self.place = Workplace(
                options,
                environment,
                self._gathering.report,
                asked,
                position,
                tracker,
                signals,
                self._gathering.timeouts,
                self._gathering.free,
            )
            undo.pop_all()
        signals.open()

    def meet(self) -> None:
        self._gathering.meet(self.place)

    def training(self, wrapped: Wrapped) -> Training:
        return Training(self.place, wrapped, self._gathering.round_end)

    def _patience_s(self) -> float:
        """Slow steps take longer to agree."""
        context = self.place.context
        slowest_s = context.boundaries.slowest_stop_s() if context is not None else 0.0
        return max(self.place.options.group.stop_timeout_s, slowest_s)

    def disown(self) -> None:
        """In a child forked by the script: nothing here belongs to it."""
        place = self.place
        place.signals.disown()
        held = [*place.signals.descriptors(), *self._gathering.descriptors()]
        if self._endpoint is not None:
            held += self._endpoint.descriptors()
        let_go([number for number in held if number >= 0])
        place.tracker.disown()
        forks.keep(self)

    def close(self, status: str) -> None:
        """``status`` is ``done``, ``stopped`` or ``failed``."""
        self.place.tracker.change(Phase.ENDING)
        if status == "done":
            self.place.tracker.describe(passed=True)
        self._gathering.close(status)
        self.place.signals.close()
        self.place.leave()
        self.place.tracker.close()
        if self._endpoint is not None:
            self._endpoint.close()
