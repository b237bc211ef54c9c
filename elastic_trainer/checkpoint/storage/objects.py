"""Checkpoints below a prefix of an object store, where nothing can be renamed and each object appears at once.

A checkpoint exists if its ``manifest.json`` does, which is written last and never over another. The other names of the
layout are prefixes as well: ``tmp-.../<checkpoint>`` marks one that is being written in its final place, and
``trash-...`` or ``corrupt-...`` hold the manifest of one that is not to be seen any more. See
``deploy/decisions/object-stores.md``.

One process at a time saves below a prefix: it has a lease of numbered objects, of which the highest is valid. It takes
it by creating the next number, which only one can do; no write ever depends on comparing times of two machines. The
holder rewrites its object periodically; a lease that was not rewritten for ``TAKEOVER_S``, by the store's clock, may be
taken over. The holder releases it by emptying the object, so that numbers only grow.

*Runs in* any process that saves, loads or lists; a thread renews the lease. *Owns* uploads until they are finished or
abandoned, and the lease. *Fails by* the ports' errors: a bucket always by OSError.
*Invariant*: a marker is written before the first byte that it covers and removed after the last, so that a process that
dies leaves only marked objects. The holder counts its lease as valid for less time than others wait.
"""

from __future__ import annotations

import contextvars
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from elastic_trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    OFFER_FILE,
    RECORD_PREFIX,
    Kind,
    kind_of,
    new_nonce,
    parse_checkpoint,
    quarantined,
    temporary_name,
    this_process,
    trashed,
)
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, RequestLimits, Sink
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import StorageError
from elastic_trainer.telemetry.logs import logger

if TYPE_CHECKING:
    from fsspec.asyn import AsyncFileSystem


# ---- a bucket, and its errors


PART_SIZE = 16 << 20
"""Bytes of a part of a large file."""


@dataclass(frozen=True, slots=True)
class Item:
    """An object: its key below the prefix, its size, and when it was written by the store's own clock."""

    key: str
    size: int
    modified: float


class Upload(Protocol):
    """An object being uploaded. It exists when ``finish`` has returned."""

    def add(self, part: bytearray) -> None:
        """Send ``part``, which must not change afterwards. Waits while too many parts are in flight."""
        ...

    def finish(self, last: bytearray) -> None: ...

    def abort(self) -> None:
        """Leave nothing behind, if possible."""
        ...


class Bucket(Protocol):
    """The objects below one prefix of a bucket. Keys are below the prefix; ``directory`` ends with a slash."""

    @property
    def location(self) -> str: ...

    def directories(self) -> tuple[str, ...]:
        """The first components of all keys that have more than one."""
        ...

    def items(self, directory: str) -> tuple[Item, ...]: ...

    def read(self, key: str, start: int, length: int) -> bytes: ...

    def open(self, key: str, length: int) -> tuple[int, bytes]:
        """The object's size, and up to ``length`` of its first bytes."""
        ...

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write an object; FileExistsError if it is to be ``new`` and there is one."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        ...

    def upload(self, key: str) -> Upload: ...

    def last_part(self, directory: str) -> float | None:
        """When the newest part of an unfinished upload was written, if the store keeps such parts."""
        ...

    def abort_uploads(self, directory: str) -> None: ...


class RemoteError(OSError):
    """An object store refuses, fails or cannot be reached. ``hint`` says what to do.

    ``refused``: the request certainly had no effect. Otherwise it may have had its effect, or may still have it.
    """

    def __init__(self, number: int, words: str, hint: str, *, refused: bool) -> None:
        super().__init__(number, words)
        self.hint, self.refused = hint, refused


_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
)
_TAKEN = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_SET_CREDENTIALS = "check the credentials: the variables of the store's own tools, or the pod's service account"
_CHECK_ADDRESS = "check the bucket's name, its region and endpoint (AWS_ENDPOINT_URL for S3), and the network"


