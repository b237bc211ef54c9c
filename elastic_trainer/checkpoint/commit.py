"""Commits a checkpoint atomically: one process publishes it, others that hold the same state may write files of it.

The publisher is rank 0 of the round, or a rank that is left alone (``serve`` in worker/steps/training.py), or an agent
whose workers have died. It writes into a temporary entry of the storage and lets it appear under its name. If others
can help, it first leaves an offer there. They look for the offer of the round and step that they hold; whoever marks a
file as taken writes it, and leaves its record. The publisher waits for the records of all files. A file that does not
come in time it writes itself, if it holds the same bytes; the shards of another rank it does not, so then nothing is
published.

====================  ================================================================
``offer.json``        the manifest of what is being written; without files if each writer has its own shards
``taken-FILE``        somebody writes FILE
``record-FILE``       a manifest with the one record of FILE, which is durable
``failed-FILE``       whoever took FILE could not write it
====================  ================================================================

*Runs in* the threads that save, and in an agent that rescues a state. *Owns* one temporary entry until its publication
or removal (the publisher), and the lock of the directory (:class:`Claim`).
*Fails by* StorageError or DamagedError: the entry is removed and every other checkpoint is unchanged. A co-writer that
fails only warns.
*Invariant*: whenever a process dies, each committed name holds a complete checkpoint. Data reach the disk before the
manifest, the manifest before the name, and a name never replaces another. All files are of one round and step, and
bytes that the publisher holds too equal its own.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from elastic_trainer.checkpoint.codec import outline
from elastic_trainer.checkpoint.manifest import (
    CHUNK,
    MANIFEST_FILE,
    OFFER_FILE,
    RECORD_PREFIX,
    STATE_FILE,
    Checksums,
    DamagedError,
    FileImage,
    FileRecord,
    Image,
    InUseError,
    Kind,
    Manifest,
    WriterIdentity,
    alive,
    from_bytes,
    is_rescued,
    kind_of,
    parse_temporary,
    part_of,
    pieces,
    record,
    seal,
    temporary_name,
    tensor_part,
    tensors_file,
    this_process,
    unseal,
)
from elastic_trainer.checkpoint.reading import read_headers, whole_tensors
from elastic_trainer.checkpoint.storage import Holder, Sink, Storage
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.telemetry.logs import logger

_HEADROOM = 4 << 20
"""Required free space in addition to the files: for the manifest, directories and file system metadata."""
_AGAIN_S = 0.1
_SLOWLY_S = 1.0
"""Seconds between two looks at a lease, each of which is a request."""
LOOK_S, SELDOM_S = 0.05, 1.0
"""Seconds between two looks at what other writers have done, at first and after a while."""
FIND_S, LONGEST_S = 120.0, 3600.0
"""Seconds that a co-writer looks for an offer, and as long as the publisher is seen busy with an earlier one."""
IDLE_S = 30.0
"""Seconds without a write after which a writer on another machine is given up."""
LEAST_PATIENCE_S, PATIENCE = 10.0, 3.0
"""A co-writer may take this many times as long for its files as the publisher took for its own."""
SHARDS_LEAST_PATIENCE_S, SHARDS_PATIENCE = 60.0, 5.0
"""The same for shards, without which there is no checkpoint."""
_LONGEST_NOTE = 64 << 20


# ---- who may write


@dataclass(frozen=True, slots=True)
class Owner:
    """The job of a process. ``run`` is the name in its checkpoints, None without one.

    ``job`` is shared by all its processes, now and after a restart; None if the launcher does not say.
    """

    run: str | None = None
    job: str | None = None


class Claim:
    """The right of ``owner`` to write in ``storage``, which one job has at a time.

    In a directory the kernel releases the lock with the process. It is a record lock: children do not inherit it, and
    network file systems extend it to other hosts. On file systems without locks no job is refused. In an object store
    the lock is a lease (storage/objects.py), which a holder that died leaves behind for a while.
    """

    def __init__(self, storage: Storage, owner: Owner, clock: Clock) -> None:
        self._storage, self._owner, self._clock = storage, owner, clock
        process = this_process()
        self._words = json.dumps({**asdict(owner), **asdict(process), "host": socket.gethostname()})

    def take(self, patience_s: float = 0.0) -> None:
        """Take the lock; InUseError if another job still holds it after ``patience_s`` seconds.

        With patience, waits for a holder that may be dead until it writes or its lease expires. A process of the same
        job is tolerated: its peers have left it behind, and nonces keep checkpoint names apart.
        """
        patience = Deadline.after(patience_s, self._clock)
        before: Holder | None = None
        while (holder := self._storage.hold(self._words, self._gives_way)) is not None:
            held_by = _parsed_words(holder.words)
            if self._same_job(held_by):
                return
            showed_itself = before is not None and holder.shown_at != before.shown_at
            maybe_dead = patience_s > 0 and holder.expires_in_s > 0 and not showed_itself
            if patience.expired and not maybe_dead:
                who = f"run {held_by['run']!r}" if held_by.get("run") else "another job"
                who += f" (process {held_by.get('pid', 'unknown')} on {held_by.get('host', 'an unknown host')})"
                raise InUseError(
                    f"checkpoint directory {self._storage.location} is in use by {who}",
                    hint="give each job a directory of its own, or wait until that one has ended",
                )
            before = holder
            pause(_SLOWLY_S if holder.expires_in_s else _AGAIN_S, clock=self._clock)

    def release(self) -> None:
        self._storage.let_go()

    def _same_job(self, held_by: Mapping[str, Any]) -> bool:
        return self._owner.job is not None and held_by.get("job") == self._owner.job

    def _gives_way(self, words: str) -> bool:
        """Whether the holder is of this job, or dead according to this machine's kernel."""
        held_by = _parsed_words(words)
        if self._same_job(held_by):
            return True
        try:
            process = WriterIdentity(*(held_by[field] for field in ("pid", "start", "boot", "namespace", "host")))
            return alive(process, this_process()) is False
        except (KeyError, TypeError):  # another version's words
            return False


