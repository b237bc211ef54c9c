"""Becomes a container: ``python -I -S container.py DESCRIPTION.json``, imports nothing of this project.

The parent of the container waits for it and passes on how it ended, as an exit code (128 + signal). The container is
process 1 of its own process tree: it must ask for a signal to get it, and all that it started dies with it.

*Runs in* a process of its own, with root, in the pod's network.
*Owns* the container's mounts and its processes, all of which vanish with process 1.
*Fails by* exit code 70 and a line on standard error, before the container has begun.
*Invariant*: it dies with the thread that started it, and the container with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
EXIT_NOT_STARTED = 70
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    _checked(_LIBRARY.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} at {target}")


def bind(source: str, target: str, read_only: bool) -> None:
    """Show ``source`` at ``target``, which is made if need be."""
    place = Path(target)
    if os.path.isdir(source):
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def build(root: str, description: dict[str, Any]) -> None:
    """Everything that the container sees, below ``root``."""
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("root", root, "tmpfs", MS_NODEV, "mode=755")
    for target, content in description["files"].items():
        place = Path(root + target)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content, encoding="utf-8")
    for target, aim in description["links"].items():
        os.symlink(aim, root + target)
    for target, (mode, owner) in description["directories"].items():
        Path(root + target).mkdir(parents=True, exist_ok=True)
        os.chown(root + target, owner, owner)
        os.chmod(root + target, mode)
    bind("/dev", root + "/dev", read_only=False)
    mount("shm", root + "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m")
    # What lies deeper comes later: this project may lie below /tmp, where pods mount a volume.
    for target, source, read_only, options in sorted(description["mounts"], key=lambda each: len(Path(each[0]).parts)):
        if source is not None:
            bind(source, root + target, read_only)
        else:
            Path(root + target).mkdir(parents=True, exist_ok=True)
            mount("memory", root + target, "tmpfs", MS_NOSUID | MS_NODEV, options)
    Path(root + "/proc").mkdir()
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    mount("", root, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def become(description: dict[str, Any]) -> NoReturn:
    socket.sethostname(description["hostname"])
    build(description["root"], description)
    os.chroot(description["root"])
    os.chdir(description["directory"])
    # Python ignores these two, and its children would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve("/usr/bin/setpriv", ["setpriv", *description["privileges"], *description["words"]], description["env"])


def _dies_with_parent() -> None:
    _checked(_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def main(path: str) -> int:
    """Start the container that the file describes, and wait for its end."""
    description = json.loads(Path(path).read_text(encoding="utf-8"))
    os.umask(0o022)
    _dies_with_parent()
    _checked(_LIBRARY.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "unshare")
    ready, up = os.pipe()  # the exec that makes the container what it is to be closes its end
    first = os.fork()
    if first == 0:
        os.close(ready)
        _dies_with_parent()
        try:
            become(description)
        except OSError as error:
            print(f"container: {error}", file=sys.stderr)
        os._exit(EXIT_NOT_STARTED)
    os.close(up)
    os.read(ready, 1)
    pid_file = Path(description["pid_file"])
    pid_file.with_suffix(".new").write_text(str(first), encoding="ascii")
    pid_file.with_suffix(".new").rename(pid_file)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
