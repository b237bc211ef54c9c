"""The safetensors file format, without tensors: its header built and parsed, sizes and bounds checked. Pure.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the header; the header, a JSON object
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` padded with spaces; the data without any gap. Tensors are
ordered by element size, largest first, so that each begins at a multiple of its element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.checkpoint.faults import DamagedError

ELEMENT_SIZE: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes per element of each element type that is read and written here."""

LONGEST_HEADER = 100_000_000
"""The format's own limit."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor of a file. ``begin`` and ``end`` are byte offsets from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ELEMENT_SIZE[self.dtype]

    @property
    def end(self) -> int:
        return self.begin + self.size


def place(tensors: Sequence[Placed]) -> tuple[Placed, ...]:
    """``tensors`` at their positions, in file order: largest elements first, otherwise as they come."""
    placed = []
    offset = 0
    for tensor in sorted(tensors, key=lambda each: -ELEMENT_SIZE[each.dtype]):
        placed.append(Placed(tensor.name, tensor.dtype, tensor.shape, offset))
        offset += tensor.size
    return tuple(placed)


def header(placed: Sequence[Placed], notes: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file that precede its data, ``notes`` among its metadata; their length is a multiple of 8."""
    entries: dict[str, Any] = {_RESERVED: {"format": "pt", **(notes or {})}}
    for each in placed:
        entries[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [each.begin, each.end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse(head: bytes | bytearray, data_size: int, where: str) -> tuple[Placed, ...]:
    """The tensors that ``head`` describes, in file order, for a file with ``data_size`` bytes behind its header.

    Raises DamagedError unless header, element types, shapes and offsets all fit together and cover the data exactly.
    """
    tensors = sorted(
        (_placed(name, entry, where) for name, entry in _entries(head, where).items() if name != _RESERVED),
        key=lambda each: (each.begin, each.end),
    )
    expected = 0
    for each in tensors:
        if each.begin != expected:
            raise DamagedError(f"{where}: tensor {each.name!r} begins at byte {each.begin}, not {expected}")
        if each.begin % ELEMENT_SIZE[each.dtype]:
            raise DamagedError(f"{where}: tensor {each.name!r} is not aligned to its elements")
        expected = each.end
    if expected != data_size:
        raise DamagedError(f"{where}: the header describes {expected} bytes of data; there are {data_size}")
    return tuple(tensors)


def metadata(head: bytes | bytearray, where: str) -> Mapping[str, Any]:
    """The notes in ``head``; DamagedError where it makes no sense."""
    notes = _entries(head, where).get(_RESERVED, {})
    if not isinstance(notes, dict):
        raise DamagedError(f"{where}: the header's metadata is not a JSON object")
    return notes


def _entries(head: bytes | bytearray, where: str) -> dict[str, Any]:
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if not 0 < length <= LONGEST_HEADER or len(head) != _LENGTH_BYTES + length:
        raise DamagedError(f"{where}: the header says {length} bytes; {max(0, len(head) - _LENGTH_BYTES)} are there")
    try:
        entries = json.loads(bytes(head[_LENGTH_BYTES:]), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: the header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise DamagedError(f"{where}: the header is not a JSON object")
    return entries


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _placed(name: str, entry: Any, where: str) -> Placed:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        element = ELEMENT_SIZE[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{where}: the header entry of tensor {name!r} is invalid") from error
    numbers = (*shape, begin, end)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise DamagedError(f"{where}: tensor {name!r} has invalid sizes or offsets")
    if end - begin != math.prod(shape) * element:
        raise DamagedError(f"{where}: tensor {name!r} of shape {shape} does not fit its {end - begin} bytes")
    return Placed(name, dtype, shape, begin)
