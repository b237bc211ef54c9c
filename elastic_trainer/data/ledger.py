"""Which samples each committed step used: a chain of records that shows later whether any of them was changed.

All ranks append the same records: a step, a round, how the data are cut, the digest of a state. Each has a hash over
itself and the hash before it, so that the last one, the *head*, stands for all; the ranks compare their heads where
they compare other things anyway. The order of an epoch follows from its seed, so a step is an epoch, a position and a
count.

Rank 0 writes records into *segments*, immutable entries in the folder ``ledger`` of the checkpoint directory, one with
each checkpoint. In them a record has also what rank 0 alone knows (loss, norm of the gradients, learning rate), and a
*link*, a hash over all of it and the link before. What no segment has yet is part of the training's state: with a
checkpoint, a copy in memory or a peer's state comes what happened up to there, and steps that a new life undoes are not
in its chain. :class:`History` reads the segments, and proves or refutes them.

*Fails by* LedgerError for a segment that is damaged or was changed, which names it and the first record that does not
fit. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.plan import EpochPlan, Ids, LrRule, halved, share
from elastic_trainer.errors import CheckpointError
from elastic_trainer.model import Cursor

FOLDER: Final = "ledger"
FILE: Final = "manifest.json"
"""The name of the file that makes an entry complete, in every storage: it is the only one that a segment has."""
GENESIS: Final = bytes(16)
"""The head before the first record."""
FIRST_LINK: Final = bytes(8)
SKIPPED: Final = 1
"""Of a step: it made no update, on purpose."""
PASSED_OVER: Final = 2
"""Its samples were passed over, since they could not be trained on."""
UNKNOWN: Final = 4
"""Its samples are not known: the script draws them in a way of its own."""
MOST_PENDING: Final = 1 << 15
"""Records that are kept until a segment has them. More are dropped, and missing in the ledger, if nothing can be
saved."""

_MAGIC: Final = b"elastic_trainer ledger 1\n"
_BODY: Final = struct.Struct("<QBBIIQ")
"""Step, kind, flags, count, epoch, start: what the head is over."""
_ROW: Final = struct.Struct("<BBIIQBfff")
"""Kind, flags, count, epoch, start; what is known of the loss; loss, norm, learning rate."""
WHOLE: Final = 1
"""The loss is that of all ranks."""
_LOSS_KNOWN: Final = 2
_LINKED: Final = _ROW.size + len(FIRST_LINK)
ROWS: Final = np.dtype(
    [
        *(("kind", "u1"), ("flags", "u1"), ("count", "<u4"), ("epoch", "<u4"), ("start", "<u8"), ("known", "u1")),
        *(("loss", "<f4"), ("norm", "<f4"), ("lr", "<f4"), ("link", "V8")),
    ]
)
"""A record in a segment."""
_NAME: Final = re.compile(r"([0-9]{9,18})-([0-9]{9,18})-r([0-9]{1,18})-([0-9a-f]{12})")
_NEVER: Final = 1 << 62
"""No step is that far."""
_LENGTH: Final = struct.Struct("<I")
NAN: Final = float("nan")
MOST_KEYS: Final = 5_000_000
"""Keys of a data set that are written."""


class LedgerError(CheckpointError):
    """A record or a segment is not what was written."""


class Kind(IntEnum):
    """What a record is about. All but a step have a text, a JSON object."""

    STEP = 1
    ROUND = 2
    """A round begins: its ``round``, the ``nodes`` of its ranks, the step that it goes on ``from``; ``reached``: the
    last step that was committed before, as far as known."""
    PLAN = 3
    """How the data of the following steps are cut: fields of an EpochPlan, and what a rank's part depends on."""
    DIGEST = 4
    """The ``digest`` of the parameters after a ``step``."""
    GAP = 5
    """What happened between two steps, ``after`` one and ``until`` another, is not known."""


IN_FORCE: Final = (Kind.ROUND, Kind.PLAN)
"""What holds for all steps until the next of its kind."""


def _hash(before: bytes, *parts: bytes) -> bytes:
    found = blake2b(before, digest_size=len(before))
    for each in parts:
        found.update(each)
    return found.digest()


