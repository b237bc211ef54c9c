"""Where checkpoints lie: the port, its implementations, and the one place that turns a path or URL into a storage."""

from elastic_trainer.checkpoint.storage.locations import open_storage
from elastic_trainer.checkpoint.storage.port import ByteSource, Sink, Storage
from elastic_trainer.checkpoint.storage.posix import PosixStorage

__all__ = ["ByteSource", "PosixStorage", "Sink", "Storage", "open_storage"]
