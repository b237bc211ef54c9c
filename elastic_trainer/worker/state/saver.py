"""When the state is saved, by whom, and saving it.

The copy that a save takes is written beside training. The shard ranks of a sharded model copy at the same steps: shard
rank 0 of each group decides, and one small sum before each copy tells the others (:meth:`Saver._together`).

*Runs in* the worker's main thread; of the ranks, only rank 0 publishes what all write (checkpoint.commit).
*Owns* the checkpoint directory's manager, and the copies.
*Fails by* CheckpointError (StorageError: the directory refuses) or NonFiniteError from :meth:`Saver.save`;
:meth:`Saver.attempt` and :meth:`Saver.make_durable` return them.
*Invariant*: a state with non-finite parameters is never saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from elastic_trainer.checkpoint import (
    Arena,
    BackgroundSaves,
    CheckpointManager,
    Committed,
    NoRoomError,
    Save,
    SaveInfo,
    ShardGroup,
    StateSnapshot,
)
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.checkpoint.neighbours import MemoryAddress, Neighbour
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError, NonFiniteError, last_line
from elastic_trainer.ipc.page import SAVE_SUFFIX
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, Purpose, ThreadedWork, storage_awaited
from elastic_trainer.worker.comm.groups import RankAssignment
from elastic_trainer.worker.comm.placement import AUTO
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.training_state import TrainingState, check_finite, watched

FIELD: Final = "experience"
"""The field of a checkpoint that holds what ``auto`` has learned."""
PRIOR_S: Final = 6 * 3600.0
"""Training time to the next failure that is assumed while none has been seen; it counts as one failure seen."""
FIRST_S: Final = 60.0
"""The interval before a save has been measured."""
SHORTEST_S: Final = 10.0
LONGEST_S: Final = 1800.0
_SMOOTHING: Final = 0.3
LEAST_APART_S: Final = 5.0
_SHARE: Final = 0.01
"""Part of the training time that snapshots in memory may take."""
_SENT_SHARE: Final = 0.05
"""Part of the time in which a copy may be on its way to the neighbour, beside training."""


class WhenBehind(StrEnum):
    """What becomes of a save by steps while storage is still busy with the two before it."""

    WAIT = "wait"
    SKIP = "skip"
    REPLACE = "replace"
    """The snapshot that waits is given up for the new one."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often to save. All ranks count the same steps; the seconds (``"auto"``: chosen here) are rank 0's."""

    every_steps: int | None = None
    every_s: float | str | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"checkpoint_every_steps is {self.every_steps}", hint="it must be at least 1, or None")
        if isinstance(self.every_s, str):
            if self.every_s != AUTO:
                raise ConfigError(
                    f"checkpoint_every_s is {self.every_s!r}", hint=f"give seconds, {AUTO!r}, or None for never"
                )
        elif self.every_s is not None and not self.every_s > 0:
            raise ConfigError(f"checkpoint_every_s is {self.every_s}", hint="it must be positive, or None")

    def interval_s(self, seen: Experience) -> float | None:
        """Seconds between two saves by time; None for none."""
        return best_interval_s(seen) if isinstance(self.every_s, str) else self.every_s


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that outlives this process: the agent's ``files``, and how often to copy the state there.

    ``beside`` are the files of the other ranks of a sharded model.
    """

    files: Sequence[Path] = ()
    every_s: float | str | None = AUTO
    beside: Sequence[Path] = ()

    def apart_s(self, took_s: float, sent_s: float = 0.0) -> float:
        """Seconds between snapshots that take ``took_s``, and ``sent_s`` to the neighbour; infinite for none."""
        if self.every_s is None or not self.files:
            return math.inf
        longest = max(LEAST_APART_S, took_s / _SHARE, sent_s / _SENT_SHARE)
        return longest if isinstance(self.every_s, str) else self.every_s


@dataclass(frozen=True, slots=True)
class Experience:
    """What this training's saves cost and how often it failed. ``failures``: lives that resumed and had lost steps."""

    cost_s: float | None = None
    """Seconds for which a save held up the training, smoothed; None before the first."""
    trained_s: float = 0.0
    failures: int = 0

    @property
    def mean_time_to_failure_s(self) -> float:
        """Posterior mean of a failure rate that was assumed to be one in ``PRIOR_S``."""
        return (PRIOR_S + self.trained_s) / (1 + self.failures)

    def after_save(self, cost_s: float) -> Experience:
        before_s = self.cost_s if self.cost_s is not None else cost_s
        return replace(self, cost_s=before_s + _SMOOTHING * (cost_s - before_s))

    def kept(self, *, settled: bool) -> dict[str, Any]:
        """The field of a checkpoint; ``settled``: it is the last of this life, so nothing is lost behind it."""
        return {"trained_s": round(self.trained_s, 3), "failures": self.failures, "settled": settled}

    @classmethod
    def from_checkpoint(cls, fields: Mapping[str, Any], *, lost: bool = True) -> Experience:
        """The experience of a life that resumes the checkpoint with these ``fields``; ``lost``: whether steps after
        it were lost, as far as is known."""
        kept = fields.get(FIELD)
        if not isinstance(kept, Mapping):
            return cls()
        failed = lost and not kept.get("settled")
        return cls(trained_s=float(kept.get("trained_s", 0.0)), failures=int(kept.get("failures", 0)) + failed)


