"""The servers that the contract is tried on: the memory backend and a real etcd."""

from __future__ import annotations

from typing import Protocol

from elastic_trainer.clock import Deadline
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import connect
from elastic_trainer.store.api import Store
from tests.support.memory_store import MemoryBackend, MemoryStore


class World(Protocol):
    """A server, the part of its key space that this test owns, and clients of it."""

    prefix: str

    def client(self) -> Store:
        """Another client; it is closed at the end of the test."""
        ...

    def compact(self) -> None:
        """Forget the history up to now."""
        ...

    def close(self) -> None:
        """Close all clients."""
        ...


class MemoryWorld:
    """Several memory stores on one backend."""

    def __init__(self) -> None:
        self.prefix = "/contract/"
        self._backend = MemoryBackend()
        self._clients: list[Store] = []

    def client(self) -> Store:
        self._clients.append(MemoryStore(self._backend))
        return self._clients[-1]

    def compact(self) -> None:
        self._backend.compact()

    def close(self) -> None:
        for client in self._clients:
            client.close()


class EtcdWorld:
    """Several connections to one real etcd."""

    def __init__(self, server: EtcdServer, settings: StoreSettings) -> None:
        self.prefix = f"{settings.prefix}/"
        self._server = server
        self._settings = settings
        self._clients: list[Store] = []

    def client(self) -> Store:
        self._clients.append(connect(self._settings))
        return self._clients[-1]

    def compact(self) -> None:
        revision = self.client().get(self.prefix, Deadline.after(30.0)).revision
        self._server.call("kv/compaction", revision=revision, physical=True)

    def close(self) -> None:
        for client in self._clients:
            client.close()
