"""Imports modules in the template, and detects those whose import forks cannot share.

A module is refused if its import reads a variable that differs between workers, starts a thread or a process, leaves a
file or a device (such as CUDA) open, uses a global random number generator, changes the working directory, or loads the
user's own code, which must be read anew at each start.

*Runs in* the template's only thread. *Owns* ``os.environ``'s class in the template.
*Fails by* :class:`Refused` once a module has spoiled the template, which must then be replaced.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import random
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from elastic_trainer.warm.fitness import of_one_worker

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
            if of_one_worker(key):
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
    places = [path] if path is not None else list(getattr(module, "__path__", []))  # of a namespace
    return all(os.path.realpath(each).startswith(roots) for each in places if os.path.isabs(each))


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
        if name in self._tried or self._left_out(name):
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

    def _left_out(self, name: str) -> bool:
        return any(name == each or name.startswith(each + ".") for each in self._without)

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
        if _children():
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

    def settle(self) -> None:
        """After the imports: keep the garbage collector of forks from writing to shared pages."""
        gc.collect()
        gc.freeze()

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
        """``wanted`` with the changes that the imports made to ``os.environ``."""
        now = dict(os.environ.items())
        changed = {name: now[name] for name in now if self._before.get(name) != now[name]}
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
        try:
            found.add(f"{name} ({os.readlink(f'/proc/self/fd/{name}')})")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> Iterable[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


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
    return sum(_name(thread) not in _HARMLESS_THREADS for thread in os.listdir("/proc/self/task"))


def _name(thread: str) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().rstrip("\n")
    except OSError:
        return ""  # it has ended
