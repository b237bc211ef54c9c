"""A node's key: written under a lease, only by its owner, and written again as a new incarnation after a loss.

*Runs in* torchrun's main thread (``publish``) and the deciding thread (``return_from_loss``), one at a time.
*Owns* the lease session. ``own_key`` decides what is written when.
*Fails by* ConfigError when another live node uses the same id, ReplacedError when that came later, TransientError past
the deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.own_address import LOOPBACK, refusal_proves
from elastic_trainer.membership.agent_port import refuses
from elastic_trainer.membership.documents import NodeRecord
from elastic_trainer.membership.effects import Pause, ProbePort, Renew, Request, Steps, Transaction
from elastic_trainer.membership.own_key import OwnKey
from elastic_trainer.store.api import Put, Store, TransactionResult
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.telemetry.logs import logger

PROBE_LIMIT_S = 0.2


class Presence:
    """Writes the ``key`` of ``node_id``."""

    def __init__(self, store: Store, keys: RunKeys, node_id: str, session: LeaseSession, clock: Clock = SYSTEM) -> None:
        self._store, self._session, self._clock = store, session, clock
        self.key = OwnKey(keys, node_id, session, clock)
        self._lock = threading.RLock()
        self.node_id = node_id

    @property
    def ttl_s(self) -> float:
        """How long the key outlives the last keepalive of its owner."""
        return self._session.ttl_s

    @property
    def address(self) -> str:
        """The one that this node announces."""
        return self.key.record.address if self.key.record is not None else LOOPBACK

    @contextmanager
    def writing(self, record: NodeRecord) -> Iterator[Put]:
        """Context of a transaction that writes ``record`` with the round: no other thread writes the key meanwhile."""
        with self._lock:
            self.key.written = None
            yield self.key.put(record)

    def wrote(self, record: NodeRecord, revision: int) -> None:
        """Take note that such a transaction succeeded, at ``revision`` of the store."""
        with self._lock:
            self.key.wrote(record, revision)

    def publish(self, record: NodeRecord, deadline: Deadline) -> None:
        """Write ``record``; retries during an outage of the store until ``deadline``."""
        self._perform(self.key.publishing(record, deadline))

    def return_from_loss(self, deadline: Deadline) -> None:
        """After the lease was lost: write the record as a new incarnation; see :meth:`OwnKey.returning`."""
        was_away = self.key.away
        self._perform(self.key.returning(deadline))
        if was_away:
            logger().warning("node.returned", node=self.node_id, create_revision=self.key.create_revision)

    def publish_again(self, deadline: Deadline) -> None:
        """Write the present record once more: a restored store may hold an older one."""
        self._perform(self.key.publishing_again(deadline))

    def close(self) -> None:
        """Delete the key; if the store is unreachable, the key disappears when its lease ends."""
        self._session.close()

    def _perform(self, steps: Steps) -> None:
        """Answer the requests of ``steps``; holds the key's lock except during shared pauses."""
        answer: TransactionResult | bool | None = None
        error: ElasticTrainerError | None = None
        while True:
            with self._lock:
                request = self._next(steps, answer, error)
                while request is not None and not (isinstance(request, Pause) and request.shared):
                    answer, error = self._ask(request)
                    request = self._next(steps, answer, error)
            if request is None:
                return
            answer, error = self._ask(request)

    @staticmethod
    def _next(
        steps: Steps, answer: TransactionResult | bool | None, error: ElasticTrainerError | None
    ) -> Request | None:
        try:
            return steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration:
            return None

    def _ask(self, request: Request) -> tuple[TransactionResult | bool | None, ElasticTrainerError | None]:
        try:
            return self._answer(request), None
        except ElasticTrainerError as error:
            return None, error

    def _answer(self, request: Request) -> TransactionResult | bool | None:
        if isinstance(request, Transaction):
            limit = Deadline.after(request.limit_s, self._clock)
            return self._store.transact(request.guards, request.success, request.failure, deadline=limit)
        if isinstance(request, ProbePort):
            proves = refusal_proves(self.address, request.host)
            return proves and refuses(request.host, request.port, PROBE_LIMIT_S)
        if isinstance(request, Renew):
            self._session.renew(Deadline.after(request.limit_s, self._clock))
        else:
            pause(request.seconds, clock=self._clock)
        return None
