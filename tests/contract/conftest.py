"""The servers that the contract is tried on: the memory backend and a real etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.store import connect
from elastic_trainer.store.api import Store
from tests.support.memory_store import MemoryBackend, MemoryStore


@dataclass(frozen=True, slots=True)
class World:
    """A server: the part of its keys that this test owns, another client of it, and the end of its history."""

    prefix: str
    client: Callable[[], Store]
    compact: Callable[[], None]


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each implementation of the port in turn."""
    with ExitStack() as ends:

        def closed_at_the_end(store: Store) -> Store:
            ends.callback(store.close)
            return store

        if request.param == "memory":
            backend = MemoryBackend()
            yield World("/contract/", lambda: closed_at_the_end(MemoryStore(backend)), backend.compact)
            return
        server: EtcdServer = request.getfixturevalue("etcd")
        settings = request.getfixturevalue("etcd_settings")
        prefix = f"{settings.prefix}/"

        def client() -> Store:
            return closed_at_the_end(connect(settings))

        def compact() -> None:
            revision = client().get(prefix, Deadline.after(30.0)).revision
            server.call("kv/compaction", revision=revision, physical=True)

        yield World(prefix, client, compact)


@pytest.fixture
def store(world: World) -> Store:
    return world.client()
