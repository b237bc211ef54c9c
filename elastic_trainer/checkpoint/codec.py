"""A training state as two files: its structure as JSON (the skeleton), its tensors as safetensors. No pickle.

Allowed in a state: dict and OrderedDict (keys str or int), Counter, list, tuple, str, int, float, bool, None, bytes and
torch.Tensor, of exactly these types. All values are restored bit by bit with their types; a tensor that occurs twice is
restored as one tensor. Not kept: requires_grad, device (tensors are restored on the CPU), strides, and memory shared by
two *different* views. Anything else is refused with its path in the state.

*Fails by* CheckpointError (a state that cannot be written), DamagedError (files that make no state). torch is imported
only where tensors occur.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import xxhash

from elastic_trainer.checkpoint import tensors
from elastic_trainer.checkpoint.layout import STATE_FILE, TENSORS_FILE, DamagedError, tensors_file
from elastic_trainer.checkpoint.manifest import FileImage, Image, OnDevice, WatchedTensor, from_bytes
from elastic_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch


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
    places: tensors.ShardGroup | None = None,
) -> Image:
    """The files that hold ``state``; tensor data are read from their own memory when the image is written.

    Where tensors of the state are among the ``watched`` ones, the image says where they are. With several ``parts`` the
    tensors are in that many files of about equal size, which several processes that hold the same state can write;
    those that are this process's ``own``, by their names, are in the first. With ``places`` the state may be sharded
    over them, and the image is the part of this place: its file of tensors, and on place 0 the structure.
    Raises CheckpointError naming the path of the first value that cannot be saved.
    """
    encoder = _Encoder(places)
    root = encoder.value(dict(state), ())
    skeleton = {"version": SKELETON_VERSION, "state": root}
    text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode("ascii")
    contents = encoder.contents(parts, own)
    first, *others = (encoder.file(each) for each in contents)
    structure = (from_bytes(STATE_FILE, text),) if places is None or places.index == 0 else ()
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
        return dict(_leaves(_root(skeleton, where), ()))


def _leaves(node: Json, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Leaf]]:
    mark = node.get(_MARK) if isinstance(node, dict) else None
    pairs: list[tuple[Any, Json]]
    if mark in ("tensor", "complex", "blob"):
        yield path, Leaf(tensor=node["name"], mark=mark)
        return
    if mark in ("dict", "ordered", "counter"):
        pairs = [(_Decoder({}).value(key), each) for key, each in node["items"]]
    elif isinstance(node, list) or mark == "tuple":
        pairs = list(enumerate(node if isinstance(node, list) else node["items"]))
    elif isinstance(node, dict) and mark is None:
        pairs = list(node.items())
    else:
        yield path, Leaf(_Decoder({}).value(node))
        return
    if not pairs:
        yield path, Leaf(_Decoder({}).value(node))
    for key, each in pairs:
        yield from _leaves(each, (*path, key))


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
    """Walks a state once; collects tensors by name. With ``places``, also which box of each is written here."""

    def __init__(self, places: tensors.ShardGroup | None = None) -> None:
        self._places = places
        self._held: list[tensors.TensorSlice] = []
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
        if self._places is not None and self._places.index == 0:
            self._held += tensors.uncut([tensors.TensorEntry(name, "U8", (len(value),))])
        return {_MARK: "blob", "name": name}

    def _elsewhere(self, tensor: torch.Tensor, path: Trail) -> Json:
        """Another place has it, and writes it under the same name. What is tied together has one."""
        from elastic_trainer import torch_internals

        identity = (torch_internals.storage_identity(tensor), *tensors.identity(tensor))
        name = self._names_of_tensors.get(identity)
        if name is None:
            name = self._add(path, tensors.element_type(tensor), tuple(tensor.shape), lambda: memoryview(b""))
            self._names_of_tensors[identity] = name
        return {_MARK: "tensor", "name": name}

    def _tensor(self, tensor: torch.Tensor, path: Trail) -> Json:
        if self._places is not None and tensor.is_meta:
            return self._elsewhere(tensor, path)
        held = tensor if self._places is None else tensors.local(tensor)
        problem = tensors.problem_with(held)
        if problem is None and held is not tensor and tensor.is_complex() and tensors.is_sharded(tensor):
            problem = "it is sharded, and its numbers are complex", "split it by torch.view_as_real()"
        if problem is not None:
            raise _refused(path, *problem)
        mark = "complex" if tensor.is_complex() else "tensor"
        identity = tensors.identity(held)
        name = self._names_of_tensors.get(identity)
        if name is None:
            plain = tensors.plain(held)
            dtype, whole = tensors.element_type(plain), tuple(plain.shape)
            if self._places is not None and tensors.is_sharded(tensor):
                whole = tuple(tensor.shape)
            name = self._add(path, dtype, whole, lambda: tensors.source(plain))
            if held.numel():
                self._names_of_tensors[identity] = name
            try:
                if self._places is not None and self._places.writes(tensor):
                    self._held.append(_held(name, dtype, tensor, plain))
            except CheckpointError as error:
                raise _refused(path, error.message, error.hint or "") from error
        return {_MARK: mark, "name": name}

    def _add(self, path: Trail, dtype: str, shape: tuple[int, ...], source: Callable[[], memoryview | OnDevice]) -> str:
        wanted = _joined(path)
        name, count = wanted, 1
        while name in self._sources or name == "__metadata__":
            count += 1
            name = f"{wanted}#{count}"
        self._sources[name] = source
        self._described.append((name, dtype, shape))
        return name

    def contents(self, parts: int, own: Callable[[str], bool]) -> tuple[_Content, ...]:
        if self._places is not None:
            return (_content(tensors_file(self._places.index, self._places.count), self._held),)
        mine = frozenset(name for name, _, _ in self._described if own(name)) if parts > 1 else frozenset[str]()
        return _contents(tuple(self._described), parts, mine)

    def file(self, content: _Content) -> FileImage:
        """A tensor that is cut is fetched from its device as a whole; at most two of a file are."""
        wanted = [each for each in content.slices if each.size]

        def parts() -> Iterator[memoryview | OnDevice]:
            return (self._bytes_of(each) for each in wanted)

        def body() -> Iterator[memoryview]:
            return (each.fetch() if isinstance(each, OnDevice) else each for each in parts())

        return FileImage(content.name, content.header, content.size, body, parts=parts)

    def _bytes_of(self, part: tensors.TensorSlice) -> memoryview | OnDevice:
        source = self._sources[part.tensor]()
        return (
            source if part.complete or self._places is not None else source[slice(*cast("tuple[int, int]", part.span))]
        )

    def watched(self, labelled: Mapping[str, torch.Tensor], contents: Sequence[_Content]) -> Iterator[WatchedTensor]:
        held = {label: tensors.identity(tensors.local(each)) for label, each in labelled.items()}
        labels = {self._names_of_tensors.get(each): label for label, each in held.items()}
        for content in contents:
            for place, part in zip(content.placed, content.slices, strict=True):
                label = labels.get(part.tensor)
                if label is not None:
                    yield WatchedTensor(label, content.name, place.dtype, place.begin, place.end)


def _held(name: str, dtype: str, tensor: torch.Tensor, plain: torch.Tensor) -> tensors.TensorSlice:
    """What a place writes of ``tensor``: ``plain``, all that it holds."""
    whole = tuple(tensor.shape if tensors.is_sharded(tensor) else plain.shape)
    if not tensors.is_sharded(tensor) or not tensor.numel():
        return tensors.uncut([tensors.TensorEntry(name, dtype, whole)])[0]
    return tensors.TensorSlice(name, dtype, whole, *tensors.box_of(cast("Any", tensor)))


@dataclass(frozen=True, slots=True)
class _Content:
    """One file of tensors: what lies where in it."""

    name: str
    placed: tuple[tensors.TensorEntry, ...]
    slices: tuple[tensors.TensorSlice, ...]
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
    placed = [tensors.TensorEntry(*each) for each in described]
    if parts == 1:
        return (_content(TENSORS_FILE, tensors.uncut(placed)),)
    first, *others = tensors.split_tensors([each for each in placed if each.name not in own], parts)
    held = (*tensors.uncut(each for each in placed if each.name in own), *first)
    return tuple(_content(tensors_file(part, parts), each) for part, each in enumerate((held, *others)))


def _content(name: str, held: Sequence[tensors.TensorSlice]) -> _Content:
    found = tensors.by_name(held)
    placed = tensors.lay_out([tensors.TensorEntry(each, part.dtype, part.shape) for each, part in found.items()])
    header = tensors.file_header(placed, tensors.slice_notes(found))
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
    """Builds the state from its skeleton."""

    def __init__(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self._tensors = loaded
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
        name = node["name"]
        if name not in self._complex:
            self._complex[name] = tensors.as_complex(self._tensors[name])
        return self._complex[name]


_PLAIN = frozenset({type(None), bool, float, str})


def fingerprint(state: Mapping[str, Any]) -> int:
    """63 bits, equal for equal states (as the codec restores them)."""
    walk = _Walk()
    try:
        walk.value(dict(state))
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

    def value(self, value: Any) -> None:
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
            self.value(each)

    def _mapping(self, mapping: Any) -> None:
        self._add([type(mapping).__name__, len(mapping)])
        for key, each in mapping.items():
            if type(key) is str:
                self._add(key)
            elif type(key) is int:
                self._int(key)
            else:
                raise _UnknownError("a key")
            self.value(each)

    def _ordered(self, mapping: Any) -> None:
        self._mapping(mapping)
        self.value(getattr(mapping, "_metadata", None))

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

        problem = tensors.problem_with(tensor)
        if problem is not None:
            raise _UnknownError(problem[0])
        here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        try:
            return here.numpy()
        except TypeError:
            self._add(f"{here.dtype} {list(here.shape)}")
            return here.reshape(-1).view(torch.uint8).numpy()
