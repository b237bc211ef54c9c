"""Checks of the checkpoint directory: whether a commit can be written, its speed and its free space.

*Runs in* a separate process (``python -m``): a hung file server cannot be interrupted. It imports no torch.
*Owns* two small files for the rename, which it removes, and an unnamed file, of which a kill leaves nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_trainer.clock import SYSTEM
from elastic_trainer.preflight.child import Messages
from elastic_trainer.preflight.judge import MIB, Finding, FitLimits, Status, amount, size_text

LARGEST_BYTES = 64 * MIB
LONGEST_S = 1.5
"""Time limit for writing a file, and for reading it."""
_BLOCK = 4 * MIB
_PREFIX = ".preflight-"
_REMOTE_BYTES = 16 * MIB


def check(directory: Path, limits: FitLimits, messages: Messages | None = None) -> Iterator[Finding]:
    """All checks of ``directory``; stops after the first if that fails."""

    def doing(what: str) -> None:
        if messages is not None:
            messages.doing(what)

    doing(f"writing to {directory}")
    parent = existing(directory)
    try:
        _commit(parent)
    except OSError as error:
        yield _refused(directory, parent, error)
        return
    later = "" if parent == directory.absolute() else f", which will be created in {parent}"
    yield Finding("disk", Status.OK, f"{directory}{later} can be written")
    yield _space(parent, limits)
    doing(f"measuring the speed of {directory}")
    try:
        yield from _speeds(parent, limits)
    except OSError as error:
        yield _refused(directory, parent, error)


def check_url(url: str, limits: FitLimits, messages: Messages) -> Iterator[Finding]:
    """All checks of the checkpoint location ``url``: the operations of a save, and the speed of writing and reading."""
    from elastic_trainer.checkpoint.commit import check_speed, check_writable
    from elastic_trainer.checkpoint.storage import open_storage
    from elastic_trainer.errors import CheckpointError, ConfigError

    messages.doing(f"writing to {url}")
    try:
        storage = open_storage(url)
        check_writable(storage)
        yield Finding("disk", Status.OK, f"{url} can be written")
        messages.doing(f"measuring the speed of {url}")
        for name, rate in zip(("disk.write", "disk.read"), check_speed(storage, _REMOTE_BYTES), strict=True):
            yield _speed(name, rate, limits)
    except (CheckpointError, ConfigError) as error:
        yield Finding("disk", Status.BAD, error.message, hint=error.hint or "")
    except OSError as error:
        text = f"{url} cannot be read: {error.strerror or error}"
        yield Finding("disk", Status.BAD, text, hint=getattr(error, "hint", ""))


def existing(directory: Path) -> Path:
    """``directory``, or the nearest existing parent, in which it will be created."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(path))


def _refused(directory: Path, parent: Path, error: OSError) -> Finding:
    said = (error.strerror or str(error)).lower()
    where = directory if parent == directory.absolute() else f"{directory} (to be created in {parent})"
    return Finding(
        "disk", Status.BAD, f"{where} cannot be written: {said}", hint="check its mount, owner, mode and free space"
    )


def _commit(parent: Path) -> None:
    """Write, sync and rename a small directory, as the commit of a checkpoint does."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as temporary:
        before, after = Path(temporary, "before"), Path(temporary, "after")
        before.mkdir()
        with (before / "file").open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        os.rename(before, after)
        for directory in (temporary, parent):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _space(parent: Path, limits: FitLimits) -> Finding:
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    limit = limits.disk_bytes or limits.disk_doubtful_bytes
    found = Finding("disk.space", Status.OK, f"{size_text(free)} free", float(free), "B", float(limit))
    if free >= limit:
        return found
    hint = "free some space, keep fewer checkpoints, or choose another directory"
    if limits.disk_bytes:
        return found.but(Status.BAD, hint, f"{found.text}, {size_text(limit)} are needed")
    return found.but(Status.WARN, hint)


def _speeds(parent: Path, limits: FitLimits) -> Iterator[Finding]:
    status = os.statvfs(parent)
    most = min(LARGEST_BYTES, status.f_bavail * status.f_frsize // 2)  # leaves jobs half of the free space
    if most < _BLOCK:
        yield Finding("disk.write", Status.SKIPPED, "too little space to measure its speed")
        return
    with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
        descriptor = file.fileno()
        written, took_s = _written(descriptor, most)
        yield _speed("disk.write", written / took_s, limits)
        if hasattr(os, "posix_fadvise"):
            # Drops the page cache, which would be read instead; if the system keeps it anyway, a job will profit too.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read, took_s = _read(descriptor, written)
        yield _speed("disk.read", read / took_s, limits)


def _written(descriptor: int, most: int) -> tuple[int, float]:
    """Bytes written, and the seconds until they were durable."""
    block, written, begun = os.urandom(_BLOCK), 0, SYSTEM.monotonic()
    while written + _BLOCK <= most and SYSTEM.monotonic() - begun < LONGEST_S:
        written += os.write(descriptor, block)
        os.fsync(descriptor)  # after each piece: a single sync at the end could exceed the limit by far on a slow disk
    return written, max(1e-9, SYSTEM.monotonic() - begun)


def _read(descriptor: int, size: int) -> tuple[int, float]:
    done, begun = 0, SYSTEM.monotonic()
    while done < size and SYSTEM.monotonic() - begun < LONGEST_S:
        part = os.pread(descriptor, _BLOCK, done)
        if not part:
            break
        done += len(part)
    return done, max(1e-9, SYSTEM.monotonic() - begun)


def _speed(name: str, rate: float, limits: FitLimits) -> Finding:
    found = Finding(name, Status.OK, f"{amount(rate / 1e6)} MB/s", rate / 1e6, "MB/s", limits.disk_speed / 1e6)
    hint = "checkpoints will take long here: use a faster disk"
    return found.but(Status.WARN, hint) if rate < limits.disk_speed else found


def main(arguments: Sequence[str]) -> int:
    """``DIRECTORY_OR_URL NEEDED_BYTES LIMIT_S``."""
    directory, limits, messages = arguments[0], FitLimits(disk_bytes=int(arguments[1])), Messages(float(arguments[2]))
    url = "://" in directory
    for finding in check_url(directory, limits, messages) if url else check(Path(directory), limits, messages):
        messages.found(finding)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
