"""A process that trains, from the opening of its session to its end: its resources and their release, and how it meets
the others, once for its life or in rounds led by its node's agent.

*Runs in* the main thread of a worker process. *Owns* the signal handlers, the fork hooks, the metrics endpoint, the
page, the agent link and the sockets of the groups.
*Fails by* ConfigError for mistakes in the script or the environment, TransientError when the ranks cannot meet,
StorageError for a directory that cannot be written at the start; what was opened before is closed then.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from elastic_trainer import settings
from elastic_trainer.data.workers import let_go
from elastic_trainer.ipc.gloo import Sockets
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm import groups, placement
from elastic_trainer.worker.comm.control import InterruptibleWaits
from elastic_trainer.worker.comm.groups import CollectiveAborter, ElasticGroups, FormTimeouts, assignment_of
from elastic_trainer.worker.recovery import ChannelLink, InPlaceRecovery, Recovery
from elastic_trainer.worker.report import HeartbeatReporter, open_endpoint
from elastic_trainer.worker.state.saver import check_storage
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.engine import Boundaries, RankContext, WorkerContext
from elastic_trainer.worker.steps.options import SessionOptions
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.training import Training

_STOP_BOUNDARIES = 4


class StaticRendezvous:
    """One round for the life of the process, as its launcher says: it is alone, or restarted for the next."""

    report = None
    """There is no agent."""
    recovery = Recovery
    """What carries a training across rounds."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float) -> None:
        self._formation = assignment_of(environment)
        self.timeouts = FormTimeouts(min(settings.GROUP_TIMEOUT_S, timeout_s), timeout_s)
        self._sockets = Sockets()
        self.descriptors = self._sockets.descriptors

    @property
    def world_size(self) -> int:
        return self._formation.world_size

    def broken(self) -> str | None:
        return None

    def stop_requested(self, signal: str) -> None:
        """The ranks agree on it themselves."""

    def end_collectives(self, number: int) -> None:
        """End the collectives of round ``number`` in which the main thread waits."""
        groups.abort_nccl()
        self._sockets.sever()

    def close(self, status: str) -> None:
        """The launcher sees the exit code."""

    def meet(self, context: WorkerContext) -> None:
        context.position.generation = self._formation.round
        with context.tracker.during(Phase.RENDEZVOUS):
            self._sockets.forming(groups.store_ends(self._formation))
            waits = InterruptibleWaits(context.tracker)
            group = groups.form(self._formation, context.placement, self.timeouts, waits)
            self._sockets.formed(group.listening)
        context.arrive(group)
        context.rank_context = RankContext(group, Boundaries(group.control, context))
        check_storage(context.manager, group.control, context.environment)


class ElasticRendezvous:
    """Rounds come and go, in place; ranks meet once there is a model."""

    world_size = 2
    """More than one; the number is not known yet."""

    def __init__(self, environment: WorkerEnvironment, timeout_s: float, tracker: HeartbeatReporter) -> None:
        self.timeouts = FormTimeouts(environment.form_timeout, timeout_s)
        self._aborter = CollectiveAborter(tracker)
        self._link = ChannelLink(environment, self._aborter.over)
        self.stop_requested, self.report, self.close = self._link.evicted, self._link.report, self._link.close

    def descriptors(self) -> list[int]:
        return self._link.descriptors() + self._aborter.sockets.descriptors()

    def broken(self) -> str | None:
        """Why the round that the main thread is in is over; outside of rounds that thread leaves by itself."""
        return self._link.why_over(self._aborter.number) if self._aborter.in_round else None

    def end_collectives(self, number: int) -> None:
        """End the collectives of round ``number`` in which the main thread waits."""
        if number == self._aborter.number:
            groups.abort_nccl()
        self._aborter.sockets.sever(number)

    def meet(self, context: WorkerContext) -> None:
        """Ranks meet only once there is a model."""

    def recovery(self, training: Training) -> Recovery:
        groups = ElasticGroups(self._aborter, training.context.placement, self.timeouts, training.replica.layout)
        return InPlaceRecovery(self._link, groups, training)


