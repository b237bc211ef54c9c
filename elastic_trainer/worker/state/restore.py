"""All ranks read one checkpoint together, in parts, straight to their places: no rank holds a second copy of it.

Either one rank reads and passes each part on, or each rank that has the storage reads another part and passes that on.
Which is faster depends on the storage and the network: the first time both are tried, on a few parts each.

*Runs in* the worker's main thread of all ranks at once; threads read ahead. *Owns* the reader of this rank.
*Fails by* RoundBrokenError when a peer is gone. A part that cannot be read ends the load on all ranks.
*Invariant*: all ranks place the same parts in the same order, each one verified by the rank that read it.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from elastic_trainer.checkpoint import (
    LOAD_NEW,
    CheckpointManager,
    Entry,
    GoneError,
    Loaded,
    LoadInto,
    Manifest,
    StateSnapshot,
    codec,
    tensors,
)
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.checkpoint.layout import STATE_FILE, TENSORS_FILE, DamagedError, UnreadableError
from elastic_trainer.checkpoint.manifest import FileImage, seal, unseal
from elastic_trainer.checkpoint.memory import described, notes, whole_states
from elastic_trainer.checkpoint.neighbours import MemoryAddress, Neighbour, RemoteMemory
from elastic_trainer.checkpoint.reading import (
    CheckpointFiles,
    CheckpointPart,
    Filling,
    Outline,
    PartReader,
    TensorLoader,
    fill,
    parts_of,
    read_outline,
    verify,
)
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.model import StateIdentity
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.abort import ThreadedWork, storage_awaited
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter

FIELD = "loading"
"""The field of checkpoints that keeps how they are best loaded."""
MOST_READERS = 16
"""Each has a part in every rank's memory at the same time."""
_ROW = 4
"""Parts that one rank alone passes on at a time."""
_TRIAL = 2
"""Parts that each reader contributes to a trial, of which there are two: at most half of all parts, each."""


class Way(StrEnum):
    """Who reads."""

    ONE = "one"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class KnownWay:
    """Which ``way`` is best for that number of ``readers``."""

    way: Way
    readers: int

    @classmethod
    def kept(cls, fields: Mapping[str, Any], place: str) -> KnownWay | None:
        """What an earlier load from ``place`` has left in a checkpoint's ``fields``."""
        known = fields.get(FIELD)
        try:
            return cls(Way(known["way"]), int(known["readers"])) if known and known["place"] == place else None
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load went. ``whole``: no rank had an error; ``error``: this rank's.

    ``one_s`` and ``all_s``: what equally many bytes took both ways, if they were compared.
    """

    whole: bool
    way: Way
    readers: int
    error: CheckpointError | None = None
    one_s: float = 0.0
    all_s: float = 0.0

    @property
    def values(self) -> Mapping[str, Any]:
        """For the log."""
        compared = {"one_s": round(self.one_s, 4), "all_s": round(self.all_s, 4)} if self.one_s else {}
        return {"way": str(self.way), "readers": self.readers, **compared}

    def field(self, place: str) -> Mapping[str, Any]:
        """What the next load from ``place`` can use."""
        known = {"way": str(self.way), "readers": self.readers, "place": place}
        return {FIELD: known} if self.one_s and self.all_s else {}


def kept_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What of ``fields`` belongs into the next checkpoint."""
    return {FIELD: fields[FIELD]} if FIELD in fields else {}


