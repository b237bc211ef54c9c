"""Commits a checkpoint atomically.

*Runs in* the saving process. *Owns* one temporary directory until its publication or removal.
*Fails by* StorageError; the temporary directory is removed and every other checkpoint is unchanged.
*Invariant*: whenever the process dies, each committed name holds a complete checkpoint. Data reach the disk before the
manifest, the manifest before the name, and a name never replaces another.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from elastic_trainer.checkpoint.codec import outline
from elastic_trainer.checkpoint.layout import (
    MANIFEST_FILE,
    OFFER_FILE,
    RECORD_PREFIX,
    STATE_FILE,
    DamagedError,
    InUseError,
    Kind,
    WriterIdentity,
    alive,
    is_rescued,
    kind_of,
    parse_temporary,
    place_of,
    temporary_name,
    tensors_file,
    this_process,
)
from elastic_trainer.checkpoint.manifest import (
    CHUNK,
    Checksums,
    FileImage,
    FileRecord,
    Image,
    Manifest,
    from_bytes,
    pieces,
    record,
    seal,
    unseal,
)
from elastic_trainer.checkpoint.reading import read_headers, whole_tensors
from elastic_trainer.checkpoint.storage import Holder, Sink, Storage
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.telemetry.logs import logger


class Transition(StrEnum):
    """The transitions; the values are the names of the log lines."""

    COMMITTED = "checkpoint.committed"
    FAILED = "checkpoint.failed"
    LOADED = "checkpoint.loaded"
    QUARANTINED = "checkpoint.quarantined"
    SKIPPED = "checkpoint.skipped"
    OUTRANKED = "checkpoint.outranked"
    REMOVED = "checkpoint.removed"
    REMOVAL_FAILED = "checkpoint.removal_failed"
    SWEPT = "checkpoint.swept"


_WARNINGS = frozenset(
    {
        Transition.QUARANTINED,
        Transition.SKIPPED,
        Transition.OUTRANKED,
        Transition.REMOVAL_FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of the directory entry ``name``; ``values`` are the other keys of the log line."""

    kind: Transition
    name: str
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


EventSink = Callable[[Event], None]


def announce(event: Event, listener: EventSink | None) -> None:
    """Log ``event`` and pass it to ``listener``."""
    log = logger()
    write = log.error if event.kind is Transition.FAILED else log.warning if event.kind in _WARNINGS else log.info
    details = {"reason": event.reason, **event.values} if event.reason else dict(event.values)
    write(str(event.kind), checkpoint=event.name, **details)
    if listener is not None:
        listener(event)


_AGAIN_S = 0.1
_SLOWLY_S = 1.0
"""Seconds between two looks at a lease, each of which is a request."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The job of a process. ``run`` is the name in its checkpoints, None without one.

    ``job`` is shared by all its processes, now and after a restart; None if the launcher does not say.
    """

    run: str | None = None
    job: str | None = None


class Claim:
    """The right of ``owner`` to write in ``storage``."""

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
            if self._same_job(holder.words):
                return
            showed_itself = before is not None and holder.shown_at != before.shown_at
            maybe_dead = patience_s > 0 and holder.expires_in_s > 0 and not showed_itself
            if patience.expired and not maybe_dead:
                raise InUseError(
                    f"checkpoint directory {self._storage.location} is in use by {_shown_holder(holder.words)}",
                    hint="give each job a directory of its own, or wait until that one has ended",
                )
            before = holder
            pause(_SLOWLY_S if holder.expires_in_s else _AGAIN_S, clock=self._clock)

    def release(self) -> None:
        self._storage.let_go()

    def _same_job(self, holder: str) -> bool:
        return self._owner.job is not None and _parsed_words(holder).get("job") == self._owner.job

    def _gives_way(self, holder: str) -> bool:
        """Whether the holder is of this job, or dead according to this machine's kernel."""
        return self._same_job(holder) or _dead(_parsed_words(holder))


def _dead(read: Mapping[str, Any]) -> bool:
    try:
        process = WriterIdentity(*(read[field] for field in ("pid", "start", "boot", "namespace", "host")))
        return alive(process, this_process()) is False
    except (KeyError, TypeError):  # another version's words
        return False


