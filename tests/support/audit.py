"""``python -m tests.support.audit [--strict]``: pip-audit judges what is pinned; images are compared offline."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOOK_EVERY = timedelta(days=90)
_REFERENCE = re.compile(r"""^\s*(?:image:\s*|ARG BASE_IMAGE=)["']?([^\s"'#]+)""", re.MULTILINE)


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))


def complaints(today: date) -> list[str]:
    """Exceptions that are over, and images that are old, unpinned or not looked at for long."""
    accepted, known = load("accepted-vulnerabilities.yaml"), load("images.yaml")
    over = [each for each in accepted if each["until"] < today]
    found = [f"accepted until {each['until']}: {each['id']}, {each['reason']}" for each in over]
    if today - known["looked_at"] > LOOK_EVERY:
        found.append(f"nobody has compared the images with their releases since {known['looked_at']}")
    digest = {each["name"]: f"@{each['digest']}" if each["digest"] else "" for each in known["images"]}
    pinned = {f"{each['name']}:{each['tag']}{digest[each['name']]}": each for each in known["images"]}
    files = [ROOT / "Dockerfile", *ROOT.glob("deploy/*.yaml"), *ROOT.glob("k8s/**/*.yaml")]
    named = {
        name
        for path in files
        if not path.is_relative_to(ROOT / "k8s/chart")  # there the image is the user's
        for name in _REFERENCE.findall(path.read_text(encoding="utf-8"))
        if name.partition(":")[0].rpartition("/")[2] != "elastic-trainer"
    }
    found += [f"deploy/images.yaml and the files do not agree on {name}" for name in sorted(named ^ pinned.keys())]
    return found + [
        f"{name} is older than {each['at_least']}: {each['reason']}"
        for name, each in pinned.items()
        if _version(each["tag"]) < _version(each["at_least"])
    ]


def _version(tag: str) -> Version:
    return Version(tag.partition("-")[0].removeprefix("v"))


def main() -> int:
    found = complaints(date.today())
    print("".join(f"FAILED: {each}\n" for each in found), end="")
    call = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps"]
    call += ["--disable-pip", "--vulnerability-service", "pypi", "--progress-spinner", "off", *sys.argv[1:]]
    call += [f"--ignore-vuln={each['id']}" for each in load("accepted-vulnerabilities.yaml")]
    return subprocess.run(call, check=False).returncode or bool(found)


if __name__ == "__main__":
    sys.exit(main())