def trial_size(parts: int, readers: int) -> int:
    """How many of the ``parts`` to read in each way to see which is better; 0: it is not worth it. Pure."""
    return readers * min(_TRIAL, parts // (2 * readers)) if readers > 1 else 0


def load_together(
    control: Control,
    source: int,
    parts: Sequence[CheckpointPart],
    placing: TensorLoader,
    reader: PartReader | None,
    known: KnownWay | None,
) -> Outcome:
    """All ranks get all ``parts``, of which rank ``source`` has a reader, and others may. ``known`` is alike on all."""
    rows = control.gather([int(reader is not None)])
    others = [rank for rank, (has,) in enumerate(rows) if has and rank != source]
    load = _Load(control, (source, *others)[:MOST_READERS], placing, _ReadAhead(control, reader))
    try:
        return _load_parts(load, parts, known.way if known is not None and known.readers == len(load.readers) else None)
    finally:
        load.ahead.close()


def _load_parts(load: _Load, parts: Sequence[CheckpointPart], way: Way | None) -> Outcome:
    size, one_s, all_s = trial_size(len(parts), len(load.readers)), 0.0, 0.0
    if way is None and size:
        spans = load.timed(parts[:size], Way.ALL), load.timed(parts[size : 2 * size], Way.ONE)
        all_s, one_s = (ns / 1e9 for ns in load.control.gather([int(1e9 * each) for each in spans])[load.readers[0]])
        parts, way = parts[2 * size :], Way.ALL if all_s < one_s else Way.ONE
    way = way or Way.ONE
    load.passed(parts, way)
    return Outcome(load.whole, way, len(load.readers), load.ahead.error, one_s, all_s)


class _Load:
    """See :func:`load_together`; the first of the ``readers`` is the source."""

    def __init__(self, control: Control, readers: Sequence[int], placing: TensorLoader, ahead: _ReadAhead) -> None:
        self.control, self.readers, self._placing, self.ahead = control, readers, placing, ahead
        self.whole = True
        """Whether no rank has failed to read a part."""

    def timed(self, parts: Sequence[CheckpointPart], way: Way) -> float:
        began = SYSTEM.monotonic()
        self.passed(parts, way)
        return SYSTEM.monotonic() - began

    def passed(self, parts: Sequence[CheckpointPart], way: Way) -> None:
        """Read, give each other and place ``parts``, unless a rank cannot read one of its own."""
        among = self.readers if way is Way.ALL else self.readers[:1]
        owned = [(part, among[index % len(among)]) for index, part in enumerate(parts)]
        self.ahead.begin([part for part, owner in owned if owner == self.control.rank])
        width = len(among) if way is Way.ALL else _ROW
        for begin in range(0, len(owned), width):
            if self.whole:
                self._pass_on(owned[begin : begin + width])

    def _pass_on(self, row: Sequence[tuple[CheckpointPart, int]]) -> None:
        control, ahead = self.control, self.ahead
        held = [ahead.next() if owner == control.rank else ahead.buffer(part) for part, owner in row]
        self.whole = not any(failed for (failed,) in control.gather([int(ahead.error is not None)]))
        if not self.whole:
            return
        filled = [buffer[: part.size] for buffer, (part, _) in zip(held, row, strict=True)]
        control.broadcast_all([(each, owner) for each, (_, owner) in zip(filled, row, strict=True)])
        for each, (part, _) in zip(filled, row, strict=True):
            self._placing.put(part, each.numpy().data)
        ahead.free += held


class _ReadAhead:
    """The parts that this rank reads, in threads, before their turn comes."""

    def __init__(self, control: Control, reader: PartReader | None) -> None:
        self._works, self._reader = control.works, reader
        self._waiting: deque[CheckpointPart] = deque()
        self._running: deque[tuple[ThreadedWork, torch.Tensor]] = deque()
        self._most = 2
        self.free: list[torch.Tensor] = []
        self.error: CheckpointError | None = None
        """Of the first part that could not be read; what comes after it is not read."""

    def begin(self, parts: Sequence[CheckpointPart]) -> None:
        self._waiting.extend(parts)
        self._start()

    def next(self) -> torch.Tensor:
        """The next part; if there is an error, what it holds has no meaning."""
        self._start()
        reading, buffer = self._running.popleft()
        self._works.wait_for_own(reading)
        self.error = self.error or reading.result
        self._start()
        return buffer

    def buffer(self, part: CheckpointPart) -> torch.Tensor:
        """Memory for one part, which may have been used before."""
        fitting = next((each for each in self.free if len(each) >= part.size), None)
        if fitting is None:
            return torch.empty(part.record.chunk_size, dtype=torch.uint8)
        self.free = [each for each in self.free if each is not fitting]
        return fitting

    def close(self) -> None:
        """Whatever is still being read."""
        reader, running = self._reader, [reading for reading, _ in self._running]
        if reader is None:
            return
        if not running:
            reader.close()
            return

        def ended() -> None:
            for reading in running:
                reading.wait()
            reader.close()

        ThreadedWork(ended)

    def _start(self) -> None:
        while self._reader is not None and self._waiting and len(self._running) < self._most:
            part = self._waiting.popleft()
            buffer = self.buffer(part)
            self._running.append((ThreadedWork(partial(self._read, self._reader, part, buffer[: part.size])), buffer))

    def _read(self, reader: PartReader, part: CheckpointPart, into: torch.Tensor) -> CheckpointError | None:
        if self.error is not None:
            return self.error
        try:
            self._most = max(2, reader.threads(part))
            reader.read(part, into.numpy().data)
        except CheckpointError as error:
            return error
        return None


CHUNK = 32 << 20
"""Bytes per broadcast."""
_WHERE = "the state of another rank"


def share_state(control: Control, source: int, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``state`` of rank ``source`` on every rank; other ranks' argument is ignored. Tensors are on the CPU."""
    with control.agreed():
        image = codec.encode(state) if state is not None and control.rank == source else None
    if control.alone:
        return dict(state or {})
    if image is None:
        return _receive(control, source)
    files = {file.name: file for file in image.files}
    _send(control, source, files[STATE_FILE], files[TENSORS_FILE])
    return dict(state or {})


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
    arriving = _Arriving(rest[:skeleton], rest[skeleton:begin], size)
    for target in arriving.targets:
        target[:] = rest[begin : begin + len(target)]
        begin += len(target)
    return arriving.state()


def _send(control: Control, source: int, skeleton: FileImage, data: FileImage) -> None:
    control.broadcast_bytes(json.dumps([data.body_size]).encode(), source)
    control.broadcast_bytes(b"".join(skeleton.body()), source)
    control.broadcast_bytes(data.head, source)
    buffer = torch.empty(min(CHUNK, max(1, data.body_size)), dtype=torch.uint8)
    view, filled = buffer.numpy().data, 0
    for piece in _cut(data.body()):
        begin = 0
        while begin < len(piece):
            size = min(len(piece) - begin, len(view) - filled)
            view[filled : filled + size] = piece[begin : begin + size]
            begin, filled = begin + size, filled + size
            if filled == len(view):
                control.broadcast(buffer, source)
                filled = 0
    if filled:
        control.broadcast(buffer[:filled], source)


def _receive(control: Control, source: int) -> dict[str, Any]:
    (size,) = json.loads(control.broadcast_bytes(b"", source))
    skeleton = control.broadcast_bytes(b"", source)
    head = control.broadcast_bytes(b"", source)
    arriving = _Arriving(skeleton, head, size)
    target, left = memoryview(b""), size
    buffer = torch.empty(min(CHUNK, max(1, size)), dtype=torch.uint8)
    while left:
        part = buffer[: min(left, len(buffer))]
        control.broadcast(part, source)
        view = part.numpy().data
        while len(view):
            if not len(target):
                target = next(arriving.targets)
            count = min(len(view), len(target))
            target[:count] = view[:count]
            view, target = view[count:], target[count:]
        left -= len(part)
    return arriving.state()


class _Arriving:
    """A state whose tensors are still to be written into ``targets``, ``size`` bytes in all."""

    def __init__(self, skeleton: bytes, head: bytes, size: int) -> None:
        self._skeleton, self._placed = skeleton, tensors.parse_header(head, size, _WHERE)
        self._slabs = tensors.allocate(self._placed)
        self.targets = _cut(slab.view for slab in self._slabs)

    def state(self) -> dict[str, Any]:
        return codec.decode(self._skeleton, tensors.build(self._placed, self._slabs), _WHERE)


def _cut(views: Iterable[memoryview]) -> Iterator[memoryview]:
    return (view for view in views if len(view))


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
    live: LoadInto = LOAD_NEW,
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
    live: LoadInto,
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
            outcome = load_together(control, source, parts_of(manifest), TensorLoader(filling), reader, known)
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


def state_digest(state: Tree) -> int:
    """63 bits that depend on every byte of ``state`` but its random generators, which differ on purpose."""
    return fingerprint({name: part for name, part in state.items() if name != "random"})


def compare(control: Control, collect: Callable[[], Tree]) -> None:
    """CheckpointError unless all ranks hold one state."""
    if control.alone:
        return
    digests = control.gather([state_digest(collect())])
    different = [rank for rank, row in enumerate(digests) if row != digests[0]]
    if different:
        raise CheckpointError(
            f"after resuming, rank {different[0]} holds another state than rank 0",
            hint="a registered object's load_state_dict() must restore what its state_dict() gave, alike on all ranks",
        )


Part = tuple[int, int, int, int]
"""Round, step, place, and the number of places."""


@contextmanager
def together(
    control: Control, mine: Sequence[tuple[str, StateSnapshot]], here: str | None
) -> Iterator[StateSnapshot | None]:
    """The newest state of which the nodes hold all parts; None if there is none. ``mine`` are the parts in this node's
    memory with their paths, which its agent serves at ``here``.
    """
    own = {_part(each): (path, each) for path, each in mine} if here else {}
    rows = [_read(row) for row in control.gather_bytes(_packed(sorted(own)))]
    chosen = choose_parts([[(*part,) for part in row] for row in rows])
    given = {str(part[2]): _shown(*own[part]) for part, rank in chosen.items() if rank == control.rank}
    shown = control.gather_bytes(_packed([here, given])) if chosen else []
    with ExitStack() as opened:
        parts = []
        for part, rank in chosen.items():
            if part in own:
                parts.append(own[part][1])
                continue
            address, known = _read(shown[rank])
            path, text, stored = known[str(part[2])]
            memory = opened.enter_context(closing(RemoteMemory(MemoryAddress.parse(address), path)))
            parts.append(described(memory, text.encode(), stored=stored))
        yield next(whole_states(parts), None)


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


def choose_parts(rows: Sequence[Sequence[Part]]) -> Mapping[Part, int]:
    """The parts of the newest state that is whole in the memory of all ranks together, each with the first rank that
    has it; none if there is none. ``rows`` are the parts that each rank knows of. Pure.
    """
    holders: dict[Part, int] = {}
    for rank, row in enumerate(rows):
        for part in row:
            holders.setdefault(part, rank)
    states: dict[tuple[int, int, int], list[Part]] = {}
    for part in holders:
        states.setdefault((part[0], part[1], part[3]), []).append(part)
    newest = max((state for state, parts in states.items() if len(parts) == state[2]), default=None)
    return {part: holders[part] for part in sorted(states[newest])} if newest is not None else {}


def _part(snapshot: StateSnapshot) -> Part:
    place, count = snapshot.place or (0, 1)
    return *snapshot.order, place, count


def _shown(path: str, snapshot: StateSnapshot) -> tuple[str, str, bool]:
    """What another node needs to read the part."""
    return path, notes(snapshot.manifest, snapshot.location, snapshot.job).decode(), snapshot.stored


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _read(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What this rank can read: the ``snapshot`` in its node's memory, and the checkpoints of ``manager``.

    ``looks``: it is the one of its node that says what there is.
    """

    manager: CheckpointManager | None
    snapshot: StateSnapshot | None
    live: LoadInto
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
        found = _elect_shards(control, source, passed_over, unfit)
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


def _elect_shards(
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


FEW = 3
"""Up to this many ranks receive the state one by one, more of them by a broadcast to all."""


class Patient(Protocol):
    """The training state of this rank, as healing sees it."""

    def collect(self) -> dict[str, Any]: ...

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` the present one; it is invalid while this runs."""
        ...


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


def choose_by_place(moments: Sequence[StateCandidate | None], size: int) -> tuple[int, ...] | None:
    """The lowest rank of each of the ``size`` places that holds the newest state of which all places have a holder.

    Rank r is at place r modulo ``size``. None if there is no such state. Pure.
    """
    for moment in sorted({each for each in moments if each is not None}, reverse=True):
        found = [
            next((rank for rank in range(place, len(moments), size) if moments[rank] == moment), None)
            for place in range(size)
        ]
        if None not in found:
            return tuple(rank for rank in found if rank is not None)
    return None


def most_common(states: Sequence[StateIdentity | None], sources: Sequence[int], size: int) -> tuple[int, ...]:
    """For each place the lowest rank that holds the most common of the states as new as that of its source. Pure."""
    found = []
    for place, source in enumerate(sources):
        newest = _moment(states[source])
        ranks = [rank for rank in range(place, len(states), size) if _moment(states[rank]) == newest]
        counts = Counter(states[rank] for rank in ranks)
        found.append(max(ranks, key=lambda rank: counts[states[rank]]))
    return tuple(found)


def _moment(state: StateIdentity | None) -> StateCandidate | None:
    return None if state is None else StateCandidate(state.round, state.step)


def heal(
    control: Control,
    mine: StateIdentity | None,
    generation: int,
    patient: Patient,
    notes: Mapping[str, Any],
    done: int,
    alike: Control | None = None,
) -> Healed:
    """Bring all ranks to one state, if any rank holds a valid one.

    ``alike`` are the ranks that hold the same shard as this one, if the model is sharded: ranks of one place. Then all
    adopt the newest state of which each place has a holder; each place has a source of its own, and all heal at once.

    ``generation`` is the least that this rank can continue with; the source's ``notes`` come with its state. ``done``
    is a count of this rank that all ranks learn.
    """
    row = [0, 0, 0, 0] if mine is None else [1, mine.round, mine.step, int(mine.digest, 16)]
    rows = control.gather([*row, generation, done])
    states = [StateIdentity(r, s, f"{d:016x}") if held else None for held, r, s, d, _, _ in rows]
    newest, counts = max(each[4] for each in rows), tuple(each[5] for each in rows)
    moments = [_moment(each) for each in states]
    size = control.world_size // alike.world_size if alike is not None else 1
    sources = choose_by_place(moments, size)
    if sources is None:
        return Healed(None, (), newest, {}, counts, torn=any(moments))
    sources, place = most_common(states, sources, size), control.rank % size
    source = sources[place]
    behind = tuple(rank for rank, each in enumerate(states) if each != states[sources[rank % size]])
    mine_behind = tuple(rank // size for rank in behind if rank % size == place)
    received = give(alike or control, source // size, mine_behind, patient, notes) if mine_behind else {}
    if not behind:
        return Healed(source, (), newest, {}, counts)
    apart = [rank for rank in behind if moments[rank] == moments[source]]
    if apart and control.rank == 0:  # the same step, and yet a different state
        logger().warning("ranks.differed", step=rows[source][2], ranks=apart, source=source)
    return Healed(source, behind, newest, received, counts)


def give(
    control: Control, source: int, behind: tuple[int, ...], patient: Patient, notes: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The ranks that are ``behind`` adopt the state of rank ``source``; all ranks get its ``notes``."""
    gives = control.rank == source
    text = json.dumps({"notes": dict(notes), "whole": state_digest(patient.collect()) if gives else 0}).encode()
    announced = json.loads(control.broadcast_bytes(text, source))
    if len(behind) > FEW:
        received = share_state(control, source, patient.collect() if gives else None)
        if control.rank in behind:
            _take(patient, received, announced["whole"])
    else:
        for target in behind:
            pair = Pair(control, source, target)
            if gives:
                share_state(pair, source, patient.collect())
            elif control.rank == target:
                _take(patient, share_state(pair, source, None), announced["whole"])
    given: Mapping[str, Any] = announced["notes"]
    return given


def _take(patient: Patient, received: Mapping[str, Any], wanted: int) -> None:
    if state_digest(received) != wanted:
        raise CheckpointError(
            "the state received from another rank is not the one that it announced",
            hint="a registered object's state_dict() must not change from one call to the next",
        )
    patient.take_over(received)


class Pair(Control):
    """Two ranks of a round: broadcasts go from one to the other alone."""

    def __init__(self, whole: Control, source: int, target: int) -> None:
        super().__init__(None, whole.rank, whole.world_size)
        self._whole, self._source, self._target = whole, source, target

    def agree(self, error: Any) -> None:
        """An error of the source ends its process; the target learns that as the end of the round."""
        if error is not None:
            raise error

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self.rank == self._source:
            self._whole.send(tensor, self._target)
        else:
            self._whole.receive(tensor, self._source)
