"""The bucket port over any fsspec file system with conditional writes: Google's and Azure's.

Their unfinished uploads show nowhere and expire by themselves. Retries are the clients' own.

*Runs in* the calling thread; the client works in fsspec's thread, uploads in one for each part.
*Fails by* what the port says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

from elastic_trainer.checkpoint.storage.bucket import PART_SIZE, Item, RequestLimits, Upload, in_words

_TIMES = ("LastModified", "last_modified", "mtime")
"""What the file systems call the time of the last write."""
_NEEDS = "reading, writing, listing and deleting objects"


class FsspecBucket:
    """See the module. ``location`` is the URL, ``path`` what ``files`` calls it."""

    def __init__(self, location: str, files: AsyncFileSystem, path: str, limits: RequestLimits) -> None:
        self.location, self._files, self._path, self._limits = location.rstrip("/"), files, path.strip("/"), limits

    def directories(self) -> tuple[str, ...]:
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            found = self._do(self._files._ls, self._path, detail=True)
            return tuple(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")
        return ()

    def items(self, directory: str) -> tuple[Item, ...]:
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            found = self._do(self._files._find, f"{self._path}/{directory}".rstrip("/"), detail=True)
            if isinstance(found, list):  # adlfs, where the path is that of an object
                found = {path: self._do(self._files._info, path) for path in found}
            return tuple(self._item(path, info) for path, info in found.items())
        return ()

    def read(self, key: str, start: int, length: int) -> bytes:
        content = self._do(
            self._files._cat_file, self._at(key), start=start, end=start + length, limit_s=self._limits.part_s
        )
        return bytes(content)

    def open(self, key: str, length: int) -> tuple[int, bytes]:
        self._files.invalidate_cache()
        size = int(self._do(self._files._info, self._at(key))["size"])
        return size, self.read(key, 0, min(size, length)) if size else b""

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        self._do(self._files._pipe_file, self._at(key), data, mode="create" if new else "overwrite")

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._do(self._files._rm_file, self._at(key))

    def upload(self, key: str) -> Upload:
        return _Stream(self._files, self._at(key), self._limits)

    def last_part(self, directory: str) -> float | None:
        return None

    def abort_uploads(self, directory: str) -> None:
        return None

    def _at(self, key: str) -> str:
        return f"{self._path}/{key}"

    def _item(self, path: str, info: dict[str, Any]) -> Item:
        when = next(info[name] for name in _TIMES if isinstance(info.get(name), datetime))
        return Item(path.removeprefix(self._path + "/"), int(info["size"]), when.timestamp())

    def _do(self, call: Callable[..., Any], *arguments: Any, limit_s: float | None = None, **named: Any) -> Any:
        limit_s = limit_s if limit_s is not None else self._limits.request_s
        try:
            return sync(self._files.loop, call, *arguments, timeout=limit_s, **named)
        except Exception as error:
            raise in_words(error, _NEEDS) from error


class _Stream:
    """A file object of fsspec, which sends its parts one after the other and knows no limit of time.

    So a thread waits for it, which is left behind where the store stops in the middle of a part.
    """

    def __init__(self, files: AsyncFileSystem, path: str, limits: RequestLimits) -> None:
        self._files, self._path, self._limits = files, path, limits
        self._file: Any = None
        self._stuck = False

    def add(self, part: bytearray) -> None:
        self._within(self._limits.part_s, lambda: self._send(part))

    def finish(self, last: bytearray) -> None:
        def act() -> None:
            self._send(last)
            self._file.close()

        self._within(self._limits.part_s, act)

    def abort(self) -> None:
        if self._file is not None:
            self._file.closed = True  # else its finaliser would complete it
            if not self._stuck:
                self._within(self._limits.request_s, self._file.discard)

    def _send(self, part: bytearray) -> None:
        if self._file is None:
            self._file = self._files.open(self._path, "wb", block_size=PART_SIZE)
        self._file.write(part)

    def _within(self, limit_s: float, act: Callable[[], object]) -> None:
        outcome: SimpleQueue[Exception | None] = SimpleQueue()

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - the edge of a thread: the one that waits raises it
                outcome.put(error)
            else:
                outcome.put(None)

        threading.Thread(target=run, name="checkpoint-upload", daemon=True).start()
        try:
            error = outcome.get(timeout=limit_s)
        except Empty:
            self._stuck, error = True, TimeoutError()
        if error is not None:
            raise in_words(error, _NEEDS) from error
