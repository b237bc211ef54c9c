"""The ledger of a training as its steps make it (see data.ledger), and rank 0 writing it into the checkpoint directory.

*Runs in* the worker's main thread; a thread named ``ledger`` writes. *Owns* that thread, and the chain of records.
*Fails by* nothing: what cannot be written is logged, stays part of the state, and is written with a later checkpoint.
*Invariant*: a step waits neither for storage nor for a device.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from elastic_trainer.checkpoint.manifest import new_nonce
from elastic_trainer.checkpoint.storage import Storage, is_url, open_storage
from elastic_trainer.data.ledger import (
    FILE,
    FIRST_LINK,
    FOLDER,
    MOST_KEYS,
    NAN,
    PASSED_OVER,
    SKIPPED,
    UNKNOWN,
    Chain,
    Kind,
    Sealed,
    Unsealed,
    ends,
    keys_name,
    packed_keys,
    sealed_segment,
)
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.steps.feed import MARK_BYTES, DataFeed

_LATE: Final = 64
"""Losses on a device that are read together."""
_SEAL_EVERY: Final = 1 << 14
"""Steps after which a segment is written without a checkpoint."""
_BLOCK: Final = 1 << 16
"""Records take a multiple of this in a saved state, so that its layout seldom changes."""
CLOSE_S: Final = 2.0


class Step(Protocol):
    """What is recorded of one (see steps.engine)."""

    number: int
    batch: Batch | None
    skipped: bool
    world_size: int
    norm: torch.Tensor | None

    @property
    def known_mean(self) -> float | None: ...

    def loss_terms(self) -> list[tuple[torch.Tensor, float]]: ...


@dataclass(frozen=True, slots=True)
class Late:
    """What is on a device still of a step: losses with factors, and the norm of its gradients."""

    step: int
    terms: list[tuple[torch.Tensor, float]]
    norm: torch.Tensor | None

    @property
    def values(self) -> list[torch.Tensor]:
        return [loss for loss, _ in self.terms] + ([self.norm] if self.norm is not None else [])


def on_device(value: torch.Tensor) -> bool:
    """Whether reading it waits for a device."""
    return value.device.type != "cpu"


class StepRecords:
    """See the module. ``directory``: of the checkpoints; None where nothing is saved."""

    def __init__(self, directory: str | Path | None, environment: WorkerEnvironment, feed: DataFeed, seed: int) -> None:
        self._chain = Chain()
        self._node, self._reached, self._feed, self._seed = environment.node, environment.reached, feed, seed
        self._part = DataPart(0, 1)
        self._cut: tuple[EpochPlan, int] | None = None
        self._late: list[Late] = []
        self._rank0 = False
        self._sealer = Sealer(directory) if directory is not None else None

    # ---- what happens

    def begin_round(self, control: Control, part: DataPart, step: int, generation: int) -> None:
        """A round begins behind ``step``, in which this rank computes ``part`` of the data."""
        self._part, self._cut, self._rank0 = part, None, control.rank == 0
        self._chain.end_round(step)
        self._take_sealed()
        head, sealed = self._chain.head.hex(), self._chain.base
        row = {"node": self._node, "part": part.rank, "reached": self._reached, "head": head, "sealed": sealed}
        rows = [json.loads(each) for each in control.gather_bytes(json.dumps(row).encode())]
        self._settle(control, [each["head"] for each in rows])
        self._chain.forget(rows[0]["sealed"])
        about = {"round": generation, "nodes": [each["node"] for each in rows], "from": step}
        parts = [each["part"] for each in rows]
        if parts != list(range(len(rows))):
            about["parts"] = parts
        self._reached = max(self._reached, *(each["reached"] for each in rows), step)
        self._chain.add_text(Kind.ROUND, {**about, "reached": self._reached})

    def add(self, step: Step, before: Cursor, lr: float | None) -> None:
        """The open ``step`` is committed; ``before`` is the position in the data that it began at."""
        batch = step.batch
        known = batch is not None and batch.following is not None
        if known:
            self._note_cut()
        norm, mean = step.norm, step.known_mean
        terms = step.loss_terms() if mean is None else []
        late = any(map(on_device, [*(loss for loss, _ in terms), *([norm] if norm is not None else [])]))
        loss = sum(float(each) * share for each, share in terms) if terms and not late else mean
        self._chain.add_step(
            step.number,
            before,
            batch.covers if batch is not None and known else 0,
            (SKIPPED if step.skipped else 0) | (0 if known else UNKNOWN),
            loss=loss,
            whole=mean is not None or step.world_size == 1,
            norm=NAN if norm is None or late else float(norm),
            lr=NAN if lr is None else lr,
        )
        if late:
            self._late.append(Late(step.number, terms, norm))
            if len(self._late) >= _LATE:
                self._read_late()
        if self._rank0 and step.number % _SEAL_EVERY == 0:
            self.seal(step.number)

    def know_loss(self, step: int, mean: float) -> None:
        """The mean loss of ``step`` over its global batch is known now."""
        self._late = [replace(each, terms=[]) if each.step == step else each for each in self._late]
        self._chain.amend(step, loss=mean, whole=True)

    def add_passed(self, step: int, before: Cursor, following: Cursor) -> None:
        """The step ``step`` passes over the samples between two positions."""
        self._chain.add_step(step, before, following.samples - before.samples, PASSED_OVER)

    def add_digest(self, step: int, number: int, *, on_device: bool) -> None:
        """The parameters after ``step`` have this ``number``, on all ranks."""
        about = {"step": step, "digest": f"{number:016x}", "device": "cuda" if on_device else "cpu"}
        self._chain.add_text(Kind.DIGEST, about)

    def _note_cut(self) -> None:
        """How the data are cut, if that has changed."""
        cut = self._feed.cut
        if cut is None or cut == self._cut:
            return
        self._cut = cut
        plan, halvings = cut
        about = asdict(plan.for_world(self._part.world)) | {"seed_all": self._seed, "data": self._feed.kind}
        about |= {"world": self._part.world, "even": self._part.even, "halvings": halvings}
        self._chain.add_text(Kind.PLAN, about)

    def _read_late(self) -> None:
        late, self._late = self._late, []
        values = [value.detach() for each in late for value in each.values]
        device = next((value.device for value in values if on_device(value)), None)
        waiting = [value.float().reshape(()).to(device) for value in values]
        read = iter(torch.stack(waiting).tolist() if waiting else ())
        for each in late:
            loss = sum(next(read) * share for _, share in each.terms) if each.terms else None
            self._chain.amend(each.step, loss=loss, norm=next(read) if each.norm is not None else None)

    # ---- what ranks compare

    def mark(self) -> int:
        """The same on all ranks that have the same records."""
        return int.from_bytes(self._chain.head[:MARK_BYTES])

    def compare(self, control: Control) -> None:
        """Marks differ: go on with the records of rank 0."""
        self._settle(control, [each.hex() for each in control.gather_bytes(self._chain.head)])

    def _settle(self, control: Control, heads: Sequence[str]) -> None:
        """All ranks have rank 0's records."""
        if len(set(heads)) == 1:
            return
        others = [rank for rank, head in enumerate(heads) if head != heads[0]]
        plain, rows = self._chain.state()
        taken = [control.broadcast_bytes(each, 0) for each in (json.dumps(plain).encode(), rows)]
        logger().warning("ledger.differs", step=self._chain.step, ranks=others, head=heads[0])
        self._late = [] if not self._rank0 else self._late
        self._chain.load(json.loads(taken[0]), taken[1])

    # ---- with the state

    def state(self) -> dict[str, Any]:
        self._read_late()
        plain, rows = self._chain.state()
        padded = rows + bytes(-len(rows) % _BLOCK)
        held = torch.frombuffer(bytearray(padded), dtype=torch.uint8) if padded else torch.zeros(0, dtype=torch.uint8)
        return {"plain": json.dumps(plain), "size": len(rows), "rows": held}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Become what was saved; without a ledger in it, begin one."""
        self._late, self._cut = [], None
        if state is None:
            self._chain = Chain()
            return
        rows = state["rows"].cpu().numpy().tobytes()[: state["size"]]
        self._chain.load(json.loads(state["plain"]), rows)

    # ---- to storage

    def seal(self, step: int) -> None:
        """Rank 0: a checkpoint of ``step`` is committed, so its records are written too."""
        if self._sealer is None or not self._rank0:
            return
        self._take_sealed()
        self._read_late()
        if (unsealed := self._chain.unsealed(step)) is not None:
            cut, key_of = self._feed.cut, self._feed.key_of
            if cut is not None and key_of is not None:
                self._sealer.keys = Keys(self._feed.kind, cut[0].length, key_of)
            self._sealer.begin(unsealed)

    def _take_sealed(self) -> None:
        for done in self._sealer.take_done() if self._sealer is not None else ():
            self._chain.sealed(done)

    def close(self) -> None:
        """Wait a while for what is being written."""
        if self._sealer is not None:
            self._sealer.close(CLOSE_S)


@dataclass(frozen=True, slots=True)
class Keys:
    """How a data set of this type and length names its samples."""

    data: str
    length: int
    key_of: Callable[[int], str]


class Sealer:
    """Writes segments, in a thread of its own; the newest records include those that were not written before."""

    def __init__(self, directory: str | Path) -> None:
        location = f"{directory}/{FOLDER}" if is_url(directory) else Path(directory) / FOLDER
        self._storage: Storage = open_storage(location)
        self._waiting: queue.Queue[Unsealed | None] = queue.Queue()
        self._done: queue.Queue[Sealed] = queue.Queue()
        self._last: Sealed | None = None
        self._thread: threading.Thread | None = None
        self._said = False
        self.keys: Keys | None = None
        """Those of the data set in use; written once."""
        self._named = ""

    def begin(self, records: Unsealed) -> None:
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="ledger", daemon=True)
            self._thread.start()
        self._waiting.put(records)

    def take_done(self) -> list[Sealed]:
        found = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
        return found

    def close(self, limit_s: float) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(limit_s)

    def _run(self) -> None:
        while (records := self._waiting.get()) is not None:
            try:
                done = self._written(records)
                self._said = False
            except (ElasticTrainerError, OSError, ValueError, RuntimeError) as error:
                if not self._said:
                    logger().warning("ledger.not_written", reason=str(error), hint="they stay in the state")
                self._said = True
                continue
            self._last = done
            self._done.put(done)

    def _written(self, records: Unsealed) -> Sealed:
        """The end of a segment with what of ``records`` no segment has yet."""
        own = records.behind(self._last) if self._last is not None else None
        records = own if own is not None else records.beyond(self._ends(records.base))
        if not records.rows:
            return Sealed(records.base, records.head, records.link or FIRST_LINK)
        if records.link is None:
            logger().warning("ledger.gap", after=records.base, reason="earlier records were dropped unwritten")
        name, content, done = sealed_segment(records)
        if not self._storage.exists(str(name)):
            self._put(str(name), content)
        self._name_samples()
        return done

    def _name_samples(self) -> None:
        keys = self.keys
        if keys is None or keys.length > MOST_KEYS or (name := keys_name(keys.data, keys.length)) == self._named:
            return
        self._named = name
        if not self._storage.exists(name):
            self._put(name, packed_keys(map(keys.key_of, range(keys.length))))

    def _put(self, name: str, content: bytes) -> None:
        self._storage.prepare()
        temporary = f"tmp-{name}-{new_nonce()}"
        self._storage.create(temporary, name)
        sink = self._storage.sink(temporary, FILE)
        try:
            sink.write(memoryview(content))
            sink.finish()
        finally:
            sink.abandon()
        self._storage.publish(temporary, name)

    def _ends(self, base: int) -> Iterator[Sealed]:
        """The ends of the segments that reach beyond ``base``: an earlier rank 0 may have written what is here too."""
        for text in self._storage.names():
            if text.startswith("tmp-"):
                self._storage.remove(text)  # of a process that was killed: this one alone writes here
        return ends(self._storage, base)
