"""Checkpoints on disk stay what they are: of each format one is kept for ever, read bit by bit, and written again.

A writer that writes other bytes than the kept ones makes another format, or breaks one. Then give the new one its
number and its own fixture; those that are there are never replaced. ``python -m tests.unit.checkpoint.test_format DIR``
writes them to DIR.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from elastic_trainer.checkpoint import CheckpointManager, Soundness, codec, describe
from elastic_trainer.checkpoint.commit import commit
from elastic_trainer.checkpoint.manifest import Image, Manifest
from elastic_trainer.checkpoint.storage import PosixStorage
from tests.unit.checkpoint import reader
from tests.unit.checkpoint.states import newest_of, raw, same
from tests.unit.checkpoint.test_tensors import box_image, boxes

FIXTURES = Path(__file__).parents[2] / "fixtures/checkpoints"
FOLDERS = ("format-1", "format-2-parts", "format-2-boxes")
NAME = "step-000000120-r7-0123456789ab"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip


def fixed_state() -> dict[str, Any]:
    """Everything that a state may hold, with values that depend on nothing."""
    numbers = torch.arange(-30, 30, dtype=torch.float64).reshape(12, 5)
    model = OrderedDict()
    for kind in (kind for kind in DTYPES if not kind.is_complex):
        model[str(kind).removeprefix("torch.")] = (numbers > 3 if kind is torch.bool else numbers.abs()).to(kind)
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    tied = numbers.float() / 7
    return {
        "model": model,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": -tied}, -1: {}}, "groups": [{"b": (0.9, 0.999)}]},
        "tied": [tied, tied],
        "complex": [torch.complex(tied, -tied), torch.complex(numbers, numbers)],
        "empty": torch.empty(0, 4),
        "same/name": torch.tensor(1), "same": {"name": torch.tensor(2)},
        "plain": [None, True, False, 0, -7, 1 << 200, 0.1, -0.0, "text", "ü\x00€", {}, [], ()],
        "large": 3 << 2000, "bits": [float("inf"), struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]],
        "surrogate \ud800": "\udfff", "$": "a mark as a key", "ü": Counter({2: 5, "x": 1}),
        "bytes": bytes(range(256)), "blob": bytes(range(256)) * 20,
    }  # fmt: skip


def box_state() -> dict[str, Any]:
    numbers = torch.arange(60, dtype=torch.float32)
    return {"square": numbers.reshape(6, 10), "tall": numbers[:20].reshape(10, 2)}


def fixed_image(folder: str) -> Image:
    """The files of ``folder``, as today's writers make them."""
    if folder == "format-1":
        return codec.encode(fixed_state())
    if folder == "format-2-parts":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "UNCUT", 64)
            return codec.encode(fixed_state(), parts=3)
    state = box_state()
    pieces = boxes(state["square"], "square", [[2], [3, 7]]) + boxes(state["tall"], "tall", [[5], []])
    return box_image([pieces[0::2], pieces[1::2]], list(state))


def written(folder: str, directory: Path) -> Path:
    """The checkpoint of ``folder``, written to ``directory`` now."""
    manifest = Manifest(
        name=NAME, run="night", step=120, round=7, epoch=2, samples=640, world_size=4, created=1.5e9,
        metrics={"loss": 0.25, "broken": float("nan"), "far": float("-inf")}, best=True,
        fields={"seed": 7, "nested": [1, None, {"a": "ü"}]}, versions={"elastic_trainer": "0.1.0"}, files=(),
    )  # fmt: skip
    storage = PosixStorage(directory)
    storage.prepare()
    with pytest.MonkeyPatch.context() as patch:
        if folder == "format-2-parts":  # several checksums for each file
            for module in ("manifest", "commit"):
                patch.setattr(f"elastic_trainer.checkpoint.{module}.CHUNK", 1024)
        commit(storage, fixed_image(folder), manifest)
    return directory / NAME


def expected(folder: str) -> dict[str, Any]:
    return box_state() if folder == "format-2-boxes" else fixed_state()


@pytest.mark.parametrize("folder", FOLDERS)
def test_kept_checkpoints_are_read_bit_by_bit(folder: str) -> None:
    """By the manager, as a job that resumes would; every byte is verified."""
    (found,) = describe(FIXTURES / folder)
    assert (found.status, found.name) == (Soundness.VERIFIED, NAME)
    loaded = newest_of(CheckpointManager(FIXTURES / folder))
    assert same(loaded.state, expected(folder))
    manifest = loaded.manifest
    assert (manifest.format, manifest.step, manifest.run, manifest.best) == (int(folder[7]), 120, "night", True)
    assert repr(manifest.metrics) == "{'loss': 0.25, 'broken': nan, 'far': -inf}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_today_the_same_bytes_are_written(folder: str, tmp_path: Path) -> None:
    """Otherwise the format has changed without a number."""
    now = {path.name: path.read_bytes() for path in written(folder, tmp_path).iterdir()}
    kept = {path.name: path.read_bytes() for path in (FIXTURES / folder / NAME).iterdir()}
    assert sorted(now) == sorted(kept)
    assert [name for name in now if now[name] != kept[name]] == []


def as_read(value: Any) -> Any:
    """``value`` with tensors as the small reader has them, and floats by their bits."""
    if isinstance(value, torch.Tensor):
        return reader.Tensor(DTYPES[value.dtype], tuple(value.shape), raw(value))
    if isinstance(value, reader.Tensor):
        return value
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return type(value), [(key, as_read(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [as_read(each) for each in value]
    return type(value), value


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_document_suffices_to_read_them(folder: str) -> None:
    """A reader of some lines, with json, numpy and xxhash, finds the same state."""
    assert as_read(reader.read(FIXTURES / folder / NAME)) == as_read(expected(folder))


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_file_of_tensors_opens_with_safetensors(folder: str) -> None:
    """Slices too: there each is a tensor, named by its box."""
    files = [safetensors.torch.load_file(path) for path in (FIXTURES / folder / NAME).glob("tensors*")]
    names = [name for file in files for name in file]
    assert len(names) == len(set(names))
    assert any("[" in name for name in names) == (folder != "format-1")
    if folder == "format-1":
        state = fixed_state()
        assert all(same(files[0][f"model/{name}"], each) for name, each in state["model"].items())
        assert same(files[0]["empty"], state["empty"])
    assert ("square[0:2,3:7]" in names) == (folder == "format-2-boxes")


if __name__ == "__main__":
    for each in FOLDERS:
        print(written(each, Path(sys.argv[1]) / each))
