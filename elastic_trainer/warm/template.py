"""The template: imports modules once, then forks a process for each request of its owner.

A fork inherits modules that were imported with the template's environment, interpreter options and working directory. A
command fits if all of these that a module may have read during its import are equal. A module is refused if its import
reads a variable that differs between workers, starts a thread or a process, leaves a file or a device (such as CUDA)
open, uses a global random number generator, changes the working directory, or loads the user's own code.

A request is a length, a JSON object and four descriptors: standard input, output and error of the fork, and a pipe by
which the owner starts it. An object without a command is answered when the named modules are imported, with those that
it names (``also``), which the next program will need. A process between template and fork exits at once, so that the
fork becomes a child of the owner, which can wait for it and read its exit code like that of any other child. The fork
runs its script or module as ``python`` would, and sends the names that it imports.

*Runs in* its own process, with one thread, and in forks of it. *Owns* ``os.environ``'s class in the template;
``__main__``, ``sys.argv`` and the first entry of ``sys.path`` in a fork.
*Fails by* exiting; its owner then starts programs cold. A fork exits as the interpreter would, without frames of this
module in its traces. *Invariant*: the template dies with the thread of its owner that started it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import mmap
import os
import random
import runpy
import select
import signal
import site
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# ---- a process's identity in the kernel: its parent, displayed command, parent-death signal and host (Linux alone)

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 35, 36, 37
_PR_SET_MM_MAP = 14
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.sbrk.restype = ctypes.c_void_p
_ADOPTING = threading.Lock()
_PROCESS_IDS = 0x20000000
_OF_A_HOST = (("net", 0x40000000), ("uts", 0x04000000), ("ipc", 0x08000000), ("mnt", 0x00020000))
"""Kinds of namespaces, and the flags by which setns(2) makes sure of the kind."""
_shown: list[mmap.mmap] = []
"""The command and environment of this process, as /proc shows them."""


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_LIBRARY.prctl(option, *values), f"prctl {option}")


def _set_namespace(path: str, flag: int) -> None:
    with open(path, "rb") as namespace:
        _checked(_LIBRARY.setns(namespace.fileno(), flag), f"setns {path}")


@contextmanager
def next_child_on(host: int) -> Iterator[None]:
    """In the body, this thread's children get process ids of the host whose first process is ``host`` (0: this one).

    They must then :func:`enter_host`: process ids can be entered by a fork alone, all else by the process itself.
    """
    if host:
        _set_namespace(f"/proc/{host}/ns/pid", _PROCESS_IDS)
    try:
        yield
    finally:
        if host:
            _set_namespace("/proc/thread-self/ns/pid", _PROCESS_IDS)


def enter_host(host: int) -> None:
    """Move this process, which has a single thread and the host's process ids, to the host in all other respects."""
    directory = os.getcwd()
    for name, flag in _OF_A_HOST:  # the mounts last: /proc is then the host's
        _set_namespace(f"/proc/{host}/ns/{name}", flag)
    os.chdir(directory)
    platform: Any = sys.modules.get("platform")
    if platform is not None:
        platform._uname_cache = None  # of the template's host, whose name platform.node() would go on to give


