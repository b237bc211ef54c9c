"""The ledger: its chain under faults, what a proof finds, and who used which samples."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from elastic_trainer.data.ledger import (
    FIRST_LINK,
    PASSED_OVER,
    ROWS,
    SKIPPED,
    UNKNOWN,
    Chain,
    History,
    Kind,
    LedgerError,
    Sealed,
    SegmentName,
    ends,
    lineage,
    parse_name,
    parse_segment,
    sealed_segment,
    spikes,
)
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.model import Cursor

PLAN = EpochPlan(length=103, global_batch=8, micro_batch=2, seed=7)
CUT = {
    "length": 103,
    "global_batch": 8,
    "micro_batch": 2,
    "seed": 7,
    "shuffle": True,
    "passes": None,
    "drop_last": False,
    "world": 2,
    "even": False,
    "halvings": 0,
}


class Folder:
    """Segments in memory."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self.held)

    def source(self, name: str, file: str) -> Any:
        return Opened(self.held[name])

    def seal(self, chain: Chain, step: int) -> Sealed | None:
        """As the thread of rank 0 does it."""
        records = chain.unsealed(step)
        if records is None:
            return None
        records = records.beyond(ends(self, records.base))
        if not records.rows:
            return Sealed(records.base, records.head, records.link or FIRST_LINK)
        name, content, done = sealed_segment(records)
        self.held.setdefault(str(name), content)
        return done


@dataclass
class Opened:
    content: bytes

    @property
    def size(self) -> int:
        return len(self.content)

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        buffer[:] = self.content[offset : offset + len(buffer)]
        return True

    def close(self) -> None:
        pass


Used = tuple[int, int, int]
"""Epoch, position, count."""


def use(chain: Chain, step: int, cursor: Cursor, **more: Any) -> Cursor:
    """Step ``step`` uses the batch at ``cursor``; the position behind it."""
    whole = PLAN.global_batch_at(cursor)
    chain.add_step(step, cursor, len(whole.ids), **more)
    return following(cursor)


def following(cursor: Cursor) -> Cursor:
    behind = PLAN.global_batch_at(cursor).following
    return Cursor(behind.epoch + 1, 0) if PLAN.is_over(behind) else behind


def made(steps: int, *, every: int = 10) -> tuple[Folder, Chain]:
    """A run of ``steps`` steps on two nodes, which writes a segment ``every`` few of them."""
    folder, chain, cursor = Folder(), Chain(), Cursor()
    chain.add_text(Kind.ROUND, {"round": 1, "nodes": ["a", "b"], "from": 0})
    chain.add_text(Kind.PLAN, CUT)
    for step in range(1, steps + 1):
        cursor = use(chain, step, cursor, loss=1.0 / step, whole=True, lr=0.1)
        if step % every == 0:
            done = folder.seal(chain, step)
            assert done is not None
            chain.sealed(done)
    return folder, chain


# ---- under faults


@dataclass
class Life:
    """A rank's process: its chain, and the position of its state."""

    chain: Chain
    step: int
    cursor: Cursor

    def copy(self) -> Life:
        chain = Chain()
        plain, rows = self.chain.state()
        chain.load(json.loads(json.dumps(plain)), rows)
        return Life(chain, self.step, self.cursor)


