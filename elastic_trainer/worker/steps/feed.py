"""What a session trains on next: epochs and batches from the job's position in the data, cut alike by all ranks.

The position moves when a step commits, not when a batch is drawn; so a batch is repeated until it is committed.

Ranks that cut the data differently would miss or repeat samples, so they compare their plans (:class:`DataPlanCheck`):
at the first step of each round, and of each epoch for which no rank has promised the same plan (``batches(epochs=5)``
promises five, and a script may make another plan after them), by one sum, before anything is computed, as ranks that
differ in micro-batches would wait for each other in SyncBatchNorm. And they compare behind steps by a number that
travels with what they agree on anyway. So nothing depends on how often a rank calls ``batches()``, and all other steps
cost nothing.

*Runs in* the worker's main thread, the comparison on all ranks at once. *Owns* the source of samples, with its data
worker processes.
*Fails by* DataError for an unusable data set; ConfigError for one that differs from the resumed one, or from other
ranks': on the ranks that differ from those that have trained already, which go on without them; where nobody has
trained yet, on all. RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastic_trainer.data.plan import EpochPlan, SampleRequest
from elastic_trainer.data.sampler import Batch, Collate, Fetcher, LoaderSource, Sampler, Source
from elastic_trainer.data.sources import Tally, is_stream, key_of
from elastic_trainer.data.workers import Drawn, Loading
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import UNNAMED, Control, Purpose
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.training_state import SETTINGS, Position

CUT = ("length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "drop_last")
NAMES = (*CUT, "arithmetic", "run")
Fields = Mapping[str, Any]
Plan = tuple[Fields, int]
"""The fields, and the epoch before which they stay as they are; 0: nothing is promised beyond the present epoch."""
_ADVICE = "start all nodes with the same script, arguments and data"
MARK_BYTES = 5
"""A float64 sums marks of 40 bits exactly over 8,192 ranks."""


@dataclass(frozen=True, slots=True)
class RankDataPlan:
    """How one rank cuts the data (``fields`` of its plan, empty if it has none), and whether it has trained so."""

    rank: int
    node: str
    fields: Fields
    trained: bool

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (node {self.node})" if self.node != UNNAMED else "")


def refusals(plans: Sequence[RankDataPlan]) -> dict[int, str]:
    """What is wrong with each rank that cannot go on. Pure; ``plans`` are in rank order.

    Ranks that have trained are right. Where there are none, nobody knows who is right, and all are refused.
    """
    right = next((cut for cut in plans if cut.trained), plans[0])
    found = {cut.rank: sentence for cut in plans if (sentence := _difference(cut, right))}
    if found and not right.trained:
        first = next(iter(found.values()))
        return {cut.rank: found.get(cut.rank, first) for cut in plans}
    return found


def _difference(cut: RankDataPlan, right: RankDataPlan) -> str:
    for name in sorted({*cut.fields, *right.fields}):
        mine, other = (each.fields.get(name, "not set") for each in (cut, right))
        if mine != other:
            return f"ranks cut the data differently: '{name}' is {mine} on {cut} and {other} on {right}"
    return ""


def mark(fields: Fields) -> int:
    """A hash of ``fields``: other fields almost certainly give another number."""
    text = json.dumps(dict(fields), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=MARK_BYTES).digest())


class DataPlanCheck:
    """Compares how ranks cut the data. ``plan()`` is the one that the batch at hand was drawn by."""

    def __init__(self, node: str, plan: Callable[[], Plan]) -> None:
        self._node, self._plan = node, plan
        self._control = Control()
        self._given: Fields = {}
        self._compared_until = 0
        """The epoch before which no rank of this round will make another plan, by what they said when they compared."""
        self._trained = False

    def bind(self, control: Control, given: Fields) -> None:
        """A round begins. ``given``: the plan of the rank whose state was just taken over, if it had one."""
        self._control, self._given, self._compared_until = control, given, 0

    def check(self, fields: Fields) -> None:
        """Before the first batch: ConfigError unless the plan is that of the ranks that this one has joined."""
        for name, value in fields.items():
            if not self._trained and self._given.get(name, value) != value:
                here = RankDataPlan(self._control.rank, self._node, fields, trained=False)
                raise ConfigError(
                    f"ranks cut the data differently: '{name}' is {value} on {here} and {self._given[name]} on the"
                    " ranks that train already",
                    hint=_ADVICE,
                )

    def at_step(self, epoch: int) -> None:
        """A step begins: compare if it is the first of the round, or of an epoch that may have another plan."""
        if epoch >= self._compared_until:
            self._compared_until = max(self.compare(), epoch + 1)
            self._trained = True

    def fingerprint(self) -> int:
        """What all ranks must have in common, as one number."""
        return mark(self._plan()[0])

    def compare(self) -> int:
        """Look at the plans of all ranks; all call it alike. The epoch before which none of them changes."""
        fields, until = self._plan()
        if self._control.alone:
            return until
        mine = mark({**fields, "until": until})
        if self._control.sum(Purpose.PLAN, [mine])[0] == mine * self._control.world_size:
            return until
        text = json.dumps({"node": self._node, "fields": dict(fields), "trained": self._trained, "until": until})
        rows = [json.loads(each) for each in self._control.gather_bytes(text.encode())]
        common = min(int(row.pop("until")) for row in rows)
        refused = refusals([RankDataPlan(rank, **row) for rank, row in enumerate(rows)])
        if self._control.rank in refused:
            raise ConfigError(refused[self._control.rank], hint=_ADVICE)
        for sentence in refused.values():
            logger().warning("rank.refused", reason=sentence)
        return common


def check_fields(
    plan: EpochPlan, resumed: Mapping[str, Any], present: Mapping[str, Any], allow_changed: Collection[str]
) -> dict[str, Any]:
    """The fields of ``plan`` to save with the state.

    Raises ConfigError naming the first one that differs from the ``resumed`` checkpoint's, unless it is in
    ``allow_changed``. Nothing is compared once a plan of the session was alike (``present`` are its fields then).
    """
    unknown = sorted(name for name in allow_changed if name not in NAMES and name.partition(".")[0] not in SETTINGS)
    if unknown:
        raise ConfigError(
            f"allow_changed: there is no field {unknown[0]!r}",
            hint=f"known are {', '.join(NAMES)}, and settings such as optimizer.lr and scheduler.T_max",
        )
    fields: dict[str, Any] = asdict(plan)
    del fields["passes"]  # changes no sample
    for name, value in fields.items():
        if not present and name in resumed and resumed[name] != value and name not in allow_changed:
            raise ConfigError(
                f"'{name}' is {value} here and was {resumed[name]} when the checkpoint was saved",
                hint=f"set it back, or say allow_changed=[{name!r}]: samples may then repeat or be missed",
            )
    return fields


ENDLESS = 2**31
"""Epochs, where the number of steps ends the training."""


class Awaited:
    """A source of samples whose time is reported."""

    def __init__(self, source: Source, tracker: HeartbeatReporter) -> None:
        self._source, self._tracker = source, tracker
        self.follow = source.follow

    def draw(self, request: SampleRequest) -> Drawn:
        before = self._tracker.draws()
        try:
            return self._source.draw(request)
        finally:
            self._tracker.enter(before)


class DataFeed:
    """``batch`` is the present one; ``fields`` describe how the data is cut and go into every checkpoint."""

    def __init__(
        self,
        position: Position,
        device: torch.device,
        allow_changed: Collection[str],
        tracker: HeartbeatReporter,
        node: str = UNNAMED,
        without: Collection[int] = (),
    ) -> None:
        self._tracker, self._without = tracker, without
        self._position, self._device, self._allow_changed = position, device, allow_changed
        self.batch: Batch | None = None
        self._drawn_at: tuple[Cursor, int, int, int] | None = None
        self.kind = ""
        """The type of the data set, for people."""
        self.key_of: Callable[[int], str] | None = None
        """How the data set names its samples, if it does."""
        self.fields: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] = {}
        self._part = DataPart(0, 1)
        self.lr_factor = 1.0
        """Factor for the learning rate at the present number of ranks."""
        self._last_epoch: int | None = None
        """The number of epochs, inside epochs()."""
        self._sampler: Sampler | None = None
        self._most_steps: int | None = None
        self._same_until = 0
        """The epoch before which the sampler stays; 0: for the present one."""
        self._source: Fetcher | None = None
        self._source_for: tuple[Any, ...] = ()
        self.closing = False
        """Whether the script saves behind the batches of an epoch: a life that resumes there begins the next one."""
        self.halvings = 0
        """How often micro-batches were halved because memory was short."""
        self.tally = Tally()
        self.plan_check = DataPlanCheck(node, self._cut)
        self._idle = (0, 0)
        """Ranks and micro-batches at the last warning about idle ranks."""

    def bind(self, control: Control, part: DataPart, resumed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Draw this ``part`` in the present round.

        ``resumed``: the fields of the checkpoint that it began from. ``given``: those of the plan of the rank that this
        one was healed from, if any.
        """
        self._part, self._resumed = part, resumed
        self._look_up_lr()
        self.plan_check.bind(control, given)

    def redraw(self) -> None:
        """The ranks changed between a batch and its step: replace it by this rank's part of what comes next."""
        batch, sampler, cursor = self.batch, self._sampler, self._position.cursor
        if batch is None or batch.used or sampler is None or self._drawn_at == self._drawn_for:
            return
        if self._made or sampler.plan.is_over(cursor):
            batch.used = True  # by other ranks
        else:
            batch.become(self._draw(sampler))

    @property
    def cut(self) -> tuple[EpochPlan, int] | None:
        """How the data are cut that are drawn now: the plan, and how often micro-batches were halved."""
        return (self._sampler.plan, self.halvings) if self._sampler is not None else None

    @property
    def _drawn_for(self) -> tuple[Cursor, int, int, int]:
        """All that decides this rank's part: position, its number, how many there are, how often it was halved."""
        return self._position.cursor, self._part.rank, self._part.world, self.halvings

    @property
    def next_size(self) -> int:
        """Samples of the next step, job-wide; 0 if unknown, and at the end of an epoch."""
        if self._sampler is not None:
            plan = self._sampler.plan.for_world(self._part.world)
            return min(plan.global_batch, plan.left(self._position.cursor))
        fields = self.fields or self._resumed
        left = int(fields.get("length", 0)) - self._position.cursor.samples
        return max(0, min(int(fields.get("global_batch", 0)), left))

    def _cut(self) -> Plan:
        return (asdict(self._sampler.plan) if self._sampler is not None else {}), self._same_until

    def _look_up_lr(self) -> None:
        self.lr_factor = 1.0 if self._sampler is None else self._sampler.plan.lr_factor(self._part.world)

    @property
    def within_epochs(self) -> bool:
        """Whether the body of :meth:`epochs` is running."""
        return self._last_epoch is not None

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the position's to ``total - 1``; the position advances when the body of one ends."""
        try:
            while self._position.cursor.epoch < total:
                self._last_epoch = total
                yield self._position.cursor.epoch
                self._next_epoch()
        finally:
            self._last_epoch = None
            self.close()

    def batches(
        self,
        dataset: Any,
        plan: EpochPlan,
        collate: Collate | None,
        epochs: int | None,
        steps: int | None,
        loading: Loading | LoaderSource,
        change: Callable[[], bool],
    ) -> Iterator[Batch]:
        """See ``Session.batches``. Mistakes are raised here, not at the first batch.

        ``loading`` may be a source that a DataLoader of the script's own fills.

        ``change()`` lets the ranks change before a batch is drawn; it returns whether they did.
        """
        if steps is not None and (epochs is not None or self._last_epoch is not None):
            raise ConfigError("batches() with both steps and epochs", hint="say steps=N alone, outside of epochs()")
        if epochs is None and steps is None and self._last_epoch is None:
            raise ConfigError("batches() does not know how many epochs", hint="say epochs=N, or loop over epochs(N)")
        epochs = ENDLESS if steps is not None else epochs
        if plan.shuffle and is_stream(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} is a stream, which cannot be shuffled from outside",
                hint="say shuffle=False; a stream may order each epoch itself, in read_from(epoch, position)",
            )
        if self._part.fixed and plan.scale_from is not None:
            raise ConfigError(
                "reduction='tree' gives the same bits at any number of ranks, and scale_from another batch at each",
                hint="leave one of them out",
            )
        try:
            self.plan_check.check(asdict(plan))
            self.fields = check_fields(plan, self._resumed, self.fields, self._allow_changed)
        except ConfigError:
            over = epochs is not None and self._position.cursor.epoch >= epochs
            over = over or (steps is not None and self._position.step >= steps)
            if not over:
                raise  # else this is an earlier loop of a script with several: the next one is compared
        until = epochs if epochs is not None else self._last_epoch or 0
        self._tracker.set_notes(
            length=plan.left(Cursor()),
            batch=plan.for_world(self._part.world).global_batch,
            epochs=math.ceil(until) if steps is None else None,
            last_step=math.ceil(steps) if steps is not None else None,
        )
        if isinstance(loading, LoaderSource):
            self.kind, self.key_of = type(loading.dataset).__name__, key_of(loading.dataset)
            timed: Source = Awaited(loading, self._tracker)
        else:
            self.kind, self.key_of = type(dataset).__name__, key_of(dataset)
            source = self._source_of(dataset, collate, loading, plan)
            timed = source if source.immediate else Awaited(source, self._tracker)
        return self._drawn(
            Sampler(timed, plan, even=self._part.even, until=until, without=self._without), epochs, steps, change
        )

    def _source_of(self, dataset: Any, collate: Collate | None, loading: Loading, plan: EpochPlan) -> Fetcher:
        """Reuse the previous epoch's source if it fits: its data workers go on."""
        asked = (id(dataset), id(collate), loading, plan.length, plan.shuffle)  # the source keeps both of them alive
        if self._source is None or asked != self._source_for:
            self.close()
            self._source = Fetcher(dataset, self._device, collate, seed=plan.seed, loading=loading, tally=self.tally)
            self._source_for = asked
        return self._source

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source, self._source_for = None, ()

    def _drawn(
        self, sampler: Sampler, epochs: int | None, steps: int | None, change: Callable[[], bool]
    ) -> Iterator[Batch]:
        position = self._position
        self._sampler, self._same_until, self._most_steps = sampler, epochs or 0, steps
        self._look_up_lr()
        while (epochs is None or position.cursor.epoch < epochs) and not self._made:
            while not self._made and not sampler.plan.is_over(position.cursor):
                if change():
                    continue
                self.batch = self._draw(sampler)
                yield self.batch
            self.batch = None
            if epochs is None:
                return
            if sampler.plan.is_over(position.cursor):
                self._next_epoch()
        if self._sampler is sampler:
            self.close()

    @property
    def _made(self) -> bool:
        """Whether the run has made all steps, where their number was asked for."""
        return self._most_steps is not None and self._position.step >= self._most_steps

    @property
    def behind_batches(self) -> bool:
        """Whether the body of :meth:`epochs` has come to the end of its loop over batches."""
        return self.within_epochs and self.batch is None and self.at_end

    @property
    def at_end(self) -> bool:
        """Whether nothing is left to draw of the epoch, or of the run."""
        return self._sampler is not None and (self._made or self._sampler.plan.is_over(self._position.cursor))

    def _draw(self, sampler: Sampler) -> Batch:
        self._drawn_at = cursor, rank, world, _ = self._drawn_for
        if world > 1 and world > (parts := sampler.plan.for_world(world).most_parts) and self._idle != (world, parts):
            self._idle = (world, parts)
            if rank == 0:
                logger().warning("ranks.idle", idle=world - parts, world_size=world, micro_batches=parts)
        return sampler.draw(cursor, rank, world, self.halvings)

    def _next_epoch(self) -> None:
        self._position.cursor = Cursor(self._position.cursor.epoch + 1, 0)
