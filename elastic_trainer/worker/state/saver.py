"""When the state is saved, and saving it.

The places of a sharded model copy their shards at the same steps: place 0 of each group decides, and the others follow
its word in one small sum before each copy (:meth:`Saver._together`).

*Runs in* the worker's main thread; only rank 0 commits. *Owns* the checkpoint directory's manager.
*Fails by* CheckpointError (StorageError: the directory refuses) or NonFiniteError from :meth:`Saver.save`;
:meth:`Saver.attempt` returns them.
*Invariant*: a state with non-finite parameters is never saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

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
from elastic_trainer.checkpoint.arena import SLOTS
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.neighbours import Neighbour
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import CheckpointError, NonFiniteError
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.cadence import FIELD, Cadence, Experience, Memory, WhenBehind
from elastic_trainer.worker.state.on_demand import OnDemand
from elastic_trainer.worker.state.scarcity import Scarcity
from elastic_trainer.worker.state.shares import ALONE, ShardPart, Shares, in_round, not_shared
from elastic_trainer.worker.state.training_state import TrainingState, check_finite, watched

_LONG_AGO_S = -1e12


class Saver:
    """Saves ``state`` through ``manager`` (None: nowhere), on the rank that saves.

    A save copies the state, which is written beside training; :meth:`look` notes what became of it, and ``on_saved``
    gets every checkpoint, with ``fields()`` in it.
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
        self._arena = Arena(memory.files, beside=memory.beside) if manager is not None else None
        self._saves = BackgroundSaves(manager, self._arena) if manager is not None else None
        self._copied_s, self._copy_took_s = self._last_s, 0.0
        self._scarcity = Scarcity(clock)
        self._failed = self._refused = self._prepared = self._untold = False
        self._shares, self._begun = ALONE, (-1, -1)
        self._part: ShardPart | None = None
        self.newest: Save | None = None
        """The newest save that this rank has begun, as the one that commits."""

    def serve(
        self,
        *,
        saves: bool,
        world_size: int = 1,
        shares: Shares = ALONE,
        part: ShardPart | None = None,
        neighbour: Neighbour | None = None,
    ) -> None:
        """Whether this rank ``saves`` from now on, and with whom; of a sharded model, its ``part``, of which the
        ``neighbour`` keeps copies if no other rank holds it.
        """
        self._manager, self._world_size = self._held if saves else None, world_size
        self._shares, self._part = shares, part
        if self._saves is not None and self._saves.copy_to(neighbour if part is not None else None):
            self._copied_s = _LONG_AGO_S  # until the neighbour has one, a lost node takes the only copy with it
            self._untold = True

    @property
    def copied(self) -> bool:
        """Whether the neighbour has a copy of this rank's shards."""
        return self._saves is not None and self._saves.copied

    def meet(self, peers: Control) -> None:
        """A round begins with these ranks of the shard group: a save that not all of them have begun will not be."""
        if self._saves is not None and any(row != [*self._begun] for row in peers.gather([*self._begun])):
            self._saves.stop()
            self._begun = -1, -1

    def resumed(self, name: str, order: tuple[int, int], fields: Mapping[str, Any], *, stored: bool) -> None:
        """The present state was just read from the checkpoint ``name``, of that round and step, with these ``fields``;
        ``stored``: it is in storage.
        """
        step = self._state.position.step
        if self._saves is not None:
            self._saves.resumed(name, order)
        self._last_step = step if stored else self._last_step
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
        """Whether there is something unsaved, the last save or attempt is long enough ago, and storage is not behind.

        While it writes one snapshot, the other slot is left to those that stay in memory: they get newer meanwhile.
        """
        every_s = self._interval_s()
        if not self.unsaved or self._saves is None or every_s is None or self._saves.full:
            return False
        if self._clock.monotonic() - self._last_s < every_s:
            return False
        return self._memory.apart_s(0.0) == math.inf or not (self._saves.committing or self._saves.sending)

    # ---- snapshots, on every node

    def left_in_memory(self) -> StateSnapshot | None:
        """The newest state of this job that a process left in the agent's memory."""
        if self._held is None or self._arena is None or not self._arena.lasting:
            return None
        left = self._arena.newest()
        return left if left is not None and self._is_mine(self._held, left) else None

    def parts_in_memory(self) -> list[tuple[str, StateSnapshot]]:
        """The parts of sharded states of this job in the agent's memory, each with the path of its file."""
        if self._held is None or self._arena is None:
            return []
        return [(path, each) for path, each in self._arena.parts() if self._is_mine(self._held, each)]

    def _is_mine(self, manager: CheckpointManager, left: StateSnapshot) -> bool:
        return (left.location, left.job) == (manager.location, manager.owner.job)

    def prepare(self) -> None:
        """After a step the size of the state is known: have the memory for copies ready before the first one."""
        lasting = self._arena is not None and self._arena.lasting
        copies = self._manager is not None or self._shares.parts > 1 or self._part is not None or lasting
        if self._saves is not None and copies and not self._prepared:
            self._prepared, size = True, self._state.size()
            self._saves.prepare(size, pinned=self._state.device.type == "cuda")
        if self._saves is not None and self._untold:
            self._untold, needed_mb = False, round(SLOTS * self._state.size() / 1e6, 1)
            logger().info("snapshot.copies", neighbour=str(self._saves.neighbour), memory_there_mb=needed_mb)

    def copy_if_due(self) -> None:
        """Copy the state into the agent's memory, if that was not done for long enough; it is not committed."""
        if self._memory.files and self.alone and self._copy_due():
            self._copy(SnapshotPurpose.KEEP)

    def wants_copy(self) -> bool:
        """Whether the shard groups should copy the state into the agents' memory (:meth:`copy`)."""
        sending = self._saves is not None and self._saves.sending
        return self._part is not None and self._part.leads and not sending and self._copy_due()

    def copy(self) -> None:
        """On all ranks of a sharded model: what :meth:`copy_if_due` does."""
        if self._part is not None:
            self._copy(SnapshotPurpose.KEEP)

    def _copy_due(self) -> bool:
        sent_s = self._saves.sent_s if self._saves is not None else 0.0
        return self._clock.monotonic() - self._copied_s >= self._memory.apart_s(self._copy_took_s, sent_s)

    def help(self) -> None:
        """Rank 0 saves: write a part of it, on one rank of each of the other nodes, or the shards of this place."""
        whole = self._part is None and self._manager is None and self._shares.worthwhile(self._state.module)
        if whole or (self._part is not None and self._part.helps):
            self._copy(SnapshotPurpose.HELP)

    def _together(self, *, goes: bool, kept: bool = False) -> bool:
        """Whether to copy now. The places of a group do so together, if place 0 ``goes``, when all have sealed the copy
        before: then there is always one that all of them hold. Those who help learn what place 0 still writes.

        While the copy before is on its way from a place to its neighbour, none is made that is only ``kept`` in memory.
        """
        part, saves = self._part, self._saves
        if part is None or part.peers is None or saves is None:
            return goes
        saves.await_seals()
        moments = [float(each) for moment in saves.moments() for each in moment] if part.leads else []
        wish = float(goes and part.leads) - float(kept and saves.sending)
        goes_first, *under_way = part.peers.sum(Purpose.SAVE, [wish, *moments])
        if not part.leads:
            saves.stop(but=[(int(under_way[at]), int(under_way[at + 1])) for at in (0, 2)])
        return goes_first > 0

    def _copy(self, purpose: SnapshotPurpose) -> None:
        if self._held is None or self._saves is None:
            return
        free = not (self._scarcity.recent or self._saves.full or self._saves.sealing)
        if self._part is None and not free:
            return
        goes = self._part is None or self._part.peers is None or (free and self._copy_due())
        if not self._together(goes=goes, kept=purpose is SnapshotPurpose.KEEP):
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

    def save(
        self, metrics: Mapping[str, float], *, best: bool = False, wait: bool = False, begun: Save | None = None
    ) -> str | None:
        """Copy the state and write it beside training; the checkpoint's name, None without a checkpoint directory.

        Waits while storage is busy with the two before, and with ``wait`` until it is durable. StorageError or
        NonFiniteError if it cannot be saved then; CheckpointError for a state that cannot be saved at all. ``begun``:
        this state's save, if it has begun already.
        """
        self.look()
        self._last_s = self._clock.monotonic()
        if self._manager is None or self._saves is None:
            return None
        save = begun
        if save is None:
            self._together(goes=True)
        began = self._clock.monotonic()
        try:
            with self._tracker.during(Phase.CHECKPOINT):
                if save is None:
                    self.newest = save = self._begin(self._manager, self._saves, metrics, best=best)
                    self._past = self._past.saved(self._clock.monotonic() - began)
                    self._tracker.pulse.save_interval_s = self._interval_s() or 0.0
                if wait:
                    in_round(self._part, save.done.wait)
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
        state, shares, part = self._state, self._shares, self._part
        if saves.full or saves.sealing:
            in_round(part, saves.await_slot)
        position, tree = state.position, state.for_storage()
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
        parts = shares.parts if part is None and shares.worthwhile(state.module) else 1
        image = manager.encode(
            tree,
            info,
            watched=watched(state.module, tree),
            parts=parts,
            own=not_shared(state.module),
            places=None if part is None else part.places,
        )
        if purpose is not SnapshotPurpose.KEEP:
            self._begun = position.generation, position.step
        if purpose is SnapshotPurpose.HELP:
            self._last_step = position.step
        try:
            save = saves.submit(image, manager.draft(info), purpose, shares.turn)
        except NoRoomError as error:
            self._scarcity.seen(error)
            if purpose is SnapshotPurpose.KEEP or (purpose is SnapshotPurpose.HELP and part is None):
                return Save(manager.draft(info), purpose)
            check_finite(state.module, tree)
            in_round(part, saves.wait)
            return saves.at_once(image, manager.draft(info), purpose, part.over if part is not None else None)
        self._scarcity.over()
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
                self._together(goes=False)
                return None
        self.on_demand.covered(self._state.position.step)
        try:
            self.save({})
        except (CheckpointError, NonFiniteError) as error:
            self.on_demand.settled(self._state.position.step, "", error)
            return error
        return None

    def look(self) -> None:
        """Note what has become of saves since the last look."""
        for save in self._saves.finished() if self._saves is not None and self._saves.unread else ():
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
            self.on_demand.settled(save.manifest.step, save.manifest.name, save.error)

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
        """Make the state at hand durable, unless it is; wait for all that is being written. What went wrong, if so.

        A place that helps does not wait, for place 0 does. Where it cannot reach the others, no place does: one of them
        may be gone.
        """
        part = self._part
        if self._saves is None:
            return None
        apart = part is not None and part.peers is None
        if part is not None and part.helps:
            if not apart or self._state.position.step != self._last_step:
                self._copy(SnapshotPurpose.HELP)
            return None
        if not apart:
            self.wait(part)
        if not self.unsaved:
            self._together(goes=False)
            return None
        self._settling = True
        try:
            self.save({}, wait=not apart)
        except (CheckpointError, NonFiniteError) as error:
            return error
        finally:
            self._settling = False
        return None

    def wait(self, within: ShardPart | Control | None = None) -> None:
        """Until nothing is being written, and no longer than the round ``within`` lasts."""
        if self._saves is not None and not self._saves.idle:
            with self._tracker.during(Phase.CHECKPOINT):
                in_round(within, self._saves.wait)
        self.look()

    def close(self, limit_s: float | None) -> None:
        """Write what waits, and end; what takes longer than ``limit_s`` is given up."""
        if self._saves is not None:
            with self._tracker.during(Phase.CHECKPOINT):
                in_round(None, partial(self._saves.close, limit_s))
            self.look()
