"""What a command says about its job, whatever differs between the nodes that run it."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.rendezvous.launcher import job_of

PYTHON = "/usr/bin/python3"


def typed(*words: str) -> dict[str, str]:
    """The job of ``python -u WORDS``, as torchrun starts it."""
    return job_of(PYTHON, ("-u", *words))


@pytest.mark.parametrize(
    ("words", "script"), [(("train.py", "--lr", "1"), "train.py"), (("-m", "my.train", "--lr", "1"), "-m my.train")]
)
def test_script_and_arguments_are_those_that_the_user_typed(words: tuple[str, ...], script: str) -> None:
    """Nodes may have different Pythons; a program without Python is its own script."""
    found = typed(*words)
    assert found["script"] == script
    assert job_of("/opt/other/python", ("-u", *words)) == found
    assert typed(*words[:-1], "2")["command"] != found["command"]
    assert job_of("./train", ("--lr", "1")) == {**found, "script": "./train"}


@pytest.mark.parametrize("name", ["--node-rank", "--node_rank", "--machine-rank", "--hostname", "--node-id"])
def test_what_names_the_node_is_no_part_of_the_command(name: str) -> None:
    """In both spellings of an option."""
    assert typed("train.py", name, "1") == typed("train.py", f"{name}=2") == typed("train.py")


@pytest.mark.parametrize("words", [("--checkpoint-dir", "/a"), ("--checkpoint_dir=/a",), ("checkpoint.directory=/a",)])
def test_the_checkpoint_directory_is_a_field_of_its_own(words: tuple[str, ...]) -> None:
    """So that it can be allowed to differ by itself; the last one counts."""
    assert typed("train.py", *words) == typed("train.py") | {"checkpoint_dir": "/a"}
    assert typed("train.py", "checkpoint.directory=/b", *words)["checkpoint_dir"] == "/a"