def _shown_holder(holder: str) -> str:
    read = _parsed_words(holder)
    who = f"run {read['run']!r}" if read.get("run") else "another job"
    return f"{who} (process {read.get('pid', 'unknown')} on {read.get('host', 'an unknown host')})"


def _parsed_words(holder: str) -> dict[str, Any]:
    try:
        read = json.loads(holder)
    except ValueError:  # the holder has the lock but has not written its identity yet
        return {}
    return read if isinstance(read, dict) else {}


ELSEWHERE_S = 86_400.0
"""Idle time after which a writer on another machine, or in another container, counts as dead."""
REBOOTED_S = 600.0
"""The same for a writer on a host of this name before its last boot; not at once, since host names may repeat."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether a temporary directory is removed, and why."""

    remove: bool
    reason: str


def fate(writer: WriterIdentity, me: WriterIdentity, alive: bool | None, idle_s: float | None) -> Fate:
    """Judge a temporary of ``writer`` from where ``me`` stands.

    ``alive`` is what the kernel says of the writer if it can be asked, ``idle_s`` the time without writes if known.
    """
    if writer == me:
        return Fate(False, "it is being written by this process")
    if alive is not None:
        return Fate(not alive, "its writer lives" if alive else f"its writer, process {writer.pid}, is dead")
    if idle_s is None:
        return Fate(False, "its age is unknown")
    limit = REBOOTED_S if writer.host == me.host and writer.boot != me.boot else ELSEWHERE_S
    verb = "was not written to for" if idle_s > limit else "was written to within"
    return Fate(idle_s > limit, f"its writer is on {writer.host}, and it {verb} {limit:.0f} s")


def sweep(storage: Storage) -> Iterator[Event]:
    """Remove leftovers; yields one event for each removed or unremovable entry."""
    try:
        names = storage.names()
    except OSError:
        return
    for name in names:
        if kind_of(name) is Kind.TRASH:
            yield _remove(storage, name, "its removal was interrupted")
        writer = parse_temporary(name)
        if writer is not None:
            verdict = _judge(storage, name, writer)
            if verdict.remove:
                yield _remove(storage, name, verdict.reason)


def _judge(storage: Storage, name: str, writer: WriterIdentity) -> Fate:
    me = this_process()
    living = alive(writer, me)
    idle_s = _idle_s(storage, name, me) if living is None and writer != me else None
    return fate(writer, me, living, idle_s)


def at_work(storage: Storage, name: str, limit_s: float) -> bool:
    """Whether the writer of the temporary ``name`` lives; on another machine, whether it has written in ``limit_s``."""
    writer, me = parse_temporary(name), this_process()
    living = None if writer is None else alive(writer, me)
    if living is not None:
        return living
    idle_s = _idle_s(storage, name, me)
    return idle_s is not None and idle_s <= limit_s


def may_live(name: str) -> bool:
    """Whether the writer of the temporary ``name`` is not known to be dead."""
    writer = parse_temporary(name)
    return writer is not None and alive(writer, this_process()) is not False


def _idle_s(storage: Storage, name: str, me: WriterIdentity) -> float | None:
    reference = temporary_name(me)
    try:
        storage.create(reference)
    except StorageError:
        return None
    try:
        return storage.idle_s(name, reference)
    except OSError:
        return None
    finally:
        _remove(storage, reference, "")


def _remove(storage: Storage, name: str, reason: str) -> Event:
    try:
        storage.remove(name)
    except OSError as error:
        return Event(Transition.REMOVAL_FAILED, name, f"{reason}, but it cannot be removed: {error.strerror or error}")
    return Event(Transition.SWEPT, name, reason)


_HEADROOM = 4 << 20
"""Required free space in addition to the files: for the manifest, directories and file system metadata."""


def commit(storage: Storage, image: Image, manifest: Manifest) -> Manifest:
    """Write ``image`` as the checkpoint ``manifest.name``; returns the manifest with the file records filled in.

    Raises DamagedError and commits nothing if the manifest already has records that the bytes no longer match; bytes of
    an ``image`` with checksums are not compared again (see FileImage).
    """
    require_space(storage, image.size)
    with temporary_entry(storage, manifest.name) as temporary:
        written = tuple(write_file(storage, temporary, file) for file in image.files)
        if manifest.files not in ((), written):
            raise changed(manifest)
        complete = manifest.with_files(written)
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(complete)))
        storage.publish(temporary, manifest.name)
    return complete


