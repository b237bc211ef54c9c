"""The image, really built from files of the repository alone, and run as the pages say: it is what they promise."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import __version__
from tests.drills.containers.conftest import BASE, OWN, PYTHON, build
from tests.drills.containers.fleet import Engine, say
from tests.support.dockerfile import copied

UID = 10001
LARGEST_MB = 1100
"""What the image may add to its base: 924 MB were measured."""
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp", "--network=alone")
PROGRAMS = "find / -xdev -type f ( -perm /6000 -o -path */bin/pip* -o -path */bin/gcc* )"
DIGESTS = "find / -xdev -type f -not -path '/proc/*' -exec sha256sum {} + | sort -k 2"


@dataclass(frozen=True, slots=True)
class Image:
    """The image, and how it is run: as the manifests do, on a network with no way out.

    With ``--network none`` no name is known, not even the container's own, at which ``torchrun --standalone`` meets.
    """

    engine: Engine

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.engine.inspect(OWN)["Config"])

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.engine.ran("run", "--rm", *HARDENED, OWN, *command)

    def said(self, *command: str) -> str:
        ran = self.run(*command)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def own(engine: Engine, image: str) -> Image:
    assert image == OWN
    engine.docker("network", "create", "--internal", "alone")
    return Image(engine)


def test_what_reaches_the_builder_is_what_is_copied(engine: Engine, base: str, clone: Path, tmp_path: Path) -> None:
    """.dockerignore as the builder reads it keeps out history, environments, runs and passwords that lie around."""
    context = tmp_path / "context"
    shutil.copytree(clone, context)
    for name in (
        ".git/config",
        ".venv/pyvenv.cfg",
        "runs/a/model",
        "deploy/secrets/slack_api_url",
        "elastic_trainer.key",
    ):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("not for others")
    (context / "elastic_trainer/__pycache__").mkdir(exist_ok=True)
    (context / "elastic_trainer/__pycache__/x.pyc").write_text("")
    (context / "Dockerfile").write_text(f"FROM {base}\nCOPY . /context\n")
    engine.build("local/context", context)
    found = engine.docker("run", "--rm", "local/context", "find", "/context", "-mindepth", "1").splitlines()
    assert {each.split("/")[2] for each in found} == set(copied())
    assert not [each for each in found if "__pycache__" in each]
    assert "/context/elastic_trainer/py.typed" in found


def test_it_says_what_it_is(own: Image) -> None:
    """Labels, user, process 1 and health check, as a registry and a cluster read them."""
    config = own.config
    labels = {
        name.rpartition(".image.")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name
    }
    assert (labels["title"], labels["version"], labels["revision"]) == ("elastic-trainer", __version__, "abc")
    assert (labels["licenses"], labels["base.name"]) == ("Apache-2.0", BASE)
    assert config["User"] == f"{UID}:{UID}"
    assert config["Entrypoint"][0] == "dumb-init"
    assert config["Healthcheck"]["Test"] == ["CMD", "elastic-trainer", "health"]


def test_it_is_small_and_holds_no_tools_to_get_in_with(own: Image) -> None:
    """No pip, no compiler, nothing setuid, no bytecode to be written later; what it adds to its base has a bound."""
    added_mb = (own.engine.inspect(OWN)["Size"] - own.engine.inspect(BASE)["Size"]) / 2**20
    say(f"the image adds {added_mb:.0f} MB to its base")
    assert added_mb < LARGEST_MB
    found = own.engine.docker("run", "--rm", "--user=0", "--entrypoint=find", OWN, *PROGRAMS.split()[1:])
    assert found == ""
    packages = f"/opt/venv/lib/{PYTHON}/site-packages"
    listed = own.said("ls", packages).split()
    assert "torch" in listed
    assert not [name for name in listed if name == "pip" or name.startswith("nvidia")]
    own.said("ls", f"{packages}/elastic_trainer/__pycache__")


def test_its_user_is_not_root_and_can_write_nothing_but_volumes(own: Image) -> None:
    """As in the manifests: uid 10001, a root file system that is read-only."""
    assert own.said("id", "-u").strip() == str(UID)
    for place in ("/opt/venv/x", "/home/trainer/x", "/etc/x"):
        assert own.run("touch", place).returncode != 0
    volume = ("--volume=own:/checkpoints", OWN, "touch", "/tmp/x", "/checkpoints/x")
    own.engine.docker("run", "--rm", *HARDENED, *volume)


def test_its_commands_start(own: Image) -> None:
    """torchrun with the plug-in, and elastic-trainer; process 1 is the init."""
    assert own.said("elastic-trainer", "--version") == f"elastic-trainer {__version__}\n"
    assert "--rdzv-backend" in own.said("torchrun", "--help").replace("_", "-")
    assert own.said("cat", "/proc/1/comm") == "dumb-init\n"
    assert "nothing to ask" in own.said("elastic-trainer", "health")
    doctor = own.run("elastic-trainer", "doctor", "--json")
    assert {"cpu", "shm", "matmul.cpu.fp32"} <= set(doctor.stdout.replace('"', " ").split())


def test_it_trains_without_a_network(own: Image) -> None:
    """The ready-made digits, alone and under torchrun; and it has the texts."""
    small = ["mnist", "max_steps=3", "checkpoint.directory=/tmp/mnist"]
    alone = own.said("python", "-m", "elastic_trainer.training", *small)
    assert json.loads(alone.splitlines()[-1])["step"] == 3
    own.said("torchrun", "--standalone", "--nproc-per-node=2", "-m", "elastic_trainer.training", *small)
    texts = "from elastic_trainer.jobs.texts import shakespeare_files as f; print(len(f()))"
    assert int(own.said("python", "-c", texts)) > 0


def test_the_exit_code_of_a_wrong_configuration_gets_out(own: Image) -> None:
    """78, by which Kubernetes fails the job at once."""
    assert own.run("python", "-m", "elastic_trainer.training", "mnist", "no_such_key=1").returncode == 78


def test_a_second_build_gives_the_same_files(own: Image, clone: Path, wheels: str) -> None:
    """Of one commit, one base and one set of packages, byte for byte; BuildKit gives the layers other times."""
    build(own.engine, clone, wheels, "local/again", "--no-cache")
    first, second = (
        own.engine.docker("run", "--rm", "--user=0", "--network=none", "--entrypoint=sh", name, "-c", DIGESTS)
        for name in (OWN, "local/again")
    )
    made = [
        {line for line in files.splitlines() if not line.endswith(("/etc/hostname", "/etc/hosts", "/etc/resolv.conf"))}
        for files in (first, second)
    ]
    assert len(made[0]) > 10_000
    assert made[0] == made[1]
