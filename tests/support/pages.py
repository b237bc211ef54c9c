"""Reads the pages in ``docs``: their blocks of code, and the rows of their tables."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

_BLOCK = re.compile(
    r"(?P<notes>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``file``: it is the content of this file. ``not_run``: why it is not executed, or None."""

    page: str
    line: int
    language: str
    text: str
    file: str | None
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a ``sh`` block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of ``page``, in order."""
    return blocks_of(page.read_text(encoding="utf-8"), os.path.relpath(page, DOCS))


def blocks_of(text: str, name: str) -> list[Block]:
    """The fenced blocks of ``text``, which is (a part of) the page ``name``."""
    return [_block(name, text, match) for match in _BLOCK.finditer(text)]


def _block(page: str, text: str, match: re.Match[str]) -> Block:
    line = text.count("\n", 0, match.start("language")) + 1
    notes = match["notes"]
    return Block(page, line, match["language"], match["text"], _note("file", notes), _note("not run", notes))


def _note(name: str, notes: str) -> str | None:
    found = re.search(rf"<!-- {name}:(.*?)-->", notes, re.DOTALL)
    return " ".join(found[1].split()) if found is not None else None


def section(page: Path, heading: str) -> str:
    """What stands below ``heading``, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    assert found is not None, f"{page.name} has no heading '{heading}'"
    return re.split(rf"^#{{1,{len(found[1])}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in ``text``, headings and rulers left out."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        ruler = number + 1 < len(lines) and re.match(r"^\|[ |:-]+\|$", lines[number + 1])
        if line.startswith("|") and not ruler and not re.match(r"^\|[ |:-]+\|$", line):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def codes(cell: str) -> list[str]:
    """What stands between backticks in ``cell``."""
    return re.findall(r"`([^`]+)`", cell)
