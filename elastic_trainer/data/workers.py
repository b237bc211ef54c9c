"""Reads samples, here or ahead of use in data worker processes: torch's DataLoader over the requests still to come.

The next request is usually what the stream delivers next. If not (the ranks changed, the position moved), the stream
begins anew there; requests under way are abandoned between two samples. The position in the data is not here: fetching
ahead changes only when samples are read. What was delivered of the present global batch is kept for a repeated step.

A forked child holds its parent's sockets: peers would not notice the parent's death. It holds the parent's handlers and
wakeup descriptor: a signal to the child would look like one to the parent. torchrun and Slurm send SIGTERM to all
processes of a job, and a terminal that closes sends SIGHUP; the parent needs its data workers until the ranks have
agreed to stop: so data workers ignore such signals, and end with the parent.

*Runs in* the worker's main thread, and in data worker processes. *Owns* those, from the first request to ``close``.
*Fails by* what the data set raises, with the sample's number or the worker's trace as a note; DataError when no sample
is left; DataWorkerError when a worker process dies.
*Invariant*: no data worker process outlives this one (on Linux at once), or ``close``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM
from elastic_trainer.data.plan import Extent, SampleRequest
from elastic_trainer.data.seeds import SEEDED, SampleSeeds
from elastic_trainer.data.sources import Missing, StreamEndedError, checked_length, deterministic, generators, is_stream
from elastic_trainer.errors import ConfigError, DataError, DataWorkerError
from elastic_trainer.ipc.gloo import open_sockets
from elastic_trainer.telemetry.logs import logger


def placed(data: Any, device: torch.device) -> Any:
    """``data`` with all tensors in it on ``device``."""
    return _mapped(data, lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True))


def pinned(data: Any) -> Any:
    """``data`` with all CPU tensors in it in pinned memory, from which a device copies while the host goes on."""
    return _mapped(data, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)


def versions(data: Any) -> tuple[int, ...] | None:
    """How often each tensor in ``data`` was changed in place; None if it holds what may change without a trace."""
    counts = []
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            counts.append(leaf._version)
        elif not isinstance(leaf, (str, bytes, int, float, complex, type(None))):
            return None
    return tuple(counts)


def leaves(data: Any) -> Iterator[Any]:
    """What ``data`` consists of, containers apart."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from leaves(value)
    else:
        yield data


