"""The object store port for checkpoints, and the translation of its errors.

*Fails by* OSError, always: RemoteError with what to do about it, or FileNotFoundError and FileExistsError where a key
is missing or taken.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_trainer.errors import StorageError

PART_SIZE = 16 << 20
"""Bytes of a part of a large file."""


@dataclass(frozen=True, slots=True)
class Item:
    """An object: its key below the prefix, its size, and when it was written by the store's own clock."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of a request with all its retries: a small one, and one that carries a part of a file."""

    request_s: float = 60.0
    part_s: float = 300.0
    connect_s: float = 10.0
    silence_s: float = 30.0
    """After that long without a byte a try is given up for the next."""


class Upload(Protocol):
    """An object being uploaded. It exists when ``finish`` has returned."""

    def add(self, part: bytearray) -> None:
        """Send ``part``, which must not change afterwards. Waits while too many parts are in flight."""
        ...

    def finish(self, last: bytearray) -> None: ...

    def abort(self) -> None:
        """Leave nothing behind, if possible."""
        ...


class Bucket(Protocol):
    """The objects below one prefix of a bucket. Keys are below the prefix; ``directory`` ends with a slash."""

    @property
    def location(self) -> str: ...

    def directories(self) -> tuple[str, ...]:
        """The first components of all keys that have more than one."""
        ...

    def items(self, directory: str) -> tuple[Item, ...]: ...

    def read(self, key: str, start: int, length: int) -> bytes: ...

    def open(self, key: str, length: int) -> tuple[int, bytes]:
        """The object's size, and up to ``length`` of its first bytes."""
        ...

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write an object; FileExistsError if it is to be ``new`` and there is one."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        ...

    def upload(self, key: str) -> Upload: ...

    def last_part(self, directory: str) -> float | None:
        """When the newest part of an unfinished upload was written, if the store keeps such parts."""
        ...

    def abort_uploads(self, directory: str) -> None: ...


class RemoteError(OSError):
    """An object store refuses, fails or cannot be reached. ``hint`` says what to do.

    ``refused``: the request certainly had no effect. Otherwise it may have had its effect, or may still have it.
    """

    def __init__(self, number: int, words: str, hint: str, *, refused: bool) -> None:
        super().__init__(number, words)
        self.hint, self.refused = hint, refused


_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
)
_TAKEN = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_SET_CREDENTIALS = "check the credentials: the variables of the store's own tools, or the pod's service account"
_CHECK_ADDRESS = "check the bucket's name, its region and endpoint (AWS_ENDPOINT_URL for S3), and the network"


def in_words(error: BaseException, needs: str) -> OSError:
    """``error`` of any client library as an OSError. ``needs`` names the permission that the request takes."""
    response = _response(error)
    code, status = str(response.get("code", "")), response.get("status", 0)
    said = f"{code or status}{': ' if response.get('said') else ''}{response.get('said', '')}"
    if code == "NoSuchBucket":
        return RemoteError(errno.ENOTDIR, "the bucket does not exist", "create it, or correct its name", refused=True)
    if isinstance(error, FileExistsError | FileNotFoundError):
        return error
    if code in _TAKEN:
        return FileExistsError(errno.EEXIST, said)
    if status == 501:
        return RemoteError(errno.ENOSYS, f"the store knows no such request ({said})", _CHECK_ADDRESS, refused=True)
    if code in _CREDENTIALS:
        return RemoteError(errno.EACCES, f"the store rejects the credentials ({said})", _SET_CREDENTIALS, refused=True)
    if status == 403 or isinstance(error, PermissionError):
        words = f"permission denied ({said})" if response else f"permission denied: {error}"
        return RemoteError(errno.EACCES, words, f"allow {needs} there", refused=True)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return RemoteError(errno.ETIMEDOUT, "the store did not answer in time", _CHECK_ADDRESS, refused=False)
    if "Credentials" in type(error).__name__ or "TokenRetrieval" in type(error).__name__:
        return RemoteError(errno.EACCES, f"there are no usable credentials: {error}", _SET_CREDENTIALS, refused=True)
    if status >= 500:
        return RemoteError(errno.EIO, f"the store fails ({said})", "see the store's own status and logs", refused=False)
    if response:
        return RemoteError(errno.EIO, f"the store refuses the request ({said})", _CHECK_ADDRESS, refused=status < 500)
    return RemoteError(errno.EIO, f"the store cannot be reached: {error}", _CHECK_ADDRESS, refused=False)


def _response(error: BaseException) -> dict[str, Any]:
    """What an S3 service answered, if ``error`` or its cause says so; codes of other services stay in their words."""
    cause = error.__cause__ if error.__cause__ is not None else error
    answer = getattr(cause, "response", None)
    if not isinstance(answer, dict):
        return {}
    of = answer.get("Error", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return {"code": of.get("Code", ""), "said": of.get("Message", ""), "status": status}


def not_written(error: OSError, location: str) -> StorageError:
    """``error`` as the reason why no checkpoint can be saved at ``location``."""
    words = error.strerror or str(error)
    return StorageError(f"checkpoints cannot be saved at {location}: {words}", hint=getattr(error, "hint", None))
