"""Brings all ranks to one state: elect which one continues, find its holders, fill it in.

A rank that trains holds a state; so does this node's memory, another node's, and a checkpoint. All are sources of the
same parts: pieces of files of tensors, behind an outline (structure and headers) that one rank sends to all. A group
of ranks that need the same shard, which is all ranks of a model that is not sharded, read the parts in turns and give
them to each other. Plain models, sharded ones, several, and stages differ in their groups and parts, not in the way.

*Runs in* the worker's main thread, on all ranks at once; threads read ahead from storage. *Owns* the files it reads.
*Fails by* RoundBrokenError when a peer is gone; CheckpointError, on all ranks, if no state is left to continue.
*Invariant*: no rank adopts a state before each byte of it was verified, and all ranks adopt the same one. Healing
leaves what a rank holds as it is until then. A load writes into the live tensors, without a second copy in memory: from
then on this rank must not train until a load has succeeded.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash

from elastic_trainer.checkpoint import (
    LOAD_NEW,
    CheckpointManager,
    DamagedError,
    GoneError,
    LoadInto,
    Manifest,
    StateSnapshot,
    codec,
)
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.checkpoint.manifest import STATE_FILE, TENSORS_FILE, FileRecord, pieces, seal, unseal
from elastic_trainer.checkpoint.memory import described, notes, whole_states
from elastic_trainer.checkpoint.neighbours import MemoryAddress, RemoteMemory
from elastic_trainer.checkpoint.reading import (
    CheckpointFiles,
    CheckpointPart,
    Filling,
    Outline,
    PartReader,
    TensorLoader,
    WatchedFiles,
    fill,
    parts_of,
    read_manifest,
    read_outline,
    verify,
)
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError, ElasticTrainerError
from elastic_trainer.model import StateIdentity
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, ThreadedWork, storage_awaited
from elastic_trainer.worker.report import HeartbeatReporter

Tree = Mapping[str, Any]
Found = TypeVar("Found")


# ---- which state continues


@dataclass(frozen=True, slots=True)
class Election:
    """The state that continues: the rank that gives each shard of it, and the ranks that do not hold it."""

    sources: tuple[int, ...]
    behind: tuple[int, ...]


def elect(states: Sequence[StateIdentity | None], size: int = 1) -> Election | None:
    """The newest state, by round and step, that the ranks hold completely; None if there is none.

    ``states`` is what each rank holds; rank r holds shard r modulo ``size`` of it. A newer state of which nobody holds
    one of the shards is passed over. Where ranks hold different bits of the same shard after the same step, those of
    most ranks count, of the lowest rank in a tie.
    """
    moments = [None if each is None else (each.round, each.step) for each in states]
    for newest in sorted({each for each in moments if each is not None}, reverse=True):
        holders = [
            [rank for rank in range(shard, len(states), size) if moments[rank] == newest] for shard in range(size)
        ]
        if all(holders):
            sources = tuple(_most_common(states, ranks) for ranks in holders)
            behind = tuple(rank for rank, each in enumerate(states) if each != states[sources[rank % size]])
            return Election(sources, behind)
    return None


def _most_common(states: Sequence[StateIdentity | None], ranks: Sequence[int]) -> int:
    counts = Counter(states[rank] for rank in ranks)
    return max(ranks, key=lambda rank: counts[states[rank]])


# ---- from ranks that hold it


@dataclass(frozen=True, slots=True)
class Healed:
    """Who gave the state (None: no rank holds a valid one), who received it, and the source's notes."""

    source: int | None
    behind: tuple[int, ...]
    generation: int
    """The same on all ranks, and later than any before."""
    notes: Mapping[str, Any]
    done: tuple[int, ...]
    """The counts of all ranks, by rank."""
    torn: bool = False
    """Whether ranks hold shards, but not all of one state."""


def identity(committed: Mapping[str, Any], lineage: int, step: int) -> StateIdentity:
    """The name of the state with these parts, ``committed`` in generation ``lineage`` after ``step`` steps."""
    return StateIdentity(lineage, step, f"{fingerprint(committed):016x}")


