"""A key that one process overwrites repeatedly, and never with an older value.

A write of unknown outcome may still happen later, over an old connection or by an etcd member that was frozen. So each
write is guarded by the revision that the writer knows, and a late one changes nothing.

*Runs in* the writing thread, one for each slot. *Owns* nothing. *Fails by* the store's errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.store.api import Compare, Put, Read, Store, unchanged


class Slot:
    """See the module. A value by another writer of ``key`` is overwritten once its revision is known."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._revision = 0

    def replace(self, value: bytes, deadline: Deadline, guards: Sequence[Compare] = ()) -> bool:
        """Write ``value``; False if ``guards`` do not hold, or another process writes at the same time."""
        for _ in range(2):
            guard = unchanged(self._key, self._revision)
            done = self._store.transact([*guards, guard], [Put(self._key, value)], [Read(self._key)], deadline=deadline)
            if done.succeeded:
                self._revision = done.revision
                return True
            there = done.reads[0].first
            found = there.mod_revision if there is not None else 0
            if found == self._revision:
                return False
            self._revision = found  # of an earlier writer, or of our own write whose answer was lost
        return False
