"""Short forms that the store's integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_trainer.clock import Deadline
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Put, Store


def soon() -> Deadline:
    """Generous: a slow machine must not fail a test."""
    return Deadline.after(30.0)


def put(store: Store, key: str, value: bytes = b"", lease: int = 0) -> int:
    return store.transact([], [Put(key, value, lease)], deadline=soon()).revision


def settings(endpoint: str, **options: object) -> StoreSettings:
    return StoreSettings.model_validate({"endpoints": parse_endpoints(endpoint), **options})


@contextmanager
def client(endpoint: str, **options: object) -> Iterator[Store]:
    store = connect(settings(endpoint, **options))
    try:
        yield store
    finally:
        store.close()
