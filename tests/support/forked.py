"""Programs that begin with torch imported: forked from a clean process that has done it once, not started anew.

Importing torch takes longer than most of what a test's program does. The rest is as in a new process: its arguments,
environment, directory and outputs, its exit code, the ends of its threads and what it registered for its exit.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastic_trainer.local.parent_death import EXIT_ORPHAN

PRELOADED = [
    "torch._dynamo",  # each optimizer imports it
    "torch.distributed.run",
    "elastic_trainer.jobs.trainer",
    "elastic_trainer.jobs.mnist",
    "elastic_trainer.worker.session",
    "tests.support.frozen",
]


def _forkserver() -> Any:
    """What this process knows of the clean one."""
    return vars(forkserver)["_forkserver"]


@dataclass(frozen=True, slots=True)
class Program:
    """What the child is to be. ``dies_with_parent``: in a session of its own, and only as long as its parent lives."""

    words: list[str]
    env: dict[str, str]
    out: Path
    err: Path
    cwd: Path
    dies_with_parent: bool
    clean: str
    """The address of the process that forks."""


class Forked:
    """``python WORDS`` (a script, or ``-m`` and a module), with the interface of :class:`subprocess.Popen`.

    ``out`` and ``err`` are files that its outputs are appended to. Workers of a torchrun are forked likewise.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        out: Path,
        err: Path,
        cwd: Path | None = None,
        *,
        dies_with_parent: bool = False,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        _forkserver().ensure_running()
        begun, begins = context.Pipe(duplex=False)
        program = Program(
            [word for word in words if word != "-u"],
            dict(env),
            out.absolute(),
            err.absolute(),
            cwd or Path.cwd(),
            dies_with_parent,
            _forkserver()._forkserver_address,
        )
        self._process: Any = context.Process(target=_become, args=(program, begins))
        with patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # which the child would import again
            self._process.start()
        begins.close()
        with begun, suppress(EOFError):  # else it has ended already
            begun.recv_bytes()
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        """As of subprocess: negative for a signal."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, limit_s: float | None = None) -> int:
        self._process.join(limit_s)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", limit_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(program: Program, begins: Connection) -> None:
    """In the child: what a new interpreter would find, then the program."""
    words, env = program.words, program.env
    if program.dies_with_parent:
        os.setsid()
        threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # not that of this process, which its children would inherit
    begins.send_bytes(b"begun")
    begins.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(program.cwd)
    for number, path in ((1, program.out), (2, program.err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "OMP_NUM_THREADS" in env:  # which torch has read already, with what the forking process had
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if "PYTHONFAULTHANDLER" in env:
        faulthandler.enable()
    here = str(program.cwd) if words[0] == "-m" else str(Path(words[0]).parent)
    sys.path[:0] = [here, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if words[0] == "-m":
            _fork_workers_too(program)
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except Exception as error:  # noqa: BLE001 - the outermost frame of a program
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)  # which multiprocessing would not call
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(EXIT_ORPHAN)


def _fork_workers_too(program: Program) -> None:
    """torchrun starts its workers by the process that this one was forked from."""
    known = _forkserver()
    known._forkserver_address = program.clean
    known.ensure_running = lambda: None  # it is not a child of this process

    def popen(_: SubprocessHandler, words: tuple[str, ...], env: dict[str, str]) -> Forked:
        return Forked(words[1:], env, program.out, program.err, program.cwd, dies_with_parent=True)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
