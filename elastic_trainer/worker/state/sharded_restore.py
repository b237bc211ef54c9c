"""Ranks that hold shards read their own parts of the newest good state, each straight into its tensors.

One rank of each node names what the node has: the snapshot that the workers before left in its memory, or a checkpoint.
All ranks then try to read the newest of these. If every place has a rank that could, it gives its shards to the ranks
of its place that could not (their storage does not have it); else all choose again, without that one.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* CheckpointError on all ranks, as restore does.
*Invariant*: either all ranks continue, those of one place with equal shards, or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, GoneError, Live, Loaded, Manifest, StateSnapshot
from elastic_trainer.checkpoint.faults import DamagedError, UnreadableError
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.waits import storage_awaited
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.heal import choose_by_place
from elastic_trainer.worker.state.restore import Origin, StateCandidate, Tree, beside, choose, compare
from elastic_trainer.worker.state.transfer import share_state


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What this rank can read: the ``snapshot`` in its node's memory, and the checkpoints of ``manager``.

    ``looks``: it is the one of its node that says what there is.
    """

    manager: CheckpointManager | None
    snapshot: StateSnapshot | None
    live: Live
    tracker: HeartbeatReporter
    looks: bool

    def newest(self, passed_over: set[str]) -> Manifest | None:
        """The newest state here but for those ``passed_over``. CheckpointError if there is none, but checkpoints that
        are all bad or cannot be looked at.
        """
        if self.manager is None or not self.looks:
            return None
        found, problem = [], None
        if self.snapshot is not None and self.snapshot.manifest.name not in passed_over:
            found.append(self.snapshot.manifest)
        try:
            entry = self.manager.newest()
            if entry is not None and entry.name in passed_over:
                entry = next((each for each in self.manager.entries() if each.name not in passed_over), None)
            found += [entry.manifest] if entry is not None else []
        except CheckpointError as error:
            problem = error
        if problem is not None and not found:
            raise problem
        return max(found, key=lambda each: (each.round, each.step), default=None)

    def load(self, name: str, check: Callable[[], None]) -> Loaded | None:
        """What this rank holds of the state ``name``; None if that is damaged, or not here. CheckpointError for a state
        that does not fit this job; whatever ``check()`` raises between two reads ends it.
        """
        if self.manager is None:
            return None
        began = SYSTEM.monotonic()
        try:
            with storage_awaited():
                loaded = self._from_memory(self.manager, name, check)
                loaded = loaded or self.manager.load_named(name, self.live, check)
        except GoneError:
            return None
        self.tracker.operated("load", SYSTEM.monotonic() - began, ok=loaded is not None)
        return loaded

    def _from_memory(self, manager: CheckpointManager, name: str, check: Callable[[], None]) -> Loaded | None:
        if self.snapshot is None or self.snapshot.manifest.name != name:
            return None
        try:
            loaded = manager.load_snapshot(self.snapshot, self.live, check)
        except (DamagedError, UnreadableError) as error:
            logger().warning("snapshot.damaged", checkpoint=name, reason=str(error))
            return None
        logger().info("snapshot.loaded", checkpoint=name, step=loaded.manifest.step, round=loaded.manifest.round)
        return loaded


def restore_shards(
    control: Control,
    alike: Control,
    source: ShardSource,
    collect: Callable[[], Tree],
    apply: Callable[[Tree], None],
    check: Callable[[Origin], None],
    unfit: CheckpointError | None = None,
) -> Origin:
    """Bring all ranks to one state; ``alike`` are those that hold the same shard as this one. See restore."""
    size, passed_over = control.world_size // alike.world_size, set[str]()
    origin, loaded, holders = Origin(), None, None
    while holders is None:
        found = _elect(control, source, passed_over, unfit)
        if found is None:
            holders = tuple(range(size))  # the fresh states of the first group's ranks
            break
        origin = found
        check(origin)
        with control.agreed():
            loaded = source.load(str(origin.name), control.works.check)
        has = [StateCandidate(0, 0) if each else None for (each,) in control.gather([int(loaded is not None)])]
        holders = choose_by_place(has, size)
        passed_over.add(str(origin.name))
    with control.agreed():
        if loaded is not None:
            apply(loaded.state)
    giver = holders[control.rank % size] // size
    lacks = loaded is None and (origin.name is not None or alike.rank != giver)
    shared: Tree = {}
    if any(each for (each,) in alike.gather([int(lacks)])):
        shared = share_state(alike, giver, collect() if alike.rank == giver else None)
    with control.agreed():
        if lacks:
            apply(shared)
    different: CheckpointError | None = None
    try:
        compare(alike, collect)
    except CheckpointError as error:
        different = error
    control.agree(different)
    return origin


def _elect(
    control: Control, source: ShardSource, passed_over: set[str], unfit: CheckpointError | None
) -> Origin | None:
    """The newest state that a node has; None if there never was one."""
    newest: Manifest | None = None
    error: CheckpointError | None = None
    try:
        newest = beside(control, partial(source.newest, passed_over))
    except CheckpointError as problem:
        error = problem
    rows = control.gather([0, 0, 0] if newest is None else [1, newest.round, newest.step])
    winner = choose([StateCandidate(r, s) if known else None for known, r, s in rows])
    if winner is None:
        if passed_over and error is None:
            error = CheckpointError(
                f"not all shards of {', '.join(sorted(passed_over))} could be read, and there is no other checkpoint",
                hint="the logs of all ranks say why",
            )
        control.agree(error or unfit)
        return None
    known: list[Any] = []
    if newest is not None:
        stored = source.snapshot is None or source.snapshot.manifest is not newest or source.snapshot.stored
        known = [newest.name, dict(newest.fields), newest.run, stored]
    return Origin(*json.loads(control.broadcast_bytes(json.dumps(known).encode(), winner)))
