"""A training state as files and back: its structure as JSON (the skeleton), its tensors as safetensors. No pickle.

Allowed in a state: dict and OrderedDict (keys str or int), Counter, list, tuple, str, int, float, bool, None, bytes and
torch.Tensor, of exactly these types. All values are restored bit by bit with their types; a tensor that occurs twice is
restored as one tensor. Not kept: requires_grad, device (tensors are restored on the CPU), strides, and memory shared by
two *different* views. Anything else is refused with its path in the state.

A file of tensors is a safetensors file (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the
header; the header, a JSON object ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` padded with spaces; the
data without any gap. Tensors are ordered by element size, largest first, so that each begins at a multiple of its
element size. Where several processes write one state, a file has slices of tensors: boxes, named by their bounds
(``model/weight[0:512,0:1024]``), whose position in the whole tensor stands in the header's metadata.

The processes that hold one copy of a sharded state are a :class:`ShardGroup`. Each writes one file: its shards, and
rank 0 everything that is not sharded. What several hold alike one of them writes, as each finds out alone from meshes
and placements, which FSDP2 and tensor parallel make (shards of torch.chunk's sizes, uneven and empty ones too; the
strided shards of the two together)::

    group = ShardGroup(mesh)                                 # the mesh of the whole shard group, as the model's
    image = manager.encode(state, info, shard_group=group)        # on every rank of it; its own file alone
    manager.commit(image, manager.draft(info))               # rank 0
    manager.write_share(image, manager.draft(info), 0, stop) # the others, at the same time (see commit)

    manager.load(entry, LoadInto(state))                     # on every rank of any mesh: reads what it holds

torch and numpy are imported by the functions, not here: only where tensors occur.
*Fails by* CheckpointError (a state that cannot be written), DamagedError (files that make no state).
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import xxhash

from elastic_trainer.checkpoint.manifest import (
    STATE_FILE,
    TENSORS_FILE,
    DamagedError,
    FileImage,
    Image,
    OnDevice,
    WatchedTensor,
    from_bytes,
    tensors_file,
)
from elastic_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


# ---- a state


Json: TypeAlias = Any
Trail: TypeAlias = tuple[str, ...]

SKELETON_VERSION = 1
DEEPEST = 64
"""Levels of nesting; each costs a few frames here and there, and Python allows about a thousand."""

_MARK = "$"
_LARGE_BYTES = 4096
_LARGE_INT_BITS = 1024
_SHORTEST, _LONGEST = -(1 << 63), (1 << 63) - 1
_NO_SURPRISE = "supported are dict, list, tuple, str, int, float, bool, None, bytes and torch.Tensor"


def encode(
    state: Mapping[str, Any],
    watched: Mapping[str, torch.Tensor] = MappingProxyType({}),
    parts: int = 1,
    own: Callable[[str], bool] = lambda name: False,
    shard_group: ShardGroup | None = None,
) -> Image:
    """The files that hold ``state``; tensor data are read from their own memory when the image is written.

    Where tensors of the state are among the ``watched`` ones, the image says where they are. With several ``parts`` the
    tensors are in that many files of about equal size, which several processes that hold the same state can write;
    those that are this process's ``own``, by their names, are in the first. With a ``shard_group`` the state may be
    sharded over it, and the image is this rank's part: its file of tensors, and on shard rank 0 the structure.
    Raises CheckpointError naming the path of the first value that cannot be saved.
    """
    encoder = _Encoder(shard_group)
    root = encoder.value(dict(state), ())
    skeleton = {"version": SKELETON_VERSION, "state": root}
    text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode("ascii")
    contents = encoder.contents(parts, own)
    first, *others = (encoder.file(each) for each in contents)
    structure = (from_bytes(STATE_FILE, text),) if shard_group is None or shard_group.index == 0 else ()
    return Image((first, *structure, *others), tuple(encoder.watched(watched, contents)))


def decode(skeleton: bytes | bytearray, loaded: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    """The state whose skeleton file holds ``skeleton``; ``where`` names the checkpoint in errors."""
    with _judged(where):
        state = _Decoder(loaded).value(_root(skeleton, where))
    if not isinstance(state, dict):
        raise DamagedError(f"{where}: {STATE_FILE} holds a {type(state).__name__}, not a dict")
    return state


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of a state: that of a stored tensor as ``mark`` says (tensor, complex or blob), else ``value``."""

    value: Any = None
    tensor: str | None = None
    mark: str = ""


def outline(skeleton: bytes | bytearray, where: str) -> dict[tuple[Any, ...], Leaf]:
    """The leaves of the state of ``skeleton``, by path; needs neither the tensors nor torch."""
    with _judged(where):
        return dict(_leaves(_Decoder(None).value(_root(skeleton, where)), ()))


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Leaf]]:
    if isinstance(value, dict | list | tuple) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, (*path, key))
    else:
        yield path, value if isinstance(value, Leaf) else Leaf(value)


def _root(skeleton: bytes | bytearray, where: str) -> Json:
    outer = json.loads(bytes(skeleton))
    if outer["version"] != SKELETON_VERSION:
        raise DamagedError(f"{where}: {STATE_FILE} has unknown version {outer['version']!r}")
    return outer["state"]


