"""Where this package meets torchrun's agent: signals, what it starts and why, the store it gets, how it exits.

*Signals.* torchrun mishandles SIGTERM and SIGHUP in four situations.
Before its workers start, SIGTERM has its default action, and none at all for process 1 of a container: a pod that is
evicted while it waits for etcd or other nodes would join later, and be killed in the middle of its work. Here an
exception ends the process. Destructors and callbacks may swallow it, so it is raised again until the process ends;
where that end itself hangs, the process exits at once after a while.
While torchrun ends its workers because of a first signal, its handler raises for a second one too, and leaves workers
behind that nobody ends. Two come at once when a terminal and a service manager both send one, or when the process that
started torchrun dies with several threads (prctl(2), PR_SET_PDEATHSIG).
After a success, the first pod of a Kubernetes Job to exit makes the controller end the others: these are about to exit
with 0, and must still do so.
SIGHUP, the end of a terminal, makes a node leave as SIGTERM does. Under ``nohup`` it is ignored at the start, and stays
so: torchrun would handle it all the same, and pass it on to workers that ignore it, which are killed then.

*What it starts.* The handler needs the number of workers before it can assign ranks. torchrun's own backends get it
from a second exchange after the rendezvous, in which any node can block on a dying one; here it is read from the frames
of torchrun's agent, which passes none on.

torchrun starts each worker by one method, which returns a Popen; for warm starts only this method is replaced.

*Its store* answers from the round document: torchrun uses it for the ranks of its workers (a role exchange), and for a
barrier when they have finished. Neither needs other nodes here, so no node can block or fail on a dying one.

*Runs in* torchrun's main thread. *Owns* the process's handlers for SIGTERM and SIGHUP before and after torchrun's own,
which it replaces, after an early signal its real-time timer and SIGALRM, and the template's process.
*Fails by* SystemExit with the exit code of a node that left on request, from wherever the main thread is; ConfigError
when no torchrun agent is calling; KeyError for keys of the store that torchrun 2.13 does not use.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pwd
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.elastic.agent.server.api import ElasticAgent, RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_LEFT, ConfigError, ElasticTrainerError, last_line
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.torch_internals import WorkerStart
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest
from elastic_trainer.warm.template import CACHES, OPTIONS, of_one_worker

if TYPE_CHECKING:
    from elastic_trainer.membership.documents import RoundDocument

Handler = Callable[[int, FrameType | None], None]
LEAVING = (signal.SIGTERM, signal.SIGHUP)
"""What asks a node to leave by plan, with exit code 143."""
_AGAIN_S, _LIMIT_S = 1.0, 20.0
"""After an early signal: seconds between two exceptions, and until the process exits at once."""


# ---- signals


def listen_for_sigterm() -> None:
    """Handle SIGTERM and SIGHUP from now on, unless the process already does or ignores SIGHUP; a second signal cannot
    disturb the first."""
    for each in LEAVING:
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, unless_leaving(_leave))
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")  # torchrun's --signals-to-handle (torch 2.10 to 2.13)
    if handled is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        kept = [name for name in handled.split(",") if name.strip() != "SIGHUP"]
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(kept)
    name = "_terminate_process_handler"  # torchrun's own, from when it starts workers (torch 2.10 to 2.13)
    torchruns: Handler | None = getattr(api, name, None)
    if torchruns is not None:
        setattr(api, name, unless_leaving(torchruns))


def unless_leaving(handler: Handler) -> Handler:
    """``handler``, but ignored while this thread still handles the exception of an earlier signal.

    A swallowed exception is no longer being handled: the next signal raises again.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        error = sys.exception()
        while error is not None:
            if isinstance(error, SignalException) or (isinstance(error, SystemExit) and error.code == EXIT_LEFT):
                return
            error = error.__context__
        handler(number, frame)

    return handle


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Uses neither a logger nor a stream: the main thread may be inside one.
    sent = signal.Signals(number)
    said = f"elastic-trainer: {sent.name} came before the workers were started: this node leaves\n".encode()
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, said)
    limit, again = Deadline.after(_LIMIT_S), unless_leaving(_leave_again)

    def remind(number: int, frame: FrameType | None) -> None:
        if limit.expired:
            os._exit(EXIT_LEFT)
        again(number, frame)

    signal.signal(signal.SIGALRM, remind)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, _LIMIT_S)  # not before: Python itself is exiting
    raise SystemExit(EXIT_LEFT) from SignalException(f"{sent.name} came early", sent)


