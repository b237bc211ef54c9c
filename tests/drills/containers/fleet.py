"""A Docker engine of a test's own, on a host of its own: no other network meets it, and nothing of it stays.

dockerd is the first process of namespaces of its own (processes, networks, mounts). However it ends, the kernel ends
its containers with it, and takes its bridges, packet filters and mounts away. The machine's own are never touched.

*Runs in* the main thread of a test. *Owns* dockerd, its directory and its control groups, until the block ends.
*Fails by* a skipped test where a tool is missing, else by AssertionError with what Docker said.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from elastic_trainer.clock import SYSTEM
from elastic_trainer.drills.measure import Book, Standing
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.etcd import spawn
from elastic_trainer.local.ledger import LedgerTail, Line
from elastic_trainer.variables import ENV_LEDGER_DIR
from tests.support.deployment import DEPLOY
from tests.support.requirements import find, missing, needs, needs_root
from tests.support.waiting import eventually

LIMIT_S = 300.0
_FIRST = 'ip link set lo up; mount -t tmpfs tmpfs /run; exec "$@"'
"""/run has the sockets and locks of an engine that the machine may have."""
_GROUPS = Path("/sys/fs/cgroup")
_began = SYSTEM.monotonic()


def say(text: str) -> None:
    print(f"[{SYSTEM.monotonic() - _began:6.1f} s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """See the module. ``client`` is the command line that speaks to it."""

    home: Path
    client: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": f"unix://{self.home}/docker.sock", "DOCKER_BUILDKIT": "1"}

    def ran(self, *words: str | Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        return self.called(self.client, *words, limit_s=limit_s)

    def called(self, *words: str | Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)], capture_output=True, text=True, timeout=limit_s, check=False, env=self.environment
        )

    def docker(self, *words: str | Path, limit_s: float = LIMIT_S) -> str:
        ran = self.ran(*words, limit_s=limit_s)
        assert ran.returncode == 0, f"docker {words[0]}: {ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        return ran.stdout.strip()

    def inspect(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.docker("inspect", name))[0])

    def log(self, name: str) -> str:
        ran = self.ran("logs", name)
        return ran.stdout + ran.stderr

    def build(self, tag: str, folder: Path, *options: str) -> None:
        """Build the Dockerfile in ``folder``; the engine's host has loopback and no other network."""
        self.docker("build", "--progress=plain", "--network=host", *options, f"--tag={tag}", folder, limit_s=1500.0)


@contextmanager
def started(home: Path) -> Iterator[Engine]:
    """An engine that keeps everything in ``home``, which is removed at the end."""
    needs_root("starts a Docker engine")
    tools = [needs(each, "starts a Docker engine (Debian: docker.io)") for each in ("dockerd", "unshare", "ip")]
    # Of two clients that of the system goes first: another one in PATH may know nothing of BuildKit.
    client = shutil.which("docker", path=f"/usr/bin:{os.environ.get('PATH', os.defpath)}")
    if client is None:
        missing("docker is not installed: speaks to the engine (Debian: docker.io)")
    engine, group = Engine(home, client), f"elastic-trainer-{secrets.token_hex(4)}"
    spaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    daemon = [tools[0], f"--data-root={home}/data", f"--exec-root={home}/exec", f"--pidfile={home}/pid"]
    daemon += [f"--host=unix://{home}/docker.sock", f"--cgroup-parent=/{group}"]
    daemon += ["--exec-opt=native.cgroupdriver=cgroupfs"]
    with (home / "log").open("wb") as log:
        process = spawn([tools[1], *spaces, "sh", "-euc", _FIRST, "sh", *daemon], log)
    try:
        eventually(
            lambda: process.poll() is not None or engine.ran("version").returncode == 0,
            lambda: f"dockerd does not answer: {(home / 'log').read_text()[-2000:]}",
        )
        if process.poll() is not None:
            missing(f"dockerd cannot run here: {(home / 'log').read_text()[-500:]}")
        yield engine
    finally:
        process.kill()  # unshare, and by --kill-child the first process of the namespaces
        process.wait()
        eventually(lambda: _removed(group), f"control groups of {group} are still in use")
        shutil.rmtree(home)


