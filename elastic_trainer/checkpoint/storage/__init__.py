"""Opens the storage at a path or URL.

*Fails by* ConfigError: a URL of no known kind, without a bucket, or of a kind whose extra is not installed.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, RequestLimits, Sink, Storage
from elastic_trainer.checkpoint.storage.posix import PosixStorage
from elastic_trainer.errors import ConfigError

__all__ = ["ByteSource", "Holder", "PosixStorage", "Sink", "Storage", "checked", "is_url", "open_storage"]

LIMITS = RequestLimits()
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*?)/*", re.DOTALL)
_EXTRAS = {"s3": ("s3", "s3fs"), "gs": ("gcs", "gcsfs"), "az": ("azure", "adlfs")}
"""The extra of each scheme, and the module that it brings."""


def is_url(location: str | Path) -> bool:
    """Whether ``location`` is a URL, as opposed to a path."""
    return isinstance(location, str) and _URL.fullmatch(location) is not None


def checked(location: str | Path) -> str:
    """``location`` as text; ConfigError if checkpoints cannot be stored at such a URL. Imports nothing."""
    match = _URL.fullmatch(location) if isinstance(location, str) else None
    if match is not None:
        if match[1] not in _EXTRAS:
            known = ", ".join(f"{scheme}://" for scheme in _EXTRAS)
            raise ConfigError(
                f"checkpoints cannot be stored at {location!r}", hint=f"give a directory, or one of {known}"
            )
        if not match[2]:
            raise ConfigError(f"{location!r} names no bucket", hint=f"write {match[1]}://BUCKET/PREFIX")
    return str(location)


def open_storage(location: str | Path) -> Storage:
    """The storage at ``location``, a path or URL, not looked at yet. What URLs need is imported only for them."""
    match = _URL.fullmatch(checked(location)) if is_url(location) else None
    if match is None:
        return PosixStorage(Path(location))
    scheme, name, prefix = match.groups()
    extra, module = _EXTRAS[scheme]
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"checkpoints at {scheme}:// need {module}: {error}", hint=f"pip install 'elastic-trainer[{extra}]'"
        ) from error
    from elastic_trainer.checkpoint.storage.objects import FsspecBucket, ObjectStorage

    if scheme == "s3":
        from elastic_trainer.checkpoint.storage.s3 import S3Bucket

        return ObjectStorage(S3Bucket(name, prefix, LIMITS))
    from fsspec import filesystem

    files = filesystem(scheme, skip_instance_cache=True)
    return ObjectStorage(FsspecBucket(f"{scheme}://{name}/{prefix}", files, f"{name}/{prefix}", LIMITS))
