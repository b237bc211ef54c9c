"""GPT-2's tokens: byte pair encoding with the ``vocab.json`` and ``merges.txt`` that OpenAI published.

The package tokenizers (extra ``text``) reads, encodes and decodes; here is checked that the files fit together.

*Fails by* DataError for files that are missing or do not fit together, and where tokenizers is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from elastic_trainer.errors import DataError
from elastic_trainer.tasks.language.text_files import read_bytes
from elastic_trainer.tasks.language.tokenizer import Ids

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ModuleNotFoundError as error:
    raise DataError(
        "GPT-2's tokens need the package tokenizers, which is not installed",
        hint="pip install elastic-trainer[text]",
    ) from error

END_OF_TEXT = "<|endoftext|>"
_FILES = ("vocab.json", "merges.txt")


class Gpt2Bpe:
    """The encoding whose two files are in ``directory``."""

    unit = None

    def __init__(self, directory: Path) -> None:
        paths = [directory / name for name in _FILES]
        for path in paths:
            if not path.is_file():
                hint = "put GPT-2's vocab.json and merges.txt there"
                raise DataError(f"data.bpe {directory}: there is no {path.name}", hint=hint)
        content = b"".join(map(read_bytes, paths))
        try:
            ids, pairs = models.BPE.read_file(*map(str, paths))
        except Exception as error:  # tokenizers raises no other type
            raise DataError(f"data.bpe {directory}: {error}", hint="put GPT-2's own files there") from error
        _check(ids, pairs, paths[0])
        self._tokenizer = Tokenizer(models.BPE(ids, pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._digest = xxhash.xxh3_64_hexdigest(content)

    @property
    def size(self) -> int:
        """50,257 in OpenAI's own."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def end(self) -> list[int]:
        """The token between two texts, if there is one."""
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        return [] if end is None else [end]

    def encode(self, text: str) -> Ids:
        """The tokens of ``text``; special tokens in it are plain text."""
        return np.array(self._tokenizer.encode(text).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def identity(self) -> Mapping[str, Any]:
        return {"bpe files": self._digest}


def _check(ids: Mapping[str, int], pairs: Sequence[tuple[str, str]], path: Path) -> None:
    """Every text can be encoded, and the ids are 0, 1, 2, ..."""
    needed = [*pre_tokenizers.ByteLevel.alphabet(), *(left + right for left, right in pairs)]
    if lost := sorted(text for text in needed if text not in ids):
        raise DataError(f"{path}: {lost[0]!r} is missing", hint="the files do not belong together")
    if sorted(ids.values()) != list(range(len(ids))):
        raise DataError(f"{path}: the ids are not 0 to {len(ids) - 1}", hint="repair it")
