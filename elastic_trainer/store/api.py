"""The store port: the operations on etcd that the rest of the package may use, and the names of a run's keys.

Every call takes a :class:`~elastic_trainer.clock.Deadline` and ends by it. Calls raise
:class:`StoreUnavailableError` when nothing happened, :class:`OutcomeUnknownError` when a write may have
happened, :class:`LeaseLostError` for a dead lease and :class:`ConfigError` for refused credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elastic_trainer.clock import Deadline
from elastic_trainer.model import checked_name, is_name


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as the store holds it. ``lease`` is 0 for a key that outlives its writer."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The keys of one read, in the requested order, with the store revision at which they were read."""

    items: tuple[KeyValue, ...]
    revision: int

    @property
    def first(self) -> KeyValue | None:
        """The only item of a single-key read, or None."""
        return self.items[0] if self.items else None


class Field(StrEnum):
    """The field that a comparison examines."""

    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"


class Relation(StrEnum):
    """The operator of a comparison."""

    EQUAL = "equal"
    LESS = "less"


@dataclass(frozen=True, slots=True)
class Compare:
    """A guard of a transaction.

    With ``range_end`` it must hold for every key in ``[key, range_end)``. A missing key, and likewise an empty range,
    has revision 0.
    """

    key: str
    field: Field
    relation: Relation
    operand: int
    range_end: str | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Write ``value`` under ``key``, bound to ``lease`` (0: to none)."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove ``key``, or all keys of ``[key, range_end)``."""

    key: str
    range_end: str | None = None


class Order(StrEnum):
    """The sort key of a read, ascending."""

    KEY = "key"
    CREATE_REVISION = "create_revision"


@dataclass(frozen=True, slots=True)
class Read:
    """Read ``key``, or the first ``limit`` keys (0: all) of ``[key, range_end)`` in ``order``.

    With ``keys_only`` the values are empty; revisions and leases are included.
    """

    key: str
    range_end: str | None = None
    limit: int = 0
    order: Order = Order.KEY
    keys_only: bool = False