def changed(manifest: Manifest) -> DamagedError:
    """The error for files whose bytes do not match the records of ``manifest``."""
    return DamagedError(f"checkpoint {manifest.name}: its bytes have changed in memory since they were copied")


def require_space(storage: Storage, size: int) -> None:
    """Raise StorageError unless ``size`` bytes of files fit."""
    free = storage.free_bytes()
    if free is not None and free < size + _HEADROOM:
        raise StorageError(
            f"checkpoint directory {storage.location} is full: the checkpoint needs {_shown(size + _HEADROOM)}, "
            f"{_shown(free)} are free",
            hint="free some space, or keep fewer checkpoints; earlier checkpoints are intact",
        )


def check_writable(storage: Storage) -> None:
    """Raise StorageError unless a checkpoint could be written now; leaves nothing behind and does not sync."""
    storage.prepare()
    require_space(storage, 0)
    with temporary_entry(storage) as temporary:
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, b"\0" * 4096), durable=False)
        _discard(storage, temporary)


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
        _discard(storage, temporary)
    return size / (written - begun), size / (read - written)


@contextmanager
def temporary_entry(storage: Storage, name: str | None = None) -> Iterator[str]:
    """A fresh entry, to become ``name``, which is removed if the block fails or is interrupted."""
    temporary = temporary_name(this_process())
    storage.create(temporary, name)
    try:
        yield temporary
    except BaseException:
        _discard(storage, temporary)
        raise


def _discard(storage: Storage, name: str) -> None:
    try:
        storage.remove(name)
    except OSError:
        return  # a broken disk, which the original error reports; the rest is swept after this process has ended


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


def _shown(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


LOOK_S, SELDOM_S = 0.05, 1.0
"""Seconds between two looks at the storage, at first and after a while."""
FIND_S, LONGEST_S = 120.0, 3600.0
"""Seconds that a helper looks for an offer, and as long as the saving process is seen busy with an earlier one."""
LEAST_PATIENCE_S = 10.0
IDLE_S = 30.0
"""Seconds without a write after which a writer on another machine is given up."""
PATIENCE = 3.0
"""A helper may take this many times as long for its files as the process that saves took for its own."""
_LONGEST_NOTE = 64 << 20


def commit_shared(storage: Storage, image: Image, manifest: Manifest, clock: Clock = SYSTEM) -> Manifest:
    """Write ``image`` as the checkpoint ``manifest``, whose file records are known, together with any helpers."""
    require_space(storage, image.size)
    with temporary_entry(storage, manifest.name) as temporary:
        write_file(storage, temporary, from_bytes(OFFER_FILE, seal(manifest)))
        began = clock.monotonic()
        mine = set(_take(storage, temporary, image.files, manifest))
        patience = Deadline.after(max(LEAST_PATIENCE_S, PATIENCE * (clock.monotonic() - began)), clock)
        late = []
        for file in image.files:
            if file.name not in mine and not _awaited(storage, temporary, file.name, patience):
                logger().warning("checkpoint.helper_late", checkpoint=manifest.name, file=file.name)
                late.append(file.name)
                storage.discard(temporary, file.name)
                _write(storage, temporary, file, manifest)
        notes = storage.files(temporary) - {file.name for file in image.files}
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(manifest)))
        for name in notes:
            storage.discard(temporary, name)
        storage.publish(temporary, manifest.name)
    helped = len(image.files) - len(mine) - len(late)
    logger().info("checkpoint.shared", checkpoint=manifest.name, own=len(mine), helped=helped, late=len(late))
    return manifest


def help_write(
    storage: Storage, image: Image, manifest: Manifest, turn: int, stop: threading.Event, clock: Clock = SYSTEM
) -> tuple[str, ...]:
    """Write some files of the state ``manifest``, starting at file ``turn``; the names of those written here."""
    offer = find_offer(storage, manifest, _fits, stop, clock)
    if offer is None:
        return ()
    temporary, wanted = offer
    files = [*image.files[turn:], *image.files[:turn]]
    same = [file for file in files if manifest.file(file.name) == wanted.file(file.name)]
    try:
        storage.join(temporary, wanted.name)
        wrote = tuple(_take(storage, temporary, same, wanted))
    except (CheckpointError, OSError) as error:
        if storage.exists(temporary):
            logger().warning("checkpoint.help_failed", checkpoint=wanted.name, reason=str(error))
        return ()
    logger().info("checkpoint.helped", checkpoint=wanted.name, files=len(wrote))
    return wrote


