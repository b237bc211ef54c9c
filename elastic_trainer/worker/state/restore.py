"""All ranks start from one state: the newest good one in any node's memory or storage, else rank 0's fresh state.

Each node names its newest: the snapshot that workers before these left in memory, or a checkpoint. The highest
(round, step) wins and the lowest rank breaks a tie. The winner loads and verifies it and sends it to all. If it is
damaged, that node names its next one and all choose again.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* CheckpointError on all ranks: when there are checkpoints but none is good, when the state does not fit this
job, or when ranks differ afterwards. *Invariant*: either all ranks continue, with equal states, or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.checkpoint import NOTHING_LIVE, CheckpointManager, Live, Loaded, StateSnapshot
from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.transfer import share_state

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class StateCandidate:
    """The state that a node can offer, ordered by age."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the state came from: a checkpoint, with the ``fields`` and the ``run`` it was saved with, or nowhere.

    ``stored``: it is in storage, not only in a node's memory.
    """

    name: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    stored: bool = True


def choose(candidates: Sequence[StateCandidate | None]) -> int | None:
    """The rank whose candidate is the newest, the lowest of several; None if there is none. Pure."""
    known = [each for each in candidates if each is not None]
    return candidates.index(max(known)) if known else None


class Inventory:
    """What this rank can offer; only one rank per node looks at its storage, and at the ``snapshot`` in its memory."""

    def __init__(
        self,
        manager: CheckpointManager | None,
        tracker: HeartbeatReporter,
        snapshot: StateSnapshot | None = None,
        live: Live = NOTHING_LIVE,
    ) -> None:
        self._manager, self._tracker, self._snapshot, self._live = manager, tracker, snapshot, live
        self._stored = manager is not None
        """Whether storage may hold a good checkpoint."""
        self._loaded: Loaded | None = None
        self.error: CheckpointError | None = None

    def candidate(self) -> StateCandidate | None:
        in_memory = None if self._snapshot is None else StateCandidate(*self._snapshot.order)
        loaded = None if self._loaded is None else self._loaded.manifest
        other = self._in_storage() if loaded is None else StateCandidate(loaded.round, loaded.step)
        return max(filter(None, (in_memory, other)), default=None)

    def _in_storage(self) -> StateCandidate | None:
        if self._manager is None or not self._stored:
            return None
        try:
            entry = self._manager.newest()
        except CheckpointError as error:
            self.error = error
            return None
        return None if entry is None else StateCandidate(entry.manifest.round, entry.manifest.step)

    def load(self, wanted: StateCandidate) -> Loaded | None:
        """None if an older one, or none, turned out to be the newest good one: choose again."""
        if self._manager is None:
            raise RuntimeError("this rank has no checkpoints to load")
        if self._snapshot is not None and wanted == StateCandidate(*self._snapshot.order):
            self._loaded = self._from_memory(self._manager, self._snapshot) or self._loaded
        elif self._loaded is None:
            self._loaded = self._from_storage(self._manager)
            self._stored = self._loaded is not None
        return self._loaded if self._loaded is not None and self.candidate() == wanted else None

    def _from_storage(self, manager: CheckpointManager) -> Loaded | None:
        began = SYSTEM.monotonic()
        try:
            loaded = manager.load_newest(self._live)
        except CheckpointError as error:
            self.error, loaded = error, None
        self._tracker.operated("load", SYSTEM.monotonic() - began, ok=self.error is None)
        return loaded

    def _from_memory(self, manager: CheckpointManager, snapshot: StateSnapshot) -> Loaded | None:
        """A damaged snapshot counts for nothing: there are others, and checkpoints."""
        try:
            loaded = manager.load_snapshot(snapshot, self._live)
        except CheckpointError as error:
            logger().warning("snapshot.damaged", checkpoint=snapshot.manifest.name, reason=str(error))
            self._snapshot = None
            return None
        logger().info("snapshot.loaded", checkpoint=loaded.name, step=loaded.manifest.step, round=loaded.manifest.round)
        return loaded


def restore(
    control: Control,
    manager: CheckpointManager | None,
    collect: Callable[[], Tree],
    apply: Callable[[Tree], None],
    tracker: HeartbeatReporter,
    check: Callable[[Origin], None],
    unfit: CheckpointError | None = None,
    snapshot: StateSnapshot | None = None,
    live: Live = NOTHING_LIVE,
    alike: Control | None = None,
) -> Origin:
    """Bring all ranks to one state. ``collect`` gives this rank's present state, ``apply`` adopts a new one.

    The winner reads into ``live`` tensors: whatever ends this before ``apply``, the state at hand is not to be used.
    ``alike``: the ranks that hold the same shard as this one, if the model is sharded.

    ``unfit`` says why nobody may start from this rank's present state, if so; ``check`` raises, on all ranks, for a
    checkpoint that this job must not start from. ``snapshot`` is what earlier workers left in the node's memory.
    """
    inventory = Inventory(manager, tracker, snapshot, live)
    source, loaded = _elect(control, inventory)
    if source is None:
        control.agree(inventory.error or unfit)
    over = alike if alike is not None and source is None else control  # what is stored is whole
    mine = over.rank == (source or 0)
    origin = _origin_of(control, source, loaded)
    check(origin)
    tree = (loaded.state if loaded is not None else collect()) if mine else None
    shared = share_state(over, source or 0, tree)
    with control.agreed():
        if source is not None or not mine:
            apply(shared)
    _compare(alike if alike is not None else control, collect)
    return origin


def _elect(control: Control, inventory: Inventory) -> tuple[int | None, Loaded | None]:
    while True:
        mine = inventory.candidate()
        row = [1, mine.round, mine.step] if mine is not None else [0, 0, 0]
        candidates = [StateCandidate(r, s) if known else None for known, r, s in control.gather(row)]
        winner = choose(candidates)
        if winner is None:
            return None, None
        wanted = candidates[winner]
        loaded = inventory.load(wanted) if control.rank == winner and wanted is not None else None
        (done,) = control.gather([int(loaded is not None)])[winner]
        if done:
            return winner, loaded


def _origin_of(control: Control, source: int | None, loaded: Loaded | None) -> Origin:
    if source is None:
        return Origin()
    text = b""
    if loaded is not None:
        manifest = loaded.manifest
        text = json.dumps([loaded.name, dict(manifest.fields), manifest.run, loaded.stored]).encode()
    return Origin(*json.loads(control.broadcast_bytes(text, source)))


def whole(state: Tree) -> int:
    """63 bits that depend on every byte of ``state`` but its random generators, which differ on purpose."""
    return fingerprint({name: part for name, part in state.items() if name != "random"})


def _compare(control: Control, collect: Callable[[], Tree]) -> None:
    if control.alone:
        return
    digests = control.gather([whole(collect())])
    different = [rank for rank, row in enumerate(digests) if row != digests[0]]
    if different:
        raise CheckpointError(
            f"after resuming, rank {different[0]} holds another state than rank 0",
            hint="a registered object's load_state_dict() must restore what its state_dict() gave, alike on all ranks",
        )
