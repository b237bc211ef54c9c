"""A long row of tokens as training samples: sample i is context + 1 tokens from i * context on.

Its last ``context`` tokens are the targets, so each token but the first is a target in exactly one sample. A rest
shorter than the context is left out at the end of each part: all samples have one size, a mean over samples is a mean
over tokens, and a compiled model sees one shape.

*Fails by* DataError when a part is too short, SampleError when a token is read that the vocabulary does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_trainer.errors import DataError, SampleError
from elastic_trainer.tasks.language.tokenizer import Ids


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
            self._check(piece, row, start, vocabulary)
            found[done : done + len(piece)] = piece
            row, done = row + 1, done + len(piece)
        return found

    def _check(self, piece: Ids, row: int, start: int, vocabulary: int) -> None:
        if len(piece) and int(piece.max()) >= vocabulary:
            worst = int(piece.argmax())
            where = f"{self._names[row]}: token {start + worst}"
            raise SampleError(
                f"{where} is {int(piece[worst])}, but the vocabulary ends at {vocabulary - 1}",
                hint="check data.tokenizer, data.vocab_size and data.bin_dtype",
            )


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


def windows(tokens: Tokens, begin: int, end: int, context: int, vocabulary: int, what: str) -> Windows:
    """Samples of ``what`` (training, validation); DataError if there is not even one."""
    found = Windows(tokens, begin, end, context, vocabulary)
    if not len(found):
        raise DataError(
            f"the {what} text has {end - begin} tokens, but one sample needs {context + 1} (model.context + 1)",
            hint="give more text or a smaller model.context",
        )
    return found


def mapped(paths: Sequence[Path], dtype: str) -> Tokens:
    """Files of plain ``dtype`` numbers, as nanoGPT writes them; read where they are needed, never as a whole."""
    return Tokens([_mapped(path, np.dtype(dtype).newbyteorder("<")) for path in paths], list(map(str, paths)))


def _mapped(path: Path, dtype: np.dtype[Any]) -> Ids:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: is empty", hint="give files with tokens")
    if size % dtype.itemsize:
        raise DataError(f"{path}: {size} bytes are no row of {dtype.name}", hint="check data.bin_dtype")
    try:
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check its owner and mode") from error