class Chain:
    """The records that no segment has yet, and the head of all. Not thread-safe."""

    def __init__(self) -> None:
        self._base, self._base_head = 0, GENESIS
        """The last step, and the head, before the records held here."""
        self._link: bytes | None = FIRST_LINK
        """The link before them; None: not known."""
        self._in_force_before: dict[str, str] = {}
        """The texts of the round and of the plan that were in force before them."""
        self._empty()

    def _empty(self) -> None:
        self.step, self.head, self._in_force = self._base, self._base_head, dict(self._in_force_before)
        """The last step that has a record, the hash over all records, and the texts in force now."""
        self._rows, self._texts = bytearray(), list[str]()
        self._steps, self._heads = array("Q"), bytearray()
        """Of each record: its step (of one that is no step: of the one before), and the head with it."""

    # ---- appending

    def add_step(
        self,
        step: int,
        cursor: Cursor,
        count: int,
        flags: int = 0,
        *,
        loss: float | None = None,
        whole: bool = False,
        norm: float = NAN,
        lr: float = NAN,
    ) -> None:
        """Step ``step`` has used ``count`` samples from ``cursor`` on.

        If it follows an earlier step than the last one here, those between were undone.
        """
        if step != self.step + 1:
            self.go_on_from(step - 1)
        epoch, start = cursor.epoch, cursor.samples
        body = _BODY.pack(step, Kind.STEP, flags, count, epoch, start)
        known = (0 if loss is None else _LOSS_KNOWN) | (WHOLE if whole else 0)
        row = _ROW.pack(Kind.STEP, flags, count, epoch, start, known, NAN if loss is None else loss, norm, lr)
        self._append(step, blake2b(self.head + body, digest_size=16).digest(), row)
        if len(self._steps) > 2 * MOST_PENDING:
            self._drop(self._place(self._steps[MOST_PENDING]) + 1, None)

    def add_text(self, kind: Kind, about: Mapping[str, Any]) -> None:
        """A record that is no step. A round, or a plan, that is in force already is not repeated."""
        text = json.dumps(about, sort_keys=True, separators=(",", ":"))
        if kind in IN_FORCE:
            if self._in_force.get(kind.name) == text:
                return
            self._in_force[kind.name] = text
        self._texts.append(text)
        head = _hash(self.head, _BODY.pack(self.step, kind, 0, 0, 0, 0), text.encode())
        step = int(about["until"]) if kind is Kind.GAP else self.step
        self._append(step, head, _ROW.pack(kind, 0, 0, 0, 0, 0, NAN, NAN, NAN))

    def _append(self, step: int, head: bytes, row: bytes) -> None:
        self.step, self.head = step, head
        self._rows += row
        self._heads += head
        self._steps.append(step)

    def amend(
        self, step: int, *, loss: float | None = None, whole: bool | None = None, norm: float | None = None
    ) -> None:
        """What is known now of ``step``; ignored where its record is not here any more."""
        at = self._place(step) * _ROW.size
        if at < 0:
            return
        *body, known, old_loss, old_norm, lr = _ROW.unpack_from(self._rows, at)
        if loss is not None:
            known |= _LOSS_KNOWN
        if whole is not None:
            known = known | WHOLE if whole else known & ~WHOLE
        told = (old_loss if loss is None else loss), (old_norm if norm is None else norm)
        _ROW.pack_into(self._rows, at, *body, known, *told, lr)

    def go_on_from(self, step: int) -> None:
        """What follows is behind ``step``: later records are undone; earlier ones that are missing are a gap."""
        if step < self._base:  # nothing is known but that a hash stands for what happened up to there
            self._base, self._base_head, self._link = step, _hash(self.head, b"undone"), None
            self._in_force_before = {}
            self._empty()
        elif step < self.step:
            self._trim(bisect_right(self._steps, step))
        if step > self.step:
            self.add_text(Kind.GAP, {"after": self.step, "until": step})

    def end_round(self, step: int) -> None:
        """The state is that behind ``step``. What was noted behind it may not have been noted by all ranks."""
        self.go_on_from(step)
        self._trim(len(self._steps))

    def _trim(self, keep: int) -> None:
        """Hold the first ``keep`` records alone, without what is noted behind the last step of these."""
        while keep and self._rows[(keep - 1) * _ROW.size] not in (Kind.STEP, Kind.GAP):
            keep -= 1
        if keep < len(self._steps):
            self._refill(bytes(self._rows[: keep * _ROW.size]), self._texts)

    @property
    def base(self) -> int:
        """The last step whose record is not here any more."""
        return self._base

    def forget(self, step: int) -> None:
        """Rank 0 has no records up to ``step`` any more, since a segment has them."""
        if (keep := self._place(step) + 1) and step > self._base:
            self._drop(keep, None)

    # ---- where records are

    def _place(self, step: int) -> int:
        """The index of the record of ``step``; -1 if it is not here."""
        place = bisect_left(self._steps, step)
        found = place < len(self._steps) and self._steps[place] == step and self._rows[place * _ROW.size] == Kind.STEP
        return place if found else -1

    def _refill(self, rows: bytes, texts: Sequence[str]) -> None:
        """Hold these records alone, behind what no longer is here."""
        self._empty()
        self._rows = bytearray(rows)
        for step, kind, text, head in _heads(rows, texts, self._base, self._base_head):
            self.step, self.head = step, head
            self._steps.append(step)
            self._heads += head
            if text is not None:
                self._texts.append(text)
                if kind in IN_FORCE:
                    self._in_force[Kind(kind).name] = text

    def _drop(self, count: int, link: bytes | None) -> None:
        """Forget the first ``count`` records, behind which the link is ``link``, if that is known."""
        if count:
            self._base, self._base_head = self._steps[count - 1], bytes(self._heads[16 * count - 16 : 16 * count])
        self._link = link
        noted = [kind for kind in self._rows[: count * _ROW.size : _ROW.size] if kind != Kind.STEP]
        for kind, text in zip(noted, self._texts, strict=False):
            if kind in IN_FORCE:
                self._in_force_before[Kind(kind).name] = text
        del self._texts[: len(noted)]
        del self._rows[: count * _ROW.size], self._heads[: 16 * count], self._steps[:count]

    # ---- with the state of the training

    def state(self) -> tuple[dict[str, Any], bytes]:
        """All of it: plain values, and the records as they are."""
        plain = {
            "step": self.step,
            "head": self.head.hex(),
            "base": self._base,
            "base_head": self._base_head.hex(),
            "link": self._link.hex() if self._link is not None else None,
            "texts": list(self._texts),
            "in_force": dict(self._in_force_before),
        }
        return plain, bytes(self._rows)

    def load(self, plain: Mapping[str, Any], rows: bytes) -> None:
        """Become what :meth:`state` was."""
        self._base, self._base_head = plain["base"], bytes.fromhex(plain["base_head"])
        self._link = bytes.fromhex(plain["link"]) if plain["link"] is not None else None
        self._in_force_before = dict(plain["in_force"])
        self._refill(rows, plain["texts"])

    @property
    def tips(self) -> dict[int, bytes]:
        """The heads at the first step that is not here, and at the last one."""
        last = bytes(self._heads[16 * self._place(self.step) :][:16]) if self._place(self.step) >= 0 else self.head
        return {self._base: self._base_head, self.step: last} if self._rows else {self._base: self._base_head}

    # ---- into segments

    def unsealed(self, step: int) -> Unsealed | None:
        """The records up to that of ``step``, for a segment; None if there are none, or they are not here."""
        keep = self._place(step) + 1
        if not keep:
            return None
        rows = bytes(self._rows[: keep * _ROW.size])
        texts = tuple(self._texts[: sum(kind != Kind.STEP for kind in rows[:: _ROW.size])])
        return Unsealed(self._base, self._base_head, self._link, rows, texts, dict(self._in_force_before))

    def sealed(self, done: Sealed) -> None:
        """A segment has the records up to ``done``: they are not needed here any more."""
        keep = self._place(done.step) + 1
        if keep and self._heads[16 * keep - 16 : 16 * keep] == done.head:
            self._drop(keep, done.link)