def find_offer(
    storage: Storage,
    mine: Manifest,
    fits: Callable[[Manifest, Manifest], bool],
    stop: threading.Event,
    clock: Clock = SYSTEM,
    passed_over: Collection[str] = (),
) -> tuple[str, Manifest] | None:
    """The temporary directory in which another process saves the state of ``mine``, and its offer.

    While an earlier state of the round is being saved, the offer may yet come.
    """
    longest = Deadline.after(LONGEST_S, clock)
    limit, pause_s = longest.at_most(FIND_S), LOOK_S
    seen, earlier = set(passed_over), set[str]()
    while True:
        names = set(_names(storage))
        for name in names - seen:
            if not _temporary(name):
                seen.add(name)
                continue
            offer = read_note(storage, name, OFFER_FILE)
            if offer is None:
                continue
            if _moment(offer) == _moment(mine) and fits(offer, mine):
                return name, offer
            seen.add(name)
            if (offer.run, offer.round) == (mine.run, mine.round) and offer.step < mine.step:
                earlier.add(name)
        if any(may_live(name) for name in earlier & names):
            limit = longest.at_most(FIND_S)
        if limit.expired or pause(pause_s, stop, clock):
            return None
        pause_s = min(SELDOM_S, 1.2 * pause_s)


def offered(storage: Storage, draft: Manifest) -> bool:
    """Whether another process, which seems to live, rescues the state of ``draft``."""
    for name in _names(storage):
        notes = [read_note(storage, name, file) for file in (OFFER_FILE, MANIFEST_FILE)] if _temporary(name) else []
        same = (is_rescued(each.name) and _moment(each) == _moment(draft) for each in notes if each is not None)
        if any(same) and at_work(storage, name, IDLE_S):
            return True
    return False


def _temporary(name: str) -> bool:
    return kind_of(name) is Kind.TEMPORARY


def _moment(manifest: Manifest) -> tuple[str | None, int, int]:
    return manifest.run, manifest.round, manifest.step


def _names(storage: Storage) -> tuple[str, ...]:
    try:
        return storage.names()
    except OSError:  # it may be back the next time
        return ()


def read_note(storage: Storage, temporary: str, file: str) -> Manifest | None:
    """The manifest that a writer left in a temporary directory for others; None while there is none that is whole."""
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


def _fits(offer: Manifest, mine: Manifest) -> bool:
    return {each.name for each in offer.files} == {each.name for each in mine.files}


def _take(storage: Storage, temporary: str, files: Sequence[FileImage], manifest: Manifest) -> Iterator[str]:
    """Write the files of ``files``, in order, that no other process has taken."""
    for file in files:
        if storage.mark(temporary, f"taken-{file.name}"):
            _write(storage, temporary, file, manifest)
            storage.mark(temporary, f"done-{file.name}")
            yield file.name


def _write(storage: Storage, temporary: str, file: FileImage, manifest: Manifest) -> None:
    if write_file(storage, temporary, file) != manifest.file(file.name):
        raise changed(manifest)


def _awaited(storage: Storage, temporary: str, file: str, patience: Deadline) -> bool:
    """Whether a helper makes ``file`` durable in time."""
    while f"done-{file}" not in storage.files(temporary):
        if patience.expired:
            return False
        pause(LOOK_S, clock=patience.clock)
    return True


SHARDS_LEAST_PATIENCE_S = 60.0
SHARDS_PATIENCE = 5.0
"""A place may take this many times as long for its file as place 0 took for its own."""