@contextmanager
def adopting() -> Iterator[None]:
    """In the body, a grandchild whose parent ends becomes a child of this process. One thread at a time."""
    with _ADOPTING:
        before = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make ``/proc/PID/cmdline`` and ``/proc/PID/environ`` show these, as after an exec (prctl(2), PR_SET_MM_MAP)."""
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(command) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(command + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle = start + len(command)
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    code_start, code_end, stack, data_start, data_end, brk = (int(stat[each - 3]) for each in (26, 27, 28, 45, 46, 47))
    addresses = (code_start, code_end, data_start, data_end, brk, _LIBRARY.sbrk(0), stack)
    # struct prctl_mm_map: eleven addresses, the auxiliary vector (unchanged), the descriptor of the program (none).
    asked = struct.pack("=12Q2I", *addresses, start, middle, middle, middle + len(variables), 0, 0, 0xFFFFFFFF)
    buffer = ctypes.create_string_buffer(asked, len(asked))
    _prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(buffer), len(asked))
    _shown[:] = [memory]


# ---- which commands may be forked

OPTIONS = frozenset({"-u"})
"""The interpreter options that a template can have; torchrun passes no others."""
_OF_ONE_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_DIST_USE_NCCL2",
})  # fmt: skip
"""Variables that differ between workers: a module that reads one during its import is not preloaded."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""An agent sets these for its workers. Compilers read them when they compile. (torch._dynamo reads one during its
import, for a cache that TORCH_CACHING_PRECOMPILE alone uses.)"""
_PREFIXES = ("TORCHELASTIC_", "ELASTIC_TRAINER_")


def of_one_worker(name: str) -> bool:
    """Whether the variable ``name`` belongs to one worker, or one of its lives, or to the workers of one node."""
    return name in _OF_ONE_WORKER or name in CACHES or name.startswith(_PREFIXES)


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A Python program: ``python OPTIONS [-m] TARGET ARGUMENTS``."""

    executable: str
    options: tuple[str, ...]
    module: bool
    target: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """How a template was started. ``free`` variables may differ, like those of one worker."""

    executable: str
    options: tuple[str, ...]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    free: Collection[str] = ()


def decide(words: Sequence[str], environment: Mapping[str, str], directory: str, facts: Facts) -> PythonCommand | str:
    """What to fork of the template of ``facts`` for ``words`` with ``environment`` in ``directory``, or why nothing."""
    if not words or words[0] != facts.executable:
        return f"the command is not one of {facts.executable}"
    count = next((i for i, word in enumerate(words[1:]) if word not in OPTIONS), len(words) - 1)
    options, rest = tuple(words[1 : 1 + count]), words[1 + count :]
    if _unbuffered(options, environment) != _unbuffered(facts.options, facts.environment):
        return "its standard output is buffered differently"
    module = bool(rest) and rest[0] == "-m"
    rest = rest[1:] if module else rest
    if not rest or rest[0].startswith("-"):
        return "the command names neither a script nor a module"
    if directory != facts.directory:
        return f"the working directory is {directory}, not {facts.directory}"
    changed = {name for name, _ in environment.items() ^ facts.environment.items()} - {*facts.free, *CACHES}
    differing = sorted(name for name in changed if name in facts.environment or not of_one_worker(name))
    if differing:
        return f"the environment differs in {', '.join(differing)}"
    return PythonCommand(words[0], options, module, rest[0], tuple(rest[1:]))


def _unbuffered(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    return "-u" in options or bool(environment.get("PYTHONUNBUFFERED"))


class ImportRecorder:
    """A finder at the head of ``sys.meta_path`` that finds nothing, and sends the names that later finders found."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._asked = ""
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        """In the worker's own children: stop recording and drop the link to the template."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Send the previous name: by now it is loaded, or its import has failed."""
        before, self._asked = self._asked, name
        if before in sys.modules and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, self._descriptor)
                try:
                    link.send(before.encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                finally:
                    link.detach()


_HARMLESS = frozenset({"rich.style"})
"""Modules that draw a random number which forks may share: rich.style uses one as an id of a style."""
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})
"""jemalloc's, which pyarrow brings (and ``datasets`` that): a fork gives memory back without it."""
_read: list[str] = []


class _Watched(os._Environ):  # type: ignore[type-arg]
    """Records reads of variables that differ between workers."""

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)  # the template's variables are those of all its forks
        except KeyError:
            if of_one_worker(key) and key not in CACHES:
                _read.append(key)
            raise


class Refused(Exception):
    """The import of ``module`` makes this process unusable as a template."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"importing {module} {reason}")
        self.module = module


def installed_roots() -> tuple[str, ...]:
    """The directories of installed packages, the standard library and this package."""
    found = [*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    found += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    own = str(Path(__file__).parents[1])
    return tuple(sorted({os.path.realpath(each) + os.sep for each in [*found, own]}))


def is_installed(module: ModuleType, roots: tuple[str, ...]) -> bool:
    """Whether ``module`` is not the user's own code; a module without a file is built in or was created by another."""
    path: str | None = getattr(module, "__file__", None)
    paths = [path] if path is not None else list(getattr(module, "__path__", []))  # of a namespace
    return all(os.path.realpath(each).startswith(roots) for each in paths if os.path.isabs(each))


