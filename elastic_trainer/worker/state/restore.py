"""All ranks start from one state: the newest good one in any node's memory or storage, else rank 0's fresh state.

Each node names its newest: the snapshot that workers before these left in memory, or a checkpoint. The highest
(round, step) wins and the lowest rank breaks a tie. The winner opens it, and all load it together. If a rank finds it
damaged, it no longer counts on that rank's node, and all choose again.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* CheckpointError on all ranks: when there are checkpoints but none is good, when the state does not fit this
job, or when ranks differ afterwards. *Invariant*: either all ranks continue, with equal states, or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from elastic_trainer.checkpoint import NOTHING_LIVE, CheckpointManager, Entry, GoneError, Live, Manifest, StateSnapshot
from elastic_trainer.checkpoint.fingerprint import fingerprint
from elastic_trainer.checkpoint.manifest import seal, unseal
from elastic_trainer.checkpoint.parts import PartReader, Placing, parts_of
from elastic_trainer.checkpoint.reading import CheckpointFiles, Filling, Outline, fill, read_outline, verify
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.waits import ThreadedWork, storage_awaited
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.loading import KnownWay, load_together
from elastic_trainer.worker.state.transfer import share_state

Tree = Mapping[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, order=True)
class StateCandidate:
    """The state that a node can offer, ordered by age."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the state came from: a checkpoint, with the ``fields`` and the ``run`` it was saved with, or nowhere.

    ``stored``: it is in storage, not only in a node's memory. ``place``: the storage that it is read from.
    """

    name: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    stored: bool = True
    place: str = ""


def choose(candidates: Sequence[StateCandidate | None]) -> int | None:
    """The rank whose candidate is the newest, the lowest of several; None if there is none. Pure."""
    known = [each for each in candidates if each is not None]
    return candidates.index(max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Opened:
    """A state that can be loaded: from the storage at ``place``, or from the node's memory."""

    files: CheckpointFiles
    outline: Outline
    place: str
    stored: bool = True


class Inventory:
    """What this rank can offer; only one rank per node looks at its storage, and at the ``snapshot`` in its memory."""

    def __init__(
        self,
        manager: CheckpointManager | None,
        tracker: HeartbeatReporter,
        snapshot: StateSnapshot | None = None,
    ) -> None:
        self._manager, self._tracker, self._snapshot = manager, tracker, snapshot
        self._rejected: set[str] = set()
        self.error: CheckpointError | None = None

    def candidate(self) -> StateCandidate | None:
        in_memory = None if self._snapshot is None else StateCandidate(*self._snapshot.order)
        entry = self._in_storage()
        stored = None if entry is None else StateCandidate(entry.manifest.round, entry.manifest.step)
        return max(filter(None, (in_memory, stored)), default=None)

    def _in_storage(self) -> Entry | None:
        if self._manager is None or self.error is not None:
            return None
        try:
            return self._manager.newest(self._rejected)
        except CheckpointError as error:
            self.error = error
            return None

    def open(self, wanted: StateCandidate) -> Opened | None:
        """None if it cannot be loaded, or is another one by now: choose again."""
        snapshot = self._snapshot
        if snapshot is not None and wanted == StateCandidate(*snapshot.order):
            try:
                verify(snapshot, snapshot.manifest)  # there need not be another state that could be read over this one
                return Opened(snapshot, read_outline(snapshot, snapshot.manifest), "", stored=snapshot.stored)
            except CheckpointError as error:
                self._damaged(snapshot, error)
                return None
        entry = self._in_storage()
        if (
            self._manager is None
            or entry is None
            or StateCandidate(entry.manifest.round, entry.manifest.step) != wanted
        ):
            return None
        try:
            return Opened(
                self._manager.files, read_outline(self._manager.files, entry.manifest), self._manager.location
            )
        except CheckpointError as error:
            self._reject(entry.name, error)
            return None

    def reader(self, opened: Opened | None, manifest: Manifest, place: str) -> PartReader | None:
        """Of the state that this rank has ``opened``, or of the same one in this node's storage if one is read."""
        if opened is not None:
            return PartReader(opened.files, manifest)
        if self._manager is None or not place or manifest.name in self._rejected:
            return None
        return PartReader.of(self._manager.files, manifest)

    def loaded(self, opened: Opened, duration_s: float, **values: Any) -> None:
        """By the rank that has ``opened`` it."""
        manifest = opened.outline.manifest
        if isinstance(opened.files, StateSnapshot):
            logger().info("snapshot.loaded", checkpoint=manifest.name, step=manifest.step, round=manifest.round)
        elif self._manager is not None:
            self._tracker.operated("load", duration_s, ok=True)
            self._manager.loaded(manifest, duration_s, **values)

    def failed(self, opened: Opened | None, name: str, error: CheckpointError, duration_s: float) -> None:
        """This rank could not read its part of the state ``name``."""
        if opened is not None and isinstance(opened.files, StateSnapshot):
            self._damaged(opened.files, error)
        else:
            self._tracker.operated("load", duration_s, ok=False)
            self._reject(name, error)

    def _reject(self, name: str, error: CheckpointError) -> None:
        if not isinstance(error, GoneError):
            self._rejected.add(name)
        if self._manager is not None:
            self._manager.reject(name, error)

    def _damaged(self, snapshot: StateSnapshot, error: CheckpointError) -> None:
        """It counts for nothing: there are others, and checkpoints."""
        logger().warning("snapshot.damaged", checkpoint=snapshot.manifest.name, reason=str(error))
        self._snapshot = None


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
) -> Origin:
    """Bring all ranks to one state. ``collect`` gives this rank's present state, ``apply`` adopts a new one.

    Loading overwrites ``live`` tensors: if anything ends this between ``check`` and ``apply``, the present state must
    not be used.

    ``unfit`` says why nobody may start from this rank's present state, if so; ``check`` raises, on all ranks, for a
    checkpoint that this job must not start from. ``snapshot`` is what earlier workers left in the node's memory.
    """
    inventory = Inventory(manager, tracker, snapshot)
    while (found := _elect(control, inventory)) is not None:
        source, opened = found
        outline, origin = _announced(control, source, opened)
        check(origin)
        state, field = _loaded(control, source, opened, outline, origin, inventory, live)
        if state is not None:
            with control.agreed():
                apply(state)
            compare(control, collect)
            return replace(origin, fields={**origin.fields, **field})
        unfit = CheckpointError("the last checkpoint was removed while it was read", hint="start again")
    control.agree(inventory.error)
    control.agree(unfit)
    check(Origin())
    shared = share_state(control, 0, collect() if control.rank == 0 else None)
    with control.agreed():
        if control.rank != 0:
            apply(shared)
    compare(control, collect)
    return Origin()


