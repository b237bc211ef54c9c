"""What an audit's answers mean: pure rules.

A vulnerability that is known fails, unless it was accepted and that has not ended. A package that nobody could be asked
about is said, and fails where the audit is strict: "no known vulnerabilities" must not mean that nobody knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Vulnerability:
    """One that is known in a pinned package; ``ids`` are its names, the first is shown."""

    package: str
    version: str
    ids: tuple[str, ...]
    fixed_in: tuple[str, ...] = ()

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "not fixed in any version"
        return f"{self.package} {self.version}: {self.ids[0]}, {fixed}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A vulnerability that somebody has decided to live with ``until`` a day, that day included."""

    package: str
    id: str
    reason: str
    until: date

    def covers(self, found: Vulnerability) -> bool:
        return self.package == found.package and self.id in found.ids


@dataclass(frozen=True, slots=True)
class Answers:
    """What was heard: packages that are ``known``, vulnerabilities in them, and for the others why nothing is known."""

    known: frozenset[str]
    vulnerabilities: tuple[Vulnerability, ...] = ()
    unknown: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``failures`` end the audit with 1; ``notes`` are said."""

    failures: tuple[str, ...]
    notes: tuple[str, ...]


def judge(answers: Answers, accepted: Sequence[Accepted], today: date, *, strict: bool = False) -> Verdict:
    """The verdict of ``today``."""
    failures = [
        f"accepted until {each.until}, which is over: {each.id} in {each.package}"
        for each in accepted
        if each.until < today
    ]
    notes = []
    for found in answers.vulnerabilities:
        cover = next((each for each in accepted if each.covers(found) and each.until >= today), None)
        if cover is not None:
            notes.append(f"{found}; accepted until {cover.until}: {cover.reason}")
        elif not any(each.covers(found) for each in accepted):  # what is accepted no longer was said above
            failures.append(str(found))
    notes += [
        f"not needed any more: {each.id} in {each.package}"
        for each in accepted
        if each.package in answers.known and not any(map(each.covers, answers.vulnerabilities))
    ]
    (failures if strict else notes).extend(_unknown(answers))
    return Verdict(tuple(failures), tuple(notes))


def _unknown(answers: Answers) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for package, reason in sorted((answers.unknown or {}).items()):
        reasons.setdefault(reason, []).append(package)
    return [f"{len(packages)} not audited ({reason}): {', '.join(packages)}" for reason, packages in reasons.items()]