class Preloading:
    """The modules of the template: imports them, checks them, and adjusts their state in a fork."""

    def __init__(self, without: Collection[str]) -> None:
        self._without = tuple(without)
        self._roots = installed_roots()
        self._before = dict(os.environ)
        self._directory = os.getcwd()
        self._descriptors: set[str] = set()
        self._random = random.getstate()
        self._seeds: dict[str, Any] = {}
        """The state of each library's random number generator right after its import."""
        self._seen = set(sys.modules)
        self._tried: set[str] = set()
        os.environ.__class__ = _Watched

    def load(self, name: str, *, named: bool) -> None:
        """Import ``name``; a module ``named`` by the user may be any module. Raises Refused."""
        if name in self._tried or any(name == each or name.startswith(each + ".") for each in self._without):
            return
        self._tried.add(name)
        _read.clear()
        self._descriptors = _descriptors()
        try:
            if not named and not _findable(name, self._roots):
                return
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - the worker will import it itself and report the exception
            if named:
                print(f"elastic-trainer: {name} cannot be preloaded: {sys.exc_info()[1]!r}", file=sys.stderr)
        if sys.modules.keys() - self._seen:
            self._check(name, named)

    def _check(self, name: str, named: bool) -> None:
        if _read:
            raise Refused(name, f"reads {', '.join(sorted(set(_read)))}")
        if os.getcwd() != self._directory:
            raise Refused(name, "changes the working directory")
        fresh = sys.modules.keys() - self._seen
        if fresh & _HARMLESS:
            self._random = random.getstate()
        if random.getstate() != self._random or self._drawn():
            raise Refused(name, "uses random numbers")
        opened = _descriptors() - self._descriptors
        if opened:
            raise Refused(name, f"leaves open {', '.join(sorted(opened))}")
        if Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            raise Refused(name, "starts a process")
        if _threads() > 1 and _threads_after_fork() > 1:
            raise Refused(name, "starts a thread")
        self._seen |= fresh
        strange = [each for each in sorted(fresh) if not is_installed(sys.modules[each], self._roots)]
        if strange and not named:
            raise Refused(name, f"loads {strange[0]}, which is not installed")

    def _drawn(self) -> bool:
        """Whether an import has drawn from or seeded numpy's or torch's generator."""
        now: dict[str, Any] = {}
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if hasattr(numpy, "get_state"):
            _, keys, position, *_ = numpy.get_state()  # type: ignore[union-attr]
            now["numpy"] = keys.tobytes(), position
        if hasattr(torch, "default_generator"):
            now["torch"] = torch.default_generator.get_state().tolist()  # type: ignore[union-attr]
        self._seeds = now | self._seeds
        return any(self._seeds[name] != now[name] for name in now)

    def hidden_by(self, directory: str) -> str | None:
        """A file in ``directory`` that would shadow a loaded module, if ``directory`` comes first in ``sys.path``."""
        try:
            names = {entry: entry.partition(".")[0] for entry in os.listdir(directory)}
        except OSError:
            return None
        for entry, name in names.items():
            module, path = sys.modules.get(name), os.path.join(directory, entry)
            own = getattr(module, "__file__", None)
            if module is None or name in sys.builtin_module_names or own is None or name == "__main__":
                continue
            importable = entry.endswith((".py", ".pyc", ".so")) or os.path.exists(os.path.join(path, "__init__.py"))
            if importable and not os.path.realpath(own).startswith(os.path.realpath(path)):
                return path
        return None

    def environment(self, wanted: dict[str, str]) -> dict[str, str]:
        """``wanted`` with the changes that the imports made to ``os.environ``, but for where caches are."""
        now = dict(os.environ.items())
        changed = {name: now[name] for name in now if self._before.get(name) != now[name] and name not in CACHES}
        return {name: value for name, value in wanted.items() if name in now or name not in self._before} | changed

    def leave(self, environment: dict[str, str]) -> None:
        """In a fork: set up the state of a process that imported the modules itself."""
        os.environ.__class__ = os._Environ
        os.environ.clear()
        os.environ.update(environment)
        if "numpy" in self._seeds:
            sys.modules["numpy.random"].seed()
        if "torch" in self._seeds:
            sys.modules["torch"].default_generator.seed()  # Python reseeds its own generator after a fork


