"""How an image reaches the storage: here at once, in the thread that saves.

*Runs in* the thread that calls :meth:`Writer.write`. *Owns* nothing between calls. *Fails by* StorageError.
A writer in the background copies the image's bytes (into a reused arena) before it returns and commits them later; it
fits behind the same port, with the committed manifest in the future that it returns.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from elastic_trainer.checkpoint.commit import commit
from elastic_trainer.checkpoint.image import Image
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.storage import Storage


class Writer(Protocol):
    """Turns images into committed checkpoints."""

    def write(self, image: Image, manifest: Manifest) -> Future[Manifest]:
        """Take over ``image``: when this returns, the memory behind it may change.

        The future gives the complete manifest once the checkpoint is durable, or the StorageError that prevented it.
        """
        ...


class DirectWriter:
    """Commits before it returns."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write(self, image: Image, manifest: Manifest) -> Future[Manifest]:
        done: Future[Manifest] = Future()
        done.set_result(commit(self._storage, image, manifest))
        return done
