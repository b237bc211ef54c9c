"""What is published: the source archive, and the wheel that is built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def built(kind: str, source: Path, target: Path) -> Path:
    """The archive that the build backend makes of ``source``."""
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def test_the_wheel_holds_the_whole_package_and_nothing_else(tmp_path: Path) -> None:
    """Pages, templates and scripts too: setuptools leaves out without a word what no pattern names."""
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "elastic_trainer", source / "elastic_trainer", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    with tarfile.open(built("build_sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(built("build_wheel", unpacked, tmp_path)) as wheel:
        names = set(wheel.namelist())
        about = {Path(name).name: wheel.read(name).decode() for name in names if ".dist-info/" in name}
    wanted = {name for name in package if name.startswith("elastic_trainer/")}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert "elastic-trainer = elastic_trainer.cli.main:main" in about["entry_points.txt"]
    assert "etcd3 = elastic_trainer.agent.plugin:handler" in about["entry_points.txt"]
    metadata = Parser().parsestr(about["METADATA"])
    pythons = [each.rpartition(" ")[2] for each in metadata.get_all("Classifier", []) if "Python :: 3." in each]
    assert metadata["Requires-Python"] == f">={pythons[0]}"
