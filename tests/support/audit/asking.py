"""Who knows about vulnerabilities: PyPI, asked by pip-audit for each version, or by the page of a package.

pip-audit asks for the page of each version (``/pypi/NAME/VERSION/json``). Mirrors may have only the page of the
package (``/pypi/NAME/json``), whose vulnerabilities are those of its newest version: it serves where that is pinned.

*Runs in* ``make audit``. *Owns* a process of pip-audit's and connections to PyPI, for two minutes at most.
*Fails by* nothing that the network does: what could not be asked is among the unknown. AuditError for a broken answer.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ValidationError

from elastic_trainer.clock import Deadline
from tests.support.audit.judging import Answers, Vulnerability

PYPI = "https://pypi.org/pypi"
TOOL_LIMIT_S = 90.0
PAGES_LIMIT_S = 60.0
ANSWER_LIMIT_S = 10.0
AWAY = "PyPI does not answer"
NO_PAGE = "PyPI has no page of it"


class AuditError(Exception):
    """What came back cannot be understood: no verdict."""


class _Known(BaseModel):
    id: str
    fix_versions: list[str] = []
    aliases: list[str] = []


class _Dependency(BaseModel):
    name: str
    version: str | None = None
    skip_reason: str | None = None
    vulns: list[_Known] = []


class _Report(BaseModel):
    dependencies: list[_Dependency]


class _Listed(BaseModel):
    id: str
    aliases: list[str] = []
    fixed_in: list[str] = []
    withdrawn: str | None = None


class _Info(BaseModel):
    version: str


class _Page(BaseModel):
    info: _Info
    vulnerabilities: list[_Listed]


def pins(constraints: Path) -> dict[str, str]:
    """The version of each package, by its canonical name."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def ask(constraints: Path, pypi: str = PYPI) -> Answers:
    """Ask about every pin."""
    report = by_version(constraints)
    if report is None:
        return Answers(frozenset(), (), dict.fromkeys(pins(constraints), AWAY))
    return with_pages(report, pins(constraints), pypi)


def by_version(constraints: Path) -> _Report | None:
    """pip-audit's report; None where the network does not let it have one."""
    call = [sys.executable, "-m", "pip_audit", "--requirement", str(constraints), "--no-deps", "--disable-pip"]
    call += ["--vulnerability-service", "pypi", "--timeout", str(int(ANSWER_LIMIT_S)), "--progress-spinner", "off"]
    try:
        ran = subprocess.run(
            [*call, "--format", "json"], capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return understood(ran.stdout, ran.stderr)


def understood(out: str, err: str) -> _Report | None:
    """The report in pip-audit's output. A network that fails ends it with a traceback of requests or in its own
    words; any other silence is an error, so that a broken pip-audit does not pass for an evening without network."""
    if out.strip():
        try:
            return _Report.model_validate_json(out)
        except ValidationError as error:
            raise AuditError(f"pip-audit's report cannot be read: {error}") from error
    if "requests.exceptions." in err or "Could not connect" in err or "ServiceError" in err:
        return None
    raise AuditError(f"pip-audit failed: {err.strip()[-2000:]}")


def with_pages(report: _Report, versions: Mapping[str, str], pypi: str) -> Answers:
    """The report's answers, and for what it skipped those of the packages' own pages."""
    found: list[Vulnerability] = []
    known: set[str] = set()
    unknown: dict[str, str] = {}
    deadline = Deadline.after(PAGES_LIMIT_S)
    for each in report.dependencies:
        name: str = canonicalize_name(each.name)
        if each.skip_reason is None:
            known.add(name)
            found += [
                Vulnerability(name, versions[name], (v.id, *v.aliases), tuple(v.fix_versions)) for v in each.vulns
            ]
            continue
        page = AWAY if AWAY in unknown.values() else read_page(f"{pypi}/{name}/json", deadline)
        if isinstance(page, str):
            unknown[name] = page
        elif page.info.version != versions[name]:
            unknown[name] = "PyPI answers only for a newer version"
        else:
            known.add(name)
            found += [
                Vulnerability(name, versions[name], (v.id, *v.aliases), tuple(v.fixed_in))
                for v in page.vulnerabilities
                if v.withdrawn is None
            ]
    for name in versions.keys() - known - unknown.keys():
        unknown[name] = "pip-audit left it out"
    return Answers(frozenset(known), tuple(found), unknown)


def read_page(url: str, deadline: Deadline) -> _Page | str:
    """The page of a package, or why there is none."""
    if deadline.expired:
        return AWAY
    try:
        with urllib.request.urlopen(url, timeout=max(0.1, deadline.at_most(ANSWER_LIMIT_S).remaining_s())) as response:
            return _Page.model_validate_json(response.read())
    except urllib.error.HTTPError as error:
        return NO_PAGE if error.code == 404 else AWAY
    except OSError:
        return AWAY
    except ValidationError:
        return "PyPI's page of it says nothing about vulnerabilities"