def _parsed_words(words: str) -> dict[str, Any]:
    try:
        read = json.loads(words)
    except ValueError:  # the holder has the lock but has not written its identity yet
        return {}
    return read if isinstance(read, dict) else {}


# ---- one entry and its files


def require_space(storage: Storage, size: int) -> None:
    """Raise StorageError unless ``size`` bytes of files fit."""
    free = storage.free_bytes()
    if free is not None and free < size + _HEADROOM:
        raise StorageError(
            f"checkpoint directory {storage.location} is full: the checkpoint needs {(size + _HEADROOM) / 1e6:,.1f} "
            f"MB, {free / 1e6:,.1f} MB are free",
            hint="free some space, or keep fewer checkpoints; earlier checkpoints are intact",
        )


@contextmanager
def temporary_entry(storage: Storage, name: str | None = None) -> Iterator[str]:
    """A fresh entry, to become ``name``, which is removed if the block fails or is interrupted."""
    temporary = temporary_name(this_process())
    storage.create(temporary, name)
    try:
        yield temporary
    except BaseException:
        discard_entry(storage, temporary)
        raise


def discard_entry(storage: Storage, name: str) -> None:
    """Remove the entry; on a broken disk it stays, and is swept after this process has ended."""
    with suppress(OSError):
        storage.remove(name)


def write_file(storage: Storage, entry: str, file: FileImage, *, durable: bool = True) -> FileRecord:
    """Write ``file``; unless it has checksums, they are computed from the bytes that are passed to the kernel."""
    sink = storage.sink(entry, file.name)
    try:
        if file.head:
            sink.write(memoryview(file.head))
        if file.checksums:
            for piece in pieces(file.body(), CHUNK):
                sink.write(piece)
        else:
            file = _write_body(sink, file)
        sink.finish(durable=durable)
    finally:
        sink.abandon()
    return record(file)


def _write_body(sink: Sink, file: FileImage) -> FileImage:
    """Write one piece in a second thread while the next one is hashed; without the thread if the process is exiting."""
    sums = Checksums(file)
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write") as writer:
        writing: Future[None] | None = None
        for piece in pieces(file.body(), CHUNK):
            sums.add(piece)
            if writing is not None:
                writing.result()
            try:
                writing = writer.submit(sink.write, piece)
            except RuntimeError:  # the interpreter shuts down: a leaving agent commits its snapshots
                sink.write(piece)
        if writing is not None:
            writing.result()
    return sums.taken()


def check_writable(storage: Storage) -> None:
    """Raise StorageError unless a checkpoint could be written now; leaves nothing behind and does not sync."""
    storage.prepare()
    require_space(storage, 0)
    with temporary_entry(storage) as temporary:
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, b"\0" * 4096), durable=False)
        discard_entry(storage, temporary)