def _removed(group: str) -> bool:
    """Remove the control groups that dockerd made, innermost first; whether none is left."""
    tops = [each for pattern in (group, f"*/{group}") for each in _GROUPS.glob(pattern)]
    for top in tops:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process in it has not ended yet
                Path(folder).rmdir()
    return not any(top.exists() for top in tops)


@dataclass(slots=True)
class Composed:
    """The services of deploy/compose.yaml in ``clone`` that could be started here."""

    engine: Engine
    clone: Path
    services: list[str] = field(default_factory=list)
    project: str = "drill"

    def run(self, *words: str) -> str:
        """docker compose, whichever of its two kinds is here."""
        kinds = [[self.engine.client, "compose"]] if self.engine.ran("compose", "version").returncode == 0 else []
        alone = find("docker-compose")
        kinds += [[alone]] if alone is not None else []
        if not kinds:
            missing("docker compose is not installed: plays deploy/compose.yaml (Debian: docker-compose)")
        file = self.clone / "deploy/compose.yaml"
        ran = self.engine.called(*kinds[0], "-p", self.project, "-f", file, *words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    @property
    def network(self) -> str:
        return f"{self.project}_default"

    def container(self, service: str) -> str:
        return self.run("ps", "-q", service).strip()

    def healthy(self, service: str) -> bool:
        return bool(self.engine.inspect(self.container(service))["State"]["Health"]["Status"] == "healthy")

    def log(self, service: str) -> str:
        return self.engine.log(self.container(service))

    def asked(self, url: str) -> str:
        """What the engine's host, on whose loopback the ports are, gets from ``url``."""
        ask = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=20).read().decode())"
        return self.engine.docker("run", "--rm", "--network=host", "local/base:1", "python3", "-c", ask)

    def told(self, *command: str) -> str:
        """What ``elastic-trainer command`` says in the monitor's container."""
        endpoint = ("--endpoint", "etcd:2379")
        return self.engine.docker("exec", self.container("monitor"), "elastic-trainer", *command, *endpoint)


ALL = ("n0", "n1", "n2")
STEPS = 12
"""After which a round counts as quiet, as in drills."""
FOLDER = "/drill"
"""The test's directory, as containers see it."""
SAMPLES = 4000
"""Digits that the job ``mnist`` trains on."""


def digits(run: str, epochs: int, *more: str) -> tuple[str, ...]:
    """The job ``mnist``, which evaluates at its end alone."""
    where = f"checkpoint.directory=/checkpoints/{run}"
    rare = f"evaluation.every_epochs={epochs}"
    return ("-m", "elastic_trainer.training", "mnist", where, f"epochs={epochs}", rare, *more)


