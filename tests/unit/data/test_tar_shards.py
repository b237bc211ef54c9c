"""Tar files of samples: grouping, decoding, broken files, the kept index."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import structlog
import torch

from elastic_trainer.data import tar_shards as tar_index
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Fetcher, Sampler
from elastic_trainer.data.tar_shards import TarShards
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.model import Cursor


def shard(path: Path, files: Mapping[str, bytes], mode: Literal["w", "w:gz"] = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def numbered(path: Path, first: int, last: int) -> Path:
    return shard(path, {f"{number:04d}.cls": str(number).encode() for number in range(first, last)})


def array(values: list[float]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values))
    return buffer.getvalue()


def test_files_with_one_key_are_one_sample_and_decoded_by_extension(tmp_path: Path) -> None:
    """Up to the first dot of the name it is the key; folders belong to it, and hidden files to nothing. A decoder for
    the whole extension goes before one for its last part; with those of one's own, data may draw random numbers."""
    files = {
        "a/1.cls": b"7", "a/1.txt": b"caf\xc3\xa9", "a/1.json": json.dumps({"x": [1]}).encode(), "a/.hidden": b"",
        "README": b"", "b/1.x.npy": array([1.5]), "b/1.BIN": b"\0\1",
    }  # fmt: skip
    first, second = (TarShards(shard(tmp_path / "s.tar", files))[number] for number in (0, 1))
    assert first == {"__key__": "a/1", "cls": 7, "txt": "café", "json": {"x": [1]}}
    assert (second["__key__"], second["x.npy"].tolist(), second["bin"]) == ("b/1", [1.5], b"\0\1")
    path = shard(tmp_path / "s.tar", {"a.seg.txt": b"s", "a.txt": b"t"})
    shards = TarShards(path, decode={"seg.txt": lambda data: data * 2}, transform=lambda sample: sample["seg.txt"])
    assert (shards[0], shards.deterministic, TarShards(path).deterministic) == (b"ss", False, True)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (3, 2), (10, 20, 30)).save(buffer := io.BytesIO(), "png")
    path = shard(tmp_path / "s.tar", {"a.png": buffer.getvalue()})
    assert TarShards(path)[0]["png"].size == (3, 2)
    assert TarShards(path, decode=False)[0]["png"] == buffer.getvalue()


def test_several_shards_are_one_data_set_that_is_shuffled_and_divided_exactly(tmp_path: Path) -> None:
    """Patterns name them; sample numbers go on from one to the next."""
    assert tar_index.braces("a{08..10}{x,y}.tar") == [f"a{n}{c}.tar" for n in ("08", "09", "10") for c in "xy"]
    for number in range(3):
        numbered(tmp_path / f"s-{number:02d}.tar", 10 * number, 10 * number + 10)
    shards = TarShards(f"{tmp_path}/s-{{00..02}}.tar")
    assert [shards[number]["cls"] for number in range(len(shards))] == list(range(30))
    assert [path.name for path in TarShards(f"{tmp_path}/s-*.tar").paths] == ["s-00.tar", "s-01.tar", "s-02.tar"]
    with pytest.raises(IndexError):
        shards[30]

    sampler = Sampler(Fetcher(shards, torch.device("cpu"), seed=1), EpochPlan(30, 30, 7, seed=1))
    parts = [part for rank in range(3) for part in sampler.draw(Cursor(), rank, 3).micro_batches]
    assert sorted(int(each) for part in parts for each in part.data["cls"]) == list(range(30))


def damaged(path: Path, kind: str) -> Path:
    if kind in ("compressed", "undecodable"):
        return shard(path, {"a.cls": b"one"}, "w:gz" if kind == "compressed" else "w")
    if kind == "twice":  # two samples with one key lie next to each other: they would become one
        with tarfile.open(path, "w") as tar:
            for _ in range(2):
                tar.addfile(tarfile.TarInfo("a.txt"))
        return path
    numbered(path, 0, 5)
    data = path.read_bytes()
    broken = {
        "cut in a header": data[: 2 * 1024 + 100], "cut between files": data[: 3 * 1024],
        "cut in a file": data[: 2 * 1024 + 512], "header overwritten": data[:2048] + b"\xff" * 512 + data[2560:],
        "no bytes": b"", "no tar": b"hello " * 1000, "zeros": bytes(10240),
    }  # fmt: skip
    path.write_bytes(broken[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("cut in a header", "cut off or damaged at byte 2048"),
        ("cut between files", "cut off or damaged at byte 3072"),
        ("cut in a file", "not a whole tar file|cut off"),
        ("header overwritten", "cut off or damaged at byte 2048"),
        ("no bytes", "not a whole tar file"),
        ("no tar", "not a whole tar file"),
        ("zeros", "holds no samples|not a whole tar file"),
        ("compressed", "it is compressed"),
        ("twice", r"holds a\.txt twice"),
        ("undecodable", r"a\.cls in the shard .*broken\.tar cannot be decoded: ValueError"),
    ],
)
def test_a_broken_shard_is_named(tmp_path: Path, kind: str, says: str) -> None:
    """Python's reader takes most damage for the end of the file, and samples would be missing without a word."""
    with pytest.raises(DataError, match=says) as caught:
        TarShards(damaged(tmp_path / "broken.tar", kind))[0]
    assert "broken.tar" in str(caught.value)


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    for pattern in (tmp_path / "s.tar", f"{tmp_path}/*.tar"):
        with pytest.raises(DataError, match=r"\.tar"):
            TarShards(pattern)
    with pytest.raises(DataError, match="no shards are named"):
        TarShards([])


