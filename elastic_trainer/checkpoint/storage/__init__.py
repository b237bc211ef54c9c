"""Where checkpoints lie: the port, its implementations, and the one place that turns a path or URL into a storage."""

from elastic_trainer.checkpoint.storage.locations import checked, is_url, open_storage
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, Sink, Storage
from elastic_trainer.checkpoint.storage.posix import PosixStorage

__all__ = ["ByteSource", "Holder", "PosixStorage", "Sink", "Storage", "checked", "is_url", "open_storage"]