def _heads(
    rows: bytes, texts: Sequence[str], step: int, head: bytes, size: int = _ROW.size
) -> Iterator[tuple[int, int, str | None, bytes]]:
    """Step, kind, text and head of each record of ``rows``, which follow ``step`` and ``head``."""
    told, pack = iter(texts), _BODY.pack
    for at in range(0, len(rows), size):
        kind, flags, count, epoch, start = struct.unpack_from("<BBIIQ", rows, at)
        if kind == Kind.STEP:
            step += 1
            head = blake2b(head + pack(step, kind, flags, count, epoch, start), digest_size=16).digest()
            yield step, kind, None, head
            continue
        text = next(told, "")
        head = _hash(head, pack(step, kind, flags, count, epoch, start), text.encode())
        if kind == Kind.GAP:
            step = int(_object(text).get("until", step))
        yield step, kind, text, head


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Unsealed:
    """Records that follow ``base`` (a step) and ``head``, and what was in force there."""

    base: int
    head: bytes
    link: bytes | None
    rows: bytes
    texts: tuple[str, ...]
    in_force: Mapping[str, str]

    def behind(self, found: Sealed) -> Unsealed | None:
        """Those that segments up to ``found`` do not have; None where its head is none of these."""
        if (found.step, found.head) == (self.base, self.head):
            return Unsealed(self.base, self.head, found.link, self.rows, self.texts, self.in_force)
        in_force, used = dict(self.in_force), 0
        for place, (step, kind, text, head) in enumerate(_heads(self.rows, self.texts, self.base, self.head), 1):
            if text is not None:
                used += 1
                if kind in IN_FORCE:
                    in_force[Kind(kind).name] = text
            if head == found.head:
                return Unsealed(step, head, found.link, self.rows[place * _ROW.size :], self.texts[used:], in_force)
        return None

    def beyond(self, found: Iterable[Sealed]) -> Unsealed:
        """Those that none of the segments has whose ends were ``found``; the newest come first."""
        return next((rest for each in found if (rest := self.behind(each)) is not None), self)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The end of a segment."""

    step: int
    head: bytes
    link: bytes


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What the name of a segment says: its steps, the round of its last one, the beginning of its head."""

    first: int
    last: int
    round: int
    head: str

    def __str__(self) -> str:
        return f"{self.first:09d}-{self.last:09d}-r{self.round}-{self.head}"