def _findable(name: str, roots: tuple[str, ...]) -> bool:
    """Whether the top-level package of ``name`` is installed."""
    top = name.partition(".")[0]
    if top in sys.modules:
        return is_installed(sys.modules[top], roots)
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    origin = str(spec.origin)
    return origin in ("built-in", "frozen") or os.path.realpath(origin).startswith(roots)


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add(f"{name} ({os.readlink(f'/proc/self/fd/{name}')})")
    return found


def skip_last_collection() -> None:
    """For atexit: the interpreter does not look for garbage among all of torch before it ends, which takes 0.5 to 1 s.

    It must where triton brings types of nanobind (3.9, with torch 2.15): 65 lines would call those leaked.
    """
    location = getattr(sys.modules.get("triton._C.libtriton.ir"), "location", None)
    if type(location).__module__ == "nanobind":
        gc.unfreeze()
    else:
        gc.freeze()


def _threads_after_fork() -> int:
    """Threads left after a fork of this process: OpenBLAS ends its threads before a fork, others would be lost."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return _threads()


def _threads() -> int:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text().rstrip("\n"))
    return sum(name not in _HARMLESS_THREADS for name in names)


def first_entry(command: PythonCommand) -> str:
    """What Python puts first in ``sys.path``: the script's directory, or for a module the working directory."""
    return os.getcwd() if command.module else os.path.dirname(os.path.realpath(command.target))


def run(command: PythonCommand, words: list[str], installed: str) -> None:
    """Run ``command`` as ``__main__``; its entry is inserted in ``sys.path`` before ``installed``."""
    main: Any = ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.argv = ["-m" if command.module else command.target, *command.arguments]
    sys.orig_argv = words
    if not sys.flags.safe_path:
        sys.path.insert(sys.path.index(installed) if installed in sys.path else 0, first_entry(command))
    importlib.invalidate_caches()
    own = os.getpid()
    try:
        if command.module:
            if not hasattr(sys.modules.get(command.target), "__path__"):
                sys.modules.pop(command.target, None)  # a preloaded module would exist twice
            runner: Any = runpy
            runner._run_module_as_main(command.target)
        else:
            path = os.path.abspath(command.target)
            main.__file__, main.__cached__, main.__loader__ = path, None, SourceFileLoader("__main__", path)
            with io.open_code(path) as file:
                source = file.read()
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        if isinstance(error.code, str):
            _record(error, own)
        raise
    except KeyboardInterrupt as error:
        _report(error)
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None  # so that the interpreter ends by SIGINT, as its caller expects
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a program
        _report(error)
        _record(error, own)
        raise SystemExit(1) from None


def _report(error: BaseException) -> None:
    """Print it as the interpreter would, without this module's frame."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)


def _record(error: BaseException, own: int) -> None:
    """Leave it for torchrun and the agent in torchrun's error file, as torch's @record would (``ErrorHandler``).

    Unless the script has left its own; ``own`` is the process id of the program, which a child of the script has not.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or os.path.exists(file) or os.getpid() != own:
        return
    with contextlib.suppress(Exception):  # such as one of the error's own __str__
        words = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        more = {"timestamp": str(int(time.time()))}
        if not isinstance(error, SystemExit):  # whose words say all
            more["py_callstack"] = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]
        report = json.dumps({"message": {"message": words[:_LONGEST_WORDS], "extraInfo": more}})
        part = Path(f"{file}.part")
        try:
            part.write_text(report)
            part.replace(file)  # torchrun fails on half a file
        except OSError:
            part.unlink(missing_ok=True)
            raise


