"""What every run on this machine stands on: an etcd, real nodes, and what they write; for drills and for a user's job.

*Runs in* the main thread of the command or test; changes of the round document arrive on the watch's thread.
*Owns* the etcd, the connection to it, a watch on the round document and the nodes, until its block ends.
*Fails by* ConfigError or StoreUnavailableError before any node runs.
*Invariant*: after the block no process of the run is left, however it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_trainer.agent.health.node_health import told_by_all
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.local.ledger import LedgerTail
from elastic_trainer.membership.documents import DocumentError, NodeHealth, RoundDocument
from elastic_trainer.monitor.reading import Changes
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import RunKeys, Store

CONNECT_S = 20.0
PREFIX = "/elastic_trainer"


Clusters = Callable[[ClusterSpec], LocalCluster]
"""What makes the nodes of a run."""


@dataclass(frozen=True, slots=True)
class RunStore:
    """The etcd at which the nodes meet, and what can be read there."""

    etcd: EtcdServer | EtcdCluster
    store: Store
    keys: RunKeys
    rounds: Changes


@dataclass(frozen=True, slots=True)
class Harness:
    """A run under way. ``meeting`` is None with torchrun's c10d backend, which has no round document."""

    cluster: LocalCluster
    ledger: LedgerTail
    meeting: RunStore | None

    def documents(self) -> list[tuple[RoundDocument, float]]:
        """Round documents since the last look, with their times of arrival."""
        found = []
        while self.meeting is not None and not self.meeting.rounds.queue.empty():
            item, t = self.meeting.rounds.queue.get()
            with suppress(DocumentError):
                found += [(RoundDocument.decode(item.value, item.key), t)] if item is not None else []
        return found

    def health(self) -> Mapping[str, NodeHealth]:
        """What the nodes have published of their workers, by name."""
        return told_by_all(self.meeting.store, self.meeting.keys) if self.meeting is not None else {}


@contextmanager
def harness(spec: ClusterSpec, clusters: Clusters = LocalCluster, etcd_members: int = 1) -> Iterator[Harness]:
    """A run of ``spec``, whose endpoint is filled in here. No node is started yet."""
    with ExitStack() as stack:
        meeting, endpoint = None, f"{HOST}:{free_ports(1)[0]}"
        if spec.backend != "c10d":
            directory = spec.directory / "etcd"
            etcd = EtcdServer(directory) if etcd_members == 1 else EtcdCluster(etcd_members, directory=directory)
            stack.enter_context(etcd)
            endpoint = etcd.endpoint
            prefix = spec.options.get("prefix", PREFIX)
            settings = StoreSettings(endpoints=parse_endpoints(endpoint), prefix=prefix)
            store = connect_checked(settings, Deadline.after(CONNECT_S))
            stack.callback(store.close)
            keys = RunKeys(prefix, spec.run)
            meeting = RunStore(etcd, store, keys, Changes(store, keys.round, exact=True))
        cluster = stack.enter_context(clusters(replace(spec, endpoint=endpoint)))
        yield Harness(cluster, LedgerTail(spec.ledger), meeting)


def new_directory(directory: Path) -> Path:
    """Make ``directory``, unless an earlier run is there."""
    if (directory / "ledger").exists():
        raise ConfigError(f"--run-dir {directory} holds an earlier run", hint="name a new directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {directory}: {error.strerror}", hint="choose another --run-dir") from error
    return directory