def in_words(error: BaseException, needs: str) -> OSError:
    """``error`` of any client library as an OSError. ``needs`` names the permission that the request takes."""
    response = _response(error)
    code, status = str(response.get("code", "")), response.get("status", 0)
    said = f"{code or status}{': ' if response.get('said') else ''}{response.get('said', '')}"
    if code == "NoSuchBucket":
        return RemoteError(errno.ENOTDIR, "the bucket does not exist", "create it, or correct its name", refused=True)
    if isinstance(error, FileExistsError | FileNotFoundError):
        return error
    if code in _TAKEN:
        return FileExistsError(errno.EEXIST, said)
    if status == 501:
        return RemoteError(errno.ENOSYS, f"the store knows no such request ({said})", _CHECK_ADDRESS, refused=True)
    if code in _CREDENTIALS:
        return RemoteError(errno.EACCES, f"the store rejects the credentials ({said})", _SET_CREDENTIALS, refused=True)
    if status == 403 or isinstance(error, PermissionError):
        words = f"permission denied ({said})" if response else f"permission denied: {error}"
        return RemoteError(errno.EACCES, words, f"allow {needs} there", refused=True)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return RemoteError(errno.ETIMEDOUT, "the store did not answer in time", _CHECK_ADDRESS, refused=False)
    if "Credentials" in type(error).__name__ or "TokenRetrieval" in type(error).__name__:
        return RemoteError(errno.EACCES, f"there are no usable credentials: {error}", _SET_CREDENTIALS, refused=True)
    if status >= 500:
        return RemoteError(errno.EIO, f"the store fails ({said})", "see the store's own status and logs", refused=False)
    if response:
        return RemoteError(errno.EIO, f"the store refuses the request ({said})", _CHECK_ADDRESS, refused=status < 500)
    return RemoteError(errno.EIO, f"the store cannot be reached: {error}", _CHECK_ADDRESS, refused=False)


