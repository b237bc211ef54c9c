"""Asks PyPI about every pin, by pip-audit.

*Runs in* ``make audit``. *Owns* a process of pip-audit's, for 90 seconds at most.
*Fails by* nothing that the network does: what could not be asked is among the unknown. AuditError for a broken answer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ValidationError

from tests.support.audit.judging import Answers, Vulnerability

TOOL_LIMIT_S = 90.0
ANSWER_LIMIT_S = 10.0
AWAY = "PyPI does not answer"


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


def pins(constraints: Path) -> dict[str, str]:
    """The version of each package, by its canonical name."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def ask(constraints: Path) -> Answers:
    """Ask about every pin."""
    versions, report = pins(constraints), by_version(constraints)
    if report is None:
        return Answers(frozenset(), (), dict.fromkeys(versions, AWAY))
    found: list[Vulnerability] = []
    unknown: dict[str, str] = dict.fromkeys(versions, "pip-audit left it out")
    for each in report.dependencies:
        name: str = canonicalize_name(each.name)
        if each.skip_reason is not None:
            unknown[name] = each.skip_reason
            continue
        unknown.pop(name, None)
        found += [Vulnerability(name, versions[name], (v.id, *v.aliases), tuple(v.fix_versions)) for v in each.vulns]
    return Answers(frozenset(versions.keys() - unknown.keys()), tuple(found), unknown)


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
