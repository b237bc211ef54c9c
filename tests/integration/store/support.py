"""Short forms that the store's integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Put, Store
from tests.support.listeners import Recorder
from tests.support.waiting import soon


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


def watching(store: Store, prefix: str, recorder: Recorder | None = None, *, exact: bool = False) -> Recorder:
    """Who hears of a watch that has begun, over a connection that is there: nothing but what the test does is news of
    either. Closing the store ends it."""
    heard = recorder or Recorder()
    store.version(soon())
    store.watch(prefix, heard, exact=exact)
    heard.wait_snapshots(1)
    return heard