def _response(error: BaseException) -> dict[str, Any]:
    """What an S3 service answered, if ``error`` or its cause says so; codes of other services stay in their words."""
    cause = error.__cause__ if error.__cause__ is not None else error
    answer = getattr(cause, "response", None)
    if not isinstance(answer, dict):
        return {}
    of = answer.get("Error", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return {"code": of.get("Code", ""), "said": of.get("Message", ""), "status": status}


def not_written(error: OSError, location: str) -> StorageError:
    """``error`` as the reason why no checkpoint can be saved at ``location``."""
    words = error.strerror or str(error)
    return StorageError(f"checkpoints cannot be saved at {location}: {words}", hint=getattr(error, "hint", None))


# ---- the storage


BLOCK = 8 << 20
"""Bytes read at once: a chunk of a checksum."""
_FIRST_BLOCK = 1 << 20
"""Read when a file is opened: whole manifests, and heads of tensor files."""
_READERS = 16
_MARK = b"being written\n"
_TRIAL = "trial"
_LARGER_AFTER = 2500
"""Parts of one size; S3 takes 10,000 of a file."""


class ObjectStorage:
    """See the module."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._final: dict[str, str] = {}
        self._manifests: dict[str, bytearray] = {}
        self._doubtful: set[str] = set()
        """Temporaries whose manifest may have been written, or may still be: their data must stay."""
        self._lease = PrefixLease(bucket, self._age_s)

    @property
    def location(self) -> str:
        return self._bucket.location

    def prepare(self) -> None:
        """Does nothing: prefixes need not be created, and buckets belong to the user."""

    def names(self) -> tuple[str, ...]:
        """Those of torn uploads too, which have no manifest: for readers they are gone."""
        found = self._bucket.directories()
        hidden = {trashed(name) or quarantined(name) for name in found}
        return tuple(name for name in found if name not in hidden)

    def exists(self, name: str) -> bool:
        inside = f"{name}/{MANIFEST_FILE}" if parse_checkpoint(name) is not None else f"{name}/"
        return bool(self._bucket.items(inside))

    def free_bytes(self) -> int | None:
        return None

    def create(self, temporary: str, name: str | None = None) -> None:
        with _writing(self.location):
            self._bucket.put(f"{temporary}/{name or _TRIAL}", _MARK)
        if name is not None:
            self._final[temporary] = name

    def sink(self, name: str, file: str) -> Sink:
        if name in self._final and file == MANIFEST_FILE:
            return _Kept(self._manifests.setdefault(name, bytearray()))
        return _ObjectSink(self._bucket, self._key(name, file))

    def _key(self, name: str, file: str) -> str:
        """Notes of writers to each other stay with the marks."""
        note = file == OFFER_FILE or file.startswith(RECORD_PREFIX)
        return f"{name if note else self._final.get(name, name)}/{file}"

    def join(self, temporary: str, name: str) -> None:
        self._final[temporary] = name

    def mark(self, temporary: str, file: str) -> bool:
        key, content = f"{temporary}/{file}", new_nonce().encode()
        with _writing(self.location):
            try:
                self._bucket.put(key, content, new=True)
            except FileExistsError:  # another's, or this one, whose answer was lost
                with suppress(FileNotFoundError):
                    return self._bucket.read(key, 0, len(content) + 1) == content
                return False
        return True

    def files(self, temporary: str) -> frozenset[str]:
        found = (each.key.removeprefix(f"{temporary}/") for each in self._bucket.items(f"{temporary}/"))
        return frozenset(each for each in found if parse_checkpoint(each) is None)

    def discard(self, temporary: str, file: str) -> None:
        """Removes only the mark: an incomplete object is invisible, and a late one has the same bytes."""
        with _writing(self.location):
            self._bucket.delete([f"{temporary}/{file}"])

    def source(self, name: str, file: str) -> ByteSource:
        return _ObjectSource(self._bucket, self._key(name, file))

    def publish(self, temporary: str, name: str) -> None:
        with _writing(self.location):
            lost = self._lease.was_lost and not self._lease.regained()
        if lost:
            raise StorageError(f"checkpoints at {self.location} may have been taken over by another job meanwhile")
        manifest, key = bytes(self._manifests.pop(temporary)), f"{name}/{MANIFEST_FILE}"
        with _writing(self.location):
            try:
                self._bucket.put(key, manifest, new=True)
            except FileExistsError as error:
                if self._bucket.read(key, 0, len(manifest) + 1) != manifest:  # else it is ours: an answer was lost
                    raise StorageError(f"{self.location} already has a {name}; it was not overwritten") from error
            except RemoteError as error:
                if not error.refused:
                    self._doubtful.add(temporary)
                raise
        del self._final[temporary]
        with suppress(OSError):  # then it is swept when this process is gone
            self._bucket.delete([f"{temporary}/{name}"])

    def rename(self, old: str, new: str) -> None:
        """Only the manifest moves: to trash or into quarantine. The data stay until :meth:`remove`, or for people."""
        manifest = f"{old}/{MANIFEST_FILE}"
        size, content = self._bucket.open(manifest, _FIRST_BLOCK)
        if self.exists(new):
            raise FileExistsError(errno.EEXIST, "it exists", new)
        if size > len(content):
            content += self._bucket.read(manifest, len(content), size - len(content))
        self._bucket.put(f"{new}/{MANIFEST_FILE}", content, new=True)
        self._bucket.delete([manifest])

    def remove(self, name: str) -> None:
        if name in self._doubtful:
            raise OSError(errno.EBUSY, "its manifest may still arrive")
        marks = self._bucket.items(f"{name}/")
        for victim in _stands_for(name, marks):
            if kind_of(name) is Kind.TEMPORARY:
                if self.exists(victim):
                    continue  # only its mark was left
                self._bucket.abort_uploads(f"{victim}/")
            self._bucket.delete([each.key for each in self._bucket.items(f"{victim}/")])
        self._bucket.delete([each.key for each in marks])
        self._final.pop(name, None)
        self._manifests.pop(name, None)

    def idle_s(self, name: str, reference: str) -> float:
        marks = self._bucket.items(f"{name}/")
        touched = [each.modified for each in marks]
        for victim in _stands_for(name, marks):
            touched += [each.modified for each in self._bucket.items(f"{victim}/")]
            touched += filter(None, [self._bucket.last_part(f"{victim}/")])
        if not touched:
            raise FileNotFoundError(errno.ENOENT, "it is gone", name)
        return self._bucket.items(f"{reference}/")[0].modified - max(touched)

    def hold(self, words: str, gives_way: Callable[[str], bool]) -> Holder | None:
        with _writing(self.location):
            return self._lease.hold(words, gives_way)

    def let_go(self) -> None:
        self._lease.let_go()

    def _age_s(self, item: Item) -> float:
        """Age by the store's own clock, read from the timestamp of an object written for that purpose."""
        reference = f"{temporary_name(this_process())}/{_TRIAL}"
        self._bucket.put(reference, _MARK)
        try:
            return self._bucket.items(reference)[0].modified - item.modified
        finally:
            self._bucket.delete([reference])


def _stands_for(name: str, marks: tuple[Item, ...]) -> list[str]:
    """The checkpoints whose objects belong to the entry ``name``."""
    in_trash = trashed(name)
    if in_trash is not None:
        return [in_trash]
    if kind_of(name) is not Kind.TEMPORARY:
        return []
    marked = [each.key.removeprefix(f"{name}/") for each in marks]
    return [each for each in marked if parse_checkpoint(each) is not None]


@contextmanager
def _writing(location: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(error, location) from error


class _Kept:
    """The manifest, which is kept until the checkpoint is published."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    def write(self, data: memoryview) -> None:
        self._content += data

    def finish(self, *, durable: bool = True) -> None:
        return None

    def abandon(self) -> None:
        return None


class _ObjectSink:
    """Cuts what is written into parts: the one being filled and those under way are all the memory it takes."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key, self._upload = bucket, key, bucket.upload(key)
        self._part = bytearray()
        self._sent, self._size, self._finished = 0, 0, False

    def write(self, data: memoryview) -> None:
        self._size += len(data)
        while data:
            size = PART_SIZE << (self._sent // _LARGER_AFTER)
            taken = data[: size - len(self._part)]
            self._part += taken
            data = data[len(taken) :]
            if len(self._part) == size:
                part, self._part, self._sent = self._part, bytearray(), self._sent + 1
                with _writing(self._bucket.location):
                    self._upload.add(part)

    def finish(self, *, durable: bool = True) -> None:
        with _writing(self._bucket.location):
            try:
                self._upload.finish(self._part)
            except OSError:
                if not self._is_there():  # the answer that it was written is lost
                    raise
        self._finished = True

    def _is_there(self) -> bool:
        return (self._key, self._size) in {(item.key, item.size) for item in self._bucket.items(self._key)}

    def abandon(self) -> None:
        if not self._finished:
            self._finished = True
            with suppress(OSError):  # what is left is removed with the entry
                self._upload.abort()


class _ObjectSource:
    """Reads a block at a time for each thread, whatever is wanted of it."""

    readers = _READERS

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key = bucket, key
        self.size, self._first = bucket.open(key, _FIRST_BLOCK)
        self._mine = threading.local()

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        begin, block = self._block(offset, len(buffer))
        found = memoryview(block)[offset - begin : offset - begin + len(buffer)]
        buffer[: len(found)] = found
        return len(found) == len(buffer)

    def _block(self, offset: int, length: int) -> tuple[int, bytes]:
        begin, block = getattr(self._mine, "block", (0, self._first))
        if not begin <= offset <= offset + length <= begin + len(block):
            wanted = min(max(length, BLOCK), self.size - offset)
            begin, block = offset, self._bucket.read(self._key, offset, wanted) if wanted > 0 else b""
            self._mine.block = (begin, block)
        return begin, block

    def close(self) -> None:
        self._mine = threading.local()


# ---- the lease


RENEW_S = 15.0
VALID_S = 60.0
"""Seconds that the holder treats the lease as valid after the start of a renewal."""
TAKEOVER_S = 90.0
"""Seconds without a renewal after which others may take it over."""
DIRECTORY = "owner/"
_LONGEST_WORDS = 4096
_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Seen:
    """Another holder's object, how old it was by the store's clock, and when that was seen by this process's."""

    item: Item
    words: str
    age_s: float
    at: float


class PrefixLease:
    """See the module. ``age_s(item)`` measures by the store's clock."""

    def __init__(self, bucket: Bucket, age_s: Callable[[Item], float]) -> None:
        self._bucket, self._age_s = bucket, age_s
        self._mine: str | None = None
        self._words, self._renewed_at, self._process = "", 0.0, 0
        self._seen: _Seen | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def was_lost(self) -> bool:
        """Whether it was held, and may belong to another process now."""
        return self._mine is not None and SYSTEM.monotonic() - self._renewed_at > VALID_S

    def hold(self, words: str, gives_way: Callable[[str], bool]) -> Holder | None:
        """Take or keep it; the holder if that is another process."""
        if self._mine is not None and not self.was_lost:
            return None
        for _ in range(_TRIES):
            top = self._top()
            if top is not None and top.key == self._mine:
                if self.regained():
                    return None
                continue
            holder = self._judged(top, gives_way) if top is not None else None
            if holder is not None:
                return holder
            if self._take(1 if top is None else int(_number(top)) + 1, words):
                return None
        return Holder("")

    def regained(self) -> bool:
        """Renew a lease that was lost because it was not renewed in time; whether it is still this process's."""
        self._renew()
        if not self.was_lost:
            self._keep_renewing()
        return not self.was_lost

    def let_go(self) -> None:
        if self._process != os.getpid():
            return  # a fork of the holder
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        mine, self._mine, self._thread = self._mine, None, None
        if mine is not None:
            with suppress(OSError):  # then it expires
                self._bucket.put(mine, b"")

    def _judged(self, top: Item, gives_way: Callable[[str], bool]) -> Holder | None:
        """The holder according to ``top``; None if it has released the lease, is dead, or gives way."""
        if top.size == 0:
            return None
        now = SYSTEM.monotonic()
        if self._seen is None or self._seen.item != top:
            words = self._bucket.read(top.key, 0, _LONGEST_WORDS).decode(errors="replace")
            if gives_way(words):
                return None
            self._seen = _Seen(top, words, self._age_s(top), now)
        expires_in_s = TAKEOVER_S - self._seen.age_s - (now - self._seen.at)
        return Holder(self._seen.words, expires_in_s, top.modified) if expires_in_s > 0 else None

    def _take(self, number: int, words: str) -> bool:
        key, begun = f"{DIRECTORY}{number:012d}.json", SYSTEM.monotonic()
        try:
            self._bucket.put(key, words.encode(), new=True)
        except FileExistsError:
            # Another's, or our own whose answer was lost.
            if self._bucket.read(key, 0, _LONGEST_WORDS) != words.encode():
                return False
        items = self._bucket.items(DIRECTORY)
        if max(items, key=_number).key != key:
            return False
        self._bucket.delete([each.key for each in items if each.key != key])
        self._mine, self._words, self._renewed_at, self._process = key, words, begun, os.getpid()
        self._keep_renewing()
        return True

    def _keep_renewing(self) -> None:
        if self._thread is None or self._stop.is_set():
            self._stop = threading.Event()
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, self._stop), name="checkpoint-lease", daemon=True
            )
            self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while not pause(RENEW_S, stop):
            try:
                self._renew()
            except OSError as error:
                logger().warning("storage.not_renewed", reason=str(error.strerror or error), valid_s=VALID_S)

    def _renew(self) -> None:
        """Rewrite the object, unless another process has taken over."""
        mine, begun = self._mine, SYSTEM.monotonic()
        if mine is None:
            return
        top = self._top()
        if top is None or top.key != mine:
            logger().error("storage.taken_over", storage=self._bucket.location)
            self._renewed_at = -math.inf
            self._stop.set()
            return
        self._bucket.put(mine, self._words.encode())
        self._renewed_at = begun

    def _top(self) -> Item | None:
        return max(self._bucket.items(DIRECTORY), key=_number, default=None)


def _number(item: Item) -> str:
    return item.key.removeprefix(DIRECTORY).removesuffix(".json")


# ---- Google's and Azure's stores


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
        from fsspec.asyn import sync

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
        outcome: Future[object] = Future()

        def run() -> None:
            try:
                outcome.set_result(act())
            except Exception as error:  # noqa: BLE001 - the edge of a thread: the one that waits raises it
                outcome.set_exception(error)

        threading.Thread(target=run, name="checkpoint-upload", daemon=True).start()
        try:
            outcome.result(limit_s)
        except Exception as error:
            self._stuck = not outcome.done()
            raise in_words(error, _NEEDS) from error