class Process:
    """The resources of a process that trains. ``context`` is what the session works with."""

    def __init__(self, options: SessionOptions, environment: WorkerEnvironment, position: Position) -> None:
        group = options.group
        with ExitStack() as undo:
            tracker = HeartbeatReporter.open(environment)
            undo.callback(tracker.close)
            self._endpoint = open_endpoint(environment, tracker)
            if self._endpoint is not None:
                undo.callback(self._endpoint.close)
            limit_s = group.timeout_s if group.timeout_s is not None else environment.group_timeout
            self._rendezvous: StaticRendezvous | ElasticRendezvous = (
                ElasticRendezvous(environment, limit_s, tracker)
                if environment.in_place
                else StaticRendezvous(environment, limit_s)
            )
            undo.callback(self._rendezvous.close, "failed")
            self.recovery: Callable[[Training], Recovery] = self._rendezvous.recovery
            asked = placement.take(options.device, environment.local_rank, self._rendezvous.world_size, group.backend)
            signals = Signals(
                self._patience_s,
                self._rendezvous.broken,
                lambda: tracker.saving,
                self._rendezvous.stop_requested,
                leave_within_s=environment.leave_within,
            )
            self.context = WorkerContext(
                options,
                environment,
                self._rendezvous.report,
                asked,
                position,
                tracker,
                signals,
                self._rendezvous.timeouts,
                self._rendezvous.end_collectives,
            )
            undo.pop_all()
        signals.open()

    def meet(self) -> None:
        self._rendezvous.meet(self.context)

    def _patience_s(self) -> float:
        """Ranks may need some steps to agree."""
        return max(self.context.options.group.stop_timeout_s, _STOP_BOUNDARIES * self.context.span_s)

    def disown(self) -> None:
        """In a child forked by the script: nothing here belongs to it."""
        context = self.context
        context.signals.disown()
        held = [*context.signals.descriptors(), *self._rendezvous.descriptors()]
        if self._endpoint is not None:
            held += self._endpoint.descriptors()
        let_go([number for number in held if number >= 0])
        context.tracker.disown()
        keep(self)

    def close(self, status: str) -> None:
        """``status`` is ``done``, ``stopped`` or ``failed``."""
        self.context.tracker.enter_now(Phase.ENDING)
        if status == "done":
            self.context.tracker.set_notes(passed=True)
        self._rendezvous.close(status)
        self.context.signals.close()
        self.context.leave()
        self.context.tracker.close()
        if self._endpoint is not None:
            self._endpoint.close()


# ---- children that the script forks
#
# They are no part of the training: the session belongs to the process that opened it. A forked child inherits signal
# handlers and the wakeup descriptor, so its SIGTERM would reach the parent. It inherits connections, so peers would not
# notice the parent's death while the child lives. And the destructors of the parent's groups wait for threads that a
# child does not have. So signals to the child wait until its hook is done, then act as in a process without a session.


_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DISOWN: list[Callable[[], None]] = []
"""Called in a child for each open session."""
_registered = threading.Event()


class _Mask(threading.local):
    """The signals that a thread had blocked before it began to fork; None otherwise."""

    before: set[Any] | None = None


_mask = _Mask()


def watch_forks(disown: Callable[[], None]) -> None:
    """Call ``disown()`` first in each child from now on."""
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_child)
    _DISOWN.append(disown)


def leave_forks(disown: Callable[[], None]) -> None:
    """Stop doing that."""
    if disown in _DISOWN:
        _DISOWN.remove(disown)


def keep(value: object) -> None:
    """Never destroy ``value``, not even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _before_fork() -> None:
    if _DISOWN:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)


def _after_fork() -> None:
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_child() -> None:
    try:
        if _DISOWN:
            gc.freeze()  # the child never collects the parent's objects
            keep(dist.group.WORLD)
        for disown in _DISOWN:
            disown()
        _DISOWN.clear()
    finally:
        _after_fork()
