"""``elastic-trainer run``: from options to torchrun's command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_trainer.cli import run
from elastic_trainer.cli.main import main


def command(*argv: str) -> list[str]:
    parser = argparse.ArgumentParser()
    run.configure_run(parser)
    return run.command(parser.parse_args(argv))


def script(directory: Path, text: str) -> str:
    path = directory / "train.py"
    path.write_text(text)
    return str(path)


def test_torchrun_understands_the_command(tmp_path: Path) -> None:
    """With the endpoint, the run's name, one worker where there is no GPU, and restarts for weeks."""
    path = script(tmp_path, "print()\n")
    words = command("--nodes", "2:4", "--endpoint", "etcd:2379", "--", path, "--lr", "0.1")
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2:4", "1", 100)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == ("etcd3", "etcd:2379", "train")
    assert (parsed.training_script, parsed.training_script_args) == (path, ["--lr", "0.1"])


def test_a_password_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Job logs are read by many; torchrun gets it."""
    words = ["--rdzv-conf", "user=u,password=geheim-1,ttl=9", "--", "script"]
    assert any("password=geheim-1,ttl=9" in word for word in command(*words))
    assert main(["run", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    assert "user=u,password=***,ttl=9" in said.err
    assert "geheim" not in said.err + said.out


def test_etcd_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless an option names another."""
    monkeypatch.setenv("ELASTIC_TRAINER_ENDPOINT", "there:2379")
    assert "--rdzv-endpoint=there:2379" in command("--", "script")
    assert "--rdzv-endpoint=here:1" in command("--endpoint", "here:1", "--", "script")
    assert "--rdzv-endpoint=a:2379,b:1" in command("--endpoint", "a,b:1", "--", "script")


@pytest.mark.parametrize(
    ("text", "recovery"),
    [
        ("from elastic_trainer import Session\n", "in_place"),
        ("from elastic_trainer.jobs.trainer import Trainer\n", "in_place"),
        ("import elastic_trainer as et\nwith et.Session() as session: pass\n", "in_place"),
        ("from elastic_trainer import Task\n", "restart"),
        ("import elastic_trainer\n", "restart"),
        ("class Session: pass\nfoo.Session()\n", "restart"),
        ("this is not a python\n", "restart"),
    ],
)
def test_a_script_with_a_session_recovers_in_place(tmp_path: Path, text: str, recovery: str) -> None:
    """Others are restarted, since their processes cannot follow a round."""
    assert f"--rdzv-conf=recovery={recovery}" in command("--", script(tmp_path, text))


def test_what_the_user_says_of_recovery_counts(tmp_path: Path) -> None:
    """By the option, or among those of the rendezvous."""
    path = script(tmp_path, "from elastic_trainer import Session\n")
    assert "--rdzv-conf=recovery=restart" in command("--rdzv-conf", "recovery=restart", "--", path)
    assert "--rdzv-conf=ttl=9,recovery=restart" in command("--recovery=restart", "--rdzv-conf", "ttl=9", "--", path)


def test_modules_and_tasks_run_too() -> None:
    """A module as it is; a task with a directory for its checkpoints."""
    assert command("--", "-m", "my.train", "x")[-3:] == ["-m", "my.train", "x"]
    assert "--rdzv-id=train" in command("--", "-m", "my.train")
    assert command("--name", "a", "--", "mnist")[-4:] == [
        "-m",
        "elastic_trainer.training",
        "mnist",
        "checkpoint.directory=runs/a/checkpoints",
    ]


def test_a_dry_run_prints_the_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, quoted for a shell."""
    assert main(["run", "--dry-run", "--", "-m", "my.train", "two words"]) == 0
    assert capsys.readouterr().err.endswith("-m my.train 'two words'\n")