@contextmanager
def _judged(where: str) -> Iterator[None]:
    """Turns errors about a skeleton into DamagedError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, struct.error) as error:
        raise DamagedError(f"{where}: {STATE_FILE} holds no state ({type(error).__name__}: {error})") from error


def shown(path: Trail) -> str:
    """``path`` the way one would write it in Python."""
    return "state" + "".join(f"[{part}]" for part in path)


def _refused(path: Trail, what: str, hint: str = _NO_SURPRISE) -> CheckpointError:
    return CheckpointError(f"cannot save {shown(path)}: {what}", hint=hint)


class _Encoder:
    """Walks a state once; collects tensors by name. With ``shard_group``, also which box of each is written here."""

    def __init__(self, shard_group: ShardGroup | None) -> None:
        self._shard_group = shard_group
        self._held: list[TensorSlice] = []
        self._sources: dict[str, Callable[[], memoryview | OnDevice]] = {}
        self._described: list[tuple[str, str, tuple[int, ...]]] = []
        self._names_of_tensors: dict[Any, str] = {}
        self._open_containers: set[int] = set()
        self._encoders: dict[type, Callable[[Any, Trail], Json]] = {
            type(None): _as_it_is,
            bool: _as_it_is,
            int: _encode_int,
            float: _encode_float,
            str: _encode_str,
            bytes: self._bytes,
            list: self._inside(lambda value, path: self._items(value, path)),
            tuple: self._inside(lambda value, path: {_MARK: "tuple", "items": self._items(value, path)}),
            dict: self._inside(self._dict),
            OrderedDict: self._inside(self._ordered),
            Counter: self._inside(lambda value, path: {_MARK: "counter", "items": self._pairs(value, path)}),
        }

    def value(self, value: Any, path: Trail) -> Json:
        encoder = self._encoders.get(type(value))
        if encoder is not None:
            return encoder(value, path)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        raise _refused(path, f"it is a {_type_name(value)}", _advice(value))

    def _inside(self, encoder: Callable[[Any, Trail], Json]) -> Callable[[Any, Trail], Json]:
        def guarded(value: Any, path: Trail) -> Json:
            if id(value) in self._open_containers:
                raise _refused(path, "it contains itself", "store it once")
            if len(path) >= DEEPEST:
                raise _refused(path[:3], f"it is nested deeper than {DEEPEST} levels", "flatten it")
            self._open_containers.add(id(value))
            result = encoder(value, path)
            self._open_containers.discard(id(value))
            return result

        return guarded

    def _items(self, values: Any, path: Trail) -> list[Json]:
        if all(type(each) is int and _SHORTEST <= each <= _LONGEST for each in values):  # say, a random generator
            return list(values)
        return [self.value(each, (*path, str(index))) for index, each in enumerate(values)]

    def _pairs(self, mapping: Mapping[Any, Any], path: Trail) -> list[Json]:
        return [[_encode_key(key, path), self.value(each, (*path, _shown_key(key)))] for key, each in mapping.items()]

    def _dict(self, mapping: dict[Any, Any], path: Trail) -> Json:
        if _MARK not in mapping and all(type(key) is str and _is_text(key) for key in mapping):
            return {key: self.value(each, (*path, _shown_key(key))) for key, each in mapping.items()}
        return {_MARK: "dict", "items": self._pairs(mapping, path)}

    def _ordered(self, mapping: OrderedDict[Any, Any], path: Trail) -> Json:
        """``Module.state_dict()`` carries its modules' versions in an attribute."""
        result = {_MARK: "ordered", "items": self._pairs(mapping, path)}
        metadata = getattr(mapping, "_metadata", None)
        if metadata is not None:
            result["metadata"] = self.value(metadata, (*path, "_metadata"))
        return result

    def _bytes(self, value: bytes, path: Trail) -> Json:
        if len(value) <= _LARGE_BYTES:
            return {_MARK: "bytes", "base64": base64.b64encode(value).decode("ascii")}
        name = self._add(path, "U8", (len(value),), lambda: memoryview(value))
        if self._shard_group is not None and self._shard_group.index == 0:
            self._held += uncut([TensorEntry(name, "U8", (len(value),))])
        return {_MARK: "blob", "name": name}

    def _elsewhere(self, tensor: torch.Tensor, path: Trail) -> Json:
        """Another rank has it, and writes it under the same name. What is tied together has one."""
        from elastic_trainer import torch_internals

        same = (torch_internals.storage_identity(tensor), *identity(tensor))
        name = self._names_of_tensors.get(same)
        if name is None:
            name = self._add(path, element_type(tensor), tuple(tensor.shape), lambda: memoryview(b""))
            self._names_of_tensors[same] = name
        return {_MARK: "tensor", "name": name}

    def _tensor(self, tensor: torch.Tensor, path: Trail) -> Json:
        if self._shard_group is not None and tensor.is_meta:
            return self._elsewhere(tensor, path)
        held = tensor if self._shard_group is None else local(tensor)
        problem = problem_with(held)
        if problem is None and held is not tensor and tensor.is_complex() and is_sharded(tensor):
            problem = "it is sharded, and its numbers are complex", "split it by torch.view_as_real()"
        if problem is not None:
            raise _refused(path, *problem)
        mark = "complex" if tensor.is_complex() else "tensor"
        same = identity(held)
        name = self._names_of_tensors.get(same)
        if name is None:
            values = plain(held)
            dtype, shape = element_type(values), tuple(values.shape)
            if self._shard_group is not None and is_sharded(tensor):
                shape = tuple(tensor.shape)
            name = self._add(path, dtype, shape, lambda: source(values))
            if held.numel():
                self._names_of_tensors[same] = name
            try:
                if self._shard_group is not None and self._shard_group.writes(tensor):
                    self._held.append(_held(name, dtype, tensor, values))
            except CheckpointError as error:
                raise _refused(path, error.message, error.hint or "") from error
        return {_MARK: mark, "name": name}

    def _add(self, path: Trail, dtype: str, shape: tuple[int, ...], data: Callable[[], memoryview | OnDevice]) -> str:
        wanted = _joined(path)
        name, count = wanted, 1
        while name in self._sources or name == "__metadata__":
            count += 1
            name = f"{wanted}#{count}"
        self._sources[name] = data
        self._described.append((name, dtype, shape))
        return name

    def contents(self, parts: int, own: Callable[[str], bool]) -> tuple[_Content, ...]:
        if self._shard_group is not None:
            return (_content(tensors_file(self._shard_group.index, self._shard_group.count), self._held),)
        mine = frozenset(name for name, _, _ in self._described if own(name)) if parts > 1 else frozenset[str]()
        return _contents(tuple(self._described), parts, mine)

    def file(self, content: _Content) -> FileImage:
        """A tensor that is cut is fetched from its device as a whole; at most two of a file are."""

        def parts() -> Iterator[memoryview | OnDevice]:
            for each in content.slices:
                if each.size:
                    data, whole = self._sources[each.tensor](), each.complete or self._shard_group is not None
                    yield data if whole else data[slice(*cast("tuple[int, int]", each.span))]

        def body() -> Iterator[memoryview]:
            return (each.fetch() if isinstance(each, OnDevice) else each for each in parts())

        return FileImage(content.name, content.header, content.size, body, parts=parts)

    def watched(self, labelled: Mapping[str, torch.Tensor], contents: Sequence[_Content]) -> Iterator[WatchedTensor]:
        held = {label: identity(local(each)) for label, each in labelled.items()}
        labels = {self._names_of_tensors.get(each): label for label, each in held.items()}
        for content in contents:
            for entry, part in zip(content.placed, content.slices, strict=True):
                label = labels.get(part.tensor)
                if label is not None:
                    yield WatchedTensor(label, content.name, entry.dtype, entry.begin, entry.end)


