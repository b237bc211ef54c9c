"""The Dockerfile as tests read it: instructions in order, each with its stage."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from tests.support.deployment import ROOT

DOCKERFILE = ROOT / "Dockerfile"
IGNORE = ROOT / ".dockerignore"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``stage`` counts from 0, and is -1 before the first FROM."""

    stage: int
    name: str
    value: str


@cache
def instructions() -> tuple[Instruction, ...]:
    """All instructions; lines that are continued are one, comments are gone."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found, stage = [], -1
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, value = line.strip().partition(" ")
        if not name:
            continue
        stage += name == "FROM"
        found.append(Instruction(stage, name, value.strip()))
    return tuple(found)


def values(name: str, *, last_stage: bool = False) -> list[str]:
    """What all instructions ``name`` say, or those of the stage that is shipped."""
    final = instructions()[-1].stage
    return [each.value for each in instructions() if each.name == name and (not last_stage or each.stage == final)]


def arguments() -> dict[str, str]:
    """The arguments of a build with their defaults; the first word counts."""
    found: dict[str, str] = {}
    for value in values("ARG"):
        name, _, default = value.partition("=")
        found.setdefault(name, default.strip('"'))
    return found


def variables() -> dict[str, str]:
    return {
        name: value
        for line in values("ENV", last_stage=True)
        for name, _, value in (word.partition("=") for word in line.split())
    }


def copied() -> list[str]:
    return [name for value in values("COPY") if not value.startswith("--from") for name in value.split()[:-1]]


def words(value: str) -> list[str]:
    """The command in exec form that an instruction ends with; ValueError for a shell's."""
    return [str(word) for word in json.loads(value[value.index("[") :])]