_LONGEST_WORDS = 4_000
_LONGEST_TRACE = 64_000
TITLE = "elastic-trainer: template of processes"
EXIT_ORPHAN = 75
COMPILERS = ("torch._inductor.compile_fx", "elastic_trainer.warm.compiling")
"""What a worker imports that compiles its model, and what makes a fork's compiler start at once."""
QUIET_S = 5.0
"""Seconds after the last learned name: by then the worker has finished its own imports."""
_HEADER = 8
_PIECE = 1 << 16
_DESCRIPTORS = 4


@dataclass(frozen=True, slots=True)
class Start:
    """The start-up data of a template."""

    preload: Sequence[str]
    without: Sequence[str]
    learn: bool
    owner: int
    facts: Facts


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    content = json.dumps(message).encode()
    socket.send_fds(link, [len(content).to_bytes(_HEADER, "little")], list(descriptors))
    link.sendall(content)


def receive(link: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message. Raises EOFError when the other end is closed."""
    header, found, _, _ = socket.recv_fds(link, _HEADER, descriptors)
    if len(header) != _HEADER:
        raise EOFError
    left, pieces = int.from_bytes(header, "little"), []
    while left:
        pieces.append(link.recv(min(left, _PIECE)))
        if not pieces[-1]:
            raise EOFError
        left -= len(pieces[-1])
    message: dict[str, Any] = json.loads(b"".join(pieces))
    return message, list(found)


INHERITED: list[tuple[socket.socket, int, Facts]] = []
"""At most one template that this process, itself a fork, has inherited from its own: the link to it, its process, its
facts. A fork that starts programs itself need not import everything again."""
Program = tuple[PythonCommand, list[str]]
"""What a fork runs, and the words of its displayed command."""


class Template:
    """Serves its owner at the other end of ``link``; in a fork, :meth:`serve` returns the program to run."""

    def __init__(self, link: socket.socket, start: Start, modules: Preloading, flaw: str) -> None:
        self._link, self._start, self._modules = link, start, modules
        self._pending = [(name, True) for name in start.preload]
        self._learned, self._taught = socket.socketpair()
        self._rest, self._known, self._heard = "", set(start.preload), 0.0
        self._working = True
        self._flaw, self._flawed = flaw, ""
        """Why forking is impossible here, and the responsible module."""

    def serve(self) -> Program:
        """Import, learn and fork until the owner has ended; returns only in a fork."""
        while True:
            quiet_s = 0.0 if self._working else self._heard + QUIET_S - time.monotonic()
            limit_s = max(0.0, quiet_s) if self._pending else None
            ready = select.select([self._link, self._learned], [], [], limit_s)[0]
            if self._link in ready:
                program = self._answer()
                if program is not None:
                    return program
            elif self._learned in ready:
                self._learn((self._rest + self._learned.recv(_PIECE).decode(errors="replace")).split("\n"))
            else:
                self._working = True
                self._load_next()

    def _learn(self, lines: list[str]) -> None:
        *names, self._rest = lines
        fresh = [name for name in dict.fromkeys(names) if name not in self._known]
        if fresh:
            self._known.update(fresh)
            self._pending += [(name, False) for name in fresh]
            if COMPILERS[0] in fresh:
                self._pending.append((COMPILERS[1], False))
            self._heard = time.monotonic()

    def _load_next(self) -> None:
        name, named = self._pending.pop(0)
        try:
            self._modules.load(name, named=named)
        except Refused as refused:
            self._flaw, self._flawed = str(refused), refused.module
            self._pending.clear()
        if not self._pending:
            self._working = False
            gc.collect()
            gc.freeze()  # that of forks then writes to no shared page

    def _answer(self) -> Program | None:
        try:
            order, descriptors = receive(self._link, _DESCRIPTORS)
        except (EOFError, OSError):
            os._exit(0)
        if self._start.learn:
            also = [name for name in order.get("also", ()) if name not in self._known]
            self._known.update(also)
            self._pending[:0] = [(name, True) for name in also]
        while self._pending and self._pending[0][1] and not self._flaw:
            self._load_next()  # the program would import these too
        if "command" not in order:
            send(self._link, {})
            return None
        command = PythonCommand(**order["command"])
        hidden = self._modules.hidden_by(first_entry(command))
        if self._flaw:
            reason = self._flaw
        elif not command.module and not (command.target.endswith(".py") and os.path.isfile(command.target)):
            reason = f"{command.target} is not a Python file"
        elif hidden is not None:
            reason = f"{hidden} shadows a module of the template"
        else:
            return self._fork(command, order, descriptors)
        for each in descriptors:
            os.close(each)
        send(self._link, {"cold": reason, "without": self._flawed})
        return None

    def _fork(self, command: PythonCommand, order: dict[str, Any], descriptors: list[int]) -> Program | None:
        hear, say = os.pipe()
        middle = os.fork()
        if middle == 0:
            with next_child_on(order["host"]):
                child = os.fork()
            if child != 0:
                os.write(say, child.to_bytes(_HEADER, "little"))
                os._exit(0)
            os.close(hear)
            os.close(say)
            return self._become(command, order, descriptors)
        for each in (say, *descriptors):
            os.close(each)
        pid = int.from_bytes(os.read(hear, _HEADER), "little")
        os.close(hear)
        os.waitpid(middle, 0)
        send(self._link, {"pid": pid} if pid else {"cold": "the template could not fork", "without": ""})
        return None

    def _become(self, command: PythonCommand, order: dict[str, Any], descriptors: list[int]) -> Program | None:
        """Become the requested program; None in the template of such a fork."""
        *standard, go = descriptors
        self._link.close()
        if os.read(go, 1) != b"g":
            os._exit(0)  # the owner has given up and started the program cold
        for number, each in enumerate(standard):
            os.dup2(each, number)
        for each in descriptors:
            os.close(each)
        if order["host"]:
            enter_host(order["host"])
        if order["own_template"] and self._fork_template():
            return None
        os.setsid()
        if order["death_signal"]:
            die_with(0 if order["host"] else order["owner"], order["death_signal"])  # 0: an owner on another host
        gc.enable()
        atexit.register(skip_last_collection)
        self._learned.close()
        if self._start.learn:
            sys.meta_path.insert(0, ImportRecorder(self._taught.detach()))
        else:
            self._taught.close()
        show(order["words"], order["environment"])
        self._modules.leave(self._modules.environment(order["environment"]))
        return command, order["words"]

    def _fork_template(self) -> bool:
        """Fork a template for this process: True in it."""
        mine, its = socket.socketpair()
        owner = os.getpid()
        child = os.fork()
        if child != 0:
            its.close()
            facts = self._start.facts  # this process also passes on the variables that the imports have set
            given = self._modules.environment(dict(facts.environment))
            INHERITED.append((mine, child, replace(facts, environment=given)))
            return False
        mine.close()
        os.setsid()
        die_with(owner)
        self._link = its
        self._learned, self._taught = socket.socketpair()
        return True


def die_with(owner: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send ``signum`` when the parent's thread, which must be one of ``owner``, ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != owner:
        os._exit(EXIT_ORPHAN)


def main() -> None:
    """``python -c "from ... import main; main()" DESCRIPTOR``: serve, and in a fork run its program."""
    gc.disable()  # imports leave next to no garbage: looking for it takes an eighth of their time
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    values, _ = receive(link)
    start = Start(**{**values, "facts": Facts(**values["facts"])})
    die_with(start.owner)
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a program gets its own entry
    installed = sys.path[0]
    flaw = ""
    try:
        show([TITLE], os.environ)
    except OSError as error:
        flaw = f"this kernel does not let a fork change its displayed command ({error})"
    command, words = Template(link, start, Preloading(start.without), flaw).serve()
    run(command, words, installed)
