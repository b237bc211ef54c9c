"""The bucket port over S3's own interface, through the client of s3fs.

fsspec hides what is needed here: parallel parts of bounded memory, conditional writes, exact listings with the store's
times, and uploads that were never completed. Endpoint, region, credentials and retries are the AWS client's own.

*Runs in* the calling thread; the client works in fsspec's thread. *Fails by* what the port says.
"""

from __future__ import annotations

import asyncio
import errno
import io
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from s3fs import S3FileSystem
from s3fs.core import S3_RETRYABLE_ERRORS
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from elastic_trainer.checkpoint.storage.objects import Item, RemoteError, Upload, in_words
from elastic_trainer.checkpoint.storage.port import RequestLimits

PARALLEL_PARTS = 4
_BROKEN_READS = 4
"""Tries of a read whose answer breaks off: the client retries what fails before."""
_MOST_DELETED = 1000
"""Keys in one request."""
_CONNECTIONS = 32
_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")
_NEEDS = {
    "get_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_objects": "s3:DeleteObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_parts": "s3:ListMultipartUploadParts",
}

T = TypeVar("T")


class S3Bucket:
    """See the module. ``name`` is the bucket's, ``prefix`` empty or without slashes at its ends."""

    def __init__(self, name: str, prefix: str, limits: RequestLimits) -> None:
        self._name, self._prefix, self.limits = name, f"{prefix}/" if prefix else "", limits
        self.location = f"s3://{name}/{prefix}".rstrip("/")
        config = {
            "connect_timeout": limits.connect_s,
            "read_timeout": limits.silence_s,
            "max_pool_connections": _CONNECTIONS,
        }
        self._files = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
        self._files.retries = 1  # on top of the client's own

    def directories(self) -> tuple[str, ...]:
        pages = self._pages("list_objects_v2", "ContinuationToken", Prefix=self._prefix, Delimiter="/")
        return tuple(
            each["Prefix"][len(self._prefix) : -1] for page in pages for each in page.get("CommonPrefixes", ())
        )

    def items(self, directory: str) -> tuple[Item, ...]:
        pages = self._pages("list_objects_v2", "ContinuationToken", Prefix=self._prefix + directory)
        return tuple(
            Item(each["Key"][len(self._prefix) :], each["Size"], each["LastModified"].timestamp())
            for page in pages
            for each in page.get("Contents", ())
        )

    def read(self, key: str, start: int, length: int) -> bytes:
        return self._ranged(key, start, length)[1]

    def open(self, key: str, length: int) -> tuple[int, bytes]:
        return self._ranged(key, 0, length)

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        if new:
            try:
                self.request("put_object", key, Body=data, IfNoneMatch="*")
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                if self.items(key):  # the best that a service without conditional writes can do
                    raise FileExistsError(errno.EEXIST, key) from error
            else:
                return
        self.request("put_object", key, Body=data)

    def delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _MOST_DELETED):
            failed = self._deleted([self._prefix + key for key in keys[first : first + _MOST_DELETED]])
            if failed:
                failed = self._deleted([each["Key"] for each in failed])  # the client repeats whole requests only
            for each in failed:
                words = f"{each['Key']} cannot be deleted: {each.get('Code')}"
                if each.get("Code") == "AccessDenied":
                    raise RemoteError(errno.EACCES, words, "allow s3:DeleteObject there", refused=True)
                raise RemoteError(errno.EIO, words, "see the store's own status and logs", refused=True)

    def _deleted(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Delete at most 1,000 objects; what the store says of those that are still there."""
        objects = [{"Key": key} for key in keys]
        answer = self.request("delete_objects", None, Delete={"Objects": objects, "Quiet": True})
        return list(answer.get("Errors", ()))

    def upload(self, key: str) -> Upload:
        return _Multipart(self, key)

    def last_part(self, directory: str) -> float | None:
        times = [0.0]
        for key, upload in self._uploads(directory):
            for page in self._pages("list_parts", "PartNumberMarker", key, UploadId=upload):
                times += [part["LastModified"].timestamp() for part in page.get("Parts", ())]
        return max(times) or None

    def abort_uploads(self, directory: str) -> None:
        for key, upload in self._uploads(directory):
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self.request("abort_multipart_upload", key, UploadId=upload)

    # ---- requests

    def request(self, method: str, key: str | None, limit_s: float | None = None, **arguments: Any) -> Any:
        """The answer to one request, retries included."""
        limit_s = limit_s if limit_s is not None else self.limits.request_s
        return self._awaited(lambda: self.call(method, key, limit_s, **arguments), method, limit_s)

    async def call(self, method: str, key: str | None, limit_s: float, **arguments: Any) -> Any:
        """The same, for the client's thread. Raises what the client raises."""
        target = {"Bucket": self._name} | ({"Key": self._prefix + key} if key is not None else {})
        async with asyncio.timeout(limit_s):
            return await self._files._call_s3(method, **target, **arguments)  # the sync one has no limit

    def begin(self, coroutine: Any) -> Future[Any]:
        """Start ``coroutine`` in the client's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._files.loop)

    def _awaited(self, start: Callable[[], Awaitable[T]], method: str, limit_s: float) -> T:
        future: Future[T] = self.begin(start())
        try:
            return future.result(limit_s + self.limits.connect_s)  # the coroutine has the limit; its thread may hang
        except Exception as error:
            future.cancel()
            raise in_words(error, _NEEDS.get(method, "s3:PutObject")) from error

    def _ranged(self, key: str, start: int, length: int) -> tuple[int, bytes]:
        async def once() -> tuple[int, bytes]:
            given = f"bytes={start}-{start + length - 1}"
            answer = await self.call("get_object", key, self.limits.part_s, Range=given)
            async with answer["Body"] as body:
                content = await body.read()
            total = _TOTAL.fullmatch(answer.get("ContentRange", ""))
            return int(total[1]) if total else len(content), content

        async def several() -> tuple[int, bytes]:
            async with asyncio.timeout(self.limits.part_s):
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception_type(S3_RETRYABLE_ERRORS),
                    stop=stop_after_attempt(_BROKEN_READS),
                    wait=wait_random_exponential(multiplier=0.2, max=5.0),
                    reraise=True,
                ):
                    with attempt:
                        return await once()
            raise AssertionError("tenacity returns or raises")

        return self._awaited(several, "get_object", self.limits.part_s)

    def _pages(self, method: str, token: str, key: str | None = None, **arguments: Any) -> list[dict[str, Any]]:
        pages: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while not pages or pages[-1].get("IsTruncated"):
            pages.append(self.request(method, key, **arguments, **more))
            more = {token: pages[-1].get(f"Next{token}")}
        return pages

    def _uploads(self, directory: str) -> list[tuple[str, str]]:
        page = self.request("list_multipart_uploads", None, Prefix=self._prefix + directory)  # few at a time
        return [(each["Key"][len(self._prefix) :], each["UploadId"]) for each in page.get("Uploads", ())]


class _Multipart:
    """A multipart upload whose parts go at the same time; a small file goes in one request."""

    def __init__(self, bucket: S3Bucket, key: str) -> None:
        self._bucket, self._key = bucket, key
        self._upload: str | None = None
        self._under_way: deque[Future[Any]] = deque()
        self._done: list[dict[str, Any]] = []
        self._count = 0

    def add(self, part: bytearray) -> None:
        if self._upload is None:
            self._upload = self._bucket.request("create_multipart_upload", self._key)["UploadId"]
        while len(self._under_way) >= PARALLEL_PARTS:
            self._collect()
        self._count += 1
        self._under_way.append(self._bucket.begin(self._send(self._upload, self._count, io.BytesIO(part))))

    def finish(self, last: bytearray) -> None:
        if self._upload is None:
            self._bucket.request("put_object", self._key, self._bucket.limits.part_s, Body=io.BytesIO(last))
            return
        if last:
            self.add(last)
        while self._under_way:
            self._collect()
        parts = {"Parts": self._done}
        limit_s = self._bucket.limits.part_s  # large ones take a while to be put together
        self._bucket.request(
            "complete_multipart_upload", self._key, limit_s, UploadId=self._upload, MultipartUpload=parts
        )

    def abort(self) -> None:
        for future in self._under_way:
            future.cancel()
        if self._upload is not None:
            self._bucket.request("abort_multipart_upload", self._key, UploadId=self._upload)

    async def _send(self, upload: str, number: int, part: io.BytesIO) -> dict[str, Any]:
        limit_s = self._bucket.limits.part_s
        sent = await self._bucket.call("upload_part", self._key, limit_s, UploadId=upload, PartNumber=number, Body=part)
        return {"PartNumber": number, "ETag": sent["ETag"]} | {
            name: sent[name] for name in sent if name.startswith("Checksum") and name != "ChecksumType"
        }

    def _collect(self) -> None:
        try:
            self._done.append(self._under_way.popleft().result(self._bucket.limits.part_s * 2))
        except Exception as error:
            raise in_words(error, "s3:PutObject") from error
