"""Storage of checkpoints: the port, its implementations, and the function that opens a path or URL."""

from elastic_trainer.checkpoint.storage.locations import checked, is_url, open_storage
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, Sink, Storage
from elastic_trainer.checkpoint.storage.posix import PosixStorage

__all__ = ["ByteSource", "Holder", "PosixStorage", "Sink", "Storage", "checked", "is_url", "open_storage"]