@dataclass
class World:
    """Ranks that train, and what befalls them; ``truth`` is what the steps that count have used."""

    dice: random.Random
    folder: Folder = field(default_factory=Folder)
    ranks: list[Life] = field(default_factory=list)
    saved: list[Life] = field(default_factory=list)
    truth: dict[int, Used] = field(default_factory=dict)
    round: int = 0
    faults: int = 0

    def begin_round(self) -> None:
        """All hold one state: the newest."""
        source = max(self.ranks, key=lambda each: each.step)
        self.round += 1
        nodes = [f"n{self.dice.randrange(9)}" for _ in self.ranks]
        self.ranks = [each if each.step == source.step else source.copy() for each in self.ranks]
        for each in self.ranks:
            if self.dice.random() < 0.5:  # some had noted more when the last round ended
                each.chain.add_text(Kind.DIGEST, {"step": each.step, "digest": "0"})
            each.chain.end_round(each.step)
            each.chain.forget(self.ranks[0].chain.base)
            each.chain.add_text(Kind.ROUND, {"round": self.round, "nodes": nodes, "from": each.step})
            each.chain.add_text(Kind.PLAN, {**CUT, "world": len(self.ranks)})
        assert len({each.chain.head for each in self.ranks}) == 1

    def commit(self, ranks: list[Life]) -> None:
        for each in ranks:
            each.step += 1
            whole = PLAN.global_batch_at(each.cursor)
            self.truth[each.step] = each.cursor.epoch, each.cursor.samples, len(whole.ids)
            each.cursor = use(each.chain, each.step, each.cursor, loss=self.dice.random())
        self.truth = {step: used for step, used in self.truth.items() if step <= ranks[0].step}

    def save(self) -> None:
        """A checkpoint, whose segment may be late or fail."""
        first = self.ranks[0]
        self.saved.append(first.copy())
        fails, unaware = self.dice.random() < 0.3, self.dice.random() < 0.2  # it may die before it learns of that
        done = self.folder.seal(first.chain, first.step) if not fails else None
        if done is not None and not unaware:
            first.chain.sealed(done)

    def befall(self) -> None:
        """One fault at random."""
        self.faults += 1
        kind = self.dice.choice(["one dies", "in a commit", "all die", "memory", "damaged", "join", "none can save"])
        if kind in ("one dies", "in a commit") and len(self.ranks) > 1:
            if kind == "in a commit":  # some have committed the step, others not
                self.commit(self.dice.sample(self.ranks, self.dice.randint(1, len(self.ranks) - 1)))
            del self.ranks[self.dice.randrange(len(self.ranks))]
            newest = max(each.step for each in self.ranks)
            self.truth = {step: used for step, used in self.truth.items() if step <= newest}
        elif kind == "memory":
            held = self.dice.choice(self.ranks).copy()
            for _ in range(self.dice.randrange(3)):
                self.commit(self.ranks)
            self.restart(held)
        elif kind == "join":
            self.ranks.append(Life(Chain(), 0, Cursor()))
            self.dice.shuffle(self.ranks)
        elif kind == "none can save":
            for _ in range(self.dice.randrange(40)):
                self.commit(self.ranks)
            return
        elif self.saved:
            if kind == "damaged" and len(self.saved) > 1:
                self.saved.pop()
            self.restart(self.saved[-1].copy())
        self.begin_round()

    def restart(self, state: Life) -> None:
        """All workers die; others resume ``state``."""
        self.ranks = [state.copy() for _ in range(self.dice.randint(1, 4))]
        self.truth = {step: used for step, used in self.truth.items() if step <= state.step}


@pytest.mark.parametrize("seed", range(20))
def test_fifty_faults_leave_a_chain_that_verifies(seed: int) -> None:
    """1,000 in all. What it says each step has used is what the steps that count have used."""
    world = World(random.Random(seed), ranks=[Life(Chain(), 0, Cursor()) for _ in range(3)])
    world.begin_round()
    while world.faults < 50:
        for _ in range(world.dice.randrange(12)):
            world.commit(world.ranks)
        if world.dice.random() < 0.6:
            world.save()
        world.befall()
    world.commit(world.ranks)
    world.saved.append(world.ranks[0].copy())  # its records have no segment: the checkpoint holds them
    history = History(world.folder, world.saved[-1].chain)
    proof = history.verify()
    assert (proof.first, proof.last, proof.steps, proof.gaps) == (1, max(world.truth), len(world.truth), [])
    found = {each.step: (each.epoch, each.start, each.count) for each in history.between(1, proof.last)}
    assert found == world.truth
    assert all(each["whole"] for each in proof.epochs[:-1])


def test_heads_are_the_same_with_and_without_what_a_segment_has() -> None:
    """A rank that never writes, one that does, and one that took over another's state."""
    folder, writer = made(45)
    _, other = made(45, every=1000)
    healed = Chain()
    healed.load(*other.state())
    for chain in (writer, other, healed):
        chain.add_text(Kind.DIGEST, {"step": 45, "digest": "0"})
        chain.go_on_from(43)
        use(chain, 44, Cursor(3, 32))
    assert writer.head == other.head == healed.head
    done = folder.seal(healed, 44)
    assert done is not None
    assert str(parse_name(sorted(folder.held)[-1])) == f"000000041-000000044-r1-{done.head.hex()[:12]}"


