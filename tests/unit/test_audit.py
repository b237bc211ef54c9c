"""The dependency audit: what fails it, what it says, and that not knowing is never taken for being safe."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from tests.support.audit import __main__ as command
from tests.support.audit import asking
from tests.support.audit.asking import AWAY, AuditError, ask, understood
from tests.support.audit.judging import Accepted, Answers, Vulnerability, judge

TODAY = date(2026, 11, 22)
HOLE = Vulnerability("pillow", "10.0.0", ("PYSEC-2023-1", "CVE-2023-44271"), ("10.0.1",))
REASON = "nobody but us writes what is read here"
KNOWN = frozenset({"pillow"})


def accepted(until: date, identifier: str = "CVE-2023-44271") -> Accepted:
    return Accepted("pillow", identifier, REASON, until)


def test_a_known_vulnerability_fails_and_is_named_with_its_cure() -> None:
    """The package, its version, the vulnerability, and where it is fixed."""
    verdict = judge(Answers(KNOWN, (HOLE,)), [], TODAY)
    assert verdict.failures == ("pillow 10.0.0: PYSEC-2023-1, fixed in 10.0.1",)


def test_what_is_accepted_does_not_fail_to_its_last_day_and_fails_on_the_next() -> None:
    """By any of its names; while it is accepted a note gives its reason."""
    last = judge(Answers(KNOWN, (HOLE,)), [accepted(TODAY)], TODAY)
    assert last.failures == ()
    assert REASON in last.notes[0]
    over = judge(Answers(KNOWN, (HOLE,)), [accepted(date(2026, 11, 21))], TODAY)
    assert over.failures == ("accepted until 2026-11-21, which is over: CVE-2023-44271 in pillow",)


def test_an_exception_that_is_over_fails_even_where_nobody_can_be_asked() -> None:
    """A day without network does not make it longer."""
    answers = Answers(frozenset(), (), {"pillow": AWAY})
    assert judge(answers, [accepted(date(2026, 1, 1))], TODAY).failures


@pytest.mark.parametrize("other", [accepted(TODAY, "CVE-2024-1"), Accepted("numpy", "PYSEC-2023-1", REASON, TODAY)])
def test_an_exception_holds_for_one_vulnerability_of_one_package(other: Accepted) -> None:
    """Another name, or another package, is not covered."""
    assert judge(Answers(KNOWN, (HOLE,)), [other], TODAY).failures == (str(HOLE),)


def test_an_exception_without_its_vulnerability_is_said() -> None:
    """So that the file holds what is needed."""
    assert judge(Answers(KNOWN), [accepted(TODAY)], TODAY).notes == ("not needed any more: CVE-2023-44271 in pillow",)


def test_packages_that_nobody_knows_are_said_and_fail_where_that_is_asked_for() -> None:
    """One line for each reason."""
    answers = Answers(frozenset(), (), {"b": AWAY, "a": AWAY, "c": "no page"})
    lines = (f"2 not audited ({AWAY}): a, b", "1 not audited (no page): c")
    relaxed, strict = judge(answers, [], TODAY), judge(answers, [], TODAY, strict=True)
    assert (relaxed.failures, relaxed.notes) == ((), lines)
    assert (strict.failures, strict.notes) == (lines, ())


@pytest.mark.parametrize(
    "said",
    [
        "requests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org', port=443): ...",
        "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed",
    ],
)
def test_a_network_that_fails_is_no_failure_of_the_audit(said: str) -> None:
    """Neither as pip-audit says it nor as a traceback of what is below it."""
    assert understood("", said) is None


@pytest.mark.parametrize(("out", "err"), [("", "No module named pip_audit"), ("{}", ""), ("Warning!", "")])
def test_a_broken_tool_is_a_failure(out: str, err: str) -> None:
    """Unlike a network that is away."""
    with pytest.raises(AuditError):
        understood(out, err)


def constraints(directory: Path, *lines: str) -> Path:
    path = directory / "constraints.txt"
    path.write_text("\n".join(["# pins", *lines]))
    return path


def test_findings_count_and_what_was_skipped_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all names of a vulnerability, and under the package's canonical name; without network all is unknown."""
    path = constraints(tmp_path, "Pillow==10.0.0", "forgotten==1", "private==1")
    found = {"id": "PYSEC-2023-1", "aliases": ["CVE-2023-44271"], "fix_versions": ["10.0.1"], "description": "..."}
    skipped = {"name": "private", "skip_reason": "not found on PyPI"}
    report = {"dependencies": [{"name": "pillow", "version": "10.0.0", "vulns": [found]}, skipped], "fixes": []}
    monkeypatch.setattr(asking, "by_version", lambda _: understood(json.dumps(report), ""))
    answers = ask(path)
    assert (answers.known, answers.vulnerabilities) == (KNOWN, (HOLE,))
    assert answers.unknown == {"forgotten": "pip-audit left it out", "private": "not found on PyPI"}
    monkeypatch.setattr(asking, "by_version", lambda _: None)
    assert ask(path).unknown == dict.fromkeys(("pillow", "forgotten", "private"), AWAY)


@pytest.mark.parametrize(
    ("answers", "options", "code"),
    [
        (Answers(KNOWN), [], 0),
        (Answers(KNOWN, (HOLE,)), [], 1),
        (Answers(frozenset(), (), {"pillow": AWAY}), [], 0),
        (Answers(frozenset(), (), {"pillow": AWAY}), ["--strict"], 1),
    ],
)
def test_the_exit_code_is_the_verdict(
    answers: Answers, options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the last line says how many packages were known."""
    monkeypatch.setattr(command, "ask", lambda _: answers)
    assert command.main(options) == code
    assert capsys.readouterr().out.endswith(f"{len(answers.known)} of 1 pinned packages are known to PyPI\n")


@pytest.mark.parametrize("entry", ["package: pillow", "reason: no", "until: some day", "unknown: 1"])
def test_a_careless_exception_is_refused(entry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a package, a name, a reason of more than a word, and a day; with one of them spoilt it is an error."""
    whole = {"package": "pillow", "id": "CVE-1", "reason": REASON, "until": "2027-01-31"}
    path = tmp_path / "accepted.yaml"
    path.write_text(json.dumps([whole]))
    assert len(command.read_accepted(path)) == 1
    key, _, value = entry.partition(": ")
    spoilt = {name: each for name, each in whole.items() if name != key} | ({} if key == "package" else {key: value})
    path.write_text(json.dumps([spoilt]))
    assert command.main(["--accepted", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_the_file_of_this_project_can_be_read() -> None:
    """With every exception in it."""
    command.read_accepted(command.ACCEPTED)
