"""The contract's parametrisation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.store.api import Store
from tests.contract.worlds import EtcdWorld, MemoryWorld, World


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each implementation of the port in turn."""
    if request.param == "memory":
        chosen: World = MemoryWorld()
    else:
        server: EtcdServer = request.getfixturevalue("etcd")
        chosen = EtcdWorld(server, request.getfixturevalue("etcd_settings"))
    yield chosen
    chosen.close()


@pytest.fixture
def store(world: World) -> Store:
    """One client."""
    return world.client()
