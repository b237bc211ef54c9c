"""Asynchronous saves: a thread writes one snapshot to storage, while a second may wait behind it.

*Runs in* threads of its own: one seals copies, one of low priority commits them, and where a neighbour keeps copies of
shards another one sends them; the training thread calls ``submit`` and ``take_ended``.
*Owns* the arena and the threads, until :meth:`BackgroundSaves.close`.
*Fails by* the commit's error, or NonFiniteError, as the save's ``error``; later saves are still tried.
*Invariant*: snapshots are committed in the order in which they were taken, and only if watched tensors are finite.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic_trainer.checkpoint.manager import CheckpointManager, Committed
from elastic_trainer.checkpoint.manifest import Image, Manifest, checked, part_of, record
from elastic_trainer.checkpoint.memory import Arena, Held, mark_stored, seal_as
from elastic_trainer.checkpoint.neighbours import Neighbour
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.telemetry.logs import logger

_NICENESS, _SEALING_NICENESS = 10, 5
"""Of all threads, and of the sealing one: a copy without a seal is useless to a successor."""
_WORTH_PREPARING = 8 << 20


class SnapshotPurpose(StrEnum):
    """The purpose of a snapshot."""

    COMMIT = "commit"
    CO_WRITE = "co_write"
    """Another process commits the same state: write some of its files."""
    MEMORY_ONLY = "memory_only"
    """Keep it in memory for this process's successor."""


@dataclass(slots=True)
class Save:
    """A snapshot on its way to storage. When ``done`` is set, it is ``committed``, or there is an ``error``."""

    manifest: Manifest
    purpose: SnapshotPurpose = SnapshotPurpose.COMMIT
    turn: int = 0
    """The file with which a co-writer begins: others begin with others."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when co-writing is no longer needed, or a rank whose shards are needed is gone."""
    joint: bool = False
    """Whether it is the shards of one rank, without which the others of its group cannot commit."""
    committed: Committed | None = None
    error: Exception | None = None
    users: int = 1
    """How many threads still need the copy."""
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def may_succeed(self) -> bool:
        """Whether it has not failed, and nobody has given it up."""
        return self.error is None and not self.stop.is_set()


