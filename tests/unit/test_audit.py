"""The dependency audit: what fails it, what it says, and that not knowing is never taken for being safe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path

import pytest

from elastic_trainer.web.answers import JSON, Answer, Body, Request, text
from elastic_trainer.web.server import Server
from tests.support.audit import __main__ as command
from tests.support.audit import asking
from tests.support.audit.asking import AWAY, NO_PAGE, AuditError, ask, pins, understood
from tests.support.audit.images import Images, judge_images, read_images, references
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
    """By any of its names; while it is accepted it is said with its reason."""
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


def images(**changed: object) -> Images:
    one = {"name": "quay.io/coreos/etcd", "tag": "v3.5.33", "at_least": "v3.5.33", "digest": None}
    return Images.model_validate({"looked_at": TODAY, "images": [one | {"reason": "older ones have holes"} | changed]})


def test_the_images_of_this_repository_are_pinned_once_and_without_known_holes() -> None:
    """Manifests, compose files and the Dockerfile name what deploy/images.yaml says, and nothing else."""
    used = references(command.ROOT)
    assert {"Dockerfile", "deploy/compose.yaml", "k8s/base/etcd.yaml"} <= set(used)
    known = read_images(command.IMAGES)
    assert judge_images(known, used, known.looked_at, strict=True).failures == ()
    assert len(known.images) == 5


USED = {
    "k8s/base/etcd.yaml": [
        "quay.io/coreos/etcd:v3.5.33",
        "elastic-trainer:latest",
        "registry.example/elastic-trainer:1",
    ]
}


@pytest.mark.parametrize(
    ("changed", "used", "failure"),
    [
        ({"tag": "v3.5.9"}, {"a": ["quay.io/coreos/etcd:v3.5.9"]}, "etcd:v3.5.9 is older than v3.5.33: older ones"),
        ({}, {"a": ["quay.io/coreos/etcd:v3.5.34"], **USED}, "a names quay.io/coreos/etcd:v3.5.34"),
        ({}, {"a": ["redis:7"], **USED}, "a names redis:7"),
        ({}, {}, "which no file names"),
        ({"digest": "sha256:" + "0" * 64}, USED, "k8s/base/etcd.yaml names quay.io/coreos/etcd:v3.5.33, which"),
    ],
)
def test_an_image_that_is_old_or_unpinned_fails(
    changed: dict[str, object], used: dict[str, list[str]], failure: str
) -> None:
    """Versions are compared as numbers; a tag alone is not the digest that was asked for."""
    assert failure in judge_images(images(**changed), used, TODAY).failures[0]


def test_a_tag_without_a_digest_and_a_list_that_nobody_looked_at_are_said() -> None:
    """Both as notes; the second fails a strict audit."""
    assert judge_images(images(), USED, TODAY).failures == ()
    assert "not by digest" in judge_images(images(), USED, TODAY).notes[0]
    later = date(2027, 3, 1)
    assert "nobody has compared" in judge_images(images(), USED, later).notes[1]
    assert judge_images(images(), USED, later, strict=True).failures


def test_an_exception_without_its_vulnerability_is_said() -> None:
    """So that the file holds what is needed."""
    assert judge(Answers(KNOWN), [accepted(TODAY)], TODAY).notes == ("not needed any more: CVE-2023-44271 in pillow",)


def test_packages_that_nobody_knows_are_said_and_fail_where_that_is_asked_for() -> None:
    """One line for each reason."""
    answers = Answers(frozenset(), (), {"b": AWAY, "a": AWAY, "c": NO_PAGE})
    lines = (f"2 not audited ({AWAY}): a, b", f"1 not audited ({NO_PAGE}): c")
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
    """It is told from a network that is away."""
    with pytest.raises(AuditError):
        understood(out, err)


class Pages:
    """PyPI with the pages of packages alone."""

    def __init__(self, pages: Mapping[str, object]) -> None:
        self._pages = pages

    def answer(self, request: Request) -> Answer:
        page = self._pages.get(request.path.split("/")[1])
        if page is None:
            return text(404, "there is nothing here")
        return Answer(200, JSON, Body.of(json.dumps(page).encode()))


Publish = Callable[[Mapping[str, object]], str]


@pytest.fixture
def publish() -> Iterator[Publish]:
    servers: list[Server] = []

    def start(pages: Mapping[str, object]) -> str:
        servers.append(Server("127.0.0.1", 0, Pages(pages)))
        servers[-1].start()
        return f"http://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.stop()


def constraints(directory: Path, *lines: str) -> Path:
    path = directory / "constraints.txt"
    path.write_text("\n".join(["# pins", *lines]))
    return path


def skipping(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """pip-audit's report where no version has a page."""
    report = {"dependencies": [{"name": name, "skip_reason": "not found"} for name in pins(path)]}
    monkeypatch.setattr(asking, "by_version", lambda _: understood(json.dumps(report), ""))


def page(version: str, *vulnerabilities: object) -> object:
    return {"info": {"version": version}, "vulnerabilities": list(vulnerabilities)}


def test_a_packages_page_answers_for_its_newest_version_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    """For an older pin, or without a page or the list in it, nothing is known; what was withdrawn is nothing."""
    path = constraints(tmp_path, "Typing_Inspection==1.0", "old==1.0", "lost==1.0", "mute==1.0")
    skipping(monkeypatch, path)
    hole = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["1.1"]}
    url = publish(
        {
            "typing-inspection": page("1.0", hole, {**hole, "id": "PYSEC-2", "withdrawn": "2026-01-01"}),
            "old": page("2.0"),
            "mute": {"info": {"version": "1.0"}},
        }
    )
    answers = ask(path, url)
    assert answers.known == {"typing-inspection"}
    assert answers.vulnerabilities == (Vulnerability("typing-inspection", "1.0", ("PYSEC-1", "CVE-1"), ("1.1",)),)
    assert answers.unknown == {
        "old": "PyPI answers only for a newer version",
        "lost": NO_PAGE,
        "mute": "PyPI's page of it says nothing about vulnerabilities",
    }


def test_a_pypi_that_is_away_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    """Not a hundred times ten seconds; and all packages are unknown."""
    path = constraints(tmp_path, "a==1", "b==1")
    skipping(monkeypatch, path)
    asked: list[str] = []

    def read_page(url: str, deadline: object) -> str:
        asked.append(url)
        return AWAY

    monkeypatch.setattr(asking, "read_page", read_page)
    assert ask(path, "http://nowhere").unknown == {"a": AWAY, "b": AWAY}
    assert len(asked) == 1
    monkeypatch.setattr(asking, "by_version", lambda _: None)
    assert ask(path).unknown == {"a": AWAY, "b": AWAY}


def test_pip_audits_own_findings_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all names of a vulnerability, and under the package's canonical name."""
    path = constraints(tmp_path, "Pillow==10.0.0", "forgotten==1")
    found = {"id": "PYSEC-2023-1", "aliases": ["CVE-2023-44271"], "fix_versions": ["10.0.1"], "description": "..."}
    report = {"dependencies": [{"name": "pillow", "version": "10.0.0", "vulns": [found]}], "fixes": []}
    monkeypatch.setattr(asking, "by_version", lambda _: understood(json.dumps(report), ""))
    answers = ask(path)
    assert (answers.known, answers.vulnerabilities) == (KNOWN, (HOLE,))
    assert answers.unknown == {"forgotten": "pip-audit left it out"}


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
