"""Reads systemd's unit files as far as ours need it: settings, environment files, and the command that is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.deployment import DEPLOY

SYSTEMD = DEPLOY / "systemd"
UNITS = sorted([*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.timer")])
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit file: (section, key, value) in order, with continued lines joined."""

    settings: tuple[tuple[str, str, str], ...]

    def all(self, key: str) -> list[str]:
        return [value for _, name, value in self.settings if name == key]

    def one(self, key: str) -> str:
        (value,) = self.all(key)
        return value

    def seconds(self, key: str) -> float:
        found = re.fullmatch(r"([\d.]+) ?([a-z]*)", self.one(key))
        assert found is not None, self.one(key)
        return float(found[1]) * _SECONDS[found[2]]

    def words(self, environment: Mapping[str, str], instance: str = "", host: str = "host") -> list[str]:
        """The words that ExecStart= makes in ``environment``: ``${X}`` within a word, ``$X`` as words of its own."""
        specifiers = {"%i": instance, "%l": host, "%%": "%"}
        text = re.sub("%.", lambda found: specifiers[found[0]], self.one("ExecStart"))
        words: list[str] = []
        for word in shlex.split(text):
            alone = re.fullmatch(r"\$(\w+)", word)
            if alone is not None:
                words += environment.get(alone[1], "").split()
            else:
                whole = re.sub(r"\$\{(\w+)\}", lambda found: environment.get(found[1], ""), word)
                words.append(whole.replace("$$", "$"))
        return words


def unit(path: Path) -> Unit:
    section, found = "", []
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(("#", ";"))]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.strip():
            key, _, value = line.partition("=")
            found.append((section, key.strip(), value.strip()))
    return Unit(tuple(found))


def environment_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}