def heal(
    control: Control,
    mine: StateIdentity | None,
    generation: int,
    collect: Callable[[], Tree],
    take_over: Callable[[Tree], None],
    notes: Mapping[str, Any],
    done: int,
    alike: Control | None = None,
) -> Healed:
    """Bring all ranks to one state, if any rank holds a valid one: ``mine`` is this rank's, of which ``collect`` gives
    the parts. ``take_over`` makes that of another rank the present one.

    A state is identified by what a step's commit changes (see ``TrainingState.committed``). Buffers are left out: each
    rank moves its own, and the next forward pass sends rank 0's to all. So are registered objects and the position in
    the data, which the script moves between two steps. A rank that is healed receives all of it.

    ``alike`` are the ranks that hold the same shard as this one, if the model is sharded. Then each shard has a source
    of its own, and all heal at once.

    ``generation`` is the least that this rank can continue with; the source's ``notes`` come with its state. ``done``
    is a count of this rank that all ranks learn.
    """
    row = [0, 0, 0, 0] if mine is None else [1, mine.round, mine.step, int(mine.digest, 16)]
    rows = control.gather([*row, generation, done])
    states = [StateIdentity(r, s, f"{d:016x}") if held else None for held, r, s, d, _, _ in rows]
    newest, counts = max(each[4] for each in rows), tuple(each[5] for each in rows)
    group = alike or control
    size = control.world_size // group.world_size
    elected = elect(states, size)
    if elected is None:
        return Healed(None, (), newest, {}, counts, torn=any(states))
    shard = control.rank % size
    source, behind = elected.sources[shard], elected.behind
    of_shard = tuple(rank // size for rank in behind if rank % size == shard)
    received = give(group, source // size, of_shard, collect, take_over, notes) if of_shard else {}
    apart = [rank for rank in behind if rows[rank][:3] == rows[source][:3]]
    if apart and control.rank == 0:  # the same step, and yet a different state
        logger().warning("ranks.differed", step=rows[source][2], ranks=apart, source=source)
    return Healed(source, behind, newest, received, counts)


FEW = 3
"""Up to this many ranks receive the state one by one, more of them by a broadcast to all."""


def give(
    group: Control,
    source: int,
    behind: tuple[int, ...],
    collect: Callable[[], Tree],
    take_over: Callable[[Tree], None],
    notes: Mapping[str, Any],
) -> Mapping[str, Any]:
    """The ranks of ``group`` that are ``behind`` adopt the state of rank ``source``; all ranks get its ``notes``."""
    given: Mapping[str, Any] = json.loads(group.broadcast_bytes(json.dumps(dict(notes)).encode(), source))
    few, takes = len(behind) <= FEW, group.rank in behind
    if few and not takes and group.rank != source:
        return given
    state = transfer(Few(group, source, behind) if few else group, source, collect, takes=takes)
    if takes:
        take_over(state)
    return given


class Few(Control):
    """Of the ranks of ``group`` a ``source`` and its ``targets``: broadcasts go from it to them, and others do
    nothing."""

    def __init__(self, group: Control, source: int, targets: Sequence[int]) -> None:
        super().__init__(None, group.rank, group.world_size, group.works)
        self._whole, self._source, self._targets = group, source, targets

    def agree(self, error: ElasticTrainerError | None) -> None:
        """An error of the source ends its process; the targets learn that as the end of the round."""
        if error is not None:
            raise error

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Its own alone, for the same reason."""
        return [list(values)]

    def broadcast_all(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        for tensor, _ in tensors:
            if self.rank != self._source:
                self._whole.receive(tensor, self._source)
                continue
            for each in self._targets:
                self._whole.send(tensor, each)


CHUNK = 8 << 20
"""Bytes in a part of the state of a rank."""
_WHERE = "the state of another rank"


def transfer(group: Control, source: int, collect: Callable[[], Tree], *, takes: bool = True) -> dict[str, Any]:
    """The state that rank ``source`` of ``group`` can ``collect``, on each other rank that ``takes`` it.

    Its tensors are new ones, on the CPU: what a rank holds stays whole until all has arrived, for its peers may need it
    should the source die. CheckpointError on all ranks, before anything is sent, naming a value that cannot be sent;
    on one that takes it, if bits have changed on the way.
    """
    with group.agreed():
        held = _LiveParts(collect()) if group.rank == source else None
    if group.alone:
        return {}
    outline = _sent(group, source, held.outline if held is not None else None, _WHERE)
    filling = Filling(outline, LOAD_NEW) if takes and held is None else None
    placing, digest = TensorLoader(filling) if filling is not None else None, xxhash.xxh3_128()
    digest.update(b"".join((outline.skeleton, *outline.heads)))

    def put(part: CheckpointPart, data: memoryview) -> None:
        if held is not None or placing is not None:
            digest.update(data)
        if placing is not None:
            placing.put(part, data)

    pass_on(group, (source,), parts_of(outline.manifest), held or PartBuffers(), put)
    if group.broadcast_bytes(digest.digest(), source) != digest.digest() and filling is not None:
        raise CheckpointError(
            "the state received from another rank is not the one that it sent",
            hint="bits have changed in memory or on the network: look at this node's and the other's",
        )
    return filling.state() if filling is not None else {}


def _sent(group: Control, source: int, mine: Outline | None, name: str) -> Outline:
    """The outline that rank ``source`` has, of the state ``name``, on all ranks."""
    sealed = group.broadcast_bytes(b"" if mine is None else seal(mine.manifest), source)
    manifest = unseal(sealed, name) if mine is None else mine.manifest
    skeleton = group.broadcast_bytes(b"" if mine is None else mine.skeleton, source)
    heads = [b""] * len(manifest.tensor_files()) if mine is None else mine.heads
    return Outline(manifest, skeleton, tuple(group.broadcast_bytes(each, source) for each in heads))


# ---- parts, from those that can read them to all of a group

MOST_READERS = 16
_ROW = 4
"""Parts that are under way at a time, or as many as there are readers: each is in every rank's memory."""


class PartBuffers:
    """Memory for parts, used again and again; all that a rank needs which only receives them."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self._waiting: deque[CheckpointPart] = deque()
        self.error: CheckpointError | None = None
        """Of the first part that could not be read; what comes after it is not read."""

    def begin(self, parts: Sequence[CheckpointPart]) -> None:
        """This rank will be asked for ``parts``, in this order."""
        self._waiting.extend(parts)

    def next(self) -> torch.Tensor:
        """The next part; if there is an error, what it holds has no meaning."""
        return self.buffer(self._waiting.popleft())

    def buffer(self, part: CheckpointPart) -> torch.Tensor:
        fitting = next((each for each in self.free if len(each) >= part.size), None)
        if fitting is None:
            return torch.empty(part.record.chunk_size, dtype=torch.uint8)
        self.free = [each for each in self.free if each is not fitting]
        return fitting


class _LiveParts(PartBuffers):
    """The parts of the ``state`` of this rank; CheckpointError naming a value that no other rank can get."""

    def __init__(self, state: Tree) -> None:
        super().__init__()
        files = {file.name: file for file in codec.encode(state).files}
        data = files[TENSORS_FILE]
        record = FileRecord(
            name=TENSORS_FILE,
            size=data.size,
            head_size=len(data.head),
            chunk_size=CHUNK,
            chunks=("",) * (1 + -(-data.body_size // CHUNK)),  # the sum over all parts is compared
        )
        manifest = Manifest(
            name=_WHERE, step=0, round=0, epoch=0, samples=0, world_size=1, created=0.0, files=(record,)
        )
        self.outline = Outline(manifest, b"".join(files[STATE_FILE].body()), (data.head,))
        self._pieces = pieces(data.body(), CHUNK)

    def next(self) -> torch.Tensor:
        size = self._waiting[0].size
        buffer, filled = super().next(), 0
        view = buffer.numpy().data
        while filled < size:
            piece = next(self._pieces)
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        return buffer


class _ReadAhead(PartBuffers):
    """Parts that ``reader`` gets out of storage or memory, in threads, before their turn comes."""

    def __init__(self, control: Control, reader: PartReader) -> None:
        super().__init__()
        self._works, self._reader = control.works, reader
        self._running: deque[tuple[ThreadedWork, torch.Tensor]] = deque()
        self._most = 2

    def begin(self, parts: Sequence[CheckpointPart]) -> None:
        super().begin(parts)
        self._start()

    def next(self) -> torch.Tensor:
        self._start()
        reading, buffer = self._running.popleft()
        self._works.wait_for_own(reading)
        self.error = self.error or reading.result
        self._start()
        return buffer

    def close(self) -> None:
        """As soon as nothing is being read any more; nobody waits for that."""
        running = [reading for reading, _ in self._running]

        def ended() -> None:
            for reading in running:
                reading.wait()
            self._reader.close()

        if running:
            ThreadedWork(ended)
        else:
            self._reader.close()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._most:
            part = self._waiting.popleft()
            buffer = self.buffer(part)
            self._running.append((ThreadedWork(partial(self._read, part, buffer[: part.size])), buffer))

    def _read(self, part: CheckpointPart, into: torch.Tensor) -> CheckpointError | None:
        if self.error is not None:
            return self.error
        try:
            self._most = max(2, self._reader.threads(part))
            self._reader.read(part, into.numpy().data)
        except CheckpointError as error:
            return error
        return None


def pass_on(
    group: Control,
    readers: Sequence[int],
    parts: Sequence[CheckpointPart],
    held: PartBuffers,
    put: Callable[[CheckpointPart, memoryview], None],
) -> bool:
    """The ``readers`` get the ``parts`` in turns and give them to all ranks of ``group``, each of which ``put``s them.

    False, on all ranks, as soon as one of the readers has an error.
    """
    owned = [(part, readers[index % len(readers)]) for index, part in enumerate(parts)]
    held.begin([part for part, owner in owned if owner == group.rank])
    width = max(_ROW, len(readers))
    for row in (owned[begin : begin + width] for begin in range(0, len(owned), width)):
        buffers = [held.next() if owner == group.rank else held.buffer(part) for part, owner in row]
        if any(failed for (failed,) in group.gather([int(held.error is not None)])):
            return False
        filled = [buffer[: part.size] for buffer, (part, _) in zip(buffers, row, strict=True)]
        group.broadcast_all([(each, owner) for each, (_, owner) in zip(filled, row, strict=True)])
        for each, (part, _) in zip(filled, row, strict=True):
            put(part, each.numpy().data)
        held.free += buffers
    return True


# ---- from what is stored


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the state came from: a checkpoint, with the ``fields`` and the ``run`` it was saved with, or nowhere.

    ``stored``: it is in storage, not only in a node's memory.
    """

    name: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    stored: bool = True


class StoredStates:
    """What this rank can read: the checkpoints of ``manager``, and the ``snapshot`` in its node's memory or in that of
    several nodes. ``looks``: it is the one of its node that says what there is.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        tracker: HeartbeatReporter,
        snapshot: StateSnapshot | None = None,
        *,
        looks: bool = True,
    ) -> None:
        self._manager, self._tracker, self._snapshot, self._looks = manager, tracker, snapshot, looks
        self._rejected: set[str] = set()
        self._newest: Manifest | None = None
        self.lacking: set[str] = set()
        """States of which the ranks together cannot read all shards."""
        self.error: CheckpointError | None = None
        """Why there is no checkpoint to be seen, although there are some."""

    def newest(self) -> Manifest | None:
        """The newest state here. Of two that are equally old memory is quicker."""
        if not self._looks:
            return None
        found = [] if self._snapshot is None else [self._snapshot.manifest]
        if self._manager is not None and self.error is None:
            try:
                entry = self._manager.newest(self._rejected)
                if entry is not None and entry.name in self.lacking:
                    passed = self.lacking | self._rejected
                    entry = next((each for each in self._manager.entries() if each.name not in passed), None)
                found += [entry.manifest] if entry is not None else []
            except CheckpointError as error:
                self.error = error
        known = [each for each in found if each.name not in self.lacking]
        self._newest = max(known, key=lambda each: (each.round, each.step), default=None)
        return self._newest

    def outline(self, wanted: Manifest) -> tuple[Outline, bool] | None:
        """Of the ``wanted`` state, which is the newest here, and whether it is in storage; None if it cannot be read:
        choose again.
        """
        snapshot, files = self._snapshot, self._files_of(wanted)
        try:
            if snapshot is not None and files is snapshot and not snapshot.parts:
                verify(snapshot, wanted)  # there need not be another state that could be read over this one
            if files is not None:
                return read_outline(files, wanted), files is not snapshot or snapshot.stored
        except CheckpointError as error:
            self.leave_out(files, wanted.name, error)
        return None

    def holder(self, wanted: Manifest) -> CheckpointFiles | None:
        """What this rank can read the ``wanted`` state from, which another rank may have found."""
        snapshot, manager = self._snapshot, self._manager
        if wanted is self._newest:
            return self._files_of(wanted)
        if snapshot is not None and (snapshot.manifest.name, snapshot.manifest.files) == (wanted.name, wanted.files):
            return snapshot
        if manager is None or wanted.name in self._rejected:
            return None
        try:
            return manager.files if read_manifest(manager.files, wanted.name).files == wanted.files else None
        except CheckpointError:
            return None

    def _files_of(self, wanted: Manifest) -> CheckpointFiles | None:
        if self._snapshot is not None and self._snapshot.manifest is wanted:
            return self._snapshot
        return self._manager.files if self._manager is not None else None

    def loaded(self, files: CheckpointFiles, manifest: Manifest, duration_s: float, **values: Any) -> None:
        """Report that the state of ``manifest`` was read from ``files``."""
        if isinstance(files, StateSnapshot):
            logger().info("snapshot.loaded", checkpoint=manifest.name, step=manifest.step, round=manifest.round)
        elif self._manager is not None:
            self._tracker.operated("load", duration_s, ok=True)
            self._manager.loaded(manifest, duration_s, **values)

    def leave_out(
        self, files: CheckpointFiles | None, name: str, error: CheckpointError, duration_s: float = 0.0
    ) -> None:
        """The state ``name`` cannot be read from ``files``: this rank tries others."""
        if isinstance(files, StateSnapshot):
            logger().warning("snapshot.damaged", checkpoint=name, reason=str(error))
            self._snapshot = None
            return
        if duration_s:
            self._tracker.operated("load", duration_s, ok=False)
        if not isinstance(error, GoneError):
            self._rejected.add(name)
        if self._manager is not None:
            self._manager.reject(name, error)


def restore(
    control: Control,
    alike: Control,
    stored: StoredStates,
    collect: Callable[[], Tree],
    apply: Callable[[Tree], None],
    check: Callable[[Origin], None],
    unfit: CheckpointError | None = None,
    live: LoadInto = LOAD_NEW,
) -> Origin:
    """Bring all ranks of ``control`` to the newest state that is ``stored``; without one to that of the first ranks.

    ``alike`` are the ranks that hold the same shard as this one; all ranks, if the model is not sharded. ``collect``
    gives this rank's present state, ``apply`` adopts a new one. ``check`` raises, on all ranks, for a checkpoint that
    this job must not start from; ``unfit`` says why nobody may start from this rank's present state, if so.

    Loading overwrites ``live`` tensors: if anything ends this between ``check`` and ``apply``, the present state must
    not be used.
    """
    while (found := _elect(control, stored)) is not None:
        source, mine = found
        outline, origin = _announced(control, source, mine)
        check(origin)
        state = _loaded(control, alike, stored, outline, live)
        if state is not None:
            break
        unfit = CheckpointError("the last checkpoint was removed while it was read", hint="start again")
    else:
        control.agree(stored.error)
        if stored.lacking:
            lacking = ", ".join(sorted(stored.lacking))
            unfit = CheckpointError(
                f"not all shards of {lacking} could be read, and there is no other checkpoint",
                hint="the logs of all ranks say why",
            )
        control.agree(unfit)
        origin = Origin()
        check(origin)
        fresh = transfer(alike, 0, collect)
        state = fresh if alike.rank != 0 else None
    with control.agreed():
        if state is not None:
            apply(state)
    with control.agreed():
        _check_equal(alike, collect)
    return origin


def _check_equal(alike: Control, collect: Callable[[], Tree]) -> None:
    """CheckpointError unless all these ranks hold one state."""
    digests = [] if alike.alone else alike.gather([state_digest(collect())])
    for rank, row in enumerate(digests):
        if row != digests[0]:
            raise CheckpointError(
                f"after resuming, rank {rank} holds another state than rank 0",
                hint="a registered object's load_state_dict() must restore what its state_dict() gave, alike on all"
                " ranks",
            )


def _elect(control: Control, stored: StoredStates) -> tuple[int, tuple[Outline, bool] | None] | None:
    """The rank that has found the newest state, and what it has found; None if no rank has any."""
    while True:
        mine = run_beside(control, stored.newest)
        rows = control.gather([0, 0, 0] if mine is None else [1, mine.round, mine.step])
        elected = elect([StateIdentity(round_, step, "") if known else None for known, round_, step in rows])
        if elected is None:
            return None
        (source,) = elected.sources
        wins = mine is not None and control.rank == source
        found = run_beside(control, partial(stored.outline, mine)) if wins and mine is not None else None
        if control.gather([int(found is not None)])[source][0]:
            return source, found


def run_beside(control: Control, act: Callable[[], Found]) -> Found:
    """``act()`` in a thread: storage may take long, and a round that ends meanwhile must not wait for it."""
    work = ThreadedWork(partial(copy_context().run, act))
    control.works.wait_for_own(work)
    found: Found = work.result
    return found


def _announced(control: Control, source: int, found: tuple[Outline, bool] | None) -> tuple[Outline, Origin]:
    """What the ``source`` has found, on all ranks."""
    mine, stored = found if found is not None else (None, False)
    text = b"" if mine is None else json.dumps([mine.manifest.name, stored]).encode()
    name, stored = json.loads(control.broadcast_bytes(text, source))
    outline = mine if mine is not None and control.alone else _sent(control, source, mine, name)
    return outline, Origin(name, dict(outline.manifest.fields), outline.manifest.run, stored)


_IN_MEMORY = 2


def _loaded(
    control: Control, alike: Control, stored: StoredStates, outline: Outline, live: LoadInto
) -> dict[str, Any] | None:
    """The state of ``outline`` as this rank needs it; None on all ranks, if one of them could not read its part."""
    began, manifest = SYSTEM.monotonic(), outline.manifest
    size = control.world_size // alike.world_size
    files = run_beside(control, partial(stored.holder, manifest))
    kind = _IN_MEMORY if isinstance(files, StateSnapshot) else int(files is not None)
    kinds = [row[0] for row in control.gather([kind])]
    if not all(any(kinds[shard::size]) for shard in range(size)):
        stored.lacking.add(manifest.name)
        return None
    kinds = kinds[control.rank % size :: size]
    readers = [rank for rank, each in enumerate(kinds) if each == max(kinds)][:MOST_READERS]  # memory, if there is any
    itself = alike.alone or min(kinds) == _IN_MEMORY  # each rank reads all it needs
    filling: Filling | None = None
    error: CheckpointError | None = None
    with control.agreed():
        try:
            filling = Filling(outline, live)
        except DamagedError as problem:
            error = problem
    if filling is not None and files is not None and itself:
        try:
            with storage_awaited():
                fill(WatchedFiles(files, lambda size: control.works.check()), manifest.name, filling)
        except CheckpointError as problem:
            error = problem
    elif filling is not None:
        error = _shared(alike, readers, files, manifest, filling)
    duration_s = SYSTEM.monotonic() - began
    if error is not None:
        stored.leave_out(files, manifest.name, error, duration_s)
    if any(failed for (failed,) in control.gather([int(error is not None)])) or filling is None:
        return None
    if files is not None and alike.rank == readers[0]:
        stored.loaded(files, manifest, duration_s, **({} if itself else {"readers": len(readers)}))
    return filling.state()


def _shared(
    alike: Control, readers: Sequence[int], files: CheckpointFiles | None, manifest: Manifest, filling: Filling
) -> CheckpointError | None:
    """Fill ``filling`` on all ranks of ``alike``, of which the ``readers`` read in turns: this rank's error, if any."""
    parts, mine = parts_of(manifest), filling.wanted()
    rows = alike.gather_bytes(bytes((part.record.name, part.index) in mine for part in parts))
    needed = [part for part, *marks in zip(parts, *rows, strict=True) if any(marks)]
    if files is None or alike.rank not in readers:
        pass_on(alike, readers, needed, PartBuffers(), TensorLoader(filling).put)
        return None
    ahead = _ReadAhead(alike, PartReader(files, manifest))
    try:
        pass_on(alike, readers, needed, ahead, TensorLoader(filling).put)
    finally:
        ahead.close()
    return ahead.error


def state_digest(state: Tree) -> int:
    """63 bits that depend on every byte of ``state`` but its random generators, which differ on purpose."""
    return fingerprint({name: part for name, part in state.items() if name != "random"})


# ---- from the memory of several nodes


ShardCopy = tuple[int, int, int, int]
"""A copy of one shard in a node's memory: its state's round and step, the shard, and the number of shards."""


def elect_copies(rows: Sequence[Sequence[ShardCopy]]) -> Mapping[ShardCopy, int]:
    """The newest state whose shards are all in memory somewhere: each copy with the first rank that has it.

    ``rows`` are the copies that each rank knows of. Empty if no state is complete.
    """
    holders: dict[ShardCopy, int] = {}
    for rank, row in enumerate(rows):
        for copy in row:
            holders.setdefault(copy, rank)
    states: dict[tuple[int, int, int], list[ShardCopy]] = {}
    for copy in holders:
        states.setdefault((copy[0], copy[1], copy[3]), []).append(copy)
    newest = max((state for state, copies in states.items() if len(copies) == state[2]), default=None)
    return {copy: holders[copy] for copy in sorted(states[newest])} if newest is not None else {}


@contextmanager
def joined_copies(
    control: Control, mine: Sequence[tuple[str, StateSnapshot]], here: str | None
) -> Iterator[StateSnapshot | None]:
    """The newest state of which the nodes together have copies of all shards; None if there is none.

    ``mine`` are the copies of shards in this node's memory with their paths, which its agent serves at ``here``.
    """
    own = {_copy(each): (path, each) for path, each in mine} if here else {}
    rows = [_read(row) for row in control.gather_bytes(_packed(sorted(own)))]
    chosen = elect_copies([[(*copy,) for copy in row] for row in rows])
    given = {str(copy[2]): _shown(*own[copy]) for copy, rank in chosen.items() if rank == control.rank}
    shown = control.gather_bytes(_packed([here, given])) if chosen else []
    with ExitStack() as opened:
        copies = []
        for copy, rank in chosen.items():
            if copy in own:
                copies.append(own[copy][1])
                continue
            address, known = _read(shown[rank])
            path, text, stored = known[str(copy[2])]
            memory = opened.enter_context(closing(RemoteMemory(MemoryAddress.parse(address), path)))
            copies.append(described(memory, text.encode(), stored=stored))
        yield next(whole_states(copies), None) if copies else None


def _copy(snapshot: StateSnapshot) -> ShardCopy:
    shard, count = snapshot.shard or (0, 1)
    return *snapshot.order, shard, count


def _shown(path: str, snapshot: StateSnapshot) -> tuple[str, str, bool]:
    """What another node needs to read the copy."""
    return path, notes(snapshot.manifest, snapshot.location, snapshot.job).decode(), snapshot.stored


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _read(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


# ---- small states, as results of calls


def packed(state: Mapping[str, Any]) -> bytes:
    """A small ``state`` as one piece. CheckpointError naming a value that cannot be saved."""
    files = {file.name: file for file in codec.encode(state).files}
    skeleton, data = b"".join(files[STATE_FILE].body()), files[TENSORS_FILE]
    sizes = json.dumps([len(skeleton), len(data.head), data.body_size]).encode()
    return b"".join([sizes, b"\n", skeleton, data.head, *data.body()])


def unpacked(data: bytes) -> dict[str, Any]:
    """What :func:`packed` packed; tensors are on the CPU."""
    sizes, _, rest = data.partition(b"\n")
    skeleton, head, size = json.loads(sizes)
    begin = skeleton + head
    placed, _ = codec.parse_header(rest[skeleton:begin], size, _WHERE)
    slabs = codec.allocate(placed)
    for slab in slabs:
        slab.view[:] = rest[begin + slab.begin : begin + slab.begin + len(slab.view)]
    return codec.decode(rest[:skeleton], codec.build(placed, slabs), _WHERE)