def parse_name(text: str) -> SegmentName | None:
    """The segment that ``text`` names, or None if it is no such name."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = SegmentName(int(match[1]), int(match[2]), int(match[3]), match[4])
    return name if str(name) == text else None


def sealed_segment(records: Unsealed) -> tuple[SegmentName, bytes, Sealed]:
    """The name and the content of the segment with these ``records``, and its end."""
    found = np.frombuffer(records.rows, np.uint8).reshape(-1, _ROW.size)
    links, link = bytearray(), records.link or FIRST_LINK
    steps, head, number = list[int](), records.head, _number_of(records.in_force)
    walked = _heads(records.rows, records.texts, records.base, records.head)
    for at, (step, kind, text, at_head) in enumerate(walked):
        row = records.rows[at * _ROW.size : (at + 1) * _ROW.size]
        link = _hash(link, row, text.encode() if text is not None else b"")
        links += link
        head = at_head
        if kind == Kind.STEP:
            steps.append(step)
        elif kind == Kind.ROUND and text is not None:
            number = int(_object(text).get("round", number))
    linked = np.concatenate([found, np.frombuffer(bytes(links), np.uint8).reshape(-1, len(link))], axis=1)
    opening = {
        "base": records.base,
        "head_before": records.head.hex(),
        "link_before": records.link.hex() if records.link is not None else None,
        "head": head.hex(),
        "in_force": dict(records.in_force),
        "texts": list(records.texts),
    }
    written = json.dumps(opening, sort_keys=True, separators=(",", ":")).encode()
    content = _MAGIC + _LENGTH.pack(len(written)) + written + zlib.compress(linked.tobytes(), 6)
    content += blake2b(content, digest_size=16).digest()
    name = SegmentName(steps[0], steps[-1], number, head.hex()[:12])
    return name, content, Sealed(steps[-1], head, link)


def _number_of(in_force: Mapping[str, str]) -> int:
    return int(_object(in_force.get(Kind.ROUND.name, "")).get("round", 0))


# ---- reading


class Files(Protocol):
    """The folder of segments: what a checkpoint's storage can do (see checkpoint.storage.port)."""

    def names(self) -> tuple[str, ...]: ...

    def source(self, name: str, file: str) -> Any: ...


