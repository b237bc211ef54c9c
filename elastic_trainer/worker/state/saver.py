"""When the state is saved, and saving it.

*Runs in* the worker's main thread; only rank 0 writes. *Owns* the checkpoint directory's manager.
*Fails by* CheckpointError (StorageError: the directory refuses) or NonFiniteError from :meth:`Saver.save`;
:meth:`Saver.attempt` returns them.
*Invariant*: a state with non-finite parameters is never saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from elastic_trainer.checkpoint import (
    Arena,
    BackgroundSaves,
    CheckpointManager,
    Committed,
    NoRoomError,
    Save,
    SaveInfo,
    StateSnapshot,
)
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.checking import not_finite
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import CheckpointError, NonFiniteError
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.comm.round_place import RoundPlace
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.cadence import FIELD, Cadence, Experience, Memory
from elastic_trainer.worker.state.on_demand import OnDemand
from elastic_trainer.worker.state.training_state import TrainingState


class WhenBehind(StrEnum):
    """What becomes of a save by steps while storage is still busy with the two before it."""

    WAIT = "wait"
    SKIP = "skip"
    REPLACE = "replace"
    """The snapshot that waits is given up for the new one."""


class Writers(StrEnum):
    """Who writes checkpoints."""

    AUTO = "auto"
    """One rank of each node, if the state is large."""
    RANK0 = "rank0"


SHARED_FROM = 32 << 20
"""Bytes of parameters from which on several nodes write a checkpoint together."""

MOST_WRITERS = 16


@dataclass(frozen=True, slots=True)
class Shares:
    """In how many files the nodes of a round write a checkpoint together, and where this one begins."""

    parts: int = 1
    turn: int = 0

    @classmethod
    def among(cls, place: RoundPlace, writers: Writers = Writers.AUTO) -> Shares:
        """One file for each node, if all have as many ranks; nodes that count otherwise cannot help each other."""
        if writers is Writers.RANK0:
            return cls()
        nodes = place.world_size // place.local_world_size
        return cls(max(1, min(MOST_WRITERS, nodes)), place.rank // place.local_world_size)

    def worthwhile(self, module: torch.nn.Module) -> bool:
        """The same on all ranks."""
        return self.parts > 1 and sum(each.nbytes for each in module.parameters()) >= SHARED_FROM


ALONE = Shares()


def not_shared(module: torch.nn.Module) -> Callable[[str], bool]:
    """Of a tensor's name in a checkpoint: whether ranks may hold other values (buffers, random generators)."""
    buffers = {f"{place}{name}" for name, _ in module.named_buffers() for place in ("model/", "average/module.")}
    return lambda name: name in buffers or not name.startswith(("model/", "optimizer/", "average/"))