def _mapped(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(value, change) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return type(data)(_mapped(value, change) for value in data)  # type: ignore[call-arg]
    return data


_STANDARD = 2
PR_SET_PDEATHSIG = 1
_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def forking() -> Iterator[None]:
    """Children that are forked in here hold back two things until :func:`settle`, which handles them.

    SIGTERM, SIGINT and SIGHUP (other threads of this process, and their C handler, still receive them); and the
    collection of garbage, which would end process groups of the parent that only cycles hold: they wait for threads
    that a child does not have.
    """
    before, collected = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle(parent: int, forked: bool, theirs: Callable[[int], None] | None, worker: int) -> None:
    """A ``worker_init_fn``: let go of what belongs to the process ``parent``, and end when it ends; then ``theirs``."""
    if forked:
        gc.freeze()  # nothing of the parent's is ever collected here
        gc.enable()
        let_go([number for number in open_sockets() if number > _STANDARD])
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in _HELD_BACK:
            signal.signal(number, signal.SIG_DFL)
    for number in _HELD_BACK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    end_with(parent)
    if theirs is not None:
        theirs(worker)


def end_with(parent: int) -> None:
    """Be killed when ``parent`` dies. On Linux."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died before the call above, which then never signals, or a fork server started this
        with suppress(PermissionError):
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)


def let_go(numbers: Collection[int]) -> None:
    """Let go of these inherited descriptors.

    Their numbers stay taken, by /dev/null: objects of the parent that name them, and may close them at any time, then
    close nothing of this process.
    """
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


Collate = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Drawn:
    """Collated samples, and those that were left out of them."""

    data: Any
    missing: tuple[Missing, ...] = ()

    def pin_memory(self) -> Drawn:
        """The same in pinned memory; called by the thread of torch's DataLoader that does this."""
        return Drawn(pinned(self.data), self.missing)


class Cancelled(Exception):
    """Reading was given up."""


class SampleReader:
    """``seed`` None: random numbers are left as they are (evaluation). ``skips``: samples that raise are left out.

    ``draws`` names the generators of the process that reading seeds.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int | None = None, *, skips: bool = False) -> None:
        self.length = checked_length(dataset)
        self._dataset, self._own_collate, self._skips = dataset, collate, skips
        drawn = generators(dataset)
        self._seeds = SampleSeeds(seed, drawn) if seed is not None else None
        self._fixed = deterministic(dataset)
        self.draws: tuple[str, ...] = ()
        if self._seeds is not None and not (self._fixed and collate is None):
            self.draws = drawn if collate is None else tuple(SEEDED)
        may_ask_many = self._fixed or self._seeds is None
        self._many = getattr(dataset, "__getitems__", None) if may_ask_many else None
        self._stream = is_stream(dataset)
        self._epoch: int | None = None
        self._next: tuple[int, int] | None = None
        """Epoch and number of the sample that the open iterator of a stream gives next."""
        self._samples: Iterator[Any] = iter(())

    def read(self, request: SampleRequest, wanted: Callable[[], bool] = lambda: True) -> Drawn:
        """The samples of ``request``. Raises Cancelled between two of them when they are not ``wanted`` any more."""
        self._enter(request.epoch)
        numbers = [int(number) for number in request.ids]
        missing: list[Missing] = []
        samples = self._together(numbers) if self._many is not None else None
        if samples is None:
            samples = self._one_by_one(request.epoch, numbers, missing, wanted)
        if not samples:
            raise DataError(
                f"no sample of a micro-batch is left, all {len(numbers)} raised: {shown(numbers)};"
                f" sample {missing[0].number}: {missing[0].error}",
                hint="repair the data; with larger micro-batches single bad samples can be left out",
            )
        return Drawn(self._collated(request.epoch, numbers, samples), tuple(missing))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch and self._seeds is not None and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch = epoch

    def _together(self, numbers: list[int]) -> list[Any] | None:
        """All at once; None if one of them is bad, and which one has to be found out."""
        try:
            return list(self._many(numbers))  # type: ignore[misc]
        except Exception as error:
            if self._skips:
                return None
            error.add_note(f"raised by the data set for one of the samples {shown(numbers)}")
            raise

    def _one_by_one(
        self, epoch: int, numbers: list[int], missing: list[Missing], wanted: Callable[[], bool]
    ) -> list[Any]:
        samples = []
        for number in numbers:
            if not wanted():
                raise Cancelled
            try:
                samples.append(self._one(epoch, number))
            except Exception as error:
                if not self._skips or isinstance(error, (StreamEndedError, MemoryError)):
                    error.add_note(f"raised by the data set for sample {number}, in epoch {epoch}")
                    raise
                missing.append(Missing(number, f"{type(error).__name__}: {error}"[:300]))
        return samples

    def _one(self, epoch: int, number: int) -> Any:
        if self._seeds is not None and not self._fixed:
            self._seeds.sample(epoch, number)
        if not self._stream:
            return self._dataset[number]
        if self._next != (epoch, number):
            self._samples = iter(self._dataset.read_from(epoch, number))
        self._next = None  # what the stream raises closes the iterator
        try:
            sample = next(self._samples)
        except StopIteration:
            raise StreamEndedError(
                f"{type(self._dataset).__name__} of {len(self._dataset)} samples ended before sample {number} of"
                f" epoch {epoch}",
                hint="__len__ must be the number of samples that read_from(epoch, 0) gives",
            ) from None
        self._next = epoch, number + 1
        return sample

    def _collated(self, epoch: int, numbers: list[int], samples: list[Any]) -> Any:
        if self._own_collate is not None and self._seeds is not None:
            self._seeds.collate(epoch, numbers[0])
        try:
            return (self._own_collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"raised while the samples {shown(numbers)} were collated")
            raise


def shown(numbers: list[int]) -> str:
    """Sample numbers, the first few of many."""
    return f"{numbers[:8]}{'...' * (len(numbers) > 8)}"


@dataclass(frozen=True, slots=True)
class Loading:
    """``workers`` processes fetch ``prefetch`` micro-batches each ahead of use; with 0, samples are fetched on demand.
    ``pin_memory`` None: when the device is CUDA. ``bad_samples`` is raise or skip; ``max_bad_fraction`` of this rank's
    samples of an epoch may be bad before the job fails. ``multiprocessing_context`` is fork, spawn or forkserver.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    bad_samples: str = "raise"
    max_bad_fraction: float = 0.01
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers is {self.workers}", hint="it must not be negative")
        if self.prefetch < 1:
            raise ConfigError(f"prefetch is {self.prefetch}", hint="it must be at least 1")
        if self.bad_samples not in ("raise", "skip"):
            raise ConfigError(f"bad_samples is {self.bad_samples!r}", hint="use 'raise' or 'skip'")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise ConfigError(f"max_bad_fraction is {self.max_bad_fraction}", hint="it must be between 0 and 1")
        known = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context is not None and self.multiprocessing_context not in known:
            raise ConfigError(
                f"multiprocessing_context is {self.multiprocessing_context!r}", hint=f"use one of {', '.join(known)}"
            )

    def pins(self, device: torch.device) -> bool:
        """Whether batches for ``device`` pass through pinned memory; never where there is no CUDA to copy to."""
        wanted = self.pin_memory is None or self.pin_memory
        return wanted and device.type == "cuda"


_ENDING = -1
_SENDABLE = (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class FetchTask:
    """A request of one numbered ``course``. Requests of earlier courses are obsolete."""

    course: int
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to another process: pickled, or where that cannot be, in words."""

    pickled: bytes | None
    words: str
    trace: str

    @classmethod
    def of_exception(cls, error: Exception) -> Failure:
        """``error``, which is being handled."""
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        trace = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # noqa: BLE001 - an exception may be of any class, which may pickle itself anyhow
            return cls(None, words, trace)
        return cls(pickled, words, trace)

    def exception(self) -> Exception:
        """The exception, of the kind that it was; a DataError where that cannot be."""
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # noqa: BLE001 - as above
                error = None
        if not isinstance(error, Exception):
            error = DataError(self.words)
        error.add_note(f"raised in a data worker process:\n{self.trace}")
        return error


class Tasks(Dataset[Any]):
    """The data set that torch's DataLoader gives to its processes: item ``task`` is what its request gives."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._course = torch.zeros(1, dtype=torch.int64)
        self._course.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, course: int) -> None:
        """Requests of earlier courses are obsolete."""
        self._course[0] = course

    def end(self) -> None:
        """All requests are obsolete."""
        self._course[0] = _ENDING

    def __getitem__(self, task: FetchTask) -> Drawn | Failure | None:
        """What was drawn, a :class:`Failure`, or None for an obsolete request."""

        def wanted() -> bool:
            return int(self._course[0]) == task.course

        try:
            if not wanted():
                return None
            drawn = self._reader.read(task.request, wanted)
            check_sendable(drawn.data)
        except Cancelled:
            return None
        except Exception as error:  # noqa: BLE001 - the edge of a process: it is raised in the other one
            return Failure.of_exception(error)
        return drawn


def check_sendable(data: Any) -> None:
    """DataError unless ``data`` can go to another process: its queue would drop it, and the other wait forever."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise DataError("a data worker gives a tensor that is part of a graph", hint="detach() it")
        if not isinstance(leaf, _SENDABLE):
            try:
                pickle.dumps(leaf)
            except Exception as error:
                raise DataError(
                    f"a data worker gives a {type(leaf).__name__}, which cannot go to another process: {error}",
                    hint="give tensors, arrays, numbers or text, or use workers=0",
                ) from error


def unchanged(value: Any) -> Any:
    """The data are collated already."""
    return value


LOOK_S = 0.5
"""How often a wait for data looks whether the workers are alive."""
SLOW_S = 60.0
DYING_S = 2.0
"""How long after its connections a worker that ends may be seen to be dead."""
GRACE_S = 2.0
"""How long workers that are asked to end may take for the sample at hand."""

Future = Callable[[SampleRequest], Iterator[SampleRequest]]
"""A request, and those that will be made after it."""


class Upcoming:
    """The requests that are to be sent to workers, and (in ``sent``) those that were; an iterator may go on after
    StopIteration here, once it was aimed anew.
    """

    def __init__(self) -> None:
        self.sent: deque[FetchTask] = deque()
        self.course = 0
        self._requests: Iterator[SampleRequest] = iter(())

    def aim(self, requests: Iterator[SampleRequest]) -> None:
        self.course += 1
        self._requests = requests

    def __iter__(self) -> Iterator[FetchTask]:
        return self

    def __next__(self) -> FetchTask:
        task = FetchTask(self.course, next(self._requests))
        self.sent.append(task)
        return task


class Workers:
    """See the module."""

    def __init__(self, reader: SampleReader, loading: Loading, *, pin: bool) -> None:
        self._tasks, self._loading, self._pin = Tasks(reader), loading, pin
        self._upcoming = Upcoming()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        """The DataLoader's, about whose processes nothing is raised but in ``_watched``."""
        self._processes: list[Any] = []
        self._owner = os.getpid()
        self._kept: dict[Extent, tuple[Drawn, tuple[int, ...]]] = {}
        self._kept_of: tuple[int, int] | None = None
        self.future: Future = lambda request: iter([request])
        """The requests after a given one; set before each batch."""

    def get(self, request: SampleRequest) -> Drawn:
        """The samples of ``request``, not yet on the device."""
        if self._kept_of != (batch := (request.epoch, request.batch_start)):  # what is left of another global batch
            self._kept.clear()
            self._kept_of = batch
        kept = self._kept.get(request.extent)
        if kept is not None and versions(kept[0].data) == kept[1]:
            return kept[0]
        drawn = self._delivered(request)
        seen = versions(drawn.data)
        if seen is not None:
            self._kept[request.extent] = drawn, seen
            while len(self._kept) > self._loading.workers * self._loading.prefetch:
                del self._kept[next(iter(self._kept))]  # as much again as is fetched ahead, and no more
        return drawn

    def close(self) -> None:
        """End the processes; those in the middle of a sample are killed after a moment."""
        self._kept.clear()
        self._upcoming = Upcoming()
        iterator, processes = self._iterator, self._processes
        self._iterator = self._loader = None
        self._processes = []
        if iterator is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._tasks.end()
        _end(iterator, processes)

    # ---- what lies behind

    def _delivered(self, request: SampleRequest) -> Drawn:
        course = self._upcoming.course
        if not any(task.course == course and alike(task.request, request) for task in self._upcoming.sent):
            self._aim(request)  # no worker is at it, or has been
        while True:
            task, value = self._next()
            if task.course == self._upcoming.course and alike(task.request, request):
                break
        if isinstance(value, Failure):
            self._upcoming.aim(iter(()))  # the same request again gets a new answer
            self._tasks.begin(self._upcoming.course)
            raise value.exception()
        if value is None:
            raise DataWorkerError(f"the data workers gave nothing for samples {request.ids[:8].tolist()}")
        return value

    def _aim(self, request: SampleRequest) -> None:
        """Go on from ``request``, whatever was expected to come next."""
        self._upcoming.aim(self.future(request))
        self._tasks.begin(self._upcoming.course)
        if self._iterator is None:
            self._start()
        elif not self._upcoming.sent:
            self._go_on()

    def _next(self) -> tuple[FetchTask, Drawn | Failure | None]:
        began, logged = SYSTEM.monotonic(), False
        while True:
            try:
                value = self._received()  # RuntimeError after a while
            except StopIteration:  # the requests had come to an end, and go on now
                self._go_on()
                if self._upcoming.sent:
                    continue
                problem = "nothing is left to deliver"
            except (RuntimeError, OSError, EOFError) as error:  # what a data set raises comes as a value
                problem = _first_line(error)
            else:
                return self._upcoming.sent.popleft(), value
            late = "timed out after" in problem
            self._check_alive(0 if late else DYING_S)
            if not late or torch_internals.pinning_ended(self._iterator):
                self.close()
                raise DataWorkerError(f"the data workers failed: {problem}")
            if not logged and SYSTEM.monotonic() - began > SLOW_S:
                logged = True
                logger().warning("data.awaited", seconds=round(SYSTEM.monotonic() - began, 1))

    def _received(self) -> Any:
        return self._watched(lambda: next(self._iterator))

    def _go_on(self) -> None:
        """The requests had come to an end: the workers take up what follows, however long they need for that."""
        self._iterator._timeout = 0
        try:
            self._watched(lambda: iter(self._loader))  # type: ignore[arg-type]
            return
        except (RuntimeError, OSError, EOFError) as error:
            problem = _first_line(error)
        finally:
            self._iterator._timeout = LOOK_S
        self._check_alive(DYING_S)
        self.close()
        raise DataWorkerError(f"the data workers failed: {problem}")

    def _watched(self, act: Callable[[], Any]) -> Any:
        """``act()``; RuntimeError in the middle of it when a worker dies, ChildProcessError before it if one is dead.

        torch's handler of SIGCHLD raises that in the main thread wherever it is, so it knows these processes only while
        they are waited for. It also ends a read of what a killed process has half written.
        """
        with torch_internals.telling_of(self._iterator, self._processes):
            if dead_of(self._processes):
                raise ChildProcessError("a data worker has ended")
            return act()

    # ---- processes

    def _start(self) -> None:
        self._owner = os.getpid()
        context = self._loading.multiprocessing_context
        forked = (context or multiprocessing.get_start_method()) == "fork"
        loader: DataLoader[Any] = DataLoader(
            self._tasks,
            batch_size=None,
            sampler=self._upcoming,
            collate_fn=unchanged,
            num_workers=self._loading.workers,
            prefetch_factor=self._loading.prefetch,
            persistent_workers=True,
            pin_memory=self._pin,
            timeout=LOOK_S,
            worker_init_fn=partial(settle, os.getpid(), forked, None),
            multiprocessing_context=context,
            generator=torch.Generator(),  # else it draws from the one that training uses
        )
        before = set(multiprocessing.active_children())
        loader.check_worker_number_rationality()
        iterator = torch_internals.multiprocess_iterator()  # as iter(loader) would make it
        problem: str | None = None
        dead: list[Any] = []
        begun = False
        try:
            with forking() if forked else nullcontext():
                iterator.__init__(loader)
            begun = True
        except (OSError, RuntimeError) as error:
            problem = str(error)
        finally:
            if not begun:
                self.close()  # some requests may have been sent
                dead = _give_up(iterator, before)
        if dead:  # raised out here, so that no RuntimeError stands behind it: recovery looks for those
            raise died(dead[0])
        if problem is not None:
            raise DataWorkerError(f"{self._loading.workers} data workers cannot be started: {problem}")
        torch_internals.keep_iterator(loader, iterator)
        self._loader, self._iterator = loader, iterator
        self._processes = torch_internals.worker_processes(iterator)
        atexit.register(self.close)

    def _check_alive(self, wait_s: float) -> None:
        dead = dead_of(self._processes, wait_s)
        if dead:
            self.close()
            raise died(dead[0])


def alike(one: SampleRequest, other: SampleRequest) -> bool:
    """Whether both ask for the same samples of the same extent."""
    return one.extent == other.extent and np.array_equal(one.ids, other.ids)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


_CAUSES: dict[int, str] = {
    signal.SIGKILL: "out of memory? Use fewer workers, a smaller prefetch or smaller micro-batches",
    signal.SIGBUS: "is /dev/shm full? Give the container more of it (docker: --shm-size)",
}


def dead_of(processes: list[Any], wait_s: float = 0) -> list[Any]:
    """Those that have ended, or do so within ``wait_s`` seconds: by their pipes, since others may take their status."""
    ended = connection.wait([process.sentinel for process in processes], wait_s)
    return [process for process in processes if process.sentinel in ended]


def died(process: Any) -> DataWorkerError:
    """What to say of a data worker process that has ended."""
    process.join(LOOK_S)  # its pipe closes a moment before its status is there
    code = process.exitcode
    if code is None or code >= 0:
        return DataWorkerError(f"a data worker (process {process.pid}) ended by itself (exit code {code})")
    said = f"a data worker (process {process.pid}) was killed (signal {-code})"
    return DataWorkerError(said, hint=_CAUSES.get(-code))


def _end(iterator: Any, processes: list[Any]) -> None:
    """In peace, or by force where a process is dead already: it may hold a lock that the peaceful way waits for."""
    if not dead_of(processes):
        force = threading.Timer(GRACE_S, _kill, [processes])
        force.name, force.daemon = "data-workers-end", True
        force.start()
        try:
            torch_internals.end_processes(iterator)
        finally:
            force.cancel()
            force.join()
    else:
        torch_internals.let_go(iterator)
    _kill(processes)
    for process in processes:
        process.join(GRACE_S)


def _give_up(iterator: Any, before: set[Any]) -> list[Any]:
    """End what is there of ``iterator``, the making of which failed; those of its processes that were dead already.

    Those that could be started ignore what asks them to end. Children that were there ``before`` are others'.
    """
    torch_internals.forget_processes(iterator)
    torch_internals.let_go(iterator)
    processes = torch_internals.worker_processes(iterator)
    processes += [each for each in multiprocessing.active_children() if each not in {*before, *processes}]
    dead = dead_of(processes)
    _kill(processes)
    for process in processes:
        process.join(GRACE_S)
    return dead


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
