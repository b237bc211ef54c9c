"""From a path or URL to a storage; files on a POSIX file system are written as they are, whatever it refuses."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint.storage import PosixStorage, is_url, open_storage, posix
from elastic_trainer.checkpoint.storage.posix import BLOCK, PosixSink
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.jobs.config import load_job


@pytest.mark.parametrize("path", ["runs/a", "/data/run-7", "s3:/bucket/x", Path("s3://bucket/x"), "a b://c"])
def test_what_is_no_url_is_a_directory(path: str | Path) -> None:
    assert not is_url(path)
    assert isinstance(open_storage(path), PosixStorage)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s4://bucket/x", "give a directory, or one of s3://, gs://, az://"),
        ("memory://x", "cannot be stored at 'memory://x'"),
        ("s3://", "names no bucket"),
        ("s3:///x", "write s3://BUCKET/PREFIX"),
    ],
)
def test_a_url_that_cannot_be_one_of_checkpoints_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_storage(url)


@pytest.mark.parametrize(("scheme", "module", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"need {module}.*pip install 'elastic-trainer\[{extra}\]'"):
        open_storage(f"{scheme}://bucket/x")


def test_files_of_a_job_with_a_url_stay_on_disk() -> None:
    config = load_job("mnist", ["checkpoint.directory=s3://bucket/team/run-7/"])
    assert (config.checkpoint.directory, config.checkpoint.files) == ("s3://bucket/team/run-7/", Path("runs/run-7"))
    assert load_job("mnist", ["checkpoint.directory=/data/x"]).checkpoint.files == Path("/data/x")


SIZE = 10 * posix._BUFFER + 12_345
AWKWARD = (1, 8, 100, BLOCK - 1, BLOCK, BLOCK + 1, 64 << 10, posix._BUFFER, posix._BUFFER + 1, 8 << 20)


@pytest.fixture(scope="module")
def content() -> memoryview:
    """Bytes at the address of a page."""
    memory = mmap.mmap(-1, SIZE)
    memory[:] = random.Random(1).randbytes(SIZE)
    return memoryview(memory)


def written(path: Path, parts: list[memoryview]) -> bytes:
    sink = PosixSink(path, str(path))
    for part in parts:
        sink.write(part)
    sink.finish()
    sink.abandon()
    return path.read_bytes()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_pieces_is_written_as_it_is(
    tmp_path: Path, content: memoryview, seed: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned, unaligned and read-only pieces of many sizes; also where the file system refuses direct writes."""
    if not direct:
        monkeypatch.setattr(posix, "_set_direct", lambda descriptor, on: False)
    draw, parts = random.Random(seed), []
    begin = position = (0, 8, 4088, 4096, 1, 5000)[seed]
    while position < SIZE:
        part = content[position : position + draw.choice(AWKWARD)]
        parts.append(part if draw.random() < 0.8 else memoryview(bytes(part)))
        position += len(part)
    assert written(tmp_path / "file", parts) == content[begin:]


def test_a_head_and_a_body_that_lies_as_in_the_file_go_to_the_disk_from_where_they_are(
    tmp_path: Path, content: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the page that both share, and the end, are copied; where the disk takes direct writes."""
    flags: list[tuple[bool, int]] = []
    real = os.write

    def spied(descriptor: int, data: memoryview) -> int:
        flags.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", spied)
    head = bytes(content[:1000])
    assert written(tmp_path / "file", [memoryview(head), content[1000 : 8 << 20], content[8 << 20 : SIZE]]) == content
    if os.major(tmp_path.stat().st_dev) == 0 or not flags[0][0]:
        pytest.skip("this file system takes no direct writes")
    whole = SIZE // BLOCK * BLOCK
    assert flags == [(True, BLOCK), (True, (8 << 20) - BLOCK), (True, whole - (8 << 20)), (False, SIZE - whole)]


def test_a_disk_that_takes_direct_writes_back_gets_buffered_ones(
    tmp_path: Path, content: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL comes only with the first write where blocks are larger than expected."""
    real, refused = os.write, []

    def larger(descriptor: int, data: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "blocks are larger")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", larger)
    assert written(tmp_path / "file", [content]) == content
    assert len(refused) <= 1


def test_a_full_disk_is_explained_and_the_file_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    sink = PosixSink(tmp_path / "file", "here")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="is full"):
        sink.write(memoryview(bytearray(posix._BUFFER)))
    sink.abandon()
    with pytest.raises(ValueError, match="closed"):
        sink.finish()