class Saver:
    """Saves ``state`` through ``manager`` (None: nowhere), on the rank that saves.

    A save copies the state, which is written beside training; :meth:`look` notes what became of it. ``fields()`` is
    stored with it. ``on_saved`` gets every checkpoint.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        cadence: Cadence,
        state: TrainingState,
        fields: Callable[[], Mapping[str, Any]],
        on_saved: Callable[[Committed], None],
        tracker: HeartbeatReporter,
        when_behind: WhenBehind,
        memory: Memory,
        clock: Clock = SYSTEM,
    ) -> None:
        self._when_behind = when_behind
        self._held, self._cadence, self._state, self._fields = manager, cadence, state, fields
        self._on_saved, self._tracker, self._clock = on_saved, tracker, clock
        self._last_s = self._began_s = clock.monotonic()
        self._past, self._settling = Experience(), False
        tracker.pulse.save_interval_s = self._interval_s() or 0.0
        self.on_demand = OnDemand(tracker, saves=manager is not None)
        self._last_step: int | None = None
        """That of the newest snapshot, unless its commit has failed."""
        self._world_size = 1
        self._manager: CheckpointManager | None = None
        """None on ranks that do not save."""
        self._memory = memory
        self._arena = Arena(memory.files) if manager is not None else None
        self._saves = BackgroundSaves(manager, self._arena) if manager is not None else None
        self._copied_s, self._copy_took_s = self._last_s, 0.0
        self._memory_short = self._failed = self._refused = self._prepared = False
        self._shares, self._puts_together = Shares(), False

    def serve(self, *, saves: bool, world_size: int = 1, shares: Shares = ALONE, puts_together: bool = False) -> None:
        """Whether this rank ``saves`` from now on, and with whom; see :meth:`together`."""
        self._puts_together = puts_together
        self._manager, self._world_size = self._held if saves else None, world_size
        self._shares = shares

    def resumed(self, fields: Mapping[str, Any], *, stored: bool) -> None:
        """The present state was just read from a checkpoint with these ``fields``; ``stored``: it is in storage."""
        step = self._state.position.step
        if stored:
            self._last_step = step
        lost = not 0 < self._tracker.reached <= step  # 0: nobody knows how far the job was
        self._past = replace(Experience.resumed(fields, lost=lost), cost_s=self._past.cost_s)
        self._began_s = self._clock.monotonic()

    @property
    def possible(self) -> bool:
        """Whether there is a checkpoint directory."""
        return self._held is not None

    @property
    def alone(self) -> bool:
        """Whether this rank can save without others."""
        return self._state.sharding is None

    def due_by_step(self, step: int) -> bool:
        return self._cadence.every_steps is not None and step % self._cadence.every_steps == 0

    def due_by_time(self) -> bool:
        """Whether enough seconds have passed since the last save or attempt, and storage is not behind.

        While it writes one snapshot, the other slot is left to those that stay in memory: they get newer meanwhile.
        """
        every_s = self._interval_s()
        if self._manager is None or self._saves is None or every_s is None or self._saves.full:
            return False
        if self._clock.monotonic() - self._last_s < every_s:
            return False
        return self._memory.apart_s(0.0) == math.inf or not self._saves.committing

    # ---- snapshots, on every node

    def left_in_memory(self) -> StateSnapshot | None:
        """The newest state of this job that a process left in the agent's memory."""
        if self._held is None or self._arena is None or not self._arena.lasting:
            return None
        left = self._arena.newest()
        mine = left is not None and (left.location, left.job) == (self._held.location, self._held.owner.job)
        return left if mine else None

    def prepare(self) -> None:
        """After a step the size of the state is known: have the memory for copies ready before the first one."""
        copies = (
            self._manager is not None or self._shares.parts > 1 or (self._arena is not None and self._arena.lasting)
        )
        if self._saves is not None and copies and not self._prepared:
            self._prepared = True
            self._saves.prepare(self._state.size(), pinned=self._state.device.type == "cuda")

    def copy_if_due(self) -> None:
        """Copy the state into the agent's memory, if that was not done for long enough; it is not committed."""
        if self._state.sharding is None and self._clock.monotonic() - self._copied_s >= self._memory.apart_s(
            self._copy_took_s
        ):
            self._copy(SnapshotPurpose.KEEP)

    def together(self, peers: Control | None = None) -> None:
        """Before a save, on all ranks: those of the first shard group put the state together.

        With ``peers``, its ranks, only if the one of them that saves has something to save.
        """
        if self._state.sharding is None or not self._puts_together:
            return
        if peers is None or peers.sum(Purpose.SAVE, [float(self.unsaved)])[0]:
            self._state.gather()
            if self._manager is None:
                self._state.forget_whole()

    def help(self) -> None:
        """Rank 0 saves: write a part of it, on one rank of each of the other nodes."""
        if self._manager is None and self._shares.worthwhile(self._state.module):
            self._copy(SnapshotPurpose.HELP)

    def _copy(self, purpose: SnapshotPurpose) -> None:
        if self._held is None or self._saves is None or self._memory_short:
            return
        if self._saves.full or self._saves.sealing:
            return
        began = self._clock.monotonic()
        with self._tracker.during(Phase.CHECKPOINT):
            try:
                self._begin(self._held, self._saves, {}, best=False, purpose=purpose)
            except (CheckpointError, NonFiniteError) as error:
                logger().warning("snapshot.failed", step=self._state.position.step, reason=str(error))
        self._copied_s = self._clock.monotonic()
        self._copy_took_s = self._copied_s - began

    def due_on_demand(self) -> bool:
        """Whether somebody asked for a save that has not begun, and storage is not behind."""
        return not (self._saves is not None and self._saves.full) and self.on_demand.wanted(self._state.position.step)

    def _seen(self) -> Experience:
        trained_s = self._past.trained_s + self._clock.monotonic() - self._began_s
        return replace(self._past, trained_s=trained_s)

    def _interval_s(self) -> float | None:
        return self._cadence.interval_s(self._seen())

    # ---- saving

    def save(self, metrics: Mapping[str, float], *, best: bool = False, wait: bool = False) -> str | None:
        """Copy the state and write it beside training; the checkpoint's name, None without a checkpoint directory.

        Waits while storage is busy with the two before, and with ``wait`` until it is durable. StorageError or
        NonFiniteError if it cannot be saved then; CheckpointError for a state that cannot be saved at all.
        """
        self.look()
        self._last_s = self._clock.monotonic()
        if self._manager is None or self._saves is None:
            return None
        began = self._clock.monotonic()
        try:
            with self._tracker.during(Phase.CHECKPOINT):
                save = self._begin(self._manager, self._saves, metrics, best=best)
                self._past = self._past.saved(self._clock.monotonic() - began)
                self._tracker.pulse.save_interval_s = self._interval_s() or 0.0
                if wait:
                    save.done.wait()
        except (CheckpointError, NonFiniteError) as error:
            self._tracker.operated("save", self._clock.monotonic() - began, ok=False)
            if isinstance(error, NonFiniteError):
                self._log_failure(self._state.position.step, error)
            raise
        self._last_s, self._last_step = self._clock.monotonic(), self._state.position.step
        self.look()
        if save.error is not None and wait:
            raise save.error
        return save.manifest.name

    def _begin(
        self,
        manager: CheckpointManager,
        saves: BackgroundSaves,
        metrics: Mapping[str, float],
        *,
        best: bool,
        purpose: SnapshotPurpose = SnapshotPurpose.COMMIT,
    ) -> Save:
        state, shares = self._state, self._shares
        position, tree = state.position, state.collect_whole()
        info = SaveInfo(
            step=position.step,
            round=position.generation,
            epoch=position.cursor.epoch,
            samples=position.cursor.samples,
            world_size=self._world_size,
            metrics=metrics,
            best=best,
            fields={**self._fields(), **self._learned()},
        )
        parts = shares.parts if shares.worthwhile(state.module) else 1
        image = manager.encode(
            tree, info, watched=watched(state.module, tree), parts=parts, own=not_shared(state.module)
        )
        try:
            save = saves.submit(image, manager.draft(info), purpose, shares.turn)
        except NoRoomError as error:
            if not self._memory_short:
                self._memory_short = True
                logger().warning("checkpoint.not_beside", reason=str(error), effect="training waits for each save")
            if purpose is not SnapshotPurpose.COMMIT:
                return Save(manager.draft(info), purpose)
            check_finite(state.module, tree)
            return saves.at_once(image, manager.draft(info))
        self._copied_s = self._clock.monotonic()
        return save

    def _learned(self) -> Mapping[str, Any]:
        return {FIELD: self._seen().kept(settled=self._settling)} if self._cadence.auto else {}

    def attempt(self) -> CheckpointError | NonFiniteError | None:
        """Save on schedule. An error has been logged and is returned: it must not end the training."""
        if self._saves is not None and self._saves.full and self._when_behind is not WhenBehind.WAIT:
            given_up = self._saves.give_up_waiting() if self._when_behind is WhenBehind.REPLACE else None
            step = self._state.position.step if given_up is None else given_up.manifest.step
            self._tracker.operated("save", 0.0, ok=False)
            logger().warning("checkpoint.given_up", step=step, reason="storage is busy with the two before it")
            self.on_demand.given_up(step)
            if given_up is None:
                self._last_s = self._clock.monotonic()
                return None
        try:
            self.save({})
        except (CheckpointError, NonFiniteError) as error:
            return error
        return None

    def look(self) -> None:
        """Note what has become of saves since the last look."""
        for save in self._saves.finished() if self._saves is not None else ():
            if save.purpose is not SnapshotPurpose.COMMIT:
                logger().warning("snapshot.failed", step=save.manifest.step, reason=str(save.error))
                self._refused |= isinstance(save.error, NonFiniteError)
                continue
            self._failed = save.committed is None
            if save.committed is None:
                self._log_failure(save.manifest.step, save.error)
                self._refused |= isinstance(save.error, NonFiniteError)
                self._tracker.operated("save", 0.0, ok=False)
                if save.manifest.step == self._last_step:
                    self._last_step = None
            else:
                done = save.committed
                self._tracker.saved(save.manifest.step, done.size, done.duration_s, done.free_bytes)
                self._on_saved(save.committed)
            error = save.error if save.committed is None else None
            self.on_demand.settled(save.manifest.step, save.manifest.name, error)

    def refused(self) -> bool:
        """Whether, since this was asked last, a snapshot was refused because it was not finite."""
        refused, self._refused = self._refused, False
        return refused

    def _log_failure(self, step: int, error: Exception | None) -> None:
        if isinstance(error, NonFiniteError):
            logger().error("checkpoint.failed", step=step, reason=str(error))
        elif not isinstance(error, CheckpointError):  # the manager has logged those
            logger().error("checkpoint.failed", step=step, exc_info=error)

    # ---- the state at hand, made durable

    @property
    def failed(self) -> bool:
        """Whether the last save that ended has failed."""
        self.look()
        return self._failed

    @property
    def unsaved(self) -> bool:
        """Whether a step was committed since the last snapshot."""
        return self._manager is not None and self._state.position.step != self._last_step

    def settle(self) -> CheckpointError | NonFiniteError | None:
        """Make the state at hand durable, unless it is; wait for all that is being written. What went wrong, if so."""
        if self._saves is None:
            return None
        self.wait()
        if not self.unsaved:
            return None
        self._settling = True
        try:
            self.save({}, wait=True)
        except (CheckpointError, NonFiniteError) as error:
            return error
        finally:
            self._settling = False
        return None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._saves is not None and not self._saves.idle:
            with self._tracker.during(Phase.CHECKPOINT):
                self._saves.wait()
        self.look()

    def close(self, limit_s: float | None) -> None:
        """Write what waits, and end; what takes longer than ``limit_s`` is given up."""
        if self._saves is not None:
            with self._tracker.during(Phase.CHECKPOINT):
                self._saves.close(limit_s)
            self.look()