def test_what_cannot_be_known_is_a_gap() -> None:
    """A run that goes on from a checkpoint without a ledger, and records that were lost before a segment had them."""
    folder, chain = Folder(), Chain()
    chain.go_on_from(100)
    chain.add_text(Kind.PLAN, CUT)
    cursor = Cursor(7, 48)
    for step in range(101, 121):
        cursor = use(chain, step, cursor)
    assert folder.seal(chain, 120) is not None
    proof = History(folder).verify()
    assert (proof.first, proof.last, proof.gaps) == (1, 120, [(0, 100)])
    assert proof.epochs[0] == {"epoch": 7, "used": 55, "of": 103, "whole": False}


def test_a_loss_that_arrives_late_is_put_in_its_record() -> None:
    """That of a step that has a segment already, or was undone, is dropped."""
    folder, chain = made(15)
    chain.amend(15, loss=7.5)
    chain.amend(10, loss=99.0)
    chain.amend(16, loss=99.0)
    assert folder.seal(chain, 15) is not None
    assert [each.loss for each in History(folder).between(15, 15)] == [7.5]
    assert {each.loss for each in History(folder).between(1, 14)}.isdisjoint({99.0})


# ---- what a proof finds


Change = Callable[[dict[str, Any], Any, random.Random], tuple[Any, int]]
"""Changes the opening or the rows of a segment; the rows, and the index of the first record that is another one."""


def _field(opening: dict[str, Any], rows: Any, dice: random.Random) -> tuple[Any, int]:
    steps = np.flatnonzero(rows["kind"] == Kind.STEP)
    at, name = int(dice.choice(steps)), dice.choice(["count", "epoch", "start", "flags", "loss", "lr", "known"])
    rows[name][at] = rows[name][at] + 1
    return rows, at


def _drop(opening: dict[str, Any], rows: Any, dice: random.Random) -> tuple[Any, int]:
    at = int(dice.choice(np.flatnonzero(rows["kind"] == Kind.STEP)))
    return np.delete(rows, at), at


def _swap(opening: dict[str, Any], rows: Any, dice: random.Random) -> tuple[Any, int]:
    steps = np.flatnonzero(rows["kind"] == Kind.STEP)
    one, two = sorted(dice.sample(range(len(steps)), 2))
    rows[[steps[one], steps[two]]] = rows[[steps[two], steps[one]]]
    return rows, int(steps[one])


def _repeat(opening: dict[str, Any], rows: Any, dice: random.Random) -> tuple[Any, int]:
    at = int(dice.choice(np.flatnonzero(rows["kind"] == Kind.STEP)))
    return np.insert(rows, at, rows[at]), at + 1


def _written(opening: dict[str, Any], rows: Any) -> bytes:
    """As whoever knows the format would write it: the sum is right."""
    text = json.dumps(opening, sort_keys=True, separators=(",", ":")).encode()
    body = b"elastic_trainer ledger 1\n" + struct.pack("<I", len(text)) + text + zlib.compress(rows.tobytes())
    return body + blake2b(body, digest_size=16).digest()


def _parts(content: bytes) -> tuple[dict[str, Any], Any]:
    start = len(b"elastic_trainer ledger 1\n")
    (length,) = struct.unpack_from("<I", content, start)
    opening = json.loads(content[start + 4 : start + 4 + length])
    return opening, np.frombuffer(zlib.decompress(content[start + 4 + length : -16]), ROWS).copy()


@pytest.mark.parametrize("change", [_field, _drop, _swap, _repeat], ids=lambda each: each.__name__)
def test_each_of_250_changed_records_is_found_and_named(change: Change) -> None:
    """1,000 in all, each with a sum that fits again: the first record that does not fit is named by its step."""
    dice, (folder, _) = random.Random(change.__name__), made(200)
    History(folder).verify()
    honest = dict(folder.held)
    for _ in range(250):
        name = dice.choice(sorted(honest))
        opening, rows = _parts(honest[name])
        rows, at = change(opening, rows, dice)
        folder.held = honest | {name: _written(opening, rows)}
        with pytest.raises(LedgerError) as caught:
            History(folder).verify()
        step = opening["base"] + int(np.sum(rows["kind"][: at + 1] == Kind.STEP))
        named = f"the record of step {step} in segment {name} is not the one" if at < len(rows) else "the last ones are"
        assert named in str(caught.value)


