"""Small sums between the ranks of one node, through shared memory.

A sum of gloo's wakes six threads one after another, 1.3 ms on two cores where a step takes 35. Here each rank writes
its row, and adds up the rows of all when they are there.

*Runs in* the worker's main thread.
*Owns* a memory file without a name, made for one round.
*Fails by* RoundBrokenError when a peer has ended or does not come in time, ConfigError when ranks do different things.
*Invariant*: a row is overwritten only after all have read it. A rank waits for its sum ``n - AHEAD`` before it begins
sum n, so all have begun that one, and read all up to ``n - 2 * AHEAD``.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import xxhash

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.worker.comm.control import WIDTH, Control, InterruptibleWaits, Pending, Purpose

AHEAD = 32
_ROWS = 2 * AHEAD
_ROW, _SUM = struct.Struct(f"=q{WIDTH}d"), struct.Struct("=Q")
_ROW_BYTES = _ROW.size + _SUM.size
_PID = struct.Struct("=q")
_TOKEN_BYTES = 16
_LOOKED_AT_S = 1.0
"""Seconds between two looks at whether the peers live. In place the agent says so sooner."""


class NodeSums:
    """The memory: a token, the process of each rank, and the last rows of each."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._rows_at = _TOKEN_BYTES + size * _PID.size
        self._memory = mmap.mmap(descriptor, memory_bytes(size))
        at = _TOKEN_BYTES + rank * _PID.size
        self._memory[at : at + _PID.size] = _PID.pack(os.getpid())

    def write(self, number: int, values: Sequence[float]) -> None:
        """This rank's row of sum ``number``; its checksum says when it is whole."""
        row = _ROW.pack(number, *values)
        at = self._at(self.rank, number)
        self._memory[at : at + _ROW_BYTES] = row + _SUM.pack(xxhash.xxh3_64_intdigest(row))

    def read(self, rank: int, number: int) -> tuple[float, ...] | None:
        """The row of ``rank``, if it is there."""
        at = self._at(rank, number)
        data = self._memory[at : at + _ROW_BYTES]
        found, *values = _ROW.unpack_from(data)
        whole = found == number and _SUM.unpack_from(data, _ROW.size)[0] == xxhash.xxh3_64_intdigest(data[: _ROW.size])
        return tuple(values) if whole else None

    def is_alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` is there."""
        (process,) = _PID.unpack_from(self._memory, _TOKEN_BYTES + rank * _PID.size)
        try:
            os.kill(process, 0)
        except OSError as error:
            return error.errno != errno.ESRCH
        return True

    def _at(self, rank: int, number: int) -> int:
        return self._rows_at + (rank * _ROWS + number % _ROWS) * _ROW_BYTES


def memory_bytes(size: int) -> int:
    """For ``size`` ranks."""
    return _TOKEN_BYTES + size * (_PID.size + _ROWS * _ROW_BYTES)


class _Rows:
    """A pending sum: its rows, as far as they have been read."""

    def __init__(self, sums: NodeSums, number: int, limit_s: float) -> None:
        self._sums, self._number, self._limit = sums, number, Deadline.after(limit_s)
        self._found: dict[int, tuple[float, ...]] = {}
        self._late, self._never = False, threading.Event()

    def tolist(self) -> list[float]:
        """The sums; added up by rank, so that all have the same bits."""
        return [sum(each) for each in zip(*(self._found[rank] for rank in range(self._sums.size)), strict=True)]

    def is_completed(self) -> bool:
        return self._late or self._whole()

    def _whole(self) -> bool:
        for rank in range(self._sums.size):
            if rank not in self._found:
                row = self._sums.read(rank, self._number)
                if row is None:
                    return False
                self._found[rank] = row
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """RuntimeError if a row is not there after ``timeout`` or the sum's limit, or its process has ended."""
        began, look = SYSTEM.monotonic(), Deadline.after(_LOOKED_AT_S)
        deadline = self._limit if timeout is None else self._limit.at_most(timeout.total_seconds())
        while not self._whole():
            self._late = self._limit.expired
            if self._late or deadline.expired:
                raise RuntimeError("a rank of this node did not come in time")
            if look.expired:
                look = Deadline.after(_LOOKED_AT_S)
                self._check_peers()
            waited_s = SYSTEM.monotonic() - began
            SYSTEM.wait(self._never, min(max(waited_s / 8.0, 2e-5), 2e-3))
        return True

    def _check_peers(self) -> None:
        for rank in range(self._sums.size):
            if rank not in self._found and not self._sums.is_alive(rank) and not self._whole():
                raise RuntimeError(f"rank {rank} of this node has ended")


class NodeControl(Control):
    """A control whose sums go through ``sums``, and all else through the group."""

    def __init__(self, sums: NodeSums, group: object, works: InterruptibleWaits, limit: timedelta) -> None:
        super().__init__(group, sums.rank, sums.size, works, limit)
        self._sums, self._limit_s = sums, limit.total_seconds()
        self._number = 0
        self._begun: deque[_Rows] = deque(maxlen=AHEAD)

    def start(self, purpose: Purpose, values: Sequence[float]) -> Pending:
        self.works.check()
        if len(self._begun) == AHEAD:
            self.finish(self._begun[0], purpose.name.lower())
        self._number += 1
        self._sums.write(self._number, self.vector(purpose, values))
        rows = _Rows(self._sums, self._number, self._limit_s)
        self._begun.append(rows)
        return Pending(self, rows, rows, purpose)


def on_this_node(control: Control, limit: timedelta) -> Control:
    """A control of the same ranks, whose sums go through shared memory; ``control`` itself where they share none."""
    if control.alone:
        return control
    size, token, made, path = control.world_size, secrets.token_bytes(_TOKEN_BYTES), None, ""
    with contextlib.suppress(OSError):
        if control.rank == 0:
            made = os.memfd_create("elastic-trainer-sums")
            os.ftruncate(made, memory_bytes(size))
            os.write(made, token)
            path = f"/proc/{os.getpid()}/fd/{made}"
    told = control.broadcast_bytes(token + path.encode(), 0)
    sums = _opened(told[:_TOKEN_BYTES], told[_TOKEN_BYTES:].decode(), control.rank, size)
    refused = control.sum(Purpose.AGREE, [float(sums is None)])[0]
    if made is not None:
        os.close(made)
    if sums is None or refused:
        return control
    return NodeControl(sums, control.group, control.works, limit)


def _opened(token: bytes, path: str, rank: int, size: int) -> NodeSums | None:
    """None if this process does not see rank 0's file: with a process namespace of its own it may see another one."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != memory_bytes(size) or os.pread(descriptor, len(token), 0) != token:
            return None
        return NodeSums(descriptor, rank, size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
