"""Environments with some of this one's packages: made at once, without a network, and as isolated as any."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

SITE = Path(sysconfig.get_path("purelib"))


class Environment:
    """A virtual environment in which the ``packages`` of this one, entries of its site-packages, are linked."""

    def __init__(self, directory: Path, packages: Iterable[Path]) -> None:
        venv.create(directory, symlinks=True, with_pip=False)
        self.bin = directory / "bin"
        self.site = directory / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        for each in packages:
            (self.site / each.name).symlink_to(each)

    def run(
        self, *command: str, cwd: Path, limit_s: float = 100.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` as in a shell where this environment is active."""
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "VIRTUAL_ENV": str(self.bin.parent)} | variables
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )


def all_but(*names: str) -> list[Path]:
    """What is installed here, without the packages and distributions of these ``names``."""
    return [each for each in SITE.iterdir() if each.name.partition("-")[0] not in names]


def needed_by(requirements: Iterable[Requirement]) -> set[Path]:
    """What the installed distributions that ``requirements`` ask for, and those that these need, consist of."""
    return {
        SITE / file.parts[0]
        for name in {name for each in requirements for name in _closure(each, set())}
        for file in distribution(name).files or []
        if file.parts[0] != ".." and (SITE / file.parts[0]).exists()
    }


def _closure(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[str]:
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) not in seen:
            seen.add((requirement.name, extra))
            yield requirement.name
            for each in map(Requirement, distribution(requirement.name).requires or []):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    yield from _closure(each, seen)
