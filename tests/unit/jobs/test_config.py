"""Job files and overrides, and what a job says when something in them is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.jobs import names
from elastic_trainer.jobs.config import (
    AdamWConfig,
    JobConfig,
    Precision,
    SgdConfig,
    StepConfig,
    as_yaml,
    checked,
    load_job,
    parse_yaml,
    with_overrides,
)
from elastic_trainer.jobs.main import main

JOB = """\
task: mnist
epochs: 2
global_batch: 32
optimizer: {name: sgd, lr: 0.1}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def _refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(str(path), overrides)
    assert caught.value.exit_code == EXIT_CONFIG
    text = str(caught.value)
    assert "\n" not in text, "an error is one line"
    return text


def test_a_file_is_read_with_defaults_filled_in(job: Path) -> None:
    config = load_job(str(job))
    assert (config.task, config.epochs, config.global_batch, config.seed) == ("mnist", 2, 32, 0)
    assert config.optimizer == SgdConfig(name="sgd", lr=0.1)
    assert config.precision is Precision.FP32
    assert config.checkpoint.keep_last == 3


def test_overrides_replace_single_values_and_keep_their_neighbours(job: Path) -> None:
    """key.sub=value sets one value, typed as YAML types it; 1e-3, which YAML 1.1 calls text, is a number."""
    config = load_job(str(job), ["optimizer.lr=1e-3", "precision=bf16", "checkpoint.every_s=null", "model.width=8"])
    assert config.optimizer == SgdConfig(name="sgd", lr=0.001)
    assert config.precision is Precision.BF16
    assert config.checkpoint.every_s is None
    assert config.model == {"width": 8}


def test_overrides_can_choose_another_member_of_a_section(job: Path) -> None:
    """A list value and a change of the kind of optimizer and scheduler work from the command line."""
    overrides = [
        "optimizer.name=adamw",
        "optimizer.betas=[0.8, 0.9]",
        "scheduler.name=step",
        "scheduler.every_epochs=1",
    ]
    config = load_job(str(job), overrides)
    assert config.optimizer == AdamWConfig(lr=0.1, betas=(0.8, 0.9))
    assert config.scheduler == StepConfig(name="step", every_epochs=1)


def test_a_date_is_a_text(job: Path) -> None:
    """A directory is often called after one, also one that no calendar has."""
    for name in ("2024-02-28", "2024-02-30"):
        assert load_job(str(job), [f"checkpoint.directory={name}"]).checkpoint.directory == name


def test_an_override_leaves_an_alias_as_it_was() -> None:
    values = parse_yaml("a: &a {lr: 1}\nb: *a\n", "f")
    assert with_overrides(values, ["a.lr=2"]) == {"a": {"lr": 2}, "b": {"lr": 1}}


