"""What samples come from: map-style data sets, streams that can go to a position, streams that keep their own state.

Streams with a state can only be read on. So the job reads a fixed number of them in turns, whatever its ranks: a global
batch of G samples has the next G / streams samples of each. Any rank can therefore say which sample of which stream
lies at a position, and get it by reading that stream up to there. Every ``state_every`` steps the ranks exchange the
states of the streams they read, and keep them with the training state: a rank that takes over a stream reads on there.

*Runs in* the worker's main thread. *Owns* the open streams of this rank.
*Fails by* DataError for what is no data set, has no length or is empty, and when more of an epoch is bad than allowed;
ConfigError for a stream without a state, or another global batch than before; what a stream raises passes through.
*Invariant*: the states in :meth:`Streams.state_dict` are alike on all ranks, and none is ahead of what is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, Subset, TensorDataset

from elastic_trainer.data.seeds import SEEDED
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.telemetry.logs import logger

ALWAYS_LOGGED = 10
LEAST_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Missing:
    """Sample ``number`` could not be fetched; ``error`` says why."""

    number: int
    error: str


def limit(length: int, world: int, fraction: float) -> int:
    """How many bad samples of an epoch of ``length`` samples one of ``world`` ranks may leave out. Pure."""
    return max(LEAST_LIMIT, int(fraction * length / world))


class Tally:
    """``total`` is the number of samples that this process left out. One that is drawn again counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._epoch = -1
        self._seen: set[int] = set()

    def add_missing(self, epoch: int, missing: Iterable[Missing], most: int) -> None:
        """The samples ``missing`` of ``epoch`` were left out; ``most`` may be."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen.clear()
        for each in missing:
            if each.number in self._seen:
                continue
            self._seen.add(each.number)
            self.total += 1
            # The first ones are all logged, then each time that they have doubled.
            if self.total <= ALWAYS_LOGGED or self.total & (self.total - 1) == 0:
                seen = {"in_epoch": len(self._seen), "count": self.total}
                logger().warning("data.sample_skipped", sample=each.number, epoch=epoch, error=each.error, **seen)
            if len(self._seen) > most:
                raise DataError(
                    f"{len(self._seen)} samples of epoch {epoch} could not be fetched here, and at most {most} may"
                    f" be left out; the last is sample {each.number}: {each.error}",
                    hint="repair the data, or raise max_bad_fraction",
                )


@runtime_checkable
class MapDataset(Protocol):
    """A data set that knows its length and gives sample number i, always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class NamedSamples(Protocol):
    """A data set whose samples have names, by which people know them."""

    def key(self, number: int, /) -> str:
        """The name of sample ``number``."""


@runtime_checkable
class SeekableStream(Protocol):
    """Samples that come in an order of their own, and can be read from any position on.

    Sample numbers are positions. The order may differ between epochs, but must be the same each time that one epoch is
    read: then a job that is resumed, or whose ranks change, still uses each sample exactly once per epoch. Reading may
    begin anywhere, in several processes at once; a position that is next to the last one read costs no new beginning.
    """

    def __len__(self) -> int:
        """Samples of an epoch."""

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        """The samples of ``epoch`` from number ``position`` to the last one."""


