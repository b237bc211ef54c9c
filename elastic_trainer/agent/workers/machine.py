"""How busy this machine is, and what the workers wrote last.

*Runs in* the agent, each time its health is published.
*Owns* nothing; ``/proc``, the driver of the GPUs and the files that workers write to are only read.
*Fails by* nothing: what cannot be read is not known.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil
import pynvml

from elastic_trainer.checkpoint.memory import GROUP, group_memory
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import GpuLoad, LogTail, NodeLoad
from elastic_trainer.model import as_text
from elastic_trainer.telemetry.logs import logger

LINE: Final = 200
"""Characters of a line that are told."""
_BLOCK: Final = 1 << 14
"""Bytes at the end of a file in which its last lines are looked for."""
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Machine:
    """The load of the machine, or of the container that this process is in: its memory limit, and its GPUs."""

    def __init__(self, environ: Mapping[str, str] = os.environ, group: Path = GROUP) -> None:
        self._group = group
        self._gpus = _visible(environ.get("CUDA_VISIBLE_DEVICES"))
        psutil.cpu_percent()  # the first call only begins to count

    def usage(self) -> NodeLoad:
        """The mean since the last call (CPUs), since a moment of the driver's choice (GPUs), and the memory now."""
        memory = psutil.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        of_group = group_memory(self._group)
        if of_group is not None and of_group[1] < total:
            used, total = of_group
        return NodeLoad(
            cpu=min(1.0, psutil.cpu_percent() / 100.0),
            cpus=psutil.cpu_count() or 1,
            used_bytes=max(0, used),
            total_bytes=total,
            gpus=tuple(each for each in map(_gpu, self._gpus) if each is not None),
        )


def _visible(devices: str | None) -> list[object]:
    """The driver's handles of the GPUs that ``devices`` (CUDA_VISIBLE_DEVICES) names; all if it is not set."""
    try:
        pynvml.nvmlInit()
        if devices is None:
            return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        named = [each.strip() for each in devices.split(",") if each.strip() not in ("", "-1")]
        return [
            pynvml.nvmlDeviceGetHandleByIndex(int(each)) if each.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(each)
            for each in named
        ]
    except pynvml.NVMLError as error:
        if not isinstance(error, pynvml.NVMLError_LibraryNotFound):
            logger().debug("gpus.unknown", error=str(error))
        return []


def _gpu(handle: object) -> GpuLoad | None:
    """One GPU; a part of one (MIG) has no utilization of its own."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        index = pynvml.nvmlDeviceGetIndex(handle)
    except pynvml.NVMLError:
        return None
    try:
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
    except pynvml.NVMLError:
        busy = None
    return GpuLoad(index=index, busy=busy, used_bytes=memory.used, total_bytes=memory.total)


class LogTails:
    """The last lines of what this node's workers wrote, where that goes to files.

    Workers share torchrun's file, or have one each (``--redirects``, ``--tee``). Where none is known, it is torchrun's:
    a worker may end before it has a page, or never have one. The lines of a dead worker stay until
    another has its place: they say how it died.
    """

    def __init__(self, lines: int, proc: Path = Path("/proc")) -> None:
        self._lines, self._proc = lines, proc
        self._files: dict[int, tuple[Path, ...]] = {}
        """By local rank."""
        self._ranks: dict[int, int] = {}

    def read(self, readings: Iterable[Reading]) -> tuple[LogTail, ...]:
        """The newest file of each worker; all workers together have ``lines`` lines, each at least one."""
        if not self._lines:
            return ()
        for each in readings:
            self._files[each.local_rank] = written_by(self._proc / str(each.pid))
            self._ranks[each.local_rank] = each.pulse.rank
        sharing: dict[Path, list[int]] = {}
        for local_rank, files in sorted(self._files.items()):
            if (newest := max(files, key=_written, default=None)) is not None:
                sharing.setdefault(newest, []).append(self._ranks[local_rank])
        if not sharing and (files := written_by(self._proc / "self")):
            sharing[max(files, key=_written)] = []
        share = max(1, self._lines // max(1, len(sharing)))
        tails = ((path, ranks, last_lines(path, share)) for path, ranks in sharing.items())
        return tuple(
            LogTail(ranks=tuple(sorted(rank for rank in ranks if rank >= 0)), file=as_text(str(path)), lines=lines)
            for path, ranks, lines in tails
            if lines
        )


def written_by(process: Path) -> tuple[Path, ...]:
    """The regular files that are its standard output and error output."""
    found = dict[Path, None]()
    for number in ("1", "2"):
        try:
            link = process / "fd" / number
            if stat.S_ISREG(link.stat().st_mode):
                found[link.readlink()] = None
        except OSError:
            continue  # it is gone, or has closed it
    return tuple(found)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_lines(path: Path, most: int) -> tuple[str, ...]:
    """The last lines of ``path`` that say something, without colours, as a terminal would leave them."""
    lines = (_shown(each) for each in end_of(path).split("\n"))
    return tuple([each for each in lines if each][-most:])


def end_of(path: Path, begin: int = 0) -> str:
    """The last lines of ``path`` behind byte ``begin``, as many as a block holds; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = file.seek(max(begin, end - _BLOCK, 0))
            block = file.read(_BLOCK)
    except OSError:
        return ""
    if 0 < begin == end - _BLOCK and b"\n" in block:
        block = block.partition(b"\n")[2]  # its first line is a part of one
    return block.decode("utf-8", "replace")


def size_of(path: Path) -> int:
    """The bytes of ``path``; 0 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shown(line: str) -> str:
    """What a terminal shows of it: a progress bar writes the same line again and again."""
    last = next((part for part in reversed(_ESCAPES.sub("", line).split("\r")) if part.strip()), "")
    kept = "".join(each if each.isprintable() else " " for each in last.expandtabs(4)).rstrip()
    return kept if len(kept) <= LINE else kept[: LINE - 1] + "…"
