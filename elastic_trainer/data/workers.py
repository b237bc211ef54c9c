"""Data worker processes that fetch ahead: torch's DataLoader over the requests that are still to come.

The next request is usually what the stream delivers next. If not (the ranks changed, the position moved), the stream
begins anew there; requests under way are abandoned between two samples. The position in the data is not here: fetching
ahead changes only when samples are read. What was delivered of the present global batch is kept for a repeated step.

*Runs in* the worker's main thread. *Owns* the data worker processes, from the first request to ``close``.
*Fails by* what the data set raises, with the worker's trace as a note; DataWorkerError when a worker process dies.
*Invariant*: no data worker process outlives this one, or ``close``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM
from elastic_trainer.data.child import forking, settle
from elastic_trainer.data.loading import Loading
from elastic_trainer.data.placing import versions
from elastic_trainer.data.plan import Place, SampleRequest
from elastic_trainer.data.reader import Drawn, SampleReader
from elastic_trainer.data.tasks import Failure, FetchTask, Tasks, unchanged
from elastic_trainer.errors import DataWorkerError
from elastic_trainer.telemetry.logs import logger

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
        self._kept: dict[Place, tuple[Drawn, tuple[int, ...]]] = {}
        self._kept_of: tuple[int, int] | None = None
        self.future: Future = lambda request: iter([request])
        """The requests after a given one; set before each batch."""

    def get(self, request: SampleRequest) -> Drawn:
        """The samples of ``request``, not yet on the device."""
        self._keep_only(request)
        kept = self._kept.get(request.place)
        if kept is not None and versions(kept[0].data) == kept[1]:
            return kept[0]
        drawn = self._delivered(request)
        seen = versions(drawn.data)
        if seen is not None:
            self._kept[request.place] = drawn, seen
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

    def _keep_only(self, request: SampleRequest) -> None:
        """Forget what was delivered of another global batch."""
        batch = request.epoch, request.batch_start
        if batch != self._kept_of:
            self._kept.clear()
            self._kept_of = batch

    def _delivered(self, request: SampleRequest) -> Drawn:
        if not self._coming(request):
            self._aim(request)
        while True:
            task, value = self._next()
            if task.course == self._upcoming.course and alike(task.request, request):
                break
        if isinstance(value, Failure):
            self._aim_again()
            raise value.exception()
        if value is None:
            raise DataWorkerError(f"the data workers gave nothing for samples {request.ids[:8].tolist()}")
        return value

    def _coming(self, request: SampleRequest) -> bool:
        """Whether workers are at ``request``, or have been."""
        course = self._upcoming.course
        return any(task.course == course and alike(task.request, request) for task in self._upcoming.sent)

    def _aim(self, request: SampleRequest) -> None:
        """Go on from ``request``, whatever was expected to come next."""
        self._upcoming.aim(self.future(request))
        self._tasks.begin(self._upcoming.course)
        if self._iterator is None:
            self._start()
        elif not self._upcoming.sent:
            self._go_on()

    def _aim_again(self) -> None:
        """A request failed: the same one again gets a new answer."""
        self._upcoming.aim(iter(()))
        self._tasks.begin(self._upcoming.course)

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
    """Whether both ask for the same samples of the same place."""
    return one.place == other.place and np.array_equal(one.ids, other.ids)


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