def check_speed(storage: Storage, size: int) -> tuple[float, float]:
    """Bytes per second of writing and reading ``storage``; leaves nothing behind. StorageError if not writable."""
    with temporary_entry(storage) as temporary:
        begun = SYSTEM.monotonic()
        write_file(storage, temporary, from_bytes(STATE_FILE, os.urandom(size)))
        written = SYSTEM.monotonic()
        source = storage.source(temporary, STATE_FILE)
        source.read_into(memoryview(bytearray(size)), 0)
        source.close()
        read = SYSTEM.monotonic()
        discard_entry(storage, temporary)
    return size / (written - begun), size / (read - written)


# ---- the publisher


def commit(
    storage: Storage, image: Image, manifest: Manifest, stop: threading.Event | None = None, clock: Clock = SYSTEM
) -> Manifest:
    """Write ``image`` as the checkpoint ``manifest.name``; returns the manifest with the records of all files.

    Others may write files of a state that is in several files with known records, and of one that an agent rescues. Of
    a sharded state ``image`` has the shards of rank 0 of the group, and the others must write theirs. After ``stop`` it
    waits for none of them.

    Raises StorageError if files cannot be written, or shards are missing; DamagedError, and commits nothing, if the
    manifest already has records that the bytes no longer match. Bytes of an ``image`` with checksums are not compared
    again (see FileImage).
    """
    group = part_of(image.names)
    if group is not None and group[0]:
        raise StorageError(f"{manifest.name} is not committed: the shards of one place are not a checkpoint")
    require_space(storage, image.size)
    shares: dict[str, int] | None = None
    with temporary_entry(storage, manifest.name) as temporary:
        if group is not None or (manifest.files and (image.shared or is_rescued(manifest.name))):
            records, shares = _write_with_others(storage, temporary, image, manifest, stop, clock)
        else:
            records = {file.name: write_file(storage, temporary, file) for file in image.files}
        if manifest.files not in ((), tuple(records[name] for name in image.names)):
            raise _changed(manifest)
        complete = manifest.with_files(tuple(records.values()))
        if group is not None:
            _check_whole(storage, temporary, complete, image)
        notes = storage.files(temporary) - set(records) if shares is not None else frozenset[str]()
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(complete)))
        for name in notes:
            storage.discard(temporary, name)
        storage.publish(temporary, manifest.name)
    if group is not None:
        logger().info("checkpoint.joined", checkpoint=manifest.name, places=group[1])
    elif shares is not None:
        logger().info("checkpoint.shared", checkpoint=manifest.name, **shares)
    return complete


def _write_with_others(
    storage: Storage, temporary: str, image: Image, manifest: Manifest, stop: threading.Event | None, clock: Clock
) -> tuple[dict[str, FileRecord], dict[str, int]]:
    """Offer the state, write what nobody else has taken, and wait for the rest; the records of all files, in order, and
    how many files this process wrote, others wrote, and this one wrote again because they did not.
    """
    group = part_of(image.names)
    offer = manifest if group is None else manifest.model_copy(update={"files": ()})
    write_file(storage, temporary, from_bytes(OFFER_FILE, seal(offer)))
    began = clock.monotonic()
    mine = {file.name: write_file(storage, temporary, file) for file in _taken(storage, temporary, image.files)}
    factor, least_s = (PATIENCE, LEAST_PATIENCE_S) if group is None else (SHARDS_PATIENCE, SHARDS_LEAST_PATIENCE_S)
    patience = Deadline.after(max(least_s, factor * (clock.monotonic() - began)), clock)
    records, late = dict[str, FileRecord](), 0
    for file in image.files:
        try:
            records[file.name] = mine.get(file.name) or _awaited(storage, temporary, offer, file.name, patience, stop)
        except _NotWrittenError:
            logger().warning("checkpoint.helper_late", checkpoint=offer.name, file=file.name)
            late += 1
            storage.discard(temporary, file.name)
            records[file.name] = write_file(storage, temporary, file)
    others = [] if group is None else [tensors_file(rank, group[1]) for rank in range(1, group[1])]
    for name in others:
        records[name] = _awaited(storage, temporary, offer, name, patience, stop)
    return records, {"own": len(mine), "helped": len(records) - len(mine) - late, "late": late}


def _taken(storage: Storage, temporary: str, files: Sequence[FileImage]) -> Iterator[FileImage]:
    """The files that no other process has taken; they are this one's to write now."""
    return (file for file in files if storage.mark(temporary, f"taken-{file.name}"))