def check_storage(manager: CheckpointManager | None, control: Control, environment: WorkerEnvironment) -> None:
    """Raise on all ranks if rank 0 cannot write checkpoints.

    Not where a process continues a training: the directory could be written when that began.
    """
    with control.agreed():
        if manager is None or control.rank != 0:
            return
        try:
            manager.check_writable()
            manager.sweep()
        except CheckpointError as error:
            if not _goes_on(manager, environment):
                raise
            logger().error("storage.refused", step=environment.reached, error=str(error))


def _goes_on(manager: CheckpointManager, environment: WorkerEnvironment) -> bool:
    """Whether the training was under way before: steps are known, or there is a checkpoint."""
    try:
        return environment.reached > 0 or (environment.midway and manager.newest() is not None)
    except CheckpointError:
        return False


def watched(module: torch.nn.Module, tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters that must be finite, by name, as the state ``tree`` holds them."""
    named = module.state_dict(keep_vars=True).items()
    held = ((name, tree["model"].get(name, each)) for name, each in named if isinstance(each, torch.nn.Parameter))
    return {name: each for name, each in held if each.is_floating_point() and each.numel()}


def check_finite(module: torch.nn.Module, tree: Mapping[str, Any]) -> None:
    """NonFiniteError naming the first parameter that holds a NaN or an infinity."""
    for name, each in watched(module, tree).items():
        if not bool(torch.isfinite(each.detach()).all()):
            raise not_finite(name)
