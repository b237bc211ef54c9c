"""The safetensors header: built as others read it, parsed as if an enemy had written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint.layout import TENSORS_FILE, DamagedError
from elastic_trainer.checkpoint.tensors import ELEMENT_SIZE, TensorEntry, file_header, lay_out, parse_header


def head(entries: Any) -> bytes:
    """A header around any JSON."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    """A header entry, right unless told otherwise."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_SIZE)), st.lists(st.integers(0, 4), max_size=3)), max_size=8))
def test_a_built_header_parses_back_aligned(kinds: list[tuple[str, list[int]]]) -> None:
    """Each tensor begins at a multiple of its element size, without gaps; the header's length keeps data aligned."""
    placed = lay_out([TensorEntry(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(kinds)])
    text = file_header(placed)
    assert len(text) % 8 == 0
    parsed = parse_header(text, sum(each.size for each in placed), "here")
    assert set(parsed) == set(placed)
    assert all(each.begin % ELEMENT_SIZE[each.dtype] == 0 for each in parsed)


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    """The tensors file is an ordinary safetensors file for everybody else."""
    state = {
        "half": torch.randn(3).to(torch.bfloat16),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(5),
        "none": torch.empty(0, 4),
    }
    file = next(each for each in codec.encode(state).files if each.name == TENSORS_FILE)
    path = tmp_path / TENSORS_FILE
    path.write_bytes(file.head + b"".join(file.body()))
    read = safetensors.torch.load_file(path)
    assert set(read) == set(state)
    assert all(torch.equal(read[name], state[name]) and read[name].dtype == state[name].dtype for name in state)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        head({})[:-1],
        head({}) + b" ",
        (1 << 63).to_bytes(8, "little") + b"{}",
        head(b"{"),
        head(b"\xff\xfe"),
        head([]),
        head(b'{"a":' * 50_000),
        head(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        ),
        head({"a": 1}),
        head({"a": {"dtype": "F32"}}),
        head({"a": tensor(dtype="F31")}),
        head({"a": tensor(dtype=["F32"])}),
        head({"a": tensor(shape=[-2])}),
        head({"a": tensor(shape=[2.0])}),
        head({"a": tensor(shape=[True, 2])}),
        head({"a": tensor(shape=[1 << 62, 1 << 62])}),
        head({"a": tensor(shape="2")}),
        head({"a": tensor(begin=8, end=0)}),
        head({"a": tensor(end=12)}),
        head({"a": tensor(begin=8, end=16)}),
        head({"a": tensor(), "b": tensor()}),
        head({"a": tensor(), "b": tensor(begin=4, end=12)}),
        head({"a": tensor(), "b": tensor(begin=8, end=16)}),
        head({"a": tensor("U8", [3], 0, 3), "b": tensor("F32", [1], 3, 7), "c": tensor("U8", [1], 7, 8)}),
        head({}),
    ],
    ids=lambda content: repr(content[:60]),
)
def test_a_header_that_does_not_fit_eight_bytes_of_data_is_damage(content: bytes) -> None:
    """Wrong lengths, types, shapes, gaps, overlaps and misalignment are all refused before memory is asked for."""
    with pytest.raises(DamagedError):
        parse_header(content, 8, "here")


WHOLE = file_header(lay_out([TensorEntry("weight", "F32", (2, 3)), TensorEntry("bias", "F32", (3,))]))
"""Of 36 bytes of data."""


@given(
    st.integers(0, len(WHOLE) - 1),
    st.integers(0, 8),
    st.binary(max_size=8) | st.sampled_from([b'"', b"-1", b"1e9", b"[]"]),
)
def test_no_mutation_breaks_the_parser(start: int, cut: int, put: bytes) -> None:
    """A header of which a few bytes were changed, cut or added gives tensors within the data, or DamagedError."""
    try:
        found = parse_header(WHOLE[:start] + put + WHOLE[start + cut :], 36, "here")
    except DamagedError:
        return
    assert sorted((each.begin, each.begin + each.size) for each in found)[-1][1] == 36
