"""Reads the pages in ``elastic_trainer/docs``: their blocks of code, and the rows of their tables."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "elastic_trainer" / "docs"
PAGES = sorted(DOCS.glob("*.md"))

_BLOCK = re.compile(
    r"(?P<notes>(?:^<!--(?:(?!-->).)*-->\n+)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_WORDS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}


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
    return blocks_of(page.read_text(encoding="utf-8"), page.name)


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


# ---- keys of a configuration, as a table says them


@dataclass(frozen=True, slots=True)
class Key:
    """A key with its type and default in the words of the tables."""

    type: str
    default: str


def keys(kind: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """All keys of ``kind``, sections opened: ``evaluation.every_steps``; of alternatives ``optimizer.lr (sgd)``."""
    found: dict[str, Key] = {}
    for name, field in kind.model_fields.items():
        members = _members(field.annotation)
        models = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(models) < len(members):
            found[prefix + name] = Key(spoken_type(field.annotation), spoken_default(field))
            continue
        for model in models:
            tag = f" ({get_args(model.model_fields['name'].annotation)[0]})" if len(models) > 1 else ""
            found |= {f"{key}{tag}": value for key, value in keys(model, f"{prefix}{name}.").items()}
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def spoken_type(annotation: Any) -> str:
    """``int | None`` as "integer or null"."""
    return " or ".join(_word(each) for each in _members(annotation))


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    return _WORDS[kind]


def spoken_default(field: FieldInfo) -> str:
    """The default as YAML says it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{spoken(value)}`"


def spoken(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, tuple):
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