class BackgroundSaves:
    """See the module. ``manager`` commits, in the committing thread."""

    def __init__(self, manager: CheckpointManager, arena: Arena | None = None) -> None:
        self._manager, self._arena = manager, arena if arena is not None else Arena()
        self._changed = threading.Condition()
        self._unsealed: list[tuple[Save, Held]] = []
        self._waiting: list[tuple[Save, Held]] = []
        self.unread: list[Save] = []
        """Those that have ended since :meth:`take_ended` was called."""
        self._under_way: list[Save] = []
        self._neighbour: Neighbour | None = None
        self._copied_to: Neighbour | None = None
        self._unsent: list[tuple[Save, Held, Neighbour]] = []
        self._protected_copy: tuple[int, int] | None = None
        self._copy_failed = False
        self.sent_s = 0.0
        """Seconds that the last copy took to the neighbour."""
        self._busy = False
        self._closed = self._started = self._sends = False
        self._threads: list[threading.Thread] = []

    @property
    def full(self) -> bool:
        """Whether another snapshot would have to wait."""
        return self._arena.full

    @property
    def committing(self) -> bool:
        """Whether a snapshot is being written to storage, or waits to be."""
        with self._changed:
            return self._busy or bool(self._waiting)

    @property
    def sealing(self) -> bool:
        """Whether the previous copy is still unsealed in memory that outlives this process."""
        return self._arena.lasting and bool(self._unsealed)

    @property
    def neighbour(self) -> Neighbour | None:
        """Who gets a copy of each sealed shard."""
        return self._neighbour

    @property
    def copied(self) -> bool:
        return self._neighbour is not None and self._copied_to is self._neighbour

    @property
    def sending(self) -> bool:
        return bool(self._unsent)

    def copy_to(self, neighbour: Neighbour | None) -> bool:
        """From now on leave a copy of each sealed shard with ``neighbour``. Whether there is one, and memory that
        outlives this process.
        """
        with self._changed:
            self._neighbour = neighbour if self._arena.lasting else None
            if self._neighbour is not None and not self._sends:
                self._sends = True
                self._begin_thread("checkpoint-copies", self._send_all)
            return self._neighbour is not None

    def protect(self, name: str, order: tuple[int, int]) -> None:
        """The job has resumed the snapshot ``name``: here and at the neighbour it is overwritten last."""
        if self._arena.lasting:
            self._arena.reuse_last(name)
            self._protected_copy = order

    @property
    def memory(self) -> int:
        """Bytes of memory of the copies."""
        return self._arena.size

    @property
    def idle(self) -> bool:
        """Whether nothing is being written or waits to be."""
        with self._changed:
            return self._nothing_left()

    def prepare(self, size: int, *, pinned: bool = False) -> None:
        """Prepare for copies of ``size`` bytes: a thread touches the memory, so that the first copies need not."""

        def work() -> None:
            _give_way(_NICENESS)
            self._arena.prepare(size, pinned=pinned)

        if size >= _WORTH_PREPARING:
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(work,), name="checkpoint-memory", daemon=True).start()

    def submit(
        self, image: Image, manifest: Manifest, purpose: SnapshotPurpose = SnapshotPurpose.COMMIT, turn: int = 0
    ) -> Save:
        """Copy ``image`` now, and write it later if its watched tensors are finite. Waits while no slot is free.

        In memory that outlives this process it also waits for the seal of the previous copy: the other slot holds the
        only state that is left if this process dies meanwhile. NoRoomError if there is too little memory for the copy.
        """
        self._end_co_writing()
        self.await_slot()
        held = self._arena.hold(image)
        save = Save(manifest, purpose, turn, joint=part_of(image.names) is not None)
        with self._changed:
            self._under_way.append(save)
            self._unsealed.append((save, held))
            self._start()
            self._changed.notify_all()
        return save

    def moments(self) -> tuple[tuple[int, int], ...]:
        """Round and step of the snapshots that are being committed or wait to be."""
        with self._changed:
            saves = [each.manifest for each in self._under_way if each.purpose is SnapshotPurpose.COMMIT]
        return tuple((each.round, each.step) for each in saves)

    def stop(self, but: Collection[tuple[int, int]] = ()) -> None:
        """Stop waiting for other ranks of the shard group, except in saves of the moments ``but`` (round and step)."""
        with self._changed:
            for save in self._under_way:
                if save.joint and (save.manifest.round, save.manifest.step) not in but:
                    save.stop.set()

    def _end_co_writing(self) -> None:
        """Stop looking for processes that save an earlier state: there is a newer one."""
        with self._changed:
            for save in self._under_way:
                if save.purpose is SnapshotPurpose.CO_WRITE and not save.joint:
                    save.stop.set()

    def await_slot(self) -> None:
        """Wait until :meth:`submit` need not wait."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._arena.full or self.sealing))

    def await_seals(self) -> None:
        """Wait until all copies in memory that outlives this process are sealed."""
        with self._changed:
            self._changed.wait_for(lambda: not self.sealing)

    def at_once(
        self,
        image: Image,
        manifest: Manifest,
        purpose: SnapshotPurpose = SnapshotPurpose.COMMIT,
        stop: threading.Event | None = None,
    ) -> Save:
        """Write ``image`` in this thread, after all waiting snapshots, because there is no memory for a copy.

        After ``stop`` it waits for no other rank.
        """
        self.wait()
        save = Save(manifest, purpose, stop=stop if stop is not None else threading.Event())
        self._write(save, image)
        with self._changed:
            self._report(save)
        return save

    def give_up_waiting(self) -> Save | None:
        """Withdraw the waiting snapshot, if there is one; it will not be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsealed)
            if not self._waiting:
                return None
            save, held = self._waiting.pop()
            self._under_way.remove(save)
            self._let_go(save, held)
        return save

    def take_ended(self) -> Sequence[Save]:
        """The saves that have ended since the last call, taken from ``unread``."""
        with self._changed:
            ended, self.unread = self.unread, []
        return ended

    def wait(self) -> None:
        """Wait until nothing is left to write, and look no longer for a state to co-write."""
        self._end_co_writing()
        with self._changed:
            self._changed.wait_for(self._nothing_left)

    def _nothing_left(self) -> bool:
        return not (self._busy or self._waiting or self._unsealed)

    def close(self, limit_s: float | None = None) -> None:
        """Write waiting snapshots, then end the threads and free the memory; after ``limit_s`` the process may exit.

        An interrupted commit leaves a temporary directory, which the next process sweeps.
        """
        with self._changed:
            self._closed = True
            for save in self._under_way:
                if save.purpose is SnapshotPurpose.CO_WRITE or limit_s is not None:
                    save.stop.set()
            self._changed.notify_all()
        limit = Deadline.after(limit_s) if limit_s is not None else None
        for thread in self._threads:
            thread.join(limit.remaining_s() if limit is not None else None)
        if not any(thread.is_alive() for thread in self._threads):
            self._arena.close()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._begin_thread("checkpoint-seal", self._seal_all)
            self._begin_thread("checkpoint-save", self._commit_all)

    def _begin_thread(self, name: str, work: Callable[[], None]) -> None:
        context = contextvars.copy_context()  # what each log line says of this process
        thread = threading.Thread(target=context.run, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _seal_all(self) -> None:
        """Seal copies at once, even while an earlier one is being committed."""
        _give_way(_SEALING_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsealed or self._closed)
                if not self._unsealed:
                    return
                save, held = self._unsealed[0]
            try:
                held = self._seal(save, held)
            except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever saves gets it
                save.error = error
            with self._changed:
                self._unsealed.pop(0)
                if self._neighbour is not None and save.joint and save.error is None:
                    save.users += 1
                    self._unsent.append((save, held, self._neighbour))
                if save.error is not None and not (save.joint and save.purpose is SnapshotPurpose.CO_WRITE):
                    self._end(save, held, sealed=False)
                elif save.purpose is SnapshotPurpose.MEMORY_ONLY:
                    self._end(save, held)
                else:
                    self._waiting.append((save, held))
                self._changed.notify_all()

    def _seal(self, save: Save, held: Held) -> Held:
        """NonFiniteError for a state that must not be used; OSError without memory for the seal."""
        held.arrived()
        held = replace(held, image=checked(held.image))
        save.manifest = save.manifest.with_files(tuple(map(record, held.image.files)))
        if self._arena.lasting:
            seal_as(self._arena.descriptor(held), save.manifest, self._manager.location, self._manager.owner.job)
        return held

    def _send_all(self) -> None:
        """Leave a copy of each sealed shard with who was the neighbour then, in their order, unless another one is."""
        _give_way(_NICENESS)
        to: Neighbour | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if not self._unsent:
                    break
                before, (save, held, to) = to, self._unsent[0]
            if before is not None and before is not to:
                before.close()
            if to is self._neighbour and not self._closed:
                self._send(held, save.manifest, to)
            with self._changed:
                self._unsent.pop(0)
                self._let_go(save, held)
                self._changed.notify_all()
        if to is not None:
            to.close()

    def _send(self, held: Held, manifest: Manifest, to: Neighbour) -> None:
        began = SYSTEM.monotonic()
        try:
            to.keep(
                self._arena.descriptor(held), self._protected_copy, lambda: self._closed or self._neighbour is not to
            )
            if to is self._neighbour:
                self._protected_copy, self._copy_failed, self._copied_to = None, False, to
        except Exception as error:  # noqa: BLE001 - the thread goes on, else no slot would ever be free again
            if not self._copy_failed:
                effect = "a lost node costs the steps behind the newest checkpoint"
                logger().warning("snapshot.not_copied", step=manifest.step, reason=str(error), effect=effect)
            self._copy_failed = True
        self.sent_s = SYSTEM.monotonic() - began

    def _commit_all(self) -> None:
        _give_way(_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or (self._closed and not self._unsealed))
                if not self._waiting:
                    return
                save, held = self._waiting.pop(0)
                self._busy, sealed = True, save.error is None
            self._write(save, held.image)
            with self._changed:
                if save.committed is not None and self._arena.lasting:
                    mark_stored(self._arena.descriptor(held))
                self._busy = False
                self._end(save, held, sealed=sealed)
                self._changed.notify_all()

    def _write(self, save: Save, image: Image) -> None:
        try:
            if save.purpose is SnapshotPurpose.CO_WRITE:
                refused = save.error is not None
                self._manager.write_share(image, save.manifest, save.turn, save.stop, refused=refused)
            else:
                save.committed = self._manager.commit(image, save.manifest, save.stop)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever saves gets it
            save.error = error

    def _let_go(self, save: Save, held: Held, *, sealed: bool = True) -> None:
        """A thread no longer needs the copy of ``save``."""
        save.users -= 1
        if not save.users:
            self._arena.release(held, sealed=sealed)

    def _end(self, save: Save, held: Held, *, sealed: bool = True) -> None:
        self._let_go(save, held, sealed=sealed)
        self._under_way.remove(save)
        self._report(save)

    def _report(self, save: Save) -> None:
        if save.purpose is SnapshotPurpose.COMMIT or save.error is not None:
            self.unread.append(save)
        save.done.set()


def _give_way(niceness: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
