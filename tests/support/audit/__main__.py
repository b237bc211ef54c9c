"""``python -m tests.support.audit [--strict]``: asks about every pin and says the verdict; 1 if it is a bad one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elastic_trainer.clock import SYSTEM
from tests.support.audit.asking import AuditError, ask
from tests.support.audit.images import judge_images, read_images, references
from tests.support.audit.judging import Accepted, Answers, Verdict, judge

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
ACCEPTED = ROOT / "deploy/accepted-vulnerabilities.yaml"
IMAGES = ROOT / "deploy/images.yaml"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    package: str
    id: str
    reason: str = Field(min_length=20, description="why it does not matter here; a word is no reason")
    until: date


def read_accepted(path: Path) -> list[Accepted]:
    """The file of what is accepted."""
    try:
        entries = TypeAdapter(list[_Entry]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or [])
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise AuditError(f"{path}: {error}") from error
    return [Accepted(**entry.model_dump()) for entry in entries]


def told(answers: Answers, verdict: Verdict) -> str:
    """The verdict in lines, the worst last."""
    lines = [f"note: {note}" for note in verdict.notes] + [f"FAILED: {failure}" for failure in verdict.failures]
    total = len(answers.known) + len(answers.unknown or {})
    result = (
        f"{len(verdict.failures)} problem(s)" if verdict.failures else "no known vulnerability that is not accepted"
    )
    return "\n".join([*lines, f"audit: {result}; {len(answers.known)} of {total} pinned packages are known to PyPI"])


def main(argv: Sequence[str]) -> int:
    """Audit; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.audit", description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail also where PyPI could not be asked")
    parser.add_argument("--constraints", type=Path, default=CONSTRAINTS, metavar="FILE")
    parser.add_argument("--images", type=Path, default=IMAGES, metavar="FILE")
    parser.add_argument("--accepted", type=Path, default=ACCEPTED, metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        accepted, images = read_accepted(arguments.accepted), read_images(arguments.images)
        answers = ask(arguments.constraints)
    except AuditError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    today = datetime.fromtimestamp(SYSTEM.wall(), UTC).date()
    of_packages = judge(answers, accepted, today, strict=arguments.strict)
    of_images = judge_images(images, references(ROOT), today, strict=arguments.strict)
    verdict = Verdict(of_packages.failures + of_images.failures, of_packages.notes + of_images.notes)
    print(told(answers, verdict))
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