class _NotWrittenError(StorageError):
    """Another process did not write a file."""


def _awaited(
    storage: Storage, temporary: str, offer: Manifest, file: str, patience: Deadline, stop: threading.Event | None
) -> FileRecord:
    """The record of ``file``, when another process has made it durable."""
    pause_s, record_file = LOOK_S, f"{RECORD_PREFIX}{file}"
    while True:
        there = storage.files(temporary)
        note = _read_note(storage, temporary, record_file) if record_file in there else None
        if note is not None and note.name == offer.name:
            return note.file(file)
        hint = "it may have died; all nodes of a sharded job must see the same checkpoint directory"
        if f"failed-{file}" in there:
            what, hint = "could not write its shards there", "its log says why"
        elif patience.expired or (stop is not None and stop.is_set()):
            what = (
                "did not write its shards in time" if f"taken-{file}" in there else "did not come to write its shards"
            )
        else:
            pause(pause_s, stop, patience.clock)
            pause_s = min(SELDOM_S, 1.2 * pause_s)
            continue
        part, _ = tensor_part(file) or (0, 1)
        text = f"no checkpoint was saved in {storage.location}: place {part} {what}"
        raise _NotWrittenError(text, hint=hint)


def _check_whole(storage: Storage, temporary: str, complete: Manifest, image: Image) -> None:
    """StorageError unless the files, as this process sees them, hold all tensors of the state wholly."""
    structure = b"".join(next(file for file in image.files if file.name == STATE_FILE).body())
    wanted = {leaf.tensor for leaf in outline(structure, complete.name).values()} - {None}
    try:
        seen = complete.model_copy(update={"name": temporary})
        missing = wanted - {each.name for each in whole_tensors(read_headers(storage, seen), seen)}
        if missing:
            raise DamagedError(f"no place has written {min(map(str, missing))!r}")
    except DamagedError as error:
        raise StorageError(
            f"no checkpoint was saved in {storage.location}: the files of its places do not match: {error}",
            hint="all ranks of a sharded job must save the same state",
        ) from error


def _changed(manifest: Manifest) -> DamagedError:
    return DamagedError(f"checkpoint {manifest.name}: its bytes have changed in memory since they were copied")


# ---- the others


def write_share(
    storage: Storage,
    image: Image,
    manifest: Manifest,
    turn: int,
    stop: threading.Event,
    clock: Clock = SYSTEM,
    *,
    refused: bool = False,
) -> tuple[str, ...]:
    """Write files of the state ``manifest`` that another process publishes, and return their names.

    ``image`` is this process's shards, or all of a state that both hold: then it begins with file ``turn``, and writes
    only files whose records equal the offered ones. It writes nothing if no offer comes in time or before ``stop``, or
    if others were faster. If its shards are ``refused``, the publisher learns that instead.
    """
    shards, tried = part_of(image.names) is not None, set[str]()
    while True:
        found = _find_offer(storage, manifest, stop, clock, tried, shards=shards)
        if found is None:
            if shards and not tried and not stop.is_set():
                reason = "place 0 did not begin to save it in time"
                where = {"checkpoint": manifest.name, "file": image.names[0]}
                logger().warning("checkpoint.place_given_up", reason=reason, **where)
            return ()
        temporary, offer = found
        files = [*image.files[turn:], *image.files[:turn]]
        if not shards:
            files = [file for file in files if manifest.file(file.name) == offer.file(file.name)]
        wrote = []
        try:
            storage.join(temporary, offer.name)
            for file in _taken(storage, temporary, files):
                if refused:
                    storage.mark(temporary, f"failed-{file.name}")
                    return ()
                _write_recorded(storage, temporary, file, offer, manifest)
                wrote.append(file.name)
            if OFFER_FILE not in storage.files(temporary):  # published or given up meanwhile: nobody removes the notes
                for note in ("taken-", RECORD_PREFIX):
                    for name in wrote:
                        storage.discard(temporary, f"{note}{name}")
        except (CheckpointError, OSError) as error:
            if storage.exists(temporary) and shards:
                file_name = image.names[0]
                logger().warning("checkpoint.place_failed", checkpoint=offer.name, file=file_name, reason=str(error))
            elif storage.exists(temporary):
                logger().warning("checkpoint.help_failed", checkpoint=offer.name, reason=str(error))
            return ()
        if not shards:
            logger().info("checkpoint.helped", checkpoint=offer.name, files=len(wrote))
            return tuple(wrote)
        if wrote:
            logger().info("checkpoint.place_written", checkpoint=offer.name, file=image.names[0])
            return tuple(wrote)
        tried.add(temporary)  # another replica was faster; the step may be saved twice


