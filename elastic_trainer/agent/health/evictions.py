"""Nodes that ask others to leave: those whose ranks are slow (stragglers), or compute wrong results (audits).

The node of rank 0 asks through a key of the other node, which then leaves as after a SIGTERM: by a planned change, with
exit code 143.

*Runs in* the agent: the thread ``health-writer``. *Fails by* ElasticTrainerError when the store is away.
*Invariant*: a request to an earlier node of the same name is ignored.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.store.api import Delete, Put, Store, created_at, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

_LIMIT_S: Final = 3.0


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Evictions:
    """See the module. ``obeys``: whether this node goes when it is asked to; ``created()`` is the revision of the store
    at which its key was created.
    """

    def __init__(
        self,
        node: str,
        store: Store,
        keys: RunKeys,
        created: Callable[[], int],
        *,
        obeys: bool,
        leave: Callable[[], None] = _leave,
    ) -> None:
        self._node, self._store, self._keys, self._created = node, store, keys, created
        self._obeys, self._leave = obeys, leave

    def obey(self) -> None:
        """Leave, if this node was asked to; a request older than its key was for an earlier node of its name."""
        if not self._obeys:
            return
        asked = self._store.get(self._keys.eviction(self._node), Deadline.after(_LIMIT_S)).first
        if asked is None:
            return
        guard = unchanged(asked.key, asked.mod_revision)
        self._store.transact([guard], [Delete(asked.key)], deadline=Deadline.after(_LIMIT_S))
        if asked.mod_revision > self._created():
            self._go(plain(asked.value.decode(errors="replace")))

    def ask(self, current: RoundDocument, node: str, reason: str) -> bool:
        """Ask ``node``, a member of the round ``current``, to leave; this one does so at once. Whether it was asked."""
        member = current.member(node)
        if member is None:
            return False
        if node == self._node:
            self._go(reason)
            return True
        # A write that etcd does late must not send away who comes back under this name.
        guard = created_at(self._keys.node(node), member.create_revision)
        put = Put(self._keys.eviction(node), reason.encode())
        return self._store.transact([guard], [put], deadline=Deadline.after(_LIMIT_S)).succeeded

    def _go(self, reason: str) -> None:
        logger().warning("node.evicted", node=self._node, reason=reason)
        self._leave()