class StreamEndedError(DataError):
    """A stream had fewer samples than its length says."""


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is read in its own order."""
    return isinstance(dataset, SeekableStream)


def by_number(dataset: Any) -> bool:
    """Whether an IterableDataset gives any sample by its number all the same, as those of LitData and MosaicML do."""
    return type(dataset).__getitem__ is not IterableDataset.__getitem__


def key_of(dataset: Any) -> Callable[[int], str] | None:
    """How the data set names a sample, if it does: by its method ``key(number)``, or by the paths of its files, as
    torchvision's folders keep them in ``samples``. A subset names those it has chosen.
    """
    if type(dataset) is Subset:
        inner, indices = key_of(dataset.dataset), dataset.indices
        return None if inner is None else lambda number: inner(int(indices[number]))
    if isinstance(dataset, NamedSamples):
        return lambda number: str(dataset.key(number))
    samples = getattr(dataset, "samples", None)
    if (
        isinstance(samples, list | tuple)
        and samples
        and isinstance(samples[0], tuple)
        and isinstance(samples[0][0], str)
    ):
        return lambda number: str(samples[number][0])
    return None


def checked_length(dataset: Any) -> int:
    """The length of ``dataset``. DataError if it has none, is empty, or can neither be indexed nor sought in."""
    if isinstance(dataset, IterableDataset) and not is_stream(dataset) and not by_number(dataset):
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set, and cannot be read from a position on: after a"
            " failure the job could not go on where it was",
            hint="give it __len__() and read_from(epoch, position), which iterates from that sample on (see"
            " SeekableStream); tar files of samples are read by TarShards",
        )
    if not is_stream(dataset) and not isinstance(dataset, MapDataset):
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set: it needs __len__ and __getitem__",
            hint="or __len__ and read_from(epoch, position), if it is a stream",
        )
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(f"{type(dataset).__name__} does not know its length", hint="give it __len__") from error
    if length < 1:
        raise DataError(f"the data set {type(dataset).__name__} is empty", hint="check its path or filter")
    return length


def plain_tensors(dataset: Any) -> bool:
    """Whether ``dataset`` is a TensorDataset whose samples are the rows of its tensors, and nothing else."""
    return isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__


def deterministic(dataset: Any) -> bool:
    """Whether fetching a sample draws no random numbers: plain tensors, what says ``deterministic = True``, subsets.

    Such data sets need no seeding; with ``__getitems__`` a whole micro-batch is read at once.
    """
    if type(dataset) is Subset:
        return deterministic(dataset.dataset)
    return plain_tensors(dataset) or getattr(dataset, "deterministic", False) is True


def generators(dataset: Any) -> tuple[str, ...]:
    """The default generators that a sample draws from, by the name of their module: what ``generators`` of the data set
    names, else all. Each that is not named costs no seeding for each sample.

    Raises DataError when the data set names another.
    """
    if type(dataset) is Subset:
        return generators(dataset.dataset)
    named = getattr(dataset, "generators", None)
    if named is None:
        return tuple(SEEDED)
    if not isinstance(named, (tuple, list, set, frozenset)) or any(each not in [*SEEDED] for each in named):
        raise DataError(
            f"{type(dataset).__name__}.generators is {named!r}: unknown",
            hint=f"name those of {', '.join(map(repr, SEEDED))} that a sample draws from, as a tuple",
        )
    return tuple(named)


ENDLESS = 2**53
"""Samples of the one epoch that streams have: a number that JSON keeps exactly."""
_END: object = object()
StreamState = tuple[int, int, Any]
"""Samples read, passes made, and the stream's own state."""