def _write_recorded(storage: Storage, temporary: str, file: FileImage, offer: Manifest, mine: Manifest) -> None:
    try:
        require_space(storage, file.size)
        written = write_file(storage, temporary, file)
        if mine.files and written not in mine.files:
            raise _changed(mine)
        note = offer.with_files((written,))
        write_file(storage, temporary, from_bytes(f"{RECORD_PREFIX}{file.name}", seal(note)))
    except (CheckpointError, OSError):
        storage.mark(temporary, f"failed-{file.name}")
        raise


def _find_offer(
    storage: Storage, mine: Manifest, stop: threading.Event, clock: Clock, passed_over: Collection[str], *, shards: bool
) -> tuple[str, Manifest] | None:
    """The temporary entry in which another process saves the state of ``mine``, and its offer.

    While an earlier state of the round is being saved, the offer may yet come.
    """
    longest = Deadline.after(LONGEST_S, clock)
    limit, pause_s = longest.at_most(FIND_S), LOOK_S
    seen, earlier = set(passed_over), set[str]()
    names_of_mine = {each.name for each in mine.files}
    while True:
        names = set(_names(storage))
        for name in names - seen:
            offer = _read_note(storage, name, OFFER_FILE) if kind_of(name) is Kind.TEMPORARY else None
            if offer is None:
                continue
            fits = not offer.files if shards else {each.name for each in offer.files} == names_of_mine
            if _moment(offer) == _moment(mine) and fits:
                return name, offer
            seen.add(name)
            if (offer.run, offer.round) == (mine.run, mine.round) and offer.step < mine.step:
                earlier.add(name)
        if any(_may_live(name) for name in earlier & names):
            limit = longest.at_most(FIND_S)
        if limit.expired or pause(pause_s, stop, clock):
            return None
        pause_s = min(SELDOM_S, 1.2 * pause_s)


def offered(storage: Storage, draft: Manifest) -> bool:
    """Whether another process, which seems to live, rescues the state of ``draft``."""
    for name in _names(storage):
        if kind_of(name) is Kind.TEMPORARY:
            notes = (_read_note(storage, name, file) for file in (OFFER_FILE, MANIFEST_FILE))
            same = (each and is_rescued(each.name) and _moment(each) == _moment(draft) for each in notes)
            if any(same) and _at_work(storage, name):
                return True
    return False


def _moment(manifest: Manifest) -> tuple[str | None, int, int]:
    return manifest.run, manifest.round, manifest.step


def _names(storage: Storage) -> tuple[str, ...]:
    try:
        return storage.names()
    except OSError:  # it may be back the next time
        return ()


def _read_note(storage: Storage, temporary: str, file: str) -> Manifest | None:
    """The manifest that a writer left in a temporary entry for others; None while there is none that is whole."""
    try:
        source = storage.source(temporary, file)
    except OSError:
        return None
    try:
        content = bytearray(min(source.size, _LONGEST_NOTE))
        if not source.read_into(memoryview(content), 0):
            return None
        return unseal(bytes(content), json.loads(content)["manifest"]["name"])
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        source.close()


# ---- whether a writer lives


def _may_live(temporary: str) -> bool:
    """Whether the writer of ``temporary`` is not known to be dead."""
    writer = parse_temporary(temporary)
    return writer is not None and alive(writer, this_process()) is not False


def _at_work(storage: Storage, temporary: str) -> bool:
    """Whether the writer of ``temporary`` lives; on another machine, whether it has written in ``IDLE_S``."""
    writer = parse_temporary(temporary)
    living = None if writer is None else alive(writer, this_process())
    if living is not None:
        return living
    quiet_s = idle_s(storage, temporary)
    return quiet_s is not None and quiet_s <= IDLE_S


def idle_s(storage: Storage, name: str) -> float | None:
    """Seconds since the last write to the entry ``name``, by the storage's own clock; None if that is not known."""
    reference = temporary_name(this_process())
    try:
        storage.create(reference)
        return storage.idle_s(name, reference)
    except (OSError, StorageError):
        return None
    finally:
        discard_entry(storage, reference)