def commit_jointly(
    storage: Storage, image: Image, manifest: Manifest, stop: threading.Event | None = None, clock: Clock = SYSTEM
) -> Manifest:
    """Write ``image``, the files of place 0, and publish the checkpoint when those of all other places are there.

    After ``stop`` it waits for no place any more: one of them is known to be gone.
    """
    where = place_of(image.names)
    if where is None or where[0] != 0:
        raise StorageError(f"{manifest.name} is not committed: the shards of one place are not a checkpoint")
    require_space(storage, image.size)
    with temporary_entry(storage, manifest.name) as temporary:
        offer = manifest.model_copy(update={"files": ()})
        write_file(storage, temporary, from_bytes(OFFER_FILE, seal(offer)))
        began = clock.monotonic()
        first, *rest = (write_file(storage, temporary, file) for file in image.files)
        if manifest.files not in ((), (first, *rest)):
            raise changed(manifest)
        patience = Deadline.after(max(SHARDS_LEAST_PATIENCE_S, SHARDS_PATIENCE * (clock.monotonic() - began)), clock)
        others = [
            _record_of(storage, temporary, offer, place, where[1], patience, stop) for place in range(1, where[1])
        ]
        complete = manifest.with_files((first, *rest, *others))
        _check_whole(storage, temporary, complete, image)
        for name in storage.files(temporary) - {each.name for each in complete.files}:
            storage.discard(temporary, name)
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(complete)))
        storage.publish(temporary, manifest.name)
    logger().info("checkpoint.joined", checkpoint=manifest.name, places=where[1])
    return complete


def write_place(
    storage: Storage,
    image: Image,
    manifest: Manifest,
    stop: threading.Event,
    clock: Clock = SYSTEM,
    *,
    refused: bool = False,
) -> tuple[str, ...]:
    """Write ``image``, the file of a place other than 0, where place 0 saves the state ``manifest``.

    Returns its name; nothing where no place 0 was found in time, before ``stop``, or another replica was faster. If it
    is ``refused``, place 0 learns that in place of the file.
    """
    (file,) = image.files
    tried = set[str]()
    while True:
        found = find_offer(storage, manifest, lambda offer, _: not offer.files, stop, clock, tried)
        if found is None:
            if not tried and not stop.is_set():
                reason = "place 0 did not begin to save it in time"
                logger().warning("checkpoint.place_given_up", checkpoint=manifest.name, file=file.name, reason=reason)
            return ()
        temporary, offer = found
        try:
            storage.join(temporary, offer.name)
            if not storage.mark(temporary, f"taken-{file.name}"):
                tried.add(temporary)  # one step may be saved twice
                continue
            if refused:
                storage.mark(temporary, f"failed-{file.name}")
                return ()
            _write_recorded(storage, temporary, image, offer, manifest)
        except (CheckpointError, OSError) as error:
            if storage.exists(temporary):
                logger().warning("checkpoint.place_failed", checkpoint=offer.name, file=file.name, reason=str(error))
            return ()
        logger().info("checkpoint.place_written", checkpoint=offer.name, file=file.name)
        return (file.name,)


def _write_recorded(storage: Storage, temporary: str, image: Image, offer: Manifest, mine: Manifest) -> None:
    (file,) = image.files
    try:
        require_space(storage, file.size)
        record = write_file(storage, temporary, file)
        if mine.files not in ((), (record,)):
            raise changed(mine)
        note = offer.with_files((record,))
        write_file(storage, temporary, from_bytes(f"{RECORD_PREFIX}{file.name}", seal(note)))
    except (CheckpointError, OSError):
        storage.mark(temporary, f"failed-{file.name}")
        raise


def _record_of(
    storage: Storage,
    temporary: str,
    offer: Manifest,
    place: int,
    places: int,
    patience: Deadline,
    stop: threading.Event | None,
) -> FileRecord:
    """The record of the file of ``place``, when it is durable; StorageError if that fails or takes too long."""
    file, pause_s = tensors_file(place, places), LOOK_S
    while True:
        there = storage.files(temporary)
        note = read_note(storage, temporary, f"{RECORD_PREFIX}{file}") if f"{RECORD_PREFIX}{file}" in there else None
        if note is not None and note.name == offer.name:
            return note.file(file)
        if f"failed-{file}" in there:
            raise _missing(storage, place, "could not write its shards there", "its log says why")
        if patience.expired or (stop is not None and stop.is_set()):
            what = (
                "did not write its shards in time" if f"taken-{file}" in there else "did not come to write its shards"
            )
            hint = "it may have died; all nodes of a sharded job must see the same checkpoint directory"
            raise _missing(storage, place, what, hint)
        pause(pause_s, stop, patience.clock)
        pause_s = min(SELDOM_S, 1.2 * pause_s)


def _missing(storage: Storage, place: int, what: str, hint: str) -> StorageError:
    return StorageError(f"no checkpoint was saved in {storage.location}: place {place} {what}", hint=hint)


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
