"""Texts to token ids and back: bytes, or the characters of the training text. (GPT-2's are in bpe.)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

GPT2_SIZE = 50257
UNKNOWN = "\ufffd"
"""Unicode's replacement character stands for characters that the training text does not have."""

Ids = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """A fixed, reversible way to write texts as numbers below ``size``."""

    @property
    def size(self) -> int:
        """How many different tokens there are."""

    @property
    def unit(self) -> str | None:
        """What each token is one of ("byte", "char"), if that can be said."""

    @property
    def end(self) -> list[int]:
        """The token between two texts, if there is one."""

    def encode(self, text: str) -> Ids:
        """The tokens of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""

    def identity(self) -> Mapping[str, Any]:
        """What may not change while a model that was trained with it is used."""


class Bytes:
    """The 256 bytes of UTF-8. Files are taken as they are, in any encoding."""

    size, unit = 256, "byte"
    end: ClassVar[list[int]] = []

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def identity(self) -> Mapping[str, Any]:
        return {}


class Chars:
    """The given characters, in order of their code points; the first token is any other character."""

    unit = "char"
    end: ClassVar[list[int]] = []

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters) - {UNKNOWN})
        self._points = _points("".join(self.characters))

    @property
    def size(self) -> int:
        """The known characters, and one token for the unknown ones."""
        return len(self.characters) + 1

    def encode(self, text: str) -> Ids:
        points = _points(text)
        if not self.characters:
            return np.zeros(len(points), np.int64)
        places = np.searchsorted(self._points, points).clip(max=len(self._points) - 1)
        return np.where(self._points[places] == points, places + 1, 0).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        known = [UNKNOWN, *self.characters]
        return "".join(known[number] for number in ids)

    def identity(self) -> Mapping[str, Any]:
        return {"characters": self.characters}


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