Operation = Put | Delete | Read


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """Which branch ran, the snapshots of its reads in order, and the revision after it."""

    succeeded: bool
    reads: tuple[Snapshot, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease. ``ttl_s`` is what the store granted, which may be more than requested."""

    id: int
    ttl_s: float


class EventKind(StrEnum):
    """What happened to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change. For a DELETE the value is empty and ``mod_revision`` is the revision of the deletion."""

    kind: EventKind
    item: KeyValue


class WatchListener(Protocol):
    """Receives snapshots and events of a watch in revision order, in the watch's thread. Must not block or raise."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """The complete state: at the start, and again when the history was lost (compacted, or the store was wiped)."""

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        """Changes after the last snapshot or events, each exactly once."""

    def on_connected(self, connected: bool) -> None:
        """The stream was lost, or works again (once for each change, and once at the start).

        It precedes the first snapshot; with False if the store cannot be reached at the start.
        """


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop the watch and join its thread; the listener is not called afterwards."""


class Store(Protocol):
    """The port. One instance is one connection; safe to use from several threads."""

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        """Read one key (linearizable)."""

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        """Read the first ``limit`` (0: all) of the keys that begin with ``prefix`` (linearizable), as a Read does."""

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        """Run ``success`` if all guards hold, else ``failure``, atomically."""

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        """Grant a lease that ends ``ttl_s`` seconds after its last keep-alive."""

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        """Refresh a lease once; returns its remaining seconds. Raises LeaseLostError when it has ended."""

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        """End a lease and delete its keys; a lease that has already ended is not an error."""

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        """Follow all keys that begin with ``prefix`` (``exact``: that one key) until closed.

        The listener first gets a snapshot, then each later change exactly once and in order; it survives
        any outage of the store. Returns at once; the snapshot arrives from the watch's thread.
        """

    def version(self, deadline: Deadline) -> str:
        """The version that the server reports, such as ``3.5.1``."""

    def close(self) -> None:
        """Close the connection and end all watches."""


def prefix_end(prefix: str) -> str:
    """The first key after all keys that begin with ``prefix`` (etcd's range end)."""
    if not prefix:
        raise ValueError("a prefix must not be empty")
    last = ord(prefix[-1])
    if last >= 0x7F:
        raise ValueError("a prefix must end in an ASCII character")
    return prefix[:-1] + chr(last + 1)


def absent(key: str) -> Compare:
    """Holds while ``key`` does not exist."""
    return Compare(key, Field.CREATE_REVISION, Relation.EQUAL, 0)


def none_below(prefix: str) -> Compare:
    """Holds while no key begins with ``prefix``."""
    return Compare(prefix, Field.CREATE_REVISION, Relation.EQUAL, 0, range_end=prefix_end(prefix))


def unchanged(key: str, mod_revision: int) -> Compare:
    """Holds while ``key`` has not changed since ``mod_revision`` (0: absent)."""
    return Compare(key, Field.MOD_REVISION, Relation.EQUAL, mod_revision)


def created_at(key: str, create_revision: int) -> Compare:
    """Holds while ``key`` is still the one that was created at ``create_revision``."""
    return Compare(key, Field.CREATE_REVISION, Relation.EQUAL, create_revision)


_EVENT_DIGITS = 12  # so that keys sort by number
_INCIDENT_DIGITS = 16


def machine_faults(prefix: str, machine: str) -> str:
    """The prefix of the faults of ``machine``, of all runs below ``prefix``; no run can have this name."""
    return f"{prefix}/_machines/{checked_name(machine, 'machine')}/"


class RunKeys:
    """The keys of run ``run_id`` below ``prefix``, and with a slash at their end prefixes of keys.

    Raises ConfigError for an invalid name.
    """

    def __init__(self, prefix: str, run_id: str) -> None:
        self.prefix, self.run_id = prefix, checked_name(run_id, "run id")
        root = self.root = f"{prefix}/{run_id}/"
        """The prefix of everything that belongs to the run."""
        self.spec = root + "spec"
        """What all nodes of the run must agree on."""
        self.round = root + "round"
        """The one round document."""
        self.progress = root + "progress"
        """The last progress that rank 0's agent reported."""
        self.departure = root + "departure"
        """How the last node left; exists only while no node is present."""
        self.nodes = root + "nodes/"
        self.health = root + "health/"
        """The nodes' health documents."""
        self.save = root + "save"
        """The newest requested save."""
        self.pause = root + "pause"
        """While it is there all ranks wait: an operator wants it."""
        self.restart = root + "restart"
        """All workers of a round are to be started anew."""
        self.incidents = root + "incidents/"
        self.open_incident = root + "incidents/open"
        """The incident that ended the newest round, while no other round has followed."""
        self.preflight = root + "preflight/"
        """The nodes' preflight reports."""
        self.preflight_meeting = root + "preflight/_meeting/"  # no node can have this name
        """The nodes that measure their network together."""
        self.compile_caches = root + "compiled/"
        """The bundles of what compilers have made."""
        self.events = root + "events/"
        """The journal."""

    def node(self, node_id: str) -> str:
        """The leased key of one node."""
        return self.nodes + checked_name(node_id, "node id")

    def node_id(self, key: str) -> str | None:
        """The node that ``key`` belongs to; None if it is not a node key of this run, or has an invalid node name."""
        name = key.removeprefix(self.nodes)
        return name if key.startswith(self.nodes) and is_name(name) else None

    def node_health(self, node_id: str) -> str:
        """One node's health document; it outlives the node, since it holds counters."""
        return self.health + checked_name(node_id, "node id")

    def eviction(self, node_id: str) -> str:
        """The key that asks a node to leave."""
        return f"{self.root}evictions/{checked_name(node_id, 'node id')}"

    def incident(self, number: int) -> str:
        """The key of an incident by its time (milliseconds since 1970); these keys sort by time."""
        if not 0 <= number < 10**_INCIDENT_DIGITS:
            raise ValueError(f"incident {number} is out of range")
        return f"{self.incidents}{number:0{_INCIDENT_DIGITS}d}"

    def compiled(self, key: str) -> str:
        """The bundle of what compilers have made of one script on machines of one kind."""
        return self.compile_caches + checked_name(key, "key of a compile cache")

    def preflight_node(self, node_id: str) -> str:
        """One node's preflight report."""
        return self.preflight + checked_name(node_id, "node id")

    def is_preflight_meeting(self, key: str) -> bool:
        """Whether ``key`` is a meeting's key rather than a node's report."""
        return key.startswith(self.preflight_meeting)

    def event(self, number: int) -> str:
        """The key of journal entry ``number``; these keys sort by number."""
        if not 0 <= number < 10**_EVENT_DIGITS:
            raise ValueError(f"journal entry {number} is out of range")
        return f"{self.events}{number:0{_EVENT_DIGITS}d}"
