"""A reader of checkpoints after ``deploy/decisions/formats/checkpoint.md`` alone: no code of the package, no torch."""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

SIZES = {"8": 1, "6": 2, "2": 4, "4": 8, "L": 1, "3": 1}
"""Bytes of an element by the last letter of its type: U8, BF16, F32, I64, BOOL, F8_E4M3; F8_E5M2 is told apart."""


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read(directory: Path) -> Any:
    """The state in the checkpoint ``directory``; AssertionError if a byte is wrong."""
    sealed = (directory / "manifest.json").read_bytes()
    body = sealed[len(b'{"xxh3_128": "') + 32 + len(b'",\n"manifest": ') : -len(b"}\n")]
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    assert sealed == b'{"xxh3_128": "' + digest + b'",\n"manifest": ' + body + b"}\n"
    manifest = json.loads(body)
    assert manifest["format"] <= 2
    assert manifest["name"] == directory.name
    files = {record["name"]: verified(directory / record["name"], record) for record in manifest["files"]}
    skeleton = json.loads(files["state.json"])
    assert skeleton["version"] == 1
    return value(skeleton["state"], together([data for name, data in files.items() if name.startswith("tensors")]))


def verified(path: Path, record: dict[str, Any]) -> bytes:
    content, head, size = path.read_bytes(), record["head_size"], record["chunk_size"]
    assert len(content) == record["size"]
    chunks = ([content[:head]] if head else []) + [content[at : at + size] for at in range(head, len(content), size)]
    assert [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks] == record["chunks"]
    return content


def together(files: list[bytes]) -> dict[str, Tensor]:
    wholes: dict[str, Any] = {}
    for content in files:
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        cut = json.loads(header.pop("__metadata__").get("slices", "{}"))
        for name, each in header.items():
            about = cut.get(name, {"tensor": name, "shape": each["shape"], "offset": [0] * len(each["shape"])})
            element = 1 if each["dtype"] == "F8_E5M2" else SIZES[each["dtype"][-1]]
            first, last = (begin + offset for offset in each["data_offsets"])
            data = np.frombuffer(content[first:last], np.uint8).reshape(*each["shape"], element)
            whole = np.zeros((*about["shape"], element), np.uint8)
            whole = wholes.setdefault(about["tensor"], (each["dtype"], whole))[1]
            whole[tuple(slice(o, o + s) for o, s in zip(about["offset"], each["shape"], strict=True))] = data
    return {name: Tensor(dtype, whole.shape[:-1], whole.tobytes()) for name, (dtype, whole) in wholes.items()}


def value(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [value(each, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    match node.get("$"):
        case None:
            return {key: value(each, tensors) for key, each in node.items()}
        case "tuple":
            return tuple(value(each, tensors) for each in node["items"])
        case "dict" | "ordered" | "counter" as kind:
            pairs = [(value(key, tensors), value(each, tensors)) for key, each in node["items"]]
            return (
                OrderedDict(pairs) if kind == "ordered" else Counter(dict(pairs)) if kind == "counter" else dict(pairs)
            )
        case "int":
            return int(node["hex"], 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(node["bits"]))[0]
        case "str":
            return bytes.fromhex(node["hex"]).decode("utf-8", "surrogatepass")
        case "bytes":
            return base64.b64decode(node["base64"])
        case "blob":
            return tensors[node["name"]].data
        case "tensor":
            return tensors[node["name"]]
        case "complex":  # the last dimension holds the two parts
            pairs_of = tensors[node["name"]]
            return Tensor({"F32": "C64", "F64": "C128"}[pairs_of.dtype], pairs_of.shape[:-1], pairs_of.data)
    raise AssertionError(node)
