"""A key that one process replaces again and again: what it holds only becomes newer.

A write whose outcome stayed unknown may still be done later, over an old connection or by a member of etcd that stood
still. Each write is therefore guarded by the revision that the writer knows, and so a late one changes nothing.

*Runs in* the thread that writes, one for each slot. *Owns* nothing. *Fails by* the store's errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.store.api import Compare, Put, Read, Store, unchanged


class Slot:
    """See the module. Whoever else writes ``key`` is overwritten once it has been seen."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._revision = 0

    def replace(self, value: bytes, deadline: Deadline, guards: Sequence[Compare] = ()) -> bool:
        """Write ``value``; False where ``guards`` do not hold, or somebody else writes at the same time."""
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
            self._revision = found  # that of a writer before, or of a write of ours whose answer was lost
        return False