def _held(name: str, dtype: str, tensor: torch.Tensor, values: torch.Tensor) -> TensorSlice:
    """What a rank writes of ``tensor``: ``values``, all that it holds."""
    shape = tuple(tensor.shape if is_sharded(tensor) else values.shape)
    if not is_sharded(tensor) or not tensor.numel():
        return uncut([TensorEntry(name, dtype, shape)])[0]
    return TensorSlice(name, dtype, shape, *box_of(cast("Any", tensor)))


@dataclass(frozen=True, slots=True)
class _Content:
    """One file of tensors: what lies where in it."""

    name: str
    placed: tuple[TensorEntry, ...]
    slices: tuple[TensorSlice, ...]
    """Of the same order."""
    header: bytes

    @property
    def size(self) -> int:
        return self.placed[-1].end if self.placed else 0


@lru_cache(maxsize=2)
def _contents(
    described: tuple[tuple[str, str, tuple[int, ...]], ...], parts: int, own: frozenset[str]
) -> tuple[_Content, ...]:
    """The files of these tensors (name, type, shape): from one save to the next they seldom change."""
    placed = [TensorEntry(*each) for each in described]
    if parts == 1:
        return (_content(TENSORS_FILE, uncut(placed)),)
    first, *others = split_tensors([each for each in placed if each.name not in own], parts)
    held = (*uncut(each for each in placed if each.name in own), *first)
    return tuple(_content(tensors_file(part, parts), each) for part, each in enumerate((held, *others)))


def _content(name: str, held: Sequence[TensorSlice]) -> _Content:
    found = by_name(held)
    placed = lay_out([TensorEntry(each, part.dtype, part.shape) for each, part in found.items()])
    header = file_header(placed, slice_notes(found))
    return _Content(name, placed, tuple(found[each.name] for each in placed), header)


@lru_cache(maxsize=1 << 16)
def _joined(path: Trail) -> str:
    return "/".join(part.strip("'\"") for part in path).encode("ascii", "backslashreplace").decode("ascii")


def _as_it_is(value: Any, path: Trail) -> Json:
    return value


def _encode_int(value: int, path: Trail) -> Json:
    return value if value.bit_length() <= _LARGE_INT_BITS else {_MARK: "int", "hex": hex(value)}


def _encode_float(value: float, path: Trail) -> Json:
    """Finite floats are exact in JSON (shortest repr); the others by their bits, so that a NaN keeps its payload."""
    if value - value == 0.0:
        return value
    return {_MARK: "float", "bits": struct.pack(">d", value).hex()}