class Streams:
    """``shards`` streams without end, for ``session.batches(streams, shuffle=False, steps=N)``.

    ``make(shard, shards)`` gives stream number ``shard``: an iterable with ``state_dict()`` and ``load_state_dict()``
    that gives the same samples each time. One that ends is made anew; ``close()`` and ``set_epoch(pass)`` are called if
    it has them. The states are exchanged every ``state_every`` steps, and kept as ``name`` in checkpoints.
    """

    def __init__(
        self, make: Callable[[int, int], Any], shards: int, *, state_every: int = 100, name: str = "streams"
    ) -> None:
        for option, value in (("shards", shards), ("state_every", state_every)):
            if value < 1:
                raise ConfigError(f"Streams with {option}={value}", hint="it must be at least 1")
        self.name, self.shards, self._every = name, shards, state_every
        self._open = [_Stream(make, shard, shards) for shard in range(shards)]
        self._known: dict[int, StreamState] = {}
        self._turn = self._exchanged = 0

    # ---- as a data set

    def __len__(self) -> int:
        return ENDLESS

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        """The samples from ``position`` on; there is but one epoch."""
        for number in count(position):
            shard, index = self.place(number)
            yield self._open[shard].sample(index, self._known.get(shard))

    def place(self, position: int) -> tuple[int, int]:
        """The stream of the sample at ``position``, and its number there."""
        batch, offset = divmod(position, self._turn * self.shards)
        return offset // self._turn, batch * self._turn + offset % self._turn

    def begin(self, global_batch: int) -> None:
        """ConfigError unless ``global_batch`` samples are the same number of each stream, and the same as before."""
        turn, rest = divmod(global_batch, self.shards)
        if rest:
            raise ConfigError(
                f"a global batch of {global_batch} samples cannot be divided among {self.shards} streams",
                hint="let global_batch_size be a multiple of the number of streams",
            )
        if self._turn not in (0, turn):
            raise ConfigError(
                f"streams were read with a global batch of {self._turn * self.shards} samples, and now it is"
                f" {global_batch}",
                hint="leave global_batch_size as it was",
            )
        self._turn = turn
        for each in self._open:
            each.keep(turn)

    def close(self) -> None:
        """Let go of what is open. Reading goes on from the states that were exchanged last."""
        for each in self._open:
            each.close()

    # ---- the states, between two steps

    def due(self, step: int) -> bool:
        """Whether the states are to be exchanged behind ``step``; alike on all ranks."""
        return step - self._exchanged >= self._every

    def mine(self, samples: int) -> dict[str, Any]:
        """The states of the streams that this rank has read, none of them beyond the job's first ``samples``."""
        most = samples // self.shards
        states = {each.shard: each.state() for each in self._open if each.is_open and 0 < each.read <= most}
        return {str(shard): state for shard, state in states.items() if state[0] > self._known.get(shard, (0,))[0]}

    def exchanged(self, step: int, states: Sequence[Mapping[str, Any]]) -> None:
        """These are the states of all ranks behind ``step``."""
        for row in states:
            for shard, state in row.items():
                if state[0] > self._known.get(int(shard), (0,))[0]:
                    self._known[int(shard)] = (state[0], state[1], state[2])
        self._exchanged = step

    def state_dict(self) -> dict[str, Any]:
        known = {str(shard): list(state) for shard, state in sorted(self._known.items())}
        return {"shards": self.shards, "turn": self._turn, "exchanged": self._exchanged, "streams": known}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ConfigError for the state of another number of streams."""
        if state["shards"] != self.shards:
            raise ConfigError(
                f"the job reads {self.shards} streams here, and read {state['shards']} when it was saved",
                hint="the number of streams stays the same for a whole run, whatever the number of ranks",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self._turn, self._exchanged = state["turn"] or self._turn, state["exchanged"]
        self._known = {int(shard): (each[0], each[1], each[2]) for shard, each in state["streams"].items()}


class _Stream:
    """One stream, open or not. ``read``: how many samples it has given, over all passes."""

    def __init__(self, make: Callable[[int, int], Any], shard: int, shards: int) -> None:
        self._make, self.shard, self._shards = make, shard, shards
        self.read = self._passes = 0
        self._source: Any = None
        self._samples: Iterator[Any] = iter(())
        self._recent: deque[tuple[int, Any]] = deque(maxlen=1)
        """What was read last: a step that is repeated asks for it again."""

    def keep(self, size: int) -> None:
        """Keep that many samples for a repeated step."""
        if self._recent.maxlen != size:
            self._recent = deque(self._recent, maxlen=size)

    @property
    def is_open(self) -> bool:
        return self._source is not None

    def close(self) -> None:
        source, self._source, self._samples = self._source, None, iter(())
        if hasattr(source, "close"):
            source.close()

    def state(self) -> StreamState:
        return self.read, self._passes, self._source.state_dict()

    def sample(self, index: int, known: StreamState | None) -> Any:
        """Sample ``index``, read on from ``known`` if that is nearer."""
        for number, sample in self._recent:
            if number == index:
                return sample
        if known is not None and known[0] > index:
            known = None
        at = known[0] if known is not None else 0
        if self._source is None or self.read > index or self.read < at:
            self._enter(known[1] if known is not None else 0, at, known[2] if known is not None else None)
        while True:
            sample = self._next()
            if self.read > index:
                return sample

    def _enter(self, passes: int, read: int, state: Any) -> None:
        self.close()
        source = self._make(self.shard, self._shards)
        if not all(callable(getattr(source, each, None)) for each in ("state_dict", "load_state_dict", "__iter__")):
            raise ConfigError(
                f"stream {self.shard} is a {type(source).__name__}, which does not keep where it is",
                hint="it needs __iter__(), state_dict() and load_state_dict(state); torchdata's StatefulDataLoader"
                " gives them to any IterableDataset, and TarShards reads tar files of samples exactly",
            )
        if hasattr(source, "set_epoch"):
            source.set_epoch(passes)
        if state is not None:
            source.load_state_dict(state)
        self._source, self._samples, self._passes, self.read = source, iter(source), passes, read

    def _next(self) -> Any:
        sample = self._advanced()
        if sample is _END:
            self._enter(self._passes + 1, self.read, None)
            sample = self._advanced()
        if sample is _END:
            raise DataError(f"stream {self.shard} of {self._shards} has no samples", hint="use fewer streams")
        self._recent.append((self.read, sample))
        self.read += 1
        return sample

    def _advanced(self) -> Any:
        try:
            return next(self._samples, _END)
        except Exception:
            self._source = None  # a generator that has raised would seem to be at its end
            raise