@cache
def documented() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of ``docker run`` that deploy/image.md names, and the command in the container."""
    found = re.search(r"^docker run (.*?)^```", (DEPLOY / "image.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    image = words.index("elastic-trainer")
    return tuple(words[:image]), tuple(words[image:])


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """``words`` with other values behind some options, each of which must be among them."""
    assert set(values) <= set(words)
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]


class Fleet:
    def __init__(self, composed: Composed, run: str, folder: Path, job: Sequence[str]) -> None:
        self.composed, self.run, self.folder, self.job = composed, run, folder, tuple(job)
        self.book = Book()
        folder.chmod(0o777)  # for the image's user
        (folder / "ledger").mkdir()
        (folder / "ledger").chmod(0o777)
        self._tail = LedgerTail(folder / "ledger")
        self._lives: dict[tuple[str, int], int] = {}
        self._started: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self.engine.docker("rm", "--force", "--volumes", *self._started)

    @property
    def engine(self) -> Engine:
        return self.composed.engine

    # ---- acting

    def start(self, *names: str, options: Iterable[str] = (), job: Sequence[str] | None = None) -> None:
        given, command = documented()
        entry = command.index("-m")
        for name in names:
            mine = {"--name": name, "--hostname": name, "--network": self.composed.network}
            ours = {"--rdzv-id": self.run, "--nnodes": "1:3"}
            marks = ["--volume", f"{self.folder}:{FOLDER}", "--env", f"{ENV_LEDGER_DIR}={FOLDER}/ledger"]
            threads = ["--env", "OMP_NUM_THREADS=1"]  # as on a machine with many nodes
            words = [*replaced(given, mine), *marks, *threads, *options, *replaced(command[:entry], ours)]
            self.engine.docker("run", *words, *(self.job if job is None else job))
            self._started.append(name)

    def remove(self, *names: str) -> None:
        self.engine.docker("rm", "--force", "--volumes", *names)
        self._started = [name for name in self._started if name not in names]

    def stop(self, *names: str) -> None:
        """``docker stop``: each leaves by plan, and its container says so."""
        self.engine.docker("stop", *names)
        assert [self.code(name) for name in names] == [EXIT_LEFT] * len(names)

    def kill(self, name: str) -> float:
        """``docker kill``: SIGKILL to all processes of a container; when that was asked for."""
        asked = SYSTEM.monotonic()
        self.engine.docker("kill", name)
        assert self.code(name) == 128 + signal.SIGKILL
        return asked

    # ---- looking

    def state(self, name: str) -> dict[str, Any]:
        return dict(self.engine.inspect(name)["State"])

    def code(self, name: str) -> int:
        eventually(lambda: not self.state(name)["Running"], lambda: f"{name} runs on: {self.describe()}", LIMIT_S)
        return int(self.state(name)["ExitCode"])

    def look(self) -> Standing | None:
        self.book.add(map(self._told, self._tail.read()))
        return self.book.standing()

    def _told(self, line: Line) -> Line:
        """A node is called like its container, and each process has a number that no other container has."""
        number = self._lives.setdefault((line.node, line.pid), len(self._lives) + 1)
        return line.model_copy(update={"pid": number, "node": line.node.partition("-")[0]})

    def events(self) -> str:
        return self.composed.told("events", self.run)

    def describe(self) -> str:
        """The last words of all, for the message of a failure."""
        told = [f"{self.look()}", self.events()]
        told += [f"{name}: {line[:500]}" for name in self._started for line in self.engine.log(name).splitlines()[-6:]]
        return "\n".join(told)

    # ---- waiting

    def until(self, holds: Callable[[], object], what: str) -> None:
        eventually(holds, lambda: f"{what} did not come about: {self.describe()}", LIMIT_S)

    def settled(self, *names: str, steps: int = STEPS) -> Standing:
        """Wait until exactly these train together, and have committed ``steps`` steps in that."""
        self.until(lambda: self._together(set(names), steps), f"a round of {' '.join(names)}")
        standing = self.look()
        assert standing is not None
        return standing

    def _together(self, names: set[str], steps: int) -> bool:
        standing = self.look()
        if standing is None or set(standing.nodes) != names or standing.world != len(standing.pids):
            return False
        return standing.least_steps() >= steps

    def aftermath(self, before: Standing, what: str, t: float, *struck: str) -> None:
        """Wait until the survivors step in a round later than that of ``t``. Their processes are still the same."""
        survivors = {name: life for name, life in before.pids.items() if name not in struck}
        ask = (survivors.values(), t, before.round + 1)
        self.until(lambda: self.look() and self.book.resumed_at(*ask, 5), f"a step after: {what}")
        resumed, standing = self.book.resumed_at(*ask), self.look()
        assert resumed is not None
        assert standing is not None
        assert {name: standing.pids[name] for name in survivors} == survivors, f"{what}: a survivor was restarted"
        lost = self.book.committed_again(survivors.values())
        assert lost == 0, f"{what}: survivors made {lost} committed steps again"
        say(f"{what}: the others stepped again after {resumed - t:.2f} s, no committed step lost")