def _encode_str(value: str, path: Trail) -> Json:
    if _is_text(value):
        return value
    return {_MARK: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON would join to pairs
        return False
    return True


def _encode_key(key: Any, path: Trail) -> Json:
    if type(key) is str:
        return _encode_str(key, path)
    if type(key) is int:
        return _encode_int(key, path)
    raise _refused(path, f"its key {key!r} is a {_type_name(key)}", "keys must be str or int")


def _shown_key(key: Any) -> str:
    """Python refuses to print integers of more than 4300 digits."""
    return hex(key)[:40] if type(key) is int and key.bit_length() > _LARGE_INT_BITS else repr(key)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: Any) -> str:
    if type(value).__module__.partition(".")[0] == "numpy":
        if getattr(value, "shape", None) == ():
            return "convert it with .item()"
        return "convert it with torch.from_numpy()"
    for base in (dict, tuple, list, str, int, float, bytes):
        if isinstance(value, base):
            return f"convert it with {base.__name__}()"
    return _NO_SURPRISE


class _Decoder:
    """Builds the state from its skeleton; without ``loaded`` tensors it has a :class:`Leaf` for each."""

    def __init__(self, loaded: Mapping[str, torch.Tensor] | None) -> None:
        self._tensors = loaded if loaded is not None else {}
        self._complex: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, Callable[[dict[str, Json]], Any]] = {
            "tuple": lambda node: tuple(self.value(each) for each in node["items"]),
            "dict": lambda node: dict(self._pairs(node)),
            "ordered": self._ordered,
            "counter": lambda node: Counter(dict(self._pairs(node))),
            "int": lambda node: int(node["hex"], 16),
            "float": lambda node: struct.unpack(">d", bytes.fromhex(node["bits"]))[0],
            "str": lambda node: bytes.fromhex(node["hex"]).decode("utf-8", "surrogatepass"),
            "bytes": lambda node: base64.b64decode(node["base64"], validate=True),
            "blob": lambda node: self._tensors[node["name"]].numpy().tobytes(),
            "tensor": lambda node: self._tensors[node["name"]],
            "complex": self._complex_tensor,
        }
        if loaded is None:
            for mark in ("blob", "tensor", "complex"):
                self._kinds[mark] = lambda node: Leaf(tensor=node["name"], mark=node[_MARK])

    def value(self, node: Json) -> Any:
        if isinstance(node, list):
            return [self.value(each) for each in node]
        if not isinstance(node, dict):
            return node
        if _MARK in node:
            return self._kinds[node[_MARK]](node)
        return {key: self.value(each) for key, each in node.items()}

    def _pairs(self, node: dict[str, Json]) -> Iterator[tuple[Any, Any]]:
        return ((self.value(key), self.value(each)) for key, each in node["items"])

    def _ordered(self, node: dict[str, Json]) -> Any:
        result = OrderedDict(self._pairs(node))
        if "metadata" in node:
            result._metadata = self.value(node["metadata"])  # type: ignore[attr-defined]
        return result

    def _complex_tensor(self, node: dict[str, Json]) -> torch.Tensor:
        import torch

        name = node["name"]
        if name not in self._complex:
            self._complex[name] = torch.view_as_complex(self._tensors[name])
        return self._complex[name]


# ---- a number for a state


_PLAIN = frozenset({type(None), bool, float, str})


def fingerprint(state: Mapping[str, Any]) -> int:
    """63 bits, equal for equal states (as the codec restores them)."""
    walk = _Walk()
    try:
        walk.walk(dict(state))
    except (_UnknownError, RecursionError) as error:
        encode(state)  # says what is wrong, and where
        raise TypeError(f"a state without a fingerprint: {error}") from error
    return walk.number()


class _UnknownError(Exception):
    """A value that the codec does not support."""


