"""The first process of a host (see hosts.py): ``python -m elastic_trainer.local.host_init PARENT JSON``.

Prints its id as the parent sees it, then adopts the orphans of all other processes of the host.

*Runs in* two processes of its own, each with one thread: one makes the namespaces, its child is the first in them.
*Owns* the namespaces. *Fails by* exit code 1, with the reason as the last line on standard error.
*Invariant*: no process of a host outlives the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_NET, _UTS, _IPC, _MNT, _PID = 0x40000000, 0x04000000, 0x08000000, 0x00020000, 0x20000000
_PR_SET_PDEATHSIG = 1
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
PRIVATE = ("/tmp", "/dev/shm")
"""Directories of which each host has its own."""
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBRARY, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def hold(parent: int, wanted: Mapping[str, Any]) -> None:
    """Make the host and wait until it or ``parent`` has ended."""
    asked_by = os.pidfd_open(parent)
    _call("unshare", _NET | _UTS | _IPC | _MNT | _PID)
    hear, say = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(hear)
        _be_first(wanted, say)
    os.close(say)
    if os.read(hear, 1) == b"r":
        print(first, flush=True)
    ended = os.pidfd_open(first)
    select.select([asked_by, ended], [], [])
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def _be_first(wanted: Mapping[str, Any], say: int) -> NoReturn:
    """Be the host's first process: furnish it, then adopt and await the orphans of all others."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    _furnish(wanted)
    os.write(say, b"r")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _furnish(wanted: Mapping[str, Any]) -> None:
    name = str(wanted["name"]).encode()
    _call("sethostname", name, len(name))
    _mount("none", "/", "", _REC | _PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in wanted["shared"] if path.startswith(PRIVATE)}
    outside = os.open("/proc", os.O_PATH)
    for each in PRIVATE:
        _mount("tmpfs", each, "tmpfs", options="mode=1777")
    for path, descriptor in kept.items():
        if not Path(path).exists():  # below one that is there again
            Path(path).mkdir(parents=True)
            _mount(f"/proc/self/fd/{descriptor}", path, "", _BIND | _REC)
    if wanted["proc"]:
        Path(wanted["proc"]).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{outside}", wanted["proc"], "", _BIND)
    names = Path(PRIVATE[0], "hosts")
    names.write_text(wanted["names"])
    _mount(str(names), "/etc/hosts", "", _BIND)
    names.unlink()
    _mount("proc", "/proc", "proc")


if __name__ == "__main__":
    hold(int(sys.argv[1]), json.loads(sys.argv[2]))
