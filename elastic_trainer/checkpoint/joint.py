"""Commits one checkpoint of a sharded state: each place writes the file of its shards, and place 0 commits.

Places coordinate through storage. Place 0 writes an offer into its temporary entry. Every other place looks for the
offer of its own round and step, writes its file there, and then the file's record with all checksums. Place 0 publishes
when all records exist and the headers of all files, read back, make every tensor whole.

====================  ================================================================
``offer.json``        the manifest of what is being written, without files
``taken-FILE``        a place writes FILE; of several replicas of a place, the first
``failed-FILE``       it could not
``record-FILE``       a manifest with the one record of FILE, which is durable
====================  ================================================================

*Runs in* the threads that commit, at the same time on all places. *Owns* the temporary entry (place 0).
*Fails by* StorageError on place 0 when a file is missing: nothing is published, and the previous checkpoint stays the
newest.
*Invariant*: a published checkpoint has a durable file of every place, all of one round and step.
"""

from __future__ import annotations

from threading import Event

from elastic_trainer.checkpoint.codec import outline
from elastic_trainer.checkpoint.commit import changed, require_space, temporary_entry, write_file
from elastic_trainer.checkpoint.faults import DamagedError
from elastic_trainer.checkpoint.image import Image, from_bytes
from elastic_trainer.checkpoint.layout import (
    MANIFEST_FILE,
    OFFER_FILE,
    RECORD_PREFIX,
    STATE_FILE,
    place_of,
    tensors_file,
)
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest, seal
from elastic_trainer.checkpoint.reading import read_headers, whole_tensors
from elastic_trainer.checkpoint.sharing import LOOK_S, SELDOM_S, find_offer, read_note
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.telemetry.logs import logger

LEAST_PATIENCE_S = 60.0
PATIENCE = 5.0
"""A place may take this many times as long for its file as place 0 took for its own."""


def commit_jointly(
    storage: Storage, image: Image, manifest: Manifest, stop: Event | None = None, clock: Clock = SYSTEM
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
        patience = Deadline.after(max(LEAST_PATIENCE_S, PATIENCE * (clock.monotonic() - began)), clock)
        others = [_awaited(storage, temporary, offer, place, where[1], patience, stop) for place in range(1, where[1])]
        complete = manifest.with_files((first, *rest, *others))
        _check_whole(storage, temporary, complete, image)
        for name in storage.files(temporary) - {each.name for each in complete.files}:
            storage.discard(temporary, name)
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(complete)))
        storage.publish(temporary, manifest.name)
    logger().info("checkpoint.joined", checkpoint=manifest.name, places=where[1])
    return complete


def write_place(
    storage: Storage, image: Image, manifest: Manifest, stop: Event, clock: Clock = SYSTEM, *, refused: bool = False
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
            _write(storage, temporary, image, offer, manifest)
        except (CheckpointError, OSError) as error:
            if storage.exists(temporary):
                logger().warning("checkpoint.place_failed", checkpoint=offer.name, file=file.name, reason=str(error))
            return ()
        logger().info("checkpoint.place_written", checkpoint=offer.name, file=file.name)
        return (file.name,)


def _write(storage: Storage, temporary: str, image: Image, offer: Manifest, mine: Manifest) -> None:
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


def _awaited(
    storage: Storage, temporary: str, offer: Manifest, place: int, places: int, patience: Deadline, stop: Event | None
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