def _elect(control: Control, inventory: Inventory) -> tuple[int, Opened | None] | None:
    """The rank that has the newest state, which it has opened; None if no rank has any."""
    while True:
        mine = beside(control, inventory.candidate)
        row = [1, mine.round, mine.step] if mine is not None else [0, 0, 0]
        candidates = [StateCandidate(r, s) if known else None for known, r, s in control.gather(row)]
        winner = choose(candidates)
        if winner is None:
            return None
        wanted = candidates[winner]
        wins = control.rank == winner
        opened = beside(control, partial(inventory.open, wanted)) if wins and wanted is not None else None
        (done,) = control.gather([int(opened is not None)])[winner]
        if done:
            return winner, opened


def beside(control: Control, act: Callable[[], Found]) -> Found:
    """``act()`` in a thread: storage may take long, and a round that ends meanwhile must not wait for it."""
    work = ThreadedWork(partial(copy_context().run, act))
    control.works.wait_for_own(work)
    found: Found = work.result
    return found


def _announced(control: Control, source: int, opened: Opened | None) -> tuple[Outline, Origin]:
    """What the ``source`` has opened, on all ranks."""
    text = b""
    if opened is not None:
        known = opened.outline.manifest
        text = json.dumps([known.name, dict(known.fields), known.run, opened.stored, opened.place]).encode()
    origin = Origin(*json.loads(control.broadcast_bytes(text, source)))
    if opened is not None and control.alone:
        return opened.outline, origin
    mine = None if opened is None else opened.outline
    sealed = control.broadcast_bytes(b"" if mine is None else seal(mine.manifest), source)
    manifest = unseal(sealed, str(origin.name))
    skeleton = control.broadcast_bytes(b"" if mine is None else mine.skeleton, source)
    heads = [b""] * len(manifest.tensor_files()) if mine is None else mine.heads
    return Outline(manifest, skeleton, tuple(control.broadcast_bytes(each, source) for each in heads)), origin


def _loaded(
    control: Control,
    source: int,
    opened: Opened | None,
    outline: Outline,
    origin: Origin,
    inventory: Inventory,
    live: Live,
) -> tuple[dict[str, Any] | None, Mapping[str, Any]]:
    """The state, and what has been measured; no state if a rank could not read its part."""
    began, manifest = SYSTEM.monotonic(), outline.manifest
    values: Mapping[str, Any] = {}
    field: Mapping[str, Any] = {}
    try:
        if opened is not None and control.alone:
            with storage_awaited():
                state = fill(opened.files, outline, live)
        else:
            filling, known = Filling(outline, live), KnownWay.kept(origin.fields, origin.place)
            reader = beside(control, partial(inventory.reader, opened, manifest, origin.place))
            outcome = load_together(control, source, parts_of(manifest), Placing(filling), reader, known)
            if outcome.error is not None:
                raise outcome.error
            if not outcome.whole:
                return None, {}
            values, field = outcome.values, outcome.field(origin.place)
            state = filling.state()
    except CheckpointError as error:
        inventory.failed(opened, manifest.name, error, SYSTEM.monotonic() - began)
        return None, {}
    if opened is not None:
        inventory.loaded(opened, SYSTEM.monotonic() - began, **values)
    return state, field


def whole(state: Tree) -> int:
    """63 bits that depend on every byte of ``state`` but its random generators, which differ on purpose."""
    return fingerprint({name: part for name, part in state.items() if name != "random"})


def compare(control: Control, collect: Callable[[], Tree]) -> None:
    """CheckpointError unless all ranks hold one state."""
    if control.alone:
        return
    digests = control.gather([whole(collect())])
    different = [rank for rank, row in enumerate(digests) if row != digests[0]]
    if different:
        raise CheckpointError(
            f"after resuming, rank {different[0]} holds another state than rank 0",
            hint="a registered object's load_state_dict() must restore what its state_dict() gave, alike on all ranks",
        )
