"""The language model from end to end: it learns, resumes exactly, compiles, writes, refuses in one sentence."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError
from elastic_trainer.jobs import gpt_sample
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.gpt import Gpt
from elastic_trainer.jobs.trainer import Trainer
from elastic_trainer.telemetry import logs
from tests.integration.training.launch import records, train
from tests.support.requirements import needs
from tests.unit.checkpoint.states import newest_of

pytestmark = pytest.mark.timeout(900)

VERSE = "Row, row, row your boat, gently down the stream; merrily, merrily, merrily, life is but a dream.\n"
SMALL = (
    "model.layers=2",
    "model.heads=2",
    "model.width=32",
    "model.context=16",
    "options.batch_tokens=128",
    "logging.loss_every=1",
    "checkpoint.every_s=null",
    "device=cpu",
    "data.validation_fraction=0.1",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logs.configure(io.StringIO())
    yield
    logs.configure()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "verse.txt"
    path.write_text(VERSE * 50)
    return path


def _config(directory: Path, text: Path, *overrides: str, tokens: int = 128 * 20) -> JobConfig:
    fixed = [f"checkpoint.directory={directory}", f"data.files={text}", f"options.max_tokens={tokens}"]
    return load_job("gpt", [*SMALL, *fixed, *overrides])


def _parameters(directory: Path) -> Mapping[str, torch.Tensor]:
    loaded = newest_of(CheckpointManager(directory))
    model: Mapping[str, torch.Tensor] = loaded.state["model"]
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, while it loads the compiler
def test_a_compiled_model_computes_alike_and_its_checkpoints_fit(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters keep their names: what it saved is resumed without, and stays where it was to 1e-4."""
    needs("g++", "torch.compile makes C++ of a model on the CPU")
    # Without vectors torch need not try which ones this machine has, by a compilation for each kind.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)
    # One layer, and batches of one size in training and evaluation: each other shape is compiled anew.
    sizes = ("model.layers=1", "evaluation.batch_size=8", "data.validation_fraction=0.055")
    plain = Trainer(Gpt, _config(tmp_path / "plain", text, *sizes, tokens=128 * 4)).run()
    trainer = Trainer(Gpt, _config(tmp_path / "run", text, *sizes, "compile=true", tokens=128 * 4))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = trainer.run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert compiled["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], abs=1e-4)
    assert _parameters(tmp_path / "run").keys() == _parameters(tmp_path / "plain").keys()
    more = Trainer(Gpt, _config(tmp_path / "run", text, *sizes, tokens=128 * 6)).run()
    assert more["resumed_from"] is not None
    assert more["step"] == 6


def test_a_sharded_model_begins_and_learns_alike_on_any_number_of_processes(tmp_path: Path, text: Path) -> None:
    """It goes on from an unsharded one's checkpoint, divided by FSDP and by tensor parallel, as that one does."""

    def trained(name: str, *overrides: str, tokens: int = 128 * 6, world: int = 1) -> list[float]:
        fixed = (f"checkpoint.directory={tmp_path / name}", f"data.files={text}", f"options.max_tokens={tokens}")
        outcome = train("gpt", *SMALL, *fixed, "logging.tensorboard=true", *overrides, world=world)
        assert outcome.code == 0, outcome.err
        assert not outcome.events("exhibits.failed")
        return [outcome.report["train_loss"], outcome.report["metrics"]["loss"]]

    sharded = "model.shard=true"
    alone = trained("alone", sharded)
    assert trained("two", sharded, world=2) == pytest.approx(alone, abs=1e-6)
    assert not list((tmp_path / "two").glob("*.safetensors"))  # no rank holds the whole model
    assert _parameters(tmp_path / "two").keys() == _parameters(tmp_path / "alone").keys()

    Trainer(Gpt, _config(tmp_path / "plain", text, tokens=128 * 3)).run()
    shutil.copytree(tmp_path / "plain", tmp_path / "divided")
    plain = trained("plain")
    assert trained("divided", sharded, "model.tensor_parallel=2", world=2) == pytest.approx(plain, abs=1e-5)


def test_another_vocabulary_on_resuming_is_refused_by_its_difference(tmp_path: Path, text: Path) -> None:
    """Before a tensor is compared: what was added and what went is told. With another tokenizer equal sizes would not
    make it the same model."""
    Trainer(Gpt, _config(tmp_path / "run", text, tokens=128 * 2)).run()
    with pytest.raises(ConfigError, match="'tokenizer' is 'bytes' here and was 'chars'"):
        Trainer(Gpt, _config(tmp_path / "run", text, "data.tokenizer=bytes")).run()
    text.write_text(VERSE.replace("w", "v").replace("\n", "Z") * 50)
    with pytest.raises(ConfigError) as caught:
        Trainer(Gpt, _config(tmp_path / "run", text)).run()
    sentence = str(caught.value)
    assert "'characters' changed since the run began: 'Z', 'v' added, '\\n', 'w' removed" in sentence
    assert caught.value.exit_code == EXIT_CONFIG


def test_it_learns_a_verse_and_writes_it(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss falls far below guessing; perplexity and bits follow from it exactly; the history has all three. It
    writes without the texts: the characters are kept with the checkpoint. The likeliest next letters are the verse's;
    else the seed decides. The best checkpoint is the last one here."""
    overrides = ("evaluation.every_steps=40", "checkpoint.keep_last=2")
    report = Trainer(Gpt, _config(tmp_path / "run", text, *overrides, tokens=128 * 240)).run()
    metrics = report["metrics"]
    assert metrics["loss"] < 0.5 * math.log(len(set(VERSE)))
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert metrics["bits_per_char"] == metrics["loss"] / math.log(2)
    assert records(tmp_path / "run")[-1]["metrics"] == metrics
    assert report["step"] == 240
    assert report["best"]["loss"] == metrics["loss"]
    text.unlink()
    words = [str(tmp_path / "run"), "--prompt", "gently do", "--tokens", "6", "--temperature", "0"]
    assert gpt_sample.main(words) == 0
    assert capsys.readouterr().out == "gently down the\n"
    said = []
    for extra in (["--seed", "1"], ["--seed", "1", "--best"], ["--seed", "2"]):
        words = [str(tmp_path / "run"), "--temperature", "2", "--top-k", "9", "--tokens", "60"]
        assert gpt_sample.main([*words, *extra]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_a_moving_average_is_what_writes(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(Gpt, _config(tmp_path / "run", text, "average=0.5", tokens=128 * 3)).run()
    loaded = newest_of(CheckpointManager(tmp_path / "run"))
    state = loaded.state
    model = gpt_sample._model(Gpt(_config(tmp_path, text)), len(state["model"]["tokens.weight"]), state)
    assert torch.equal(model.tokens.weight, state["average"]["module.tokens.weight"])
    assert not torch.equal(model.tokens.weight, state["model"]["tokens.weight"])
    assert gpt_sample.main([str(tmp_path / "run"), "--tokens", "3"]) == 0
    assert len(capsys.readouterr().out) == len("\n") + 3 + len("\n")


@pytest.mark.parametrize(
    ("content", "words", "code", "sentence"),
    [
        (None, [], EXIT_CONFIG, "is not the directory of a run: it has no config.yaml"),
        ("task: mnist\nepochs: 1\nglobal_batch: 2\n", [], EXIT_CONFIG, "the task mnist is not a language model"),
        ("task: gpt\nepochs: 1\nglobal_batch: 2\n", [], EXIT_FAILURE, "has no checkpoint"),
        ("task: gpt\nepochs: 1\nglobal_batch: 2\n", ["--best"], EXIT_FAILURE, "has no checkpoint that was the best"),
        ("task: gpt\nepochs: 1\nglobal_batch: 2\n", ["--prompt", ""], EXIT_CONFIG, "--prompt is empty"),
    ],
)
def test_a_run_that_cannot_write_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: list[str],
    code: int,
    sentence: str,
) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert gpt_sample.main([str(tmp_path), *words]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1
