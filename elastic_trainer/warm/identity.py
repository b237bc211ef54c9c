"""A process's identity in the kernel: its parent, its displayed command, its parent-death signal, its host.

*Runs in* the template and its forks, and in the process that starts them.
*Owns* the memory that holds a fork's displayed command.
*Fails by* OSError if the kernel does not support it (only Linux does).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 35, 36, 37
_PR_SET_MM_MAP = 14
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.sbrk.restype = ctypes.c_void_p
_ADOPTING = threading.Lock()
_PROCESS_IDS = ("pid", 0x20000000)
_OF_A_HOST = (("net", 0x40000000), ("uts", 0x04000000), ("ipc", 0x08000000), ("mnt", 0x00020000))
"""Kinds of namespaces, and the flags by which setns(2) makes sure of the kind."""
_shown: list[mmap.mmap] = []
"""The command and environment of this process, as /proc shows them."""


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    if _LIBRARY.prctl(option, *values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def die_with_parent(signum: int) -> None:
    """Make the kernel send ``signum`` when this process's parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _set_namespace(path: str, flag: int) -> None:
    with open(path, "rb") as namespace:
        if _LIBRARY.setns(namespace.fileno(), flag) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns {path}: {os.strerror(number)}")


@contextmanager
def next_child_on(host: int) -> Iterator[None]:
    """In the body, this thread's children get process ids of the host whose first process is ``host`` (0: this one).

    They must then :func:`enter_host`: process ids can be entered by a fork alone, all else by the process itself.
    """
    name, flag = _PROCESS_IDS
    if host:
        _set_namespace(f"/proc/{host}/ns/{name}", flag)
    try:
        yield
    finally:
        if host:
            _set_namespace(f"/proc/thread-self/ns/{name}", flag)


def enter_host(host: int) -> None:
    """Move this process, which has a single thread and the host's process ids, to the host in all other respects."""
    directory = os.getcwd()
    paths = [(f"/proc/{host}/ns/{name}", flag) for name, flag in _OF_A_HOST]
    for path, flag in paths:  # the mounts last: /proc is then the host's
        _set_namespace(path, flag)
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
    places = (code_start, code_end, data_start, data_end, brk, _LIBRARY.sbrk(0), stack)
    # struct prctl_mm_map: eleven addresses, the auxiliary vector (unchanged), the descriptor of the program (none).
    asked = struct.pack("=12Q2I", *places, start, middle, middle, middle + len(variables), 0, 0, 0xFFFFFFFF)
    buffer = ctypes.create_string_buffer(asked, len(asked))
    _prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(buffer), len(asked))
    _shown[:] = [memory]