def test_a_segment_that_was_rewritten_with_all_its_hashes_does_not_fit_the_next() -> None:
    """Of the last one the checkpoint knows the head."""
    folder, chain = made(40)
    other, cursor = Chain(), Cursor()
    other.load(*made(20)[1].state())
    cursor = Cursor(1, 56)
    for step in range(21, 31):
        cursor = use(other, step, cursor, flags=SKIPPED)
    records = other.unsealed(30)
    assert records is not None
    forged, content, _ = sealed_segment(records)
    names = sorted(folder.held)
    without = {name: folder.held[name] for name in names if name != names[2]}
    folder.held = without | {str(forged): content}
    with pytest.raises(LedgerError, match="does not follow the one before it"):
        History(folder).verify()
    folder.held = {name: held for name, held in folder.held.items() if name != names[3]}
    History(folder).verify()  # nobody could know
    with pytest.raises(LedgerError, match="the records of steps 31 to 40 are missing"):
        History(folder, chain).verify()


def test_segments_that_are_missing_exchanged_or_damaged_are_named() -> None:
    folder, _ = made(50)
    names, honest = sorted(folder.held), dict(folder.held)
    folder.held = {name: honest[name] for name in names if name != names[1]}
    with pytest.raises(LedgerError, match="the records of steps 11 to 20 are missing"):
        History(folder).verify()
    folder.held = {name: honest[name] for name in names[1:]}
    assert History(folder).verify().first == 11  # what was before may have been removed: the proof says where it begins
    folder.held = honest | {names[1]: honest[names[2]]}
    with pytest.raises(LedgerError, match="the records of steps 11 to 20 are missing"):
        History(folder).verify()
    for place in range(0, len(honest[names[2]]), 7):
        folder.held = honest | {names[2]: _flipped(honest[names[2]], place)}
        with pytest.raises(LedgerError, match=f"segment {names[2]} is not as it was written"):
            History(folder).verify()


def test_a_segment_that_cannot_be_read_is_named_and_stops_nobody_from_writing() -> None:
    folder, chain = made(30)
    first, second, _ = sorted(folder.held)
    folder.held[second] = b"nonsense"
    with pytest.raises(LedgerError, match=f"segment {second} is not as it was written"):
        History(folder).verify()
    use(chain, 31, Cursor(2, 32))
    records = chain.unsealed(31)
    assert records is not None
    assert records.beyond(ends(folder, 0)) is not None

    def gone(name: str, file: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    folder.source = gone  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match=f"segment {first} cannot be read: No such file"):
        History(folder).verify()


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("cursor", "count", "said"),
    [
        (Cursor(0, 8), 8, "step 3: the samples 8 to 15 of the order of epoch 0 are used again"),
        (Cursor(0, 24), 8, "step 3: the samples 16 to 23 of the order of epoch 0 are left out"),
    ],
)
def test_an_honest_chain_of_wrong_steps_is_refuted(cursor: Cursor, count: int, said: str) -> None:
    folder, chain = Folder(), Chain()
    chain.add_text(Kind.PLAN, CUT)
    use(chain, 1, Cursor())
    use(chain, 2, Cursor(0, 8))
    chain.add_step(3, cursor, count)
    folder.seal(chain, 3)
    with pytest.raises(LedgerError, match=said):
        History(folder).verify()


def test_an_epoch_that_was_left_early_is_not_whole() -> None:
    """Nor one whose order changed within it; of one that a longer data set follows the own length counts."""
    folder, chain = Folder(), Chain()
    chain.add_text(Kind.PLAN, CUT)
    cursor = use(chain, 1, Cursor())
    use(chain, 2, cursor)
    cursor = use(chain, 3, Cursor(1, 0))
    chain.add_text(Kind.PLAN, CUT | {"seed": 8})
    step = 3
    while cursor.epoch == 1:
        step += 1
        cursor = use(chain, step, cursor)
    while cursor.epoch == 2:
        step += 1
        cursor = use(chain, step, cursor)
    chain.add_text(Kind.PLAN, CUT | {"length": 1000})
    chain.add_step(step + 1, Cursor(3, 0), 8)
    folder.seal(chain, step + 1)
    assert [(each["used"], each["of"], each["whole"]) for each in History(folder).verify().epochs] == [
        (16, 103, False),
        (103, 103, False),
        (103, 103, True),
        (8, 1000, False),
    ]