def test_the_effective_configuration_reads_back_equal(job: Path, tmp_path: Path) -> None:
    """What is written beside the checkpoints starts the same job again."""
    for overrides in ([], ["scheduler.name=cosine", "clip_norm=1.0", "max_steps=7"]):
        config = load_job(str(job), overrides)
        copy = tmp_path / "copy.yaml"
        copy.write_text(as_yaml(config))
        assert load_job(str(copy)) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("epochz=3", ["command line", "unknown key 'epochz'", "did you mean 'epochs'?"]),
        ("optimizer.momentun=0.9", ["unknown key 'optimizer.momentun'", "did you mean 'momentum'?"]),
        ("checkpoint.keep=2", ["unknown key 'checkpoint.keep'"]),
        ("evaluation.every_step=2", ["unknown key 'evaluation.every_step'", "did you mean 'every_steps'?"]),
        ("epochs=three", ["'epochs' is 'three'", "valid integer"]),
        ("epochs=yes", ["'epochs' is 'True'", "valid integer"]),
        ("epochs=0", ["'epochs' is 0", "greater than or equal to 1"]),
        ("epochs=2.5", ["'epochs' is 2.5"]),
        ("epochs=null", ["'epochs' or 'max_steps'"]),
        ("global_batch=null", ["'global_batch' is missing"]),
        ("reduction=diloco", ["'reduction' diloco needs 'sync_every'"]),
        ("sync_every=30", ["'reduction' ddp goes without 'sync_every'"]),
        ("optimizer.lr=-1", ["'optimizer.lr' is -1", "greater than 0"]),
        ("optimizer.lr=.nan", ["'optimizer.lr' is nan", "finite"]),
        ("optimizer.name=sdg", ["'optimizer.name' is 'sdg'", "did you mean 'sgd'?"]),
        ("optimizer.nesterov=true", ["nesterov needs a momentum"]),
        ("scheduler.gamma=0.5", ["'scheduler.name' is missing"]),
        ("scheduler.name=step", ["'scheduler.every_epochs' is missing"]),
        ("precision=int8", ["'precision' is 'int8'"]),
        ("device=tpu", ["'device' is 'tpu'", "auto, cpu, cuda"]),
        ("micro_batch=64", ["'micro_batch' 64 is larger than 'global_batch' 32"]),
        ("checkpoint.mode=best", ["'checkpoint.mode' is 'best'"]),
        ("optimizer=[1, 2]", ["'optimizer' is [1, 2]"]),
        ("optimizer", ["'optimizer' is not key=value"]),
        ("=3", ["'=3' is not key=value"]),
        ("optimizer..lr=3", ["is not key=value"]),
        ("--epochs=3", ["is not key=value"]),
        ("epochs.x=3", ["'epochs' is 2, which has no parts"]),
        ("epochs=2024-02-30", ["'epochs' is '2024-02-30'"]),
        ("epochs=!!timestamp x", ["override 'epochs=!!timestamp x'", "does not fit its type"]),
        ("epochs=!!int ''", ["override", "does not fit its type"]),
        ("epochs=!!float x", ["override", "does not fit its type"]),
        ("epochs=!!bool x", ["override", "does not fit its type"]),
        ("epochs=[1", ["override 'epochs=[1'", "line 1"]),
    ],
)
def test_a_wrong_override_is_one_sentence(job: Path, override: str, parts: list[str]) -> None:
    text = _refused(job, override)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("task: mnist\nepochs: [1\nseed: 2\n", ["job.yaml, line 3"]),
        ("task: mnist\nepochs: 1\ntask: other\n", ["job.yaml, line 3", "'task' is given twice"]),
        ("a: {b: 1,\n  b: 2}\n", ["line 2", "'b' is given twice"]),
        ("task: mnist\n\tepochs: 1\n", ["line 2"]),
        ("", ["it is empty"]),
        ("- 1\n- 2\n", ["it is a list"]),
        ("task: mnist\nepochs: 1\n", ["'global_batch' is missing"]),
        ("task: !!python/object/apply:os.system [true]\n", ["line 1"]),
        ("a: &a {b: *a}\n", ["line 1"]),
        ("1: 2\ntask: mnist\n", ["job.yaml"]),
        (
            "taks: mnist\nepochs: 1\nglobal_batch: 2\n",
            ["job.yaml: unknown key 'taks'", "did you mean 'task'?", "1 more"],
        ),
        ("[" * 3000, ["job.yaml"]),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_place(tmp_path: Path, content: str, parts: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(content)
    text = _refused(path)
    for part in parts:
        assert part in text


def test_a_missing_or_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no such file" in _refused(tmp_path / "none.yaml")
    (tmp_path / "dir.yaml").mkdir()
    assert "cannot be read" in _refused(tmp_path / "dir.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00task")
    assert "not a text file" in _refused(tmp_path / "binary.yaml")


def test_an_unknown_task_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no ready-made task 'mnst'.*did you mean 'mnist'"):
        load_job("mnst")


def test_duplicate_keys_are_refused_but_merged_ones_are_not() -> None:
    """YAML's merge key may be overridden by a key of the mapping itself."""
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}\n", "f") == {"a": {"x": 1}, "b": {"x": 2}}


def test_the_first_problem_is_named_and_the_rest_counted() -> None:
    with pytest.raises(ConfigError, match=r"2 more problem\(s\) follow"):
        checked(JobConfig, {"task": "x", "epochs": "a", "global_batch": "b", "seed": "c"}, "here")


def test_the_shipped_job_files_are_plain_yaml() -> None:
    """The ready-made files need no loader of ours; each task has one of its own name."""
    shipped = Path("elastic_trainer/jobs")
    files = sorted((Path(__file__).parents[3] / shipped).glob("*.yaml"))
    assert {path.stem for path in files} >= set(names())
    for path in files:
        assert yaml.safe_load(path.read_text())["task"] in names()


def as_rank(monkeypatch: pytest.MonkeyPatch, directory: Path | None, rank: int) -> None:
    """As torchrun, or another launcher (no directory), starts it."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    if directory is not None:
        (directory / str(rank)).mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(directory / str(rank) / "error.json"))


def test_the_first_rank_to_find_a_mistake_prints_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for the first of the node, which torchrun may have ended by then; another mistake is told as well,
    and all are told again when all are started again."""
    mistakes: tuple[list[str], ...] = ([], ["no-such-task"])
    told = []
    for attempt, rank, mistake in ((0, 2, 0), (0, 0, 0), (0, 1, 1), (1, 1, 0)):
        as_rank(monkeypatch, tmp_path / f"attempt_{attempt}", rank)
        assert main(mistakes[mistake]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: "))
    assert told == [1, 0, 1, 1]


def test_without_torchrun_the_first_of_the_node_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other launchers start each rank by itself; alone, a process is the first."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    told = []
    for rank in (1, 0):
        as_rank(monkeypatch, None, rank)
        assert main([]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: no job was given"))
    assert told == [0, 1]