def test_the_index_is_kept_and_made_anew_when_the_shard_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never without being asked; those of two shards of one name lie apart."""
    path, kept, scanned = numbered(tmp_path / "s.tar", 0, 5), tmp_path / "kept", []
    kept.mkdir()
    scan = tar_index.scan
    monkeypatch.setattr(tar_index, "scan", lambda path: scanned.append(path) or scan(path))  # type: ignore[func-returns-value]

    def classes(path: Path, index: Path) -> list[int]:
        shards = TarShards(path, index=index)
        return [shards[number]["cls"] for number in range(len(shards))]

    TarShards(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "s.tar"]
    assert classes(path, kept) == classes(path, kept) == [0, 1, 2, 3, 4]
    assert scanned == [path, path]
    numbered(path, 10, 14)
    os.utime(path, ns=(1, 1))
    assert (classes(path, kept), len(scanned)) == ([10, 11, 12, 13], 3)
    (tmp_path / "other").mkdir()
    other = numbered(tmp_path / "other" / "s.tar", 20, 24)
    os.utime(other, ns=(1, 1))
    for _ in "ab":
        assert (classes(other, kept), classes(path, kept), len(scanned)) == ([20, 21, 22, 23], [10, 11, 12, 13], 4)
    assert {each.name for each in kept.iterdir()} == {tar_index.cache_file(each, kept).name for each in (path, other)}
    TarShards(path, index=True)
    assert (tmp_path / "s.tar.index.npz").exists()
    with pytest.raises(ConfigError, match="is not there"):
        TarShards(path, index=tmp_path / "nowhere")


def test_a_damaged_index_is_made_anew_whichever_bit_has_flipped(tmp_path: Path) -> None:
    """It neither raises nor gives other samples."""
    path = numbered(tmp_path / "s.tar", 0, 3)
    TarShards(path, index=True)
    cache = tar_index.cache_file(path, None)
    whole = cache.read_bytes()
    for number in range(0, len(whole), 13):
        cache.write_bytes(whole[:number] + bytes([whole[number] ^ 1 << number % 8]) + whole[number + 1 :])
        assert [each["cls"] for each in map(TarShards(path, index=True).__getitem__, range(3))] == [0, 1, 2]
        assert cache.read_bytes() == whole


def test_an_index_that_cannot_be_kept_is_said_once(tmp_path: Path) -> None:
    """As on a read-only mount: neither the file nor its removal is possible, here for the length of its name."""
    paths = [numbered(tmp_path / f"{'x' * 240}{number}.tar", number, number + 1) for number in range(2)]
    shards = TarShards(paths, index=True)
    assert [shards[number]["cls"] for number in range(2)] == [0, 1]
    with structlog.testing.capture_logs() as logs:
        tar_index._not_kept.cache_clear()
        TarShards(paths, index=True)
    (said,) = logs
    found = said["event"], said["directory"], said["error"]
    assert found == ("tar_index.not_kept", str(tmp_path), "File name too long")


def _read(shards: TarShards, number: int, results: Any) -> None:
    results.put((shards[number]["cls"], os.getpid() == shards._files._process))


def test_each_process_opens_the_files_for_itself_and_only_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork may share nothing with its parent that moves; a pickled data set opens its files again."""
    monkeypatch.setattr(tar_index, "MOST_OPEN", 2)
    for number in range(4):
        numbered(tmp_path / f"s{number}.tar", number, number + 1)
    shards = TarShards(f"{tmp_path}/s{{0..3}}.tar")
    assert [shards[number]["cls"] for number in (0, 1, 2, 3, 0)] == [0, 1, 2, 3, 0]
    assert len(shards._files._open) == 2
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_read, args=(shards, 0, results))
    child.start()
    assert results.get(timeout=30) == (0, True)
    child.join(30)
    again = pickle.loads(pickle.dumps(shards))
    assert again[1]["cls"] == 1
    os.truncate(tmp_path / "s2.tar", 512)
    with pytest.raises(DataError, match="shorter than it was"):
        again[2]