def test_steps_without_samples_of_their_own_are_counted_apart() -> None:
    folder, chain = Folder(), Chain()
    chain.add_step(1, Cursor(), 0, UNKNOWN)
    chain.add_text(Kind.PLAN, CUT)
    cursor = use(chain, 2, Cursor())
    chain.add_step(3, cursor, 8, PASSED_OVER)
    folder.seal(chain, 3)
    proof = History(folder).verify()
    assert (proof.steps, proof.unknown, proof.passed_over) == (3, 1, 8)
    (first, *_) = History(folder).between(1, 3)
    assert (first.samples, first.parts()) == (None, [])


# ---- reading


def test_a_later_round_undoes_the_steps_of_all_before_it() -> None:
    names = [SegmentName(*each, "0" * 12) for each in ((1, 10, 1), (11, 20, 1), (21, 30, 1), (16, 18, 2), (13, 25, 4))]
    assert [(each.name.first, each.until) for each in lineage(names)] == [(1, 10), (11, 12), (13, 25)]
    assert lineage([]) == []


def test_each_rank_s_samples_are_those_that_it_drew() -> None:
    """By the same cut as in training; together they are the global batch."""
    folder, _ = made(30)
    (record,) = History(folder).between(14, 14)
    assert (record.epoch, record.start, record.count) == (1, 0, 8)
    assert record.samples is not None
    assert record.samples.tolist() == PLAN.order(1)[:8].tolist()
    parts = record.parts()
    assert [(each["ranks"], each["nodes"], len(each["micro"])) for each in parts] == [([0], ["a"], 2), ([1], ["b"], 2)]
    assert [sample for each in parts for micro in each["micro"] for sample in micro] == record.samples.tolist()


def test_a_sample_is_used_once_in_each_epoch() -> None:
    folder, _ = made(39)
    (sample,) = PLAN.order(2)[[17]].tolist()
    found = list(History(folder).using(sample))
    assert [each.epoch for each in found] == [0, 1, 2]
    assert all(each.samples is not None and sample in each.samples for each in found)
    assert [each.step for each in found if each.epoch == 2] == [26 + 3]


def test_a_name_is_that_of_a_segment_only_in_its_one_spelling() -> None:
    name = SegmentName(1, 10, 3, "ab12ab12ab12")
    assert parse_name(str(name)) == name
    for text in ("1-10-r3-ab12ab12ab12", f"{name}x", f"tmp-{name}", "000000001-000000010-r03-ab12ab12ab12"):
        assert parse_name(text) is None


def test_a_record_takes_less_than_40_bytes() -> None:
    """With a sample each, and numbers at random."""
    folder, chain, dice = Folder(), Chain(), random.Random(3)
    chain.add_text(Kind.PLAN, CUT | {"length": 10**6, "global_batch": 1, "micro_batch": None})
    for step in range(1, 5001):
        chain.add_step(step, Cursor(0, step - 1), 1, loss=dice.random(), norm=dice.random(), lr=dice.random())
    folder.seal(chain, 5000)
    assert sum(map(len, folder.held.values())) / 5000 < 40


def test_what_stands_out_is_found_among_noise() -> None:
    """The greatest first; NaN stands out most; a slow change does not."""
    noise = np.random.default_rng(3).normal(0.0, 0.05, 40_000)
    values = np.linspace(9.0, 2.0, 40_000) + noise
    values[500], values[30_000], values[16_390] = 12.0, 5.0, np.nan
    found = spikes(np.arange(40_000), values)
    assert found[0][0] == 16_390
    assert {500, 30_000} <= {step for step, _, far in found if far > 20}
    assert len([step for step, _, far in found if far > 8]) == 3
    assert spikes(np.arange(9), np.array([1.0] * 8 + [99.0])) == []


def test_a_segment_is_read_as_it_was_written() -> None:
    folder, _ = made(10)
    (name,) = folder.held
    segment = parse_segment(name, folder.held[name])
    assert [(kind, "nodes" in text) for _, kind, text in segment.noted()] == [(Kind.ROUND, True), (Kind.PLAN, False)]
    assert segment.numbers.tolist() == [0, 0, *range(1, 11)]
    first = next(History(folder).between(1, 1))
    assert (first.loss, first.whole, first.norm) == (1.0, True, None)
    assert first.round["nodes"] == ["a", "b"]
