"""Checkpoints below a prefix of an object store, where nothing can be renamed and each object appears at once.

A checkpoint exists if its ``manifest.json`` does, which is written last and never over another. The other names of the
layout are prefixes as well: ``tmp-.../<checkpoint>`` marks one that is being written in its final place, and
``trash-...`` or ``corrupt-...`` hold the manifest of one that is not to be seen any more. See
``deploy/decisions/object-stores.md``.

*Runs in* any process that saves, loads or lists. *Owns* uploads until they are finished or abandoned, and the lease.
*Fails by* the port's errors. *Invariant*: a marker is written before the first byte that it covers and removed after
the last, so that a process that dies leaves only marked objects.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elastic_trainer.checkpoint.layout import (
    MANIFEST_FILE,
    OFFER_FILE,
    RECORD_PREFIX,
    Kind,
    kind_of,
    new_nonce,
    parse_checkpoint,
    quarantined,
    temporary_name,
    trashed,
)
from elastic_trainer.checkpoint.storage.bucket import PART_SIZE, Bucket, Item, RemoteError, not_written
from elastic_trainer.checkpoint.storage.lease import PrefixLease
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, Sink
from elastic_trainer.checkpoint.writers import this_process
from elastic_trainer.errors import StorageError

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
            lost = self._lease.lost and not self._lease.regained()
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
            self._delete(self._bucket.items(f"{victim}/"))
        self._delete(marks)
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

    def _delete(self, items: tuple[Item, ...]) -> None:
        if items:
            self._bucket.delete([each.key for each in items])


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
