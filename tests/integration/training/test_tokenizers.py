"""Texts become tokens and come back; GPT-2's encoding merges as its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from elastic_trainer.errors import DataError
from elastic_trainer.jobs.corpus import TextOptions, load_corpus
from elastic_trainer.jobs.texts import END_OF_TEXT, UNKNOWN, Bytes, Chars, Gpt2Bpe
from tests.unit.jobs.test_gpt import text_of

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"]


def bpe_files(directory: Path, merges: list[str] = MERGES, drop: str | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    tokens = [*ByteLevel.alphabet(), *(merge.replace(" ", "") for merge in merges), END_OF_TEXT]
    vocabulary = {token: number for number, token in enumerate(token for token in tokens if token != drop)}
    (directory / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Gpt2Bpe:
    return Gpt2Bpe(bpe_files(tmp_path_factory.mktemp("bpe")))


def _words(bpe: Gpt2Bpe, text: str) -> list[str]:
    return [bpe.decode([int(number)]) for number in bpe.encode(text)]


@given(st.text(st.characters(codec="utf-8")))
def test_texts_come_back(bpe: Gpt2Bpe, text: str) -> None:
    for tokenizer in (bpe, Bytes()):
        assert tokenizer.decode([int(number) for number in tokenizer.encode(text)]) == text
    assert len(Bytes().encode(text)) == len(text.encode())


def test_characters_come_back_and_strangers_are_marked() -> None:
    """The vocabulary is that of the training text, in the order of code points, behind the unknown one."""
    chars = Chars("hello, wörld")
    ids = chars.encode("old wörld!")
    assert chars.size == len(set("hello, wörld")) + 1
    assert chars.decode([int(number) for number in ids]) == f"old wörld{UNKNOWN}"
    assert list(chars.encode(" ,ö")) == [1, 2, chars.size - 1]
    assert Chars(chars.characters).characters == chars.characters
    assert [len(each.encode("")) for each in (chars, Chars(""))] == [0, 0]


def test_pairs_are_merged_in_the_order_of_the_list(bpe: Gpt2Bpe) -> None:
    """Where one is missing on the way, the parts remain. The end of a text can be read, but not written in a text by
    accident."""
    assert _words(bpe, "hello") == ["hello"]
    assert _words(bpe, "hell") == ["hell"]
    assert _words(bpe, "helo") == ["he", "l", "o"]
    assert _words(bpe, "hello world") == ["hello", " wo", "r", "l", "d"]
    assert _words(bpe, "lll") == ["ll", "l"]
    assert bpe.decode(bpe.end) == END_OF_TEXT
    assert bpe.end[0] not in bpe.encode(END_OF_TEXT)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"vocab.json": None}, "there is no vocab.json"),
        ({"merges.txt": None}, "there is no merges.txt"),
        ({"vocab.json": b"{"}, "data.bpe .*: Error while reading vocab .* EOF while parsing an object at line 1"),
        ({"vocab.json": b"[1]"}, "data.bpe .*: .*Bad vocabulary json file"),
        ({"vocab.json": b"\xff"}, "data.bpe .*: .* did not contain valid UTF-8"),
        ({"merges.txt": b"h e\nhello\n"}, "data.bpe .*: .*Merges text file invalid at line 2"),
        ({"merges.txt": b"q x\n"}, "vocab.json: 'qx' is missing"),
    ],
)
def test_wrong_bpe_files_are_named(tmp_path: Path, files: dict[str, bytes | None], sentence: str) -> None:
    directory = bpe_files(tmp_path / "bpe")
    for name, content in files.items():
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        Gpt2Bpe(directory)


def test_gpt2_tokens_begin_each_text_with_the_end_of_the_last(tmp_path: Path) -> None:
    """As in the original: texts do not run into each other."""
    bpe = bpe_files(tmp_path / "bpe")
    (texts := tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (texts / name).write_text("hello world " * 8, encoding="utf-8")
    corpus = load_corpus(TextOptions(files=str(texts), tokenizer="gpt2", bpe=bpe, validation_fraction=0.3), 8)
    text = text_of(corpus.train, corpus)
    assert text.startswith("<|endoftext|>hello world ")
    assert text.count("<|endoftext|>") == 2
    assert corpus.identity("gpt2").keys() == {"tokenizer", "bpe files", "vocabulary size"}
