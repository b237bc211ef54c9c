"""The scripts to start from are short, and a plain one becomes shorter with a Session."""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path

import pytest

from elastic_trainer import cli, jobs
from elastic_trainer.drills.local_run import entry
from tests.support.pages import DOCS, ROOT, blocks

SCRIPTS = Path(jobs.__file__).with_name("scripts")
PLAIN, ELASTIC, SESSION = (SCRIPTS / name for name in ("ddp_script.py", "ddp_script_elastic.py", "session_script.py"))


def _code(path: Path) -> list[str]:
    """Lines behind the docstring, without what only a deeper block changes."""
    return [line.strip() for line in path.read_text().splitlines()[1:] if line.strip()]


def test_the_elastic_script_is_the_plain_one_with_few_other_lines() -> None:
    """At most 18 new lines, and nothing kept of samplers, loaders, process groups and checkpoints. The plain one knows
    nothing of this package: it is what people have."""
    assert "elastic" not in "".join(_code(PLAIN))
    assert len(SESSION.read_text().splitlines()) <= 60
    lines = list(difflib.ndiff(_code(PLAIN), _code(ELASTIC)))
    assert sum(line.startswith("+ ") for line in lines) <= 18
    assert sum(line.startswith("- ") for line in lines) >= 36
    gone = r"Distributed|init_process_group|dist\.|torch\.save|torch\.load|state_dict|unscale_|set_epoch"
    assert not re.search(gone, "\n".join(_code(ELASTIC)))


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "tutorials/train.md"], ids=lambda page: page.name)
def test_the_pages_show_these_scripts(page: Path) -> None:
    """What they show before and after is a piece of the scripts that other tests run, letter by letter."""
    shown = [block.text for block in blocks(page) if "autocast" in block.text]
    for text, script in zip(shown, (PLAIN, ELASTIC), strict=True):
        whole = re.sub(r"  # \d$", "", script.read_text(), flags=re.MULTILINE)
        piece = re.sub(r"  # \d$", "", text, flags=re.MULTILINE)
        assert piece in whole or textwrap.indent(piece, "    ") in whole


def test_init_writes_the_job_of_the_tutorial() -> None:
    templates = Path(cli.__file__).with_name("templates")
    shown = {block.file: block.text for block in blocks(DOCS / "tutorials/train.md")}
    for name in ("spirals.py", "spirals.yaml"):
        assert (templates / name).read_text() == shown[name]


def test_the_four_changes_are_marked() -> None:
    marks = dict(re.findall(r"^\s*(.+?)  # (\d)$", ELASTIC.read_text(), re.MULTILINE))
    named = {number: line for line, number in marks.items()}
    wanted = {"1": "with Session(", "2": "session.wrap(", "3": "session.batches(", "4": "session.step("}
    assert named.keys() == wanted.keys()
    for number, call in wanted.items():
        assert call in named[number]


def test_script_is_a_name_for_a_local_run(tmp_path: Path) -> None:
    """With its checkpoints in the run's directory, unless its arguments say otherwise."""
    where = f"--directory={tmp_path / 'checkpoints'}"
    assert entry(["script", "--epochs", "2"], tmp_path) == (str(SESSION), where, "--epochs", "2")
    assert SESSION.is_file()
    assert jobs.script("mnist") is None
