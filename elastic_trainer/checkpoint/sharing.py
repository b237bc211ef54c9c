"""Several nodes write one checkpoint. They hold the same state in the same files, and coordinate through storage.

The saving process writes an offer into its temporary directory: the manifest, with the checksums of all files. Helpers
look for the offer of the state that they hold. The first process to mark a file as taken writes it, so faster writers
write more, and without helpers the saving process writes all files. It also writes again each file that was taken but
is not done in time.

====================  ================================================================
``offer.json``        the manifest of what is being written
``taken-FILE``        somebody writes FILE
``done-FILE``         FILE is durable
====================  ================================================================

*Runs in* the threads that commit. *Owns* the temporary directory (the process that saves).
*Fails by* StorageError or DamagedError in the saving process; it continues without a failed helper.
*Invariant*: a published checkpoint has the bytes of the saving process: helpers write only files whose checksums equal
its own, and it publishes when all files are durable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Event

from elastic_trainer.checkpoint import janitor
from elastic_trainer.checkpoint.commit import changed, require_space, temporary_entry, write_file
from elastic_trainer.checkpoint.image import FileImage, Image, from_bytes
from elastic_trainer.checkpoint.layout import MANIFEST_FILE, OFFER_FILE, Kind, is_rescued, kind_of
from elastic_trainer.checkpoint.manifest import Manifest, seal, unseal
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger

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
    storage: Storage, image: Image, manifest: Manifest, turn: int, stop: Event, clock: Clock = SYSTEM
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
    stop: Event,
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
        if any(janitor.may_live(name) for name in earlier & names):
            limit = longest.at_most(FIND_S)
        if limit.expired or pause(pause_s, stop, clock):
            return None
        pause_s = min(SELDOM_S, 1.2 * pause_s)


def offered(storage: Storage, draft: Manifest) -> bool:
    """Whether another process, which seems to live, rescues the state of ``draft``."""
    for name in _names(storage):
        notes = [read_note(storage, name, file) for file in (OFFER_FILE, MANIFEST_FILE)] if _temporary(name) else []
        same = (is_rescued(each.name) and _moment(each) == _moment(draft) for each in notes if each is not None)
        if any(same) and janitor.at_work(storage, name, IDLE_S):
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
