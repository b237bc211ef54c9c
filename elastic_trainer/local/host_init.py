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
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_NET, _UTS, _IPC, _MNT, _PID = 0x40000000, 0x04000000, 0x08000000, 0x00020000, 0x20000000
_PR_SET_PDEATHSIG = 1
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
PRIVATE = tuple(os.path.realpath(each) for each in ("/tmp", "/dev/shm") if os.path.isdir(each))
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
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the parent: it ends its nodes first
        signal.signal(each, signal.SIG_IGN)
    asked_by = os.pidfd_open(parent)
    _call("unshare", _NET | _UTS | _IPC | _MNT | _PID)
    hear, say = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(hear)
        _be_first(wanted, say)
    os.close(say)
    ready = os.read(hear, 1) == b"r"
    if ready:
        print(first, flush=True)
    ended = os.pidfd_open(first)
    select.select([asked_by, ended], [], [])
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    sys.exit(0 if ready else 1)


def _be_first(wanted: Mapping[str, Any], say: int) -> NoReturn:
    """Be the host's first process: furnish it, then adopt and await the orphans of all others."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    _furnish(wanted)
    os.write(say, b"r")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def outermost(paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that are hidden by a private directory, without those below another one."""
    hidden = [path for path in paths if path not in PRIVATE and path.startswith(tuple(f"{top}/" for top in PRIVATE))]
    found: list[str] = []
    for path in sorted(set(hidden), key=len):
        if not any(path.startswith(f"{top}/") for top in found):
            found.append(path)
    return found


def _furnish(wanted: Mapping[str, Any]) -> None:
    name = str(wanted["name"]).encode()
    _call("sethostname", name, len(name))
    _mount("none", "/", "", _REC | _PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in outermost(wanted["shared"])}
    outside = os.open("/proc", os.O_PATH)
    for each in PRIVATE:
        _mount("tmpfs", each, "tmpfs", options="mode=1777")
    for path, descriptor in kept.items():
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            Path(path).mkdir(parents=True)
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
        _mount(f"/proc/self/fd/{descriptor}", path, "", _BIND | _REC)
    if wanted["proc"]:
        Path(wanted["proc"]).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{outside}", wanted["proc"], "", _BIND)
    names = Path(PRIVATE[0], "hosts")
    names.write_text(wanted["names"])
    if os.path.exists("/etc/hosts"):
        _mount(str(names), "/etc/hosts", "", _BIND)
    names.unlink()
    _mount("proc", "/proc", "proc")


if __name__ == "__main__":
    hold(int(sys.argv[1]), json.loads(sys.argv[2]))