@dataclass(frozen=True)
class Segment:
    """One segment as it was read; its sum is right, its hashes were not looked at yet."""

    name: str
    base: int
    head_before: bytes
    link_before: bytes | None
    head: bytes
    in_force: Mapping[str, str]
    texts: tuple[str, ...]
    rows: NDArray[Any]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The step of each record (of one that is no step: of the one before)."""
        counted = np.cumsum(self.rows["kind"] == Kind.STEP) + self.base
        for place, kind, text in self.noted():
            if kind is Kind.GAP:
                counted[place:] += int(_object(text).get("until", 0)) - counted[place]
        return counted

    def counting(self, until: int) -> int:
        """How many of its records count if steps behind ``until`` were undone, with what is noted behind that one."""
        made = np.flatnonzero((self.rows["kind"] == Kind.STEP) & (self.numbers <= until))
        return int(made[-1]) + 1 if len(made) else 0

    def noted(self) -> Iterator[tuple[int, Kind, str]]:
        """Place, kind and text of each record that is no step."""
        for place, text in zip(np.flatnonzero(self.rows["kind"] != Kind.STEP), self.texts, strict=False):
            yield int(place), Kind(int(self.rows["kind"][place])), text

    def check(self, head: bytes | None, link: bytes | None, until: int) -> tuple[bytes, bytes, int]:
        """Head, link and step at the end of its records up to step ``until``, if they fit.

        ``head`` and ``link`` are those before it, if known. LedgerError names the first record that does not fit.
        """
        if head is not None and self.head_before != head:
            raise LedgerError(f"segment {self.name} does not follow the one before it: a segment in between is missing")
        if link is not None and self.link_before is not None and self.link_before != link:
            raise LedgerError(f"segment {self.name} was written over other records than those before it")
        rows, at_head, at_link = self.rows.tobytes(), self.head_before, self.link_before or FIRST_LINK
        counting, before = self.counting(until), self.base
        for place, (step, kind, text, found) in enumerate(_heads(rows, self.texts, self.base, at_head, _LINKED)):
            at = place * _LINKED
            fitting = _hash(at_link, rows[at : at + _ROW.size], text.encode() if text is not None else b"")
            if fitting != rows[at + _ROW.size : at + _LINKED]:
                what = f"the record of step {step}" if kind == Kind.STEP else f"the {_kind(kind)} behind step {before}"
                raise LedgerError(f"{what} in segment {self.name} is not the one that was written there")
            at_head, at_link, before = found, fitting, step
            if place + 1 == counting and counting < len(self.rows):
                return at_head, at_link, before
        if at_head != self.head:
            raise LedgerError(f"the records of segment {self.name} end early: the last ones are missing")
        return at_head, at_link, before


def _kind(kind: int) -> str:
    return f"record of a {Kind(kind).name.lower()}" if kind in list(Kind) else f"record of unknown kind {kind}"


def parse_segment(name: str, content: bytes) -> Segment:
    """The segment ``name`` with this ``content``. LedgerError if any byte of it is another one."""
    body, total = content[:-16], content[-16:]
    if not content.startswith(_MAGIC) or blake2b(body, digest_size=16).digest() != total:
        raise LedgerError(f"segment {name} is not as it was written: its sum is another one")
    try:
        (length,) = _LENGTH.unpack_from(body, len(_MAGIC))
        at = len(_MAGIC) + _LENGTH.size
        opening = json.loads(body[at : at + length])
        rows = np.frombuffer(zlib.decompress(body[at + length :]), ROWS)
        link = opening["link_before"]
        return Segment(
            name,
            opening["base"],
            bytes.fromhex(opening["head_before"]),
            bytes.fromhex(link) if link is not None else None,
            bytes.fromhex(opening["head"]),
            opening["in_force"],
            tuple(opening["texts"]),
            rows,
        )
    except (ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
        raise LedgerError(f"segment {name} cannot be read, though its sum is right: {error}") from error


def read_segment(files: Files, name: SegmentName) -> Segment:
    """The segment ``name``."""
    return parse_segment(str(name), content_of(files, str(name)))


def content_of(files: Files, name: str) -> bytes:
    """The file of an entry. LedgerError if it cannot be read."""
    try:
        source = files.source(name, FILE)
        try:
            content = bytearray(source.size)
            if not source.read_into(memoryview(content), 0):
                raise LedgerError(f"segment {name} is cut off")
        finally:
            source.close()
    except OSError as error:
        raise LedgerError(f"segment {name} cannot be read: {error.strerror or error}") from error
    return bytes(content)


def ends(files: Files, base: int) -> Iterator[Sealed]:
    """The ends of the segments that reach to step ``base`` or beyond, the last ones first."""
    names = [name for name in map(parse_name, files.names()) if name is not None and name.last >= base]
    for name in sorted(names, key=lambda each: (-each.last, -each.round)):
        try:
            segment = read_segment(files, name)
        except LedgerError:
            continue  # a proof will name it
        yield Sealed(name.last, segment.head, bytes(segment.rows["link"][-1]))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment as far as it counts: a later round may have undone its last steps."""

    name: SegmentName
    until: int

    @property
    def kept(self) -> int:
        """How many of its steps count."""
        return self.until - self.name.first + 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step. ``loss`` is that of all ranks if ``whole``, else of rank 0's samples; None: not known."""

    step: int
    epoch: int
    start: int
    count: int
    flags: int
    loss: float | None
    whole: bool
    norm: float | None
    lr: float | None
    plan: Mapping[str, Any] = field(default_factory=dict)
    round: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> Ids | None:
        """The numbers of its samples, in the order of the global batch; None if they are not known."""
        if self.flags & UNKNOWN or not self.plan:
            return None
        return cut_of(self.plan).order(self.epoch)[self.start : self.start + self.count]

    def parts(self) -> list[dict[str, Any]]:
        """Who computed what: rank, node, and the numbers of the samples of each of its micro-batches."""
        samples, plan = self.samples, self.plan
        if samples is None or not self.count:
            return []
        cut, world = cut_of(plan), int(plan.get("world", 1))
        nodes, passes = list(self.round.get("nodes", ())), cut.passes_of(self.count)
        alike = max(1, len(nodes) // world)
        found = []
        for part in range(world):
            pieces = share(self.count, cut.micro_batch, world, part, even=bool(plan.get("even")), passes=passes)
            pieces = halved(pieces, int(plan.get("halvings", 0)), even=bool(plan.get("even")))
            ranks = [rank for rank in range(len(nodes)) if self._part_of(rank, alike) == part] or [part]
            micro = [[int(each) for each in samples[piece.start : piece.stop]] for piece in pieces if piece.counts]
            found.append({"ranks": ranks, "nodes": sorted({nodes[r] for r in ranks if r < len(nodes)}), "micro": micro})
        return found

    def _part_of(self, rank: int, alike: int) -> int:
        """Which part of the data ``rank`` computes: ranks of one shard group, or one pipeline, share theirs."""
        parts = self.round.get("parts")
        return int(parts[rank]) if parts and rank < len(parts) else rank // alike


def cut_of(plan: Mapping[str, Any]) -> EpochPlan:
    """The plan by which the batches of a record were cut."""
    names = ("length", "global_batch", "micro_batch", "seed", "shuffle", "passes", "drop_last")
    return EpochPlan(**{name: plan[name] for name in names if name in plan}, lr_rule=LrRule.NONE)


@dataclass
class Proof:
    """What is proved: that these steps have these samples, each of each epoch once."""

    head: str = ""
    """The hash over all of it, to be kept elsewhere."""
    steps: int = 0
    first: int = 0
    last: int = 0
    segments: int = 0
    rounds: int = 0
    undone: int = 0
    """Steps of segments that later rounds have undone."""
    digests: int = 0
    unknown: int = 0
    """Steps whose samples are not known."""
    passed_over: int = 0
    """Samples that could not be trained on, and were passed over."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """After which step, and until which one, nothing is known."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Of each epoch its number, how many samples were ``used``, of how many, and whether it is ``whole``."""


@dataclass(frozen=True, slots=True)
class _Beside:
    """``files``, and a segment that is in memory alone."""

    files: Files
    name: str
    content: bytes

    def names(self) -> tuple[str, ...]:
        return (*self.files.names(), self.name)

    def source(self, name: str, file: str) -> Any:
        return self if name == self.name else self.files.source(name, file)

    @property
    def size(self) -> int:
        return len(self.content)

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        buffer[:] = self.content[offset : offset + len(buffer)]
        return True

    def close(self) -> None:
        """Nothing is open."""


def _data_set(plan: Mapping[str, Any]) -> tuple[str, int]:
    """Type and length of the data set that is cut by ``plan``."""
    return str(plan.get("data", "")), int(plan.get("length", 0))


class History:
    """The segments of a run, in the order of its steps. ``checkpoint``: the chain in the newest checkpoint."""

    def __init__(self, files: Files, checkpoint: Chain | None = None) -> None:
        self._files = files
        self._keys: dict[tuple[str, int], list[str] | None] = {}
        self._tips = checkpoint.tips if checkpoint is not None else {}
        """Heads that are known from elsewhere, by step."""
        pending = checkpoint.unsealed(checkpoint.step) if checkpoint is not None else None
        names = [name for name in map(parse_name, files.names()) if name is not None]
        if pending is not None and (rest := pending.beyond(ends(files, pending.base))).rows:
            name, content, _ = sealed_segment(rest)
            self._files, names = _Beside(files, str(name), content), [*names, name]
        self.stretches = lineage(names)
        self._starts = [each.name.first for each in self.stretches]
        made = sum(each.last - each.first + 1 for each in names)
        self.undone = made - sum(each.kept for each in self.stretches)

    @property
    def last(self) -> int:
        """The last step that is known; 0 if there is none."""
        return self.stretches[-1].until if self.stretches else 0

    def data_sets(self) -> set[tuple[str, int]]:
        """Type and length of the data sets in use."""
        first = (read_segment(self._files, each.name).in_force.get(Kind.PLAN.name, "") for each in self.stretches[:1])
        plans = [*map(_object, first), *(about for _, about in self.noted(Kind.PLAN))]
        return {_data_set(plan) for plan in plans if plan}

    def sample_keys(self, data: str, length: int) -> list[str] | None:
        """See :func:`read_keys`."""
        if (data, length) not in self._keys:
            self._keys[data, length] = read_keys(self._files, data, length)
        return self._keys[data, length]

    def keys_of(self, record: StepRecord) -> list[str] | None:
        """The keys of the data set that ``record`` drew from."""
        return self.sample_keys(*_data_set(record.plan))

    def between(self, first: int, last: int) -> Iterator[StepRecord]:
        """The records of the steps ``first`` to ``last``, as far as they are known."""
        begin = max(0, bisect_right(self._starts, first) - 1)
        for stretch in self.stretches[begin:]:
            if stretch.name.first > last:
                return
            if stretch.until >= first:
                yield from records_of(read_segment(self._files, stretch.name), first, min(last, stretch.until))

    def columns(self, *names: str) -> Iterator[tuple[NDArray[Any], ...]]:
        """The steps that count of each segment, as arrays: their numbers, and these fields of their records."""
        for stretch in self.stretches:
            segment = read_segment(self._files, stretch.name)
            numbers = segment.numbers
            made = (segment.rows["kind"] == Kind.STEP) & (numbers <= stretch.until)
            yield numbers[made], *(segment.rows[name][made] for name in names)

    def using(self, sample: int, advance: Callable[[int], object] = lambda steps: None) -> Iterator[StepRecord]:
        """The steps that used the sample number ``sample``."""
        places: dict[tuple[str, int], NDArray[Any]] = {}
        for stretch in self.stretches:
            segment = read_segment(self._files, stretch.name)
            for record in records_of(segment, stretch.name.first, stretch.until):
                if record.flags & UNKNOWN or not record.count or not record.plan:
                    continue
                key = json.dumps(record.plan, sort_keys=True), record.epoch
                if key not in places:
                    places = {key: np.flatnonzero(cut_of(record.plan).order(record.epoch) == sample)}
                if np.any((places[key] >= record.start) & (places[key] < record.start + record.count)):
                    yield record
            advance(stretch.kept)

    def noted(self, kind: Kind) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The records of this ``kind`` with the step that each is behind."""
        for stretch in self.stretches:
            segment = read_segment(self._files, stretch.name)
            numbers, counting = segment.numbers, segment.counting(stretch.until)
            for place, each, text in segment.noted():
                if each is kind and place < counting:
                    yield int(numbers[place]), _object(text)

    def verify(self, advance: Callable[[int], object] = lambda steps: None) -> Proof:
        """Prove all of it; LedgerError names the first record that does not fit."""
        proof, head, link = Proof(undone=self.undone), None, None
        coverage, at = _Coverage(proof), 0
        for stretch in self.stretches:
            segment = read_segment(self._files, stretch.name)
            if head is not None and dict(segment.in_force) != coverage.in_force:
                raise LedgerError(f"segment {stretch.name} names another round or plan than the records before it")
            if head is None and segment.base == 0 and segment.head_before != GENESIS:
                raise LedgerError(f"segment {stretch.name} is not the first one: one before it is missing")
            if head is not None and segment.base != at:
                raise LedgerError(f"the records of steps {at + 1} to {segment.base} are missing")
            whole = stretch.until == stretch.name.last
            head, link, at = segment.check(head, link, _NEVER if whole else stretch.until)
            made = segment.numbers[segment.rows["kind"] == Kind.STEP]
            told = stretch.name.first, stretch.name.last, stretch.name.head
            if not len(made) or (int(made[0]), int(made[-1]), segment.head.hex()[:12]) != told:
                raise LedgerError(f"segment {stretch.name} holds other records than its name says")
            if self._tips.get(at, head) != head:
                raise LedgerError(f"step {at} has another head than a checkpoint says: all records may be others")
            proof.segments += 1
            coverage.add(segment, stretch.until)
            advance(stretch.kept)
        if (last := max(self._tips, default=0)) > at:
            raise LedgerError(f"the records of steps {at + 1} to {last} are missing: a checkpoint was made behind them")
        coverage.end()
        proof.head = head.hex() if head is not None else ""
        return proof


def lineage(names: Sequence[SegmentName]) -> list[Stretch]:
    """The segments that count, in the order of steps: a round undoes later steps of all rounds before it."""
    chosen, limit = list[Stretch](), _NEVER
    for name in sorted(set(names), key=lambda each: (each.round, each.last, -each.first, each.head), reverse=True):
        until = min(name.last, limit - 1)
        if name.first <= until:
            chosen.append(Stretch(name, until))
            limit = name.first
    return chosen[::-1]


def records_of(segment: Segment, first: int, last: int) -> Iterator[StepRecord]:
    """The steps ``first`` to ``last`` of one segment."""
    in_force = {kind: _object(text) for kind, text in segment.in_force.items()}
    steps, rows = segment.numbers, segment.rows
    noted = {place: (kind, text) for place, kind, text in segment.noted()}
    begin, end = np.searchsorted(steps, first), np.searchsorted(steps, last, side="right")
    for place in sorted(noted):
        if place < begin and noted[place][0] in IN_FORCE:
            in_force[noted[place][0].name] = _object(noted[place][1])
    for place in range(int(begin), int(end)):
        if place in noted:
            kind, text = noted[place]
            in_force[kind.name] = _object(text)
            continue
        row = rows[place]
        yield StepRecord(
            int(steps[place]),
            int(row["epoch"]),
            int(row["start"]),
            int(row["count"]),
            int(row["flags"]),
            float(row["loss"]) if row["known"] & _LOSS_KNOWN else None,
            bool(row["known"] & WHOLE),
            _known(row["norm"]),
            _known(row["lr"]),
            in_force.get(Kind.PLAN.name, {}),
            in_force.get(Kind.ROUND.name, {}),
        )


def _known(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


_ORDER: Final = ("length", "seed", "shuffle")
"""What the order of an epoch depends on."""


class _Coverage:
    """Whether each sample of each epoch was used once: its steps cover it from the first position to the last."""

    def __init__(self, proof: Proof) -> None:
        self._proof, self._plan = proof, dict[str, Any]()
        self.in_force: dict[str, str] = {}
        self._used = self._plan
        """The plan of the last step."""
        self._epoch: int | None = None
        self._mixed = False
        """Whether the order of the epoch has changed within it."""
        self._begun = self._next = 0
        self._trusted = True
        """Whether it is known where the next step has to begin."""

    def add(self, segment: Segment, until: int) -> None:
        proof = self._proof
        if not proof.steps:
            proof.first, self._trusted = segment.base + 1, segment.base == 0
            self._plan = _object(segment.in_force.get(Kind.PLAN.name, ""))
            self.in_force = dict(segment.in_force)
        steps, noted = segment.numbers, {place: (kind, text) for place, kind, text in segment.noted()}
        rows = zip(*(segment.rows[name].tolist() for name in ("flags", "count", "epoch", "start")), strict=True)
        counted = list(zip(steps.tolist(), rows, strict=True))[: segment.counting(until)]
        for place, (step, (flags, count, epoch, start)) in enumerate(counted):
            if place in noted:
                self._note(*noted[place])
            else:
                self._step(step, flags, count, epoch, start)

    def _note(self, kind: Kind, text: str) -> None:
        about, proof = _object(text), self._proof
        if kind in IN_FORCE:
            self.in_force[kind.name] = text
        if kind is Kind.PLAN:
            self._plan = about
        elif kind is Kind.GAP:
            proof.gaps.append((int(about["after"]), int(about["until"])))
            self._trusted = False
        proof.rounds += kind is Kind.ROUND
        proof.digests += kind is Kind.DIGEST

    def _step(self, step: int, flags: int, count: int, epoch: int, start: int) -> None:
        proof = self._proof
        proof.steps, proof.last = proof.steps + 1, step
        if flags & UNKNOWN:
            proof.unknown += 1
            return
        if flags & PASSED_OVER:
            proof.passed_over += count
        if epoch != self._epoch:
            self.end()
            self._epoch, self._begun, self._mixed = epoch, 0 if self._trusted else start, False
            self._next = self._begun
        elif any(self._plan.get(name) != self._used.get(name) for name in _ORDER):
            self._mixed = True
        self._used = self._plan
        if not self._trusted:
            self._next = start
        if start != self._next:
            what = "used again" if start < self._next else "left out"
            low, high = sorted((start, self._next))
            raise LedgerError(f"step {step}: the samples {low} to {high - 1} of the order of epoch {epoch} are {what}")
        self._next, self._trusted = start + count, True

    def end(self) -> None:
        """The epoch has ended, or the records."""
        if self._epoch is not None:
            over = any(
                cut_of(plan).is_over(Cursor(self._epoch, self._next)) for plan in (self._used, self._plan) if plan
            )
            whole = over and not self._begun and not self._mixed
            used, length = self._next - self._begun, int(self._used.get("length", 0))
            row = {"epoch": self._epoch, "used": used, "of": length, "whole": whole}
            self._proof.epochs.append(row | ({"mixed": True} if self._mixed else {}))


# ---- what stands out

WINDOW: Final = 200
"""Steps before one that it is compared with."""
LEAST_BEFORE: Final = 10
_AT_ONCE: Final = 1 << 14
STANDS_OUT: Final = 6.0
"""Times the median absolute deviation of those, as a normal distribution would have it, that count as a spike."""


def spikes(
    steps: NDArray[Any], values: NDArray[Any], *, most: int = 20, advance: Callable[[int], object] = lambda steps: None
) -> list[tuple[int, float, float]]:
    """Steps whose value stands far above those before it, or is not finite: step, value, and how far in deviations.

    The deviation is the median absolute one of the WINDOW finite values before, times 1.4826 (Iglewicz and Hoaglin
    1993, "How to Detect and Handle Outliers"). The greatest first.
    """
    finite = np.isfinite(values)
    found = [(int(step), float(value), math.inf) for step, value in zip(steps[~finite], values[~finite], strict=True)]
    steps, values = steps[finite], values[finite].astype(np.float64)
    for begin in range(LEAST_BEFORE, len(values), _AT_ONCE):
        end = min(begin + _AT_ONCE, len(values))
        padded = np.concatenate([np.full(max(0, WINDOW - begin), np.nan), values[max(0, begin - WINDOW) : end]])
        before = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: end - begin]
        middle = np.nanmedian(before, axis=1)
        spread = 1.4826 * np.nanmedian(np.abs(before - middle[:, None]), axis=1)
        advance(end - begin)
        far = (values[begin:end] - middle) / np.maximum(np.maximum(spread, 1e-3 * np.abs(middle)), 1e-12)
        high = np.flatnonzero(far > STANDS_OUT)
        found += zip(steps[begin + high].tolist(), values[begin + high].tolist(), far[high].tolist(), strict=True)
    return sorted(found, key=lambda each: -each[2])[:most]


# ---- names of samples


def keys_name(data: str, length: int) -> str:
    """The entry with the keys of a data set of this type and length."""
    return f"keys-{re.sub(r'[^A-Za-z0-9_]', '_', data)}-{length}"


def packed_keys(keys: Iterable[str]) -> bytes:
    """The content of that entry: a JSON string on each line."""
    packer = zlib.compressobj(6)
    return b"".join([*(packer.compress(json.dumps(key).encode() + b"\n") for key in keys), packer.flush()])


def read_keys(files: Files, data: str, length: int) -> list[str] | None:
    """The keys that a data set of this type and length has for its samples, by number; None if none were written."""
    name = keys_name(data, length)
    if name not in files.names():
        return None
    lines = zlib.decompress(content_of(files, name)).splitlines()
    return [str(json.loads(line)) for line in lines]
