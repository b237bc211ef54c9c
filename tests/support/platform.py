"""Runs the etcd that an overlay renders, with its own command and variables, on this machine's loopback.

*Runs in* a test. *Owns* the etcd processes, which end with it.
*Fails by* AssertionError, with the end of etcd's log, when they do not come up.

What a cluster would give is replaced: names of pods and the address 0.0.0.0 by 127.0.0.1 with free ports, volumes by
directories. All else is as rendered.
"""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import find_binary, spawn
from elastic_trainer.local.hosts import HOST, free_ports
from tests.support.manifests import Container, Manifest, container, named, settings_of

_START_S = 60.0
_PORTS = ("client", "peer", "metrics")


class RenderedEtcd:
    """All members of the StatefulSet ``etcd`` of ``objects``; ``volumes``: directories for paths in its pods."""

    def __init__(self, objects: list[Manifest], directory: Path, volumes: Mapping[str, Path]) -> None:
        workload = named(objects, "StatefulSet", "etcd")
        settings = settings_of(objects)
        self.directory = directory
        self.names = [f"etcd-{number}" for number in range(workload["spec"]["replicas"])]
        template = workload["spec"]["template"]
        self.members = {name: container(template, settings, pod=name) for name in self.names}
        numbers = iter(free_ports(len(_PORTS) * len(self.names)))
        self.ports = {name: {port: next(numbers) for port in _PORTS} for name in self.names}
        self._volumes = dict(volumes)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                self._start(name)
            for name in self.names:
                self._await(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all members."""
        for process in self._processes:
            process.kill()
            process.wait()

    def local(self, text: str, member: str = "") -> str:
        """``text`` with addresses of this machine: of all members by name, of ``member`` where it means itself."""
        for name in self.names:
            text = text.replace(f"{name}.etcd:2379", f"{HOST}:{self.ports[name]['client']}")
            text = text.replace(f"{name}.etcd:2380", f"{HOST}:{self.ports[name]['peer']}")
        if member:
            for port, number in self.members[member].ports.items():
                text = text.replace(f"0.0.0.0:{number}", f"{HOST}:{self.ports[member][port]}")
            text = text.replace("/var/lib/etcd", str(self.directory / member))
        for path, directory in self._volumes.items():
            text = text.replace(path, str(directory))
        return text

    def answers(self, member: str, probe: str) -> int | None:
        """The status that a probe of ``member`` gets; None: nobody answers."""
        path, number = self.members[member].probe(probe)
        port = next(name for name, each in self.members[member].ports.items() if each == number)
        return status(f"http://{HOST}:{self.ports[member][port]}{path}")

    def _start(self, name: str) -> None:
        member = self.members[name]
        program, *flags = (self.local(part, name) for part in member.command)
        assert program == "etcd"
        (self.directory / name).mkdir(parents=True)
        variables = [f"{key}={self.local(value, name)}" for key, value in member.environment.items()]
        with (self.directory / f"{name}.log").open("wb") as log:
            command = [shutil.which("env") or "/usr/bin/env", *variables, find_binary(), *flags]
            self._processes.append(spawn(command, log))

    def _await(self, name: str) -> None:
        deadline = Deadline.after(_START_S)
        while self.answers(name, "readinessProbe") != 200:
            log = (self.directory / f"{name}.log").read_text(errors="replace")[-2000:]
            assert not deadline.expired, f"{name} does not come up:\n{log}"
            pause(0.1)


def status(url: str) -> int | None:
    """The HTTP status of ``url``; None: nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def variables(started: Container) -> dict[str, str]:
    """Its variables that this package reads."""
    return {name: value for name, value in started.environment.items() if name.startswith("ELASTIC_TRAINER_")}
