"""GPT-2's tokens: byte pair encoding with the ``vocab.json`` and ``merges.txt`` that OpenAI published.

A text is cut into words (with the space before them), the bytes of each word are merged in pairs, the pair that stands
first in the list of merges first (Sennrich et al. 2016; on bytes: Radford et al. 2019, 2.2). Both files write a byte as
one visible character.

*Fails by* DataError for files that are missing or do not fit together.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from elastic_trainer.errors import DataError
from elastic_trainer.tasks.text_files import read_bytes
from elastic_trainer.tasks.tokenizer import Ids

GPT2_SIZE = 50257
END_OF_TEXT = "<|endoftext|>"
_FILES = ("vocab.json", "merges.txt")
_MOST_REMEMBERED = 1 << 16
_SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
"""Unicode's white space; Python's own ``\\s`` has four control characters more."""


class Gpt2Bpe:
    """The encoding whose two files are in ``directory``."""

    unit = None

    def __init__(self, directory: Path) -> None:
        vocabulary, merges = (_read(directory, name) for name in _FILES)
        self._ids = _vocabulary(vocabulary, directory / _FILES[0])
        lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
        self._ranks = {pair: rank for rank, pair in enumerate(_pairs(lines, directory / _FILES[1]))}
        self._texts = {number: text for text, number in self._ids.items()}
        self._digest = xxhash.xxh3_64_hexdigest((vocabulary + merges).encode())
        self._words: dict[str, list[int]] = {}
        self._check(directory)

    @property
    def size(self) -> int:
        """50,257 in OpenAI's own."""
        return len(self._ids)

    @property
    def end(self) -> list[int]:
        """The token that parts texts, if there is one."""
        return [self._ids[END_OF_TEXT]] if END_OF_TEXT in self._ids else []

    def encode(self, text: str) -> Ids:
        """The tokens of ``text``; special tokens in it are plain text."""
        ids: list[int] = []
        for word in _splitter().findall(text):
            ids += self._word(word)
        return np.array(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        visible = "".join(self._texts[number] for number in ids)
        byte_of = {letter: byte for byte, letter in visible_bytes().items()}
        return bytes(byte_of[letter] for letter in visible if letter in byte_of).decode("utf-8", errors="replace")

    def identity(self) -> Mapping[str, Any]:
        return {"bpe files": self._digest}

    def _word(self, word: str) -> list[int]:
        known = self._words.get(word)
        if known is None:
            letters = visible_bytes()
            known = [self._ids[part] for part in self._merged([letters[byte] for byte in word.encode("utf-8")])]
            if len(self._words) < _MOST_REMEMBERED:
                self._words[word] = known
        return known

    def _merged(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            pairs = set(pairwise(parts))
            first = min(pairs, key=lambda pair: self._ranks.get(pair, sys.maxsize))
            if first not in self._ranks:
                break
            parts = list(_joined(parts, first))
        return parts

    def _check(self, directory: Path) -> None:
        """Every text can be encoded, and the ids are 0, 1, 2, ..."""
        results = {left + right for left, right in self._ranks}
        lost = [text for text in [*visible_bytes().values(), *results] if text not in self._ids]
        if lost:
            raise DataError(f"{directory / _FILES[0]}: {lost[0]!r} is missing", hint="the files do not belong together")
        if sorted(self._texts) != list(range(len(self._ids))):
            raise DataError(f"{directory / _FILES[0]}: the ids are not 0 to {len(self._ids) - 1}", hint="repair it")


def _read(directory: Path, name: str) -> str:
    path = directory / name
    if not path.is_file():
        raise DataError(f"data.bpe {directory}: there is no {name}", hint="put GPT-2's vocab.json and merges.txt there")
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8", hint="put GPT-2's own file there") from error


def _vocabulary(text: str, path: Path) -> dict[str, int]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}", hint="put GPT-2's own file there") from error
    if not (isinstance(values, dict) and values and all(type(number) is int for number in values.values())):
        raise DataError(f"{path}: not an object of tokens and numbers", hint="put GPT-2's own file there")
    return values


def _pairs(lines: Sequence[str], path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataError(f"{path}: merge {number} is not two parts: {line!r}", hint="put GPT-2's own file there")
        yield left, right


def _joined(parts: Sequence[str], pair: tuple[str, str]) -> Iterator[str]:
    """``parts`` with each occurrence of ``pair`` made one, from the left."""
    index = 0
    while index < len(parts):
        both = tuple(parts[index : index + 2]) == pair
        yield parts[index] + parts[index + 1] if both else parts[index]
        index += 2 if both else 1


@cache
def visible_bytes() -> dict[int, str]:
    """The character that stands for each byte: itself where Latin-1 shows it, else the next one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}


@cache
def _splitter() -> re.Pattern[str]:
    r"""GPT-2's words: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+.

    Python's ``re`` has no \p. Its \w is the letters, the numbers and "_", so letters are \w without the numbers.
    """
    numbers = _number_ranges()
    blank = f"[{_SPACE}]"
    words = ("'s|'t|'re|'ve|'m|'ll|'d", rf" ?[^\W_{numbers}]+", f" ?[{numbers}]+", rf" ?(?:[^\w{_SPACE}]|_)+")
    return re.compile("|".join([*words, f"{blank}+(?![^{_SPACE}])", f"{blank}+"]))


def _number_ranges() -> str:
    """All characters of Unicode's categories N*, as ranges of a character class."""
    points = [point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point)).startswith("N")]
    starts = [point for point, before in zip(points, [-2, *points], strict=False) if point != before + 1]
    ends = [point for point, after in zip(points, [*points[1:], -2], strict=True) if after != point + 1]
    return "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))