def best_interval_s(seen: Experience) -> float:
    """The interval that loses least training time to saves and, after failures, to repeated steps.

    It is Daly's: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), equation 37; its first term is that of J. W. Young, "A first order
    approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974).
    """
    if seen.cost_s is None:
        return FIRST_S
    mean_s = seen.mean_time_to_failure_s
    cost_s = min(seen.cost_s, 2.0 * mean_s)  # the formula ends there; Daly's step to the mean would reverse the order
    share = cost_s / (2.0 * mean_s)
    best_s = math.sqrt(2.0 * cost_s * mean_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - cost_s
    return min(LONGEST_S, max(SHORTEST_S, best_s))


class OnDemand:
    """Saves that somebody asks for: ``elastic-trainer checkpoints save RUN``, through the agent of rank 0.

    The agent leaves a request in a file beside the heartbeat page, and reads in the page's notes what became of it: the
    checkpoint's name once that is durable, or the problem. ``saves``: whether there is a checkpoint directory.
    """

    def __init__(self, tracker: HeartbeatReporter, *, saves: bool) -> None:
        self._tracker, self._saves = tracker, saves
        self._file: Path | None = None if tracker.page.path is None else tracker.page.path.with_suffix(SAVE_SUFFIX)
        self._answered = self._pending = ""
        self._step: int | None = None
        """The snapshot that answers the pending request as soon as it is durable."""
        self._newest: tuple[int, str] | None = None
        """Step and name of the newest durable checkpoint."""

    def wanted(self, step: int) -> bool:
        """Whether a request waits for a save that has not begun; the state at hand is that of ``step``."""
        if self._file is not None and not self._pending:
            with suppress(OSError):
                asked = self._file.read_text(encoding="ascii", errors="replace").strip()
                self._pending = asked if asked != self._answered else ""
        if not self._pending or self._step is not None:
            return False
        if not self._saves:
            hint = "give its session a checkpoint_dir"
            self._answer(problem=ConfigError("the job has no checkpoint directory", hint=hint))
        elif self._newest is not None and self._newest[0] == step:
            self._answer(self._newest[1])
        return bool(self._pending)

    def covered(self, step: int) -> None:
        """A save of the state of ``step`` begins; without memory for a copy it ends before training goes on."""
        if self._pending and self._step is None:
            self._step = step

    def given_up(self, step: int) -> None:
        """The save of ``step`` made room for a newer one."""
        if self._step == step:
            self._step = None

    def report(self, step: int, name: str, error: BaseException | None) -> None:
        """The checkpoint ``name`` of ``step`` is durable, or was not written because of ``error``."""
        if error is None:
            self._newest = (step, name)
        if self._step == step:
            known = error if isinstance(error, ElasticTrainerError) else CheckpointError(str(error))
            self._answer(name) if error is None else self._answer(problem=known)

    def _answer(self, name: str = "", problem: ElasticTrainerError | None = None) -> None:
        self._answered, self._pending, self._step = self._pending, "", None
        answer: dict[str, str | int] = {"id": self._answered, "name": name}
        if problem is not None:
            answer |= {"problem": str(problem)[:500], "code": problem.exit_code}
        self._tracker.set_notes(on_demand=answer)


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
    def among(cls, assignment: RankAssignment, writers: Writers = Writers.AUTO) -> Shares:
        """One file for each node, if all have as many ranks; nodes that count otherwise cannot help each other."""
        if writers is Writers.RANK0:
            return cls()
        nodes = assignment.world_size // assignment.local_world_size
        return cls(max(1, min(MOST_WRITERS, nodes)), assignment.rank // assignment.local_world_size)

    def worthwhile(self, module: torch.nn.Module) -> bool:
        """The same on all ranks."""
        return self.parts > 1 and sum(each.nbytes for each in module.parameters()) >= SHARED_FROM


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One rank's part of a sharded state, which its shard group copies together.

    ``peers`` are the ranks of the group; None: they cannot be reached, and each acts for itself. ``writes``: the group
    writes the checkpoints; else it has copies in memory only.
    """

    shard_group: ShardGroup
    peers: Control | None
    writes: bool

    @property
    def leads(self) -> bool:
        """Whether the others of the group follow this rank."""
        return self.shard_group.index == 0

    @property
    def helps(self) -> bool:
        return self.writes and not self.leads


def in_round(within: ShardPart | Control | None, wait: Callable[[], object]) -> None:
    """``wait()`` for storage, and no longer than a round with others lasts: it may end because one of them is gone."""
    peers = within.peers if isinstance(within, ShardPart) else within
    if peers is not None:
        peers.works.wait_for_own(ThreadedWork(wait))
    else:
        with storage_awaited():
            wait()


def check_storage(manager: CheckpointManager | None, control: Control, environment: WorkerEnvironment) -> None:
    """StorageError on all ranks if rank 0 cannot write checkpoints.

    Not where a process continues a training: the directory could be written when that began.
    """
    with control.agreed():
        if manager is None or control.rank != 0:
            return
        try:
            in_round(None, manager.check_writable)
        except CheckpointError as error:
            continues = environment.reached > 0
            with suppress(CheckpointError):
                continues = continues or (environment.midway and manager.newest() is not None)
            if not continues:
                raise
            logger().error("storage.refused", step=environment.reached, error=str(error))


def find_neighbour(control: Control, here: str | None, number: int) -> Neighbour | None:
    """Who keeps copies of what this rank, the ``number``-th of its node, alone holds: the agent of the next node.

    ``here``: where this node's own agent does so for others.
    """
    at = following([row.decode() for row in control.gather_bytes((here or "").encode())], control.rank)
    return Neighbour(MemoryAddress.parse(at), number) if at else None


def following(rows: Sequence[str], rank: int) -> str:
    """The address of the node after that of ``rank``, from those of all ranks; empty if there is none. Pure."""
    mine, others = rows[rank], [*rows[rank:], *rows[:rank]]
    return next((each for each in others if each and each != mine), "") if mine else ""


def not_shared(module: torch.nn.Module) -> Callable[[str], bool]:
    """Of a tensor's name in a checkpoint: whether ranks may hold other values (buffers, random generators)."""
    buffers = {f"{prefix}{name}" for name, _ in module.named_buffers() for prefix in ("model/", "average/module.")}
    return lambda name: name in buffers or not name.startswith(("model/", "optimizer/", "average/"))


_LONG_AGO_S = -1e12
_AGAIN_S: Final = 60.0
"""Seconds after which copies that only stay in memory are tried again where memory was short."""


class Saver:
    """Saves ``state`` through ``manager`` (None: nowhere), on the rank that saves.

    A save copies the state, which is written beside training; :meth:`note_ended_saves` notes what became of it, and
    ``on_saved`` gets every checkpoint, with ``fields()`` in it.
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
        self._short_at = _LONG_AGO_S
        """When there was too little memory for a copy; long ago once there is enough."""
        self._failed = self._refused = self._prepared = self._log_copies_once = False
        self._shares, self._begun = Shares(), (-1, -1)
        self._part: ShardPart | None = None
        self.newest: Save | None = None
        """The newest save that this rank has begun, as the one that commits."""

    def serve(
        self,
        *,
        saves: bool,
        world_size: int = 1,
        shares: Shares = Shares(),
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
            self._log_copies_once = True

    @property
    def copied(self) -> bool:
        """Whether the neighbour has a copy of this rank's shards."""
        return self._saves is not None and self._saves.copied

    def meet(self, peers: Control) -> None:
        """A round begins with these ranks of the shard group: a save that not all of them have begun will not be."""
        if self._saves is not None and any(row != [*self._begun] for row in peers.gather([*self._begun])):
            self._saves.stop()
            self._begun = -1, -1

    def note_resume(self, name: str, order: tuple[int, int], fields: Mapping[str, Any], *, stored: bool) -> None:
        """The present state was just read from the checkpoint ``name``, of that round and step, with these ``fields``;
        ``stored``: it is in storage.
        """
        step = self._state.position.step
        if self._saves is not None:
            self._saves.protect(name, order)
        self._last_step = step if stored else self._last_step
        lost = not 0 < self._tracker.reached <= step  # 0: nobody knows how far the job was
        self._past = replace(Experience.from_checkpoint(fields, lost=lost), cost_s=self._past.cost_s)
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

        One of the two slots is kept for copies in memory while the other one is written.
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
        if self._saves is not None and self._log_copies_once:
            self._log_copies_once, needed_mb = False, round(SLOTS * self._state.size() / 1e6, 1)
            logger().info("snapshot.copies", neighbour=str(self._saves.neighbour), memory_there_mb=needed_mb)

    def copy_if_due(self) -> None:
        """Copy the state into the agent's memory, if that was not done for long enough; it is not committed."""
        if self._memory.files and self.alone and self._copy_due():
            self._copy(SnapshotPurpose.MEMORY_ONLY)

    def wants_copy(self) -> bool:
        """Whether the shard groups should copy the state into the agents' memory (:meth:`copy_shards`)."""
        sending = self._saves is not None and self._saves.sending
        return self._part is not None and self._part.leads and not sending and self._copy_due()

    def copy_shards(self) -> None:
        """On all ranks of a sharded model: what :meth:`copy_if_due` does."""
        if self._part is not None:
            self._copy(SnapshotPurpose.MEMORY_ONLY)

    def _copy_due(self) -> bool:
        sent_s = self._saves.sent_s if self._saves is not None else 0.0
        return self._clock.monotonic() - self._copied_s >= self._memory.apart_s(self._copy_took_s, sent_s)

    def write_share(self) -> None:
        """Rank 0 saves: write a part of it, on one rank of each of the other nodes, or the shards of this rank."""
        whole = self._part is None and self._manager is None and self._shares.worthwhile(self._state.module)
        if whole or (self._part is not None and self._part.helps):
            self._copy(SnapshotPurpose.CO_WRITE)

    def _together(self, *, goes: bool, kept: bool = False) -> bool:
        """Whether to copy now. A shard group does so together, if shard rank 0 ``goes``, when all have sealed the copy
        before: then there is always one that all of them hold. Those who help learn what shard rank 0 still writes.

        While the copy before is on its way from a rank to its neighbour, none is made that is only ``kept`` in memory.
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
        short = self._clock.monotonic() - self._short_at < _AGAIN_S
        free = not (short or self._saves.full or self._saves.sealing)
        if self._part is None and not free:
            return
        goes = self._part is None or self._part.peers is None or (free and self._copy_due())
        if not self._together(goes=goes, kept=purpose is SnapshotPurpose.MEMORY_ONLY):
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
        self.note_ended_saves()
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
                    self._past = self._past.after_save(self._clock.monotonic() - began)
                    self._tracker.pulse.save_interval_s = self._interval_s() or 0.0
                if wait:
                    in_round(self._part, save.done.wait)
        except (CheckpointError, NonFiniteError) as error:
            self._tracker.operated("save", self._clock.monotonic() - began, ok=False, error=last_line(error))
            if isinstance(error, NonFiniteError):
                logger().error("checkpoint.failed", step=self._state.position.step, reason=str(error))
            raise
        self._last_s, self._last_step = self._clock.monotonic(), self._state.position.step
        self.note_ended_saves()
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
        learned = {FIELD: self._seen().kept(settled=self._settling)} if self._cadence.every_s == AUTO else {}
        info = SaveInfo(
            step=position.step,
            round=position.generation,
            epoch=position.cursor.epoch,
            samples=position.cursor.samples,
            world_size=self._world_size,
            metrics=metrics,
            best=best,
            fields={**self._fields(), **learned},
        )
        parts = shares.parts if part is None and shares.worthwhile(state.module) else 1
        image = manager.encode(
            tree,
            info,
            watched=watched(state.module, tree),
            parts=parts,
            own=not_shared(state.module),
            shard_group=None if part is None else part.shard_group,
        )
        if purpose is not SnapshotPurpose.MEMORY_ONLY:
            self._begun = position.generation, position.step
        if purpose is SnapshotPurpose.CO_WRITE:
            self._last_step = position.step
        try:
            save = saves.submit(image, manager.draft(info), purpose, shares.turn)
        except NoRoomError as error:
            if self._short_at == _LONG_AGO_S:
                logger().warning("checkpoint.not_beside", reason=str(error), effect="training waits for each save")
            self._short_at = self._clock.monotonic()
            if purpose is SnapshotPurpose.MEMORY_ONLY or (purpose is SnapshotPurpose.CO_WRITE and part is None):
                return Save(manager.draft(info), purpose)
            check_finite(state.module, tree)
            in_round(part, saves.wait)
            over = part.peers.works.over if part is not None and part.peers is not None else None
            return saves.at_once(image, manager.draft(info), purpose, over)
        if self._short_at != _LONG_AGO_S:
            logger().info("checkpoint.beside_again", effect="training no longer waits for saves")
        self._short_at = _LONG_AGO_S
        self._copied_s = self._clock.monotonic()
        return save

    def attempt(self) -> CheckpointError | NonFiniteError | None:
        """Save on schedule. An error has been logged and is returned: it must not end the training."""
        if self._saves is not None and self._saves.full and self._when_behind is not WhenBehind.WAIT:
            given_up = self._saves.give_up_waiting() if self._when_behind is WhenBehind.REPLACE else None
            step = self._state.position.step if given_up is None else given_up.manifest.step
            reason = "storage is busy with the two before it"
            self._tracker.operated("save", 0.0, ok=False, error=reason)
            logger().warning("checkpoint.given_up", step=step, reason=reason)
            self.on_demand.given_up(step)
            if given_up is None:
                self._last_s = self._clock.monotonic()
                self._together(goes=False)
                return None
        self.on_demand.covered(self._state.position.step)
        try:
            self.save({})
        except (CheckpointError, NonFiniteError) as error:
            self.on_demand.report(self._state.position.step, "", error)
            return error
        return None

    def note_ended_saves(self) -> None:
        """Note what has become of saves since the last look."""
        for save in self._saves.take_ended() if self._saves is not None and self._saves.unread else ():
            if save.purpose is not SnapshotPurpose.COMMIT:
                logger().warning("snapshot.failed", step=save.manifest.step, reason=str(save.error))
                self._refused |= isinstance(save.error, NonFiniteError)
                continue
            self._failed = save.committed is None
            if save.committed is None:
                if isinstance(save.error, NonFiniteError):
                    logger().error("checkpoint.failed", step=save.manifest.step, reason=str(save.error))
                    self._refused = True
                elif not isinstance(save.error, CheckpointError):  # the manager has logged those
                    logger().error("checkpoint.failed", step=save.manifest.step, exc_info=save.error)
                why = last_line(save.error) if save.error is not None else ""
                self._tracker.operated("save", 0.0, ok=False, error=why)
                if save.manifest.step == self._last_step:
                    self._last_step = None
            else:
                done = save.committed
                self._tracker.note_save(save.manifest.step, done.size, done.duration_s, done.free_bytes)
                self._on_saved(save.committed)
            self.on_demand.report(save.manifest.step, save.manifest.name, save.error)

    def refused(self) -> bool:
        """Whether, since this was asked last, a snapshot was refused because it was not finite."""
        refused, self._refused = self._refused, False
        return refused

    # ---- the state at hand, made durable

    @property
    def has_failed(self) -> bool:
        """Whether the last save that ended has failed."""
        self.note_ended_saves()
        return self._failed

    @property
    def unsaved(self) -> bool:
        """Whether a step was committed since the last snapshot."""
        return self._manager is not None and self._state.position.step != self._last_step

    def make_durable(self) -> CheckpointError | NonFiniteError | None:
        """Make the state at hand durable, unless it is; wait for all that is being written. What went wrong, if so.

        A rank that helps does not wait, for shard rank 0 does. Where it cannot reach the others, no rank does: one of
        them may be gone.
        """
        part = self._part
        if self._saves is None:
            return None
        apart = part is not None and part.peers is None
        if part is not None and part.helps:
            if not apart or self._state.position.step != self._last_step:
                self._copy(SnapshotPurpose.CO_WRITE)
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
        self.note_ended_saves()

    def close(self, limit_s: float | None) -> None:
        """Write what waits, and end; what takes longer than ``limit_s`` is given up."""
        if self._saves is not None:
            with self._tracker.during(Phase.CHECKPOINT):
                in_round(None, partial(self._saves.close, limit_s))
            self.note_ended_saves()
