"""A hash that identifies a state: it depends on every byte, and takes little more time than reading them.

A large model's state has thousands of tensors, many of them small (AdamW keeps a step count per parameter). So no file
is encoded: tensors are hashed in place, and the rest as one line of text.

*Fails by* CheckpointError, for what the codec refuses.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from elastic_trainer.checkpoint import codec, tensors

_PLAIN = frozenset({type(None), bool, float, str})


def fingerprint(state: Mapping[str, Any]) -> int:
    """63 bits, equal for equal states (as the codec restores them)."""
    walk = _Walk()
    try:
        walk.value(dict(state))
    except (_UnknownError, RecursionError) as error:
        codec.encode(state)  # says what is wrong, and where
        raise TypeError(f"a state without a fingerprint: {error}") from error
    return walk.number()


class _UnknownError(Exception):
    """A value that the codec does not support."""


class _Walk:
    """Walks a state once. ``_words`` is its structure, with type and shape for each tensor."""

    def __init__(self) -> None:
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
        problem = tensors.problem_with(tensor)
        if problem is not None:
            raise _UnknownError(problem[0])
        here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        try:
            return here.numpy()
        except TypeError:
            self._add(f"{here.dtype} {list(here.shape)}")
            return here.reshape(-1).view(torch.uint8).numpy()
