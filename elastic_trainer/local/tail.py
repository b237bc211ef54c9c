"""Follows the files of a directory as other processes append lines to them.

*Runs in* the local cluster's process. *Owns* nothing: files are only read, and opened for each read.
*Fails by* OSError for an unreadable file. *Invariant*: a line is returned once, and only after its newline is written,
so a line cut off by SIGKILL never appears.
"""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.local.ledger import Line, parse


class FileTail:
    """Reads the new complete lines of one file; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[str]:
        """Lines completed since the last call, without their newlines."""
        if not self._path.exists() or self._path.stat().st_size <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def end_of(path: Path) -> list[str]:
    """The last lines of a file, at most 64 KiB; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (64 << 10)))
        return file.read().decode(errors="replace").splitlines()


class LedgerTail:
    """Reads the new ledger lines of all processes of a run, and skips those that cannot be parsed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, FileTail] = {}

    def read(self) -> list[Line]:
        """Lines that appeared since the last call, in the order of their times."""
        for path in self._directory.glob("*.jsonl"):
            self._files.setdefault(path, FileTail(path))
        texts = [text for tail in self._files.values() for text in tail.read()]
        lines = [line for line in map(parse, texts) if line is not None]
        return sorted(lines, key=lambda line: line.t)