class _Walk:
    """Walks a state once. ``_words`` is its structure, with type and shape for each tensor."""

    def __init__(self) -> None:
        import torch

        self._hasher = xxhash.xxh3_64()
        self._hash: Callable[[Any], None] = self._hasher.update
        self._words: list[Any] = []
        self._add = self._words.append
        self._shapes: dict[Any, str] = {}
        self._kinds: dict[type, Callable[[Any], None]] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            int: self._int,
            bytes: self._bytes,
            list: self._items,
            tuple: self._items,
            dict: self._mapping,
            Counter: self._mapping,
            OrderedDict: self._ordered,
        }

    def number(self) -> int:
        self._hash(json.dumps(self._words).encode())
        return self._hasher.intdigest() >> 1

    def walk(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._add(value)
            return
        walk = self._kinds.get(kind)
        if walk is None:
            raise _UnknownError(kind.__name__)
        walk(value)

    def _int(self, value: int) -> None:
        self._add(value if value.bit_length() < 64 else [hex(value)])

    def _bytes(self, value: bytes) -> None:
        self._add(["bytes", len(value)])
        self._hash(value)

    def _items(self, values: Any) -> None:
        self._add([type(values).__name__, len(values)])
        for each in values:
            self.walk(each)

    def _mapping(self, mapping: Any) -> None:
        self._add([type(mapping).__name__, len(mapping)])
        for key, each in mapping.items():
            if type(key) is str:
                self._add(key)
            elif type(key) is int:
                self._int(key)
            else:
                raise _UnknownError("a key")
            self.walk(each)

    def _ordered(self, mapping: Any) -> None:
        self._mapping(mapping)
        self.walk(getattr(mapping, "_metadata", None))

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Most tensors are contiguous on the CPU and of a type that numpy has: their bytes are hashed in place."""
        try:
            array = tensor.numpy()
            self._hash(array)
        except (TypeError, ValueError, RuntimeError):
            array = self._brought(tensor)
            self._hash(array)
        key = (array.dtype.char, array.shape)
        word = self._shapes.get(key)
        if word is None:
            word = self._shapes[key] = f"tensor {key}"
        self._add(word)

    def _brought(self, tensor: torch.Tensor) -> Any:
        """The elements as an array; as bytes if numpy lacks the type."""
        import torch

        problem = problem_with(tensor)
        if problem is not None:
            raise _UnknownError(problem[0])
        here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        try:
            return here.numpy()
        except TypeError:
            self._add(f"{here.dtype} {list(here.shape)}")
            return here.reshape(-1).view(torch.uint8).numpy()


# ---- a file of tensors


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
class TensorEntry:
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


def lay_out(tensors: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """``tensors`` at their positions, in file order: largest elements first, otherwise as they come."""
    placed = []
    offset = 0
    for tensor in sorted(tensors, key=lambda each: -ELEMENT_SIZE[each.dtype]):
        placed.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, offset))
        offset += tensor.size
    return tuple(placed)


def file_header(placed: Sequence[TensorEntry], notes: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file that precede its data, ``notes`` among its metadata; their length is a multiple of 8."""
    entries: dict[str, Any] = {_RESERVED: {"format": "pt", **(notes or {})}}
    for each in placed:
        entries[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [each.begin, each.end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_header(
    head: bytes | bytearray, data_size: int, where: str
) -> tuple[tuple[TensorEntry, ...], Mapping[str, Any]]:
    """The tensors that ``head`` describes, in file order, and its notes, for ``data_size`` bytes behind the header.

    Raises DamagedError unless header, element types, shapes and offsets all fit together and cover the data exactly.
    """
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if not 0 < length <= LONGEST_HEADER or len(head) != _LENGTH_BYTES + length:
        raise DamagedError(f"{where}: the header says {length} bytes; {max(0, len(head) - _LENGTH_BYTES)} are there")
    try:
        entries = json.loads(bytes(head[_LENGTH_BYTES:]), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: the header is not JSON ({error})") from error
    notes = entries.pop(_RESERVED, {}) if isinstance(entries, dict) else None
    if not isinstance(notes, dict):
        raise DamagedError(f"{where}: the header or its metadata is not a JSON object")
    tensors = sorted(
        (_entry(name, entry, where) for name, entry in entries.items()), key=lambda each: (each.begin, each.end)
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
    return tuple(tensors), notes


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, entry: Any, where: str) -> TensorEntry:
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
    return TensorEntry(name, dtype, shape, begin)


# ---- slices


METADATA = "slices"
"""The key of the header's metadata. Its value is JSON: ``{name: {"tensor", "shape", "offset"}}``, all of the whole."""
UNCUT = 1 << 20
"""Tensors up to this size are not cut when a state is divided."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The box of ``shape`` elements at ``offset`` of the tensor ``tensor``, which has the shape ``whole``."""

    tensor: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return self.shape == self.whole

    @property
    def name(self) -> str:
        """What it is called in a file, if that name is free there."""
        if self.complete:
            return self.tensor
        return f"{self.tensor}[{','.join(f'{o}:{o + s}' for o, s in zip(self.offset, self.shape, strict=True))}]"

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ELEMENT_SIZE[self.dtype]

    @property
    def span(self) -> tuple[int, int] | None:
        """The bytes of the whole tensor that it is, from a begin to an end; None where it has gaps there."""
        wide = next((axis for axis, size in enumerate(self.shape) if size != 1), len(self.shape))
        if self.shape[wide + 1 :] != self.whole[wide + 1 :]:
            return None
        begin = 0
        for offset, size in zip(self.offset, self.whole, strict=True):
            begin = begin * size + offset
        begin *= ELEMENT_SIZE[self.dtype]
        return begin, begin + self.size


def uncut(described: Iterable[TensorEntry]) -> tuple[TensorSlice, ...]:
    """The tensors ``described``, each as one slice."""
    return tuple(
        TensorSlice(each.name, each.dtype, each.shape, (0,) * len(each.shape), each.shape) for each in described
    )


def split_tensors(described: Iterable[TensorEntry], parts: int) -> tuple[tuple[TensorSlice, ...], ...]:
    """The tensors ``described`` in ``parts`` parts of about equal bytes; large ones are cut by rows.

    It depends on names, types and shapes alone, so writers that hold the same state agree without a word.
    """
    ordered = sorted(described, key=lambda each: each.name)
    total = sum(each.size for each in ordered)
    result: list[list[TensorSlice]] = [[] for _ in range(parts)]
    begin = 0
    for each in ordered:
        axis = next((axis for axis, size in enumerate(each.shape) if size > 1), None)
        if each.size <= UNCUT or axis is None:
            part = min(parts - 1, (begin + each.size // 2) * parts // max(1, total))
            result[part] += uncut([each])
        else:
            rows, row_size = each.shape[axis], each.size // each.shape[axis]
            ends = (total * part // parts - begin for part in range(parts + 1))
            cuts = [max(0, min(rows, (end + row_size // 2) // row_size)) for end in ends]
            for part, (first, last) in enumerate(itertools.pairwise(cuts)):
                if first < last:
                    offset = tuple(first if at == axis else 0 for at in range(len(each.shape)))
                    shape = (*each.shape[:axis], last - first, *each.shape[axis + 1 :])
                    result[part].append(TensorSlice(each.name, each.dtype, each.shape, offset, shape))
        begin += each.size
    return tuple(map(tuple, result))


def by_name(slices: Sequence[TensorSlice]) -> dict[str, TensorSlice]:
    """``slices`` by their names in one file, in the same order.

    Each has its own, even where a tensor is called as a slice would be.
    """
    taken, result = {each.name for each in slices if each.complete}, {}
    for each in slices:
        name = each.name
        while not each.complete and name in taken:
            name += "#"
        taken.add(name)
        result[name] = each
    return result


def slice_notes(found: Mapping[str, TensorSlice]) -> dict[str, str]:
    """What the header of a file says about those of its tensors that are no whole ones."""
    cut = {
        name: {"tensor": each.tensor, "shape": each.whole, "offset": each.offset}
        for name, each in found.items()
        if not each.complete
    }
    return {METADATA: json.dumps(cut, separators=(",", ":"))} if cut else {}


def slices_of(placed: Sequence[TensorEntry], about: Mapping[str, Any], where: str) -> tuple[TensorSlice, ...]:
    """The slices of a file whose header has the tensors ``placed`` and the metadata ``about``, in the same order.

    DamagedError if the two do not fit together.
    """
    try:
        cut = json.loads(about.get(METADATA, "{}"))
        slices = tuple(_slice(each, cut.pop(each.name, None)) for each in placed)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: its header describes slices wrongly ({error})") from error
    if cut:
        raise DamagedError(f"{where}: its header describes the slice {next(iter(cut))!r}, which it does not hold")
    return slices


def _slice(placed: TensorEntry, about: Mapping[str, Any] | None) -> TensorSlice:
    if about is None:
        return uncut([placed])[0]
    tensor, whole, offset = about["tensor"], tuple(about["shape"]), tuple(about["offset"])
    numbers = all(type(each) is int and 0 <= each < 1 << 62 for each in (*whole, *offset))
    if type(tensor) is not str or not numbers:
        raise ValueError(f"{placed.name!r} has no name or invalid sizes")
    if any(begin + size > most for begin, size, most in zip(offset, placed.shape, whole, strict=True)):
        raise ValueError(f"{placed.name!r} reaches beyond its tensor")
    return TensorSlice(tensor, placed.dtype, whole, offset, placed.shape)


def assemble(slices: Iterable[TensorSlice], where: str) -> tuple[TensorEntry, ...]:
    """The whole tensors that ``slices`` make, placed one behind the other; DamagedError unless each is complete."""
    found: dict[str, list[TensorSlice]] = {}
    for each in slices:
        found.setdefault(each.tensor, []).append(each)
    for name, parts in found.items():
        if len({(each.dtype, each.whole) for each in parts}) > 1:
            raise DamagedError(f"{where}: the slices of tensor {name!r} do not agree about its type or shape")
        if not (len(parts) == 1 and parts[0].complete) and not _exact(parts):
            raise DamagedError(f"{where}: the slices of tensor {name!r} overlap, or leave a part of it out")
    return lay_out([TensorEntry(name, parts[0].dtype, parts[0].whole) for name, parts in found.items()])


def _exact(boxes: Sequence[TensorSlice]) -> bool:
    """Whether each element of the whole lies in one of ``boxes`` and no more."""
    if sum(math.prod(each.shape) for each in boxes) != math.prod(boxes[0].whole):
        return False
    near: list[TensorSlice] = []
    for box in sorted((each for each in boxes if math.prod(each.shape)), key=lambda each: each.offset):
        near = [each for each in near if each.offset[0] + each.shape[0] > box.offset[0]]
        for other in near:
            bounds = zip(other.offset, other.shape, box.offset, box.shape, strict=True)
            if all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in bounds):
                return False
        near.append(box)
    return True


# ---- sharded tensors


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""An offset and a shape."""


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; torch need not be there."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_elsewhere(tensor: Any) -> bool:
    """Whether ``tensor`` is on the meta device: another process holds it."""
    return getattr(getattr(tensor, "device", None), "type", None) == "meta"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of ``tensor``, without history: a DTensor's own shard, else all of it."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held.detach()


def box_of(tensor: DTensor) -> Box:
    """Where in the whole tensor the local one lies. CheckpointError if it is not a box, or not known."""
    coordinate = _coordinate(tensor.device_mesh)
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    for axis, dimension in _in_order(tensor):
        parts = tensor.device_mesh.size(axis)
        step = -(-shape[dimension] // parts)
        first = min(shape[dimension], step * coordinate[axis])
        offset[dimension] += first
        shape[dimension] = min(step, shape[dimension] - first)
    if tuple(shape) != tuple(local(tensor).shape):
        raise _strange(tensor, f"it holds {list(local(tensor).shape)} where {shape} belongs")
    return tuple(offset), tuple(shape)


def _in_order(tensor: DTensor) -> list[tuple[int, int]]:
    """The axes of the mesh that shard ``tensor``, each with the dimension that it shards, in the order of their cuts.

    Plain shards cut from left to right. FSDP2 cuts what tensor parallel has cut before, though its axis is on the left:
    a strided shard says so, and comes last.
    """
    plain, strided = [], []
    placements: Any = tensor.placements
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise _strange(tensor, "it is a part of a sum", "redistribute it to Replicate() or Shard()")
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            plain.append((axis, placement.dim))
            continue
        behind = 1
        for later in range(axis + 1, len(placements)):
            if getattr(placements[later], "dim", None) == placement.dim:
                behind *= tensor.device_mesh.size(later)
        if factor != behind:
            raise _strange(tensor, "its parts are interleaved", "redistribute it to Shard()")
        strided.append((axis, placement.dim))
    return [*plain, *reversed(strided)]


def _coordinate(mesh: DeviceMesh) -> list[int]:
    found = mesh.get_coordinate()
    if found is None:
        raise CheckpointError("its mesh does not have this process", hint="call this on the ranks that hold it")
    return list(found)


def _strange(tensor: DTensor, what: str, hint: str = "save its .full_tensor()") -> CheckpointError:
    placements = ", ".join(map(str, tensor.placements))
    return CheckpointError(f"it is sharded as ({placements}), and {what}", hint=hint)


class ShardGroup:
    """The processes that hold one copy of the state: those of ``mesh``, of which this one is ``index`` of ``count``.

    Along the dimension ``stages`` of the mesh they hold different tensors; those of others are on the meta device here.
    """

    def __init__(self, mesh: DeviceMesh, stages: int | None = None) -> None:
        self._numbers, self._stages = mesh.mesh, stages
        self._coordinate = _coordinate(mesh)
        self.count = self._numbers.numel()
        self.index = 0
        for size, position in zip(self._numbers.shape, self._coordinate, strict=True):
            self.index = self.index * size + position
        self._first_of: dict[DeviceMesh, bool] = {}

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether this rank writes what it holds of ``tensor``."""
        if not is_sharded(tensor) or not tensor.numel():
            return self.index == 0
        sharded: Any = tensor
        coordinate, placements = _coordinate(sharded.device_mesh), sharded.placements
        first = all(not coordinate[axis] for axis, each in enumerate(placements) if each.is_replicate())
        return first and bool(local(tensor).numel()) and self._first(sharded.device_mesh)

    def _first(self, mesh: DeviceMesh) -> bool:
        """Whether ``mesh`` is the first of the like meshes that make up that of all ranks.

        A tensor that is sharded over some of its dimensions is there once for each coordinate in the others.
        """
        if mesh not in self._first_of:
            where = [(self._numbers == number).nonzero() for number in mesh.mesh.flatten()]
            if not all(len(each) == 1 for each in where):
                raise CheckpointError(
                    "it is sharded over ranks that are no places of this checkpoint",
                    hint="save with the mesh that the whole model is sharded over",
                )
            positions = [each[0].tolist() for each in where]
            fixed = [axis for axis, seen in enumerate(zip(*positions, strict=True)) if len(set(seen)) == 1]
            self._first_of[mesh] = not any(self._coordinate[axis] for axis in fixed if axis != self._stages)
        return self._first_of[mesh]


# ---- torch's tensors


SLAB = 16 << 20
"""Small tensors share memory up to this size: fresh memory in small portions costs a page fault every 4 KiB."""
OWN_SLAB = 4 << 20
"""From this size on a tensor has memory of its own."""
_MEMORY_ALIGNMENT = 64
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of what is in a module that they wrap."""


def plain_name(name: str) -> str:
    """The name of a tensor as if no module were wrapped: the same before and after one was."""
    for each in WRAPPERS:
        name = name.replace(each, "")
    return name


@cache
def _types() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }


@cache
def dtypes() -> dict[str, torch.dtype]:
    """torch's element types by their names in a file."""
    return {name: dtype for dtype, name in _types().items()}


def problem_with(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why ``tensor`` cannot be saved and what to do about it, or None."""
    import torch

    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        hint = (
            "save it with the places that hold it, or its .full_tensor()"
            if is_sharded(tensor)
            else "save the plain tensor that it stands for"
        )
        return f"it is a tensor of type {kind.__module__}.{kind.__qualname__}", hint
    if tensor.layout is not torch.strided:
        return f"it is a tensor of layout {tensor.layout}", "convert it with .to_dense()"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data", "materialize it first"
    if tensor.dtype not in _types() and tensor.dtype not in (torch.complex64, torch.complex128):
        return f"its element type is {tensor.dtype}", "convert it to a common type, say torch.float32"
    return None


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that show the same elements of the same memory in the same way."""
    storage = (str(tensor.device), tensor.data_ptr(), tensor.dtype)
    return (*storage, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without history and lazy sign; complex numbers become a last dimension of two."""
    import torch

    resolved = tensor.detach()
    if resolved.is_conj() or resolved.is_neg():
        resolved = resolved.resolve_conj().resolve_neg()
    return torch.view_as_real(resolved) if resolved.is_complex() else resolved


def element_type(tensor: torch.Tensor) -> str:
    """The name of the plain ``tensor``'s element type in a file."""
    return _types()[tensor.dtype]


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of the plain ``tensor``: its own memory if possible, else a copy of this one tensor."""
    import torch

    try:
        array = tensor.numpy()
        if array.flags.c_contiguous:
            return array.data.cast("B")
    except (TypeError, RuntimeError, ValueError, BufferError):  # on a device, or of a type that numpy does not have
        pass
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def source(tensor: torch.Tensor) -> memoryview | OnDevice:
    """The bytes of the plain ``tensor``, left on a CUDA device if they are there."""
    import torch

    return OnDevice(tensor.contiguous().reshape(-1).view(torch.uint8)) if tensor.is_cuda else memory(tensor)


def buffer(tensor: torch.Tensor) -> Any:
    """The bytes of ``tensor`` in the order of its elements, as :func:`memory` gives them but sooner, in any shape."""
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # on a device, with a history, or of a type that numpy does not have
        return memory(plain(tensor))
    return array if array.flags.c_contiguous else memory(tensor)


@dataclass(frozen=True, slots=True)
class Slab:
    """Fresh memory for consecutive tensors of a file, from byte ``begin`` of its data on."""

    begin: int
    tensors: tuple[TensorEntry, ...]
    array: Any

    @property
    def view(self) -> memoryview:
        return memoryview(self.array)


def allocate(placed: Sequence[TensorEntry]) -> tuple[Slab, ...]:
    """Memory for all of ``placed`` that has data, in file order without gaps."""
    return tuple(Slab(group[0].begin, tuple(group), fresh(group[-1].end - group[0].begin)) for group in _groups(placed))


def _groups(placed: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    group: list[TensorEntry] = []
    for tensor in placed:
        if not tensor.size:
            continue
        if group and (tensor.size >= OWN_SLAB or tensor.end - group[0].begin > SLAB):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def fresh(size: int) -> Any:
    """Uninitialized bytes at an aligned address (numpy asks the kernel for huge pages; malloc does not)."""
    import numpy as np

    raw = np.empty(size + _MEMORY_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _MEMORY_ALIGNMENT
    return raw[start : start + size]


def arrays(placed: Sequence[TensorEntry], slabs: Sequence[Slab]) -> dict[str, Any]:
    """The bytes of each tensor in ``slabs``, as numpy arrays of bytes that share their memory."""
    found = {each.name: fresh(0) for each in placed if not each.size}
    for slab in slabs:
        found |= {each.name: slab.array[each.begin - slab.begin : each.end - slab.begin] for each in slab.tensors}
    return found


def fits(tensor: Any, stored: TensorEntry) -> bool:
    """Whether ``stored`` can be read into ``tensor``: a tensor of its type and shape, whose elements are apart."""
    import torch

    if not isinstance(tensor, torch.Tensor) or problem_with(local(tensor)) is not None:
        return False
    held = local(tensor)
    if tuple(tensor.shape) != stored.shape or _types().get(held.dtype) != stored.dtype:
        return False
    return all(stride or size < 2 for stride, size in zip(held.stride(), held.shape, strict=True))


def without_data(placed: Iterable[TensorEntry], blobs: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of their types and shapes, on the meta device; zeros for those that stand for bytes."""
    import torch

    return {
        each.name: torch.empty(each.shape, dtype=dtypes()[each.dtype], device="meta")
        if each.name not in blobs
        else torch.zeros(each.shape, dtype=torch.uint8)
        for each in placed
    }


def build(placed: Sequence[TensorEntry], slabs: Sequence[Slab]) -> dict[str, torch.Tensor]:
    """The tensors of a file whose data were read into ``slabs``; they share the slabs' memory."""
    import torch

    data = arrays(placed, slabs)
    return {
        each.name: torch.from_numpy(data[each.name]).view(dtypes()[each.dtype]).reshape(each.shape) for each in placed
    }


@contextmanager
def whole(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """What to fill with the first values of ``parameter``: itself, or if it is a shard the whole, of which a part is
    kept. Every rank draws the same numbers, from torch's generator."""
    if not is_sharded(parameter):
        yield parameter
        return
    import torch

    filled = torch.empty(parameter.shape, dtype=parameter.dtype)
    yield filled
    shard: Any = parameter
    offset, shape = box_of(shard)
    for dimension, (first, length) in enumerate(zip(offset, shape, strict=True)):
        filled = filled.narrow(dimension, first, length)
    with torch.no_grad():
        local(parameter).copy_(filled)
