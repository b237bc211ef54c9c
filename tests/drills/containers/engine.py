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
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM
from elastic_trainer.local.etcd import spawn
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