def _leave_again(number: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "__main__":  # otherwise Python itself is exiting
        raise SystemExit(EXIT_LEFT)


def ignore_sigterm() -> None:
    """The run has succeeded: this process is about to exit with 0, so ignore what asks it to leave."""
    if threading.current_thread() is threading.main_thread():
        for each in LEAVING:
            signal.signal(each, signal.SIG_IGN)


# ---- what it starts, and why


def local_workers() -> WorkerSpec:
    """What the nearest torchrun agent up the stack starts on this node. Raises ConfigError if there is none."""
    for names in _callers():
        if isinstance(agent := names.get("self"), ElasticAgent):
            return agent.get_worker_group().spec
    raise ConfigError("this rendezvous backend was not called by torchrun's agent", hint="start the job with torchrun")


def launched_script() -> str:
    """The script or module that torchrun was called with, before it has an agent; empty if that cannot be seen."""
    for names in _callers():
        if isinstance(names.get("config"), LaunchConfig) and "entrypoint" in names:
            return job_of(names["entrypoint"], names.get("args") or ())["script"]
    return ""


def failures() -> dict[int, ProcessFailure]:
    """The failed workers, by rank, if torchrun calls because of their failure."""
    for names in _callers():
        if isinstance(result := names.get("run_result"), RunResult):
            return dict(result.failures)
    return {}


def error_outputs() -> dict[int, Path]:
    """The files of their own that this node's workers have for error output, by local rank."""
    for names in _callers():
        for each in (names.get("self"), names.get("agent")):
            if isinstance(each, ElasticAgent):
                return torch_internals.error_outputs(each)
    return {}


def _callers() -> Iterator[dict[str, Any]]:
    """The local variables of all callers, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def job() -> dict[str, str]:
    """The fields by which a run's spec knows its job: those of the calling torchrun agent, and this process's user."""
    spec = local_workers()
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # containers may know no names
        user = str(os.geteuid())
    return {"user": user, **job_of(spec.entrypoint, spec.args)}


_OF_NODE = re.compile(r"--?(node|machine|host)[-_]?(rank|id|name)?=", re.IGNORECASE)
_DIRECTORY = re.compile(r"(?:--?checkpoint[-_]dir(?:ectory)?|checkpoint\.directory)=(.+)", re.IGNORECASE | re.DOTALL)


def job_of(entrypoint: Callable[..., Any] | str | None, arguments: Sequence[Any]) -> dict[str, str]:
    """Script, arguments and checkpoint directory as the user named them; nodes may have different Pythons.

    What names the node itself (``--node-rank 1``) is no part of them.
    """
    words = [str(word) for word in arguments]
    if words[:2] == ["-u", "-m"]:
        script, words = f"-m {words[2]}", words[3:]
    elif words[:1] == ["-u"]:
        script, words = words[1], words[2:]
    else:
        script = entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__qualname__", "")
    options = [word for word in _split(words) if not _OF_NODE.match(word)]
    found = [match for word in options if (match := _DIRECTORY.match(word))]
    rest = "\0".join(word for word in options if not _DIRECTORY.match(word))
    digest = hashlib.sha256(rest.encode(errors="surrogateescape")).hexdigest()[:16]
    return {"script": script, "command": digest, "checkpoint_dir": found[-1].group(1) if found else ""}


def _split(words: Sequence[str]) -> Iterator[str]:
    """``--name value`` as ``--name=value``; other words as they are."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("--") and "=" not in word and left and not left[0].startswith("-"):
            word += f"={left.pop(0)}"
        yield word


# ---- how it starts them warm

OFF, AUTOMATIC = "off", "auto"
"""Special values of ``--rdzv-conf preload``; any other value names modules."""
_FIRST = ("torch",)
"""The modules that every worker imports; preloaded before the first worker has shown which others it needs."""
Await = Callable[[float, Sequence[str]], object]
"""Waits that many seconds at most until workers would start at once, with these modules too."""


def at_once(limit_s: float, also: Sequence[str] = ()) -> None:
    """Workers start cold: there is nothing to wait for."""


def start_workers_warm(preload: str) -> Await:
    """From now on start this process's workers as forks of a template that has imported their modules, if this torchrun
    supports it and ``preload`` enables it.

    A worker that cannot be forked is started by torchrun's own method, and one event says why. Output redirection, log
    prefixes, signals and exit codes remain torch's.
    """
    if preload == OFF:
        return at_once
    lacking = torch_internals.lacking([torch_internals.WARM_STARTS])
    if lacking or sys.platform != "linux":
        reason = lacking[0] if lacking else f"there is no template of processes on {sys.platform}"
        logger().warning("template.refused", reason=reason)
        return at_once
    names = _FIRST if preload == AUTOMATIC else tuple(preload.split(":"))
    marks = (ENV_LEDGER_DIR, *CACHES)  # of all processes of a local cluster, and of all workers of this node
    environment = {name: value for name, value in os.environ.items() if name in marks or not of_one_worker(name)}
    try:
        starter = Starter(names, sorted(OPTIONS), environment, learn=preload == AUTOMATIC)
    except OSError as error:  # out of processes, descriptors or memory, or no access to /dev/null
        logger().warning("template.refused", reason=str(error))
        return at_once
    atexit.register(starter.close)
    torch_internals.replace_worker_start(warm_start(starter, torch_internals.worker_start()))
    return starter.await_imports


def warm_start(starter: Starter, cold: WorkerStart, clock: Clock = SYSTEM) -> WorkerStart:
    """Wraps torch's method ``cold``."""

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        began = clock.monotonic()
        stdout, stderr = torch_internals.output_of(self)
        try:
            worker = starter.start(StartRequest([str(word) for word in args], env, 0, stdout, stderr))
        except (ColdStart, OSError) as reason:
            logger().info("worker.started", warm=False, local_rank=self.local_rank_id, reason=str(reason))
            return cold(self, args, env)
        took_s = round(clock.monotonic() - began, 3)
        logger().info("worker.started", warm=True, local_rank=self.local_rank_id, pid=worker.pid, took_s=took_s)
        return worker

    return popen


# ---- the store it gets


ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
BARRIER_COUNT = "/num_members"
BARRIER_END = "/last_member"


class RoundStore:
    """A torch ``Store`` for torchrun's agent (duck-typed: workers never get it).

    ``finish(timeout_s)`` is called when this node's workers have succeeded; it returns when all other nodes have ended.
    """

    def __init__(self, document: RoundDocument, finish: Callable[[float], None]) -> None:
        self._document, self._finish = document, finish
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Keep ``value``; torchrun writes its own role information."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``: written before, or known from the round."""
        members = self._document.members
        if key.startswith(ASSIGNED_RANKS):
            member = members[int(key.removeprefix(ASSIGNED_RANKS))]
            alike = [other for other in members if other.role == member.role]
            role_rank = sum(other.local_world_size for other in alike if other.first_rank < member.first_rank)
            role_size = sum(other.local_world_size for other in alike)
            return json.dumps([member.first_rank, self._document.world_size, role_rank, role_size]).encode()
        if key in self._values:
            return self._values[key]
        if key.startswith(ROLE_INFO):
            rank = int(key.removeprefix(ROLE_INFO))
            info = {"role": members[rank].role, "rank": rank, "local_world_size": members[rank].local_world_size}
            return json.dumps(info).encode()
        raise KeyError(f"torchrun requested {key!r}, which this backend does not know")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Count up; the barrier's counter never reaches the number of nodes, so that ``wait`` decides."""
        count = int(self._values.get(key, b"0")) + amount
        self.set(key, str(count))
        return 0 if key.endswith(BARRIER_COUNT) else count

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for the end of the run (the barrier), or return at once for keys that are known."""
        if any(key.endswith(BARRIER_END) for key in keys):
            self._finish((timeout or self._timeout).total_seconds())


# ---- how its process exits


@dataclass(frozen=True, slots=True)
class ExitReason:
    """``planned``: the node was asked to leave; otherwise it gave up."""

    planned: bool
    reason: str
    exit_code: int


def exit_reason_of(error: BaseException | None, *, made_steps: bool, died: str = "") -> ExitReason | None:
    """What ``error`` means for the run; None for a process that succeeds. ``died``: how its worker died."""
    if isinstance(error, SignalException):
        name = signal.Signals(error.sigval).name
        return ExitReason(True, name, EXIT_LEFT if error.sigval in LEAVING else EXIT_FAILURE)
    if isinstance(error, KeyboardInterrupt):
        return ExitReason(True, "SIGINT", EXIT_FAILURE)
    if isinstance(error, SystemExit):
        return _of_exit(error)
    if isinstance(error, ElasticTrainerError):
        return ExitReason(False, error.message, error.exit_code)
    if error is None:
        return None
    code = exit_code_after(error, made_steps=made_steps)
    reason = f"{died}, and no --max-restarts is left" if isinstance(error, ChildFailedError) else last_line(error)
    return ExitReason(False, reason, EXIT_FAILURE if code is None else code)


def _of_exit(error: SystemExit) -> ExitReason | None:
    code = error.code if isinstance(error.code, int) else EXIT_FAILURE if error.code else 0
    if code == 0:
        return None
    why = error.__cause__ or error.__context__
    if code == EXIT_LEFT:
        sent = why.sigval if isinstance(why, SignalException) else signal.SIGTERM
        return ExitReason(True, signal.Signals(sent).name, code)
    return ExitReason(False, why.message if isinstance(why, ElasticTrainerError) else "it cannot continue", code)


def exit_code_after(error: BaseException | None, *, made_steps: bool) -> int | None:
    """The exit code that this process must use instead of torchrun's; None if torchrun's is right.

    ``made_steps``: its workers have made steps, so their configuration was right.
    """
    if isinstance(error, SignalException) and error.sigval in LEAVING:
        return EXIT_LEFT
    wrong = isinstance(error, ChildFailedError) and any(e.exitcode == EXIT_CONFIG for e in error.failures.values())
    return EXIT_CONFIG if wrong and not made_steps else None
