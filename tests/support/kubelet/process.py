"""A running container: processes in namespaces of their own, signalled as the kubelet does it.

*Runs in* the node's thread; ``inside`` in any.
*Owns* the container's process, whose output is appended to its log.
*Fails by* OSError.
*Invariant*: the container dies with the node's thread (see container.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.kubelet import container
from tests.support.kubelet.images import HOME, Image, machine_files
from tests.support.kubelet.objects import PodSpec
from tests.support.kubelet.volumes import Mounted

LAUNCHER = str(Path(container.__file__))


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What a container starts in: its pod's network (the words that enter it), name, addresses and files."""

    enter: Sequence[str]
    hostname: str
    hosts: Path
    directory: Path
    log: Path


def _privileges(spec: PodSpec, image: Image) -> list[str]:
    """setpriv's options for the user and the rights that the specification asks for."""
    options = ["--pdeathsig=KILL", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if image.unreadable:
        return options
    who = spec.security_context
    return [*options, f"--reuid={who.run_as_user}", f"--regid={who.run_as_group}", f"--groups={who.fs_group}"]


class Process:
    """See the module."""

    def __init__(
        self,
        spec: PodSpec,
        image: Image,
        sandbox: Sandbox,
        words: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mounted],
    ) -> None:
        self._privileges = _privileges(spec, image)
        self._pid_file = sandbox.directory / "pid"
        self._pid_file.unlink(missing_ok=True)
        self._environment = {**image.environment, "HOSTNAME": sandbox.hostname, **environment}
        written = sandbox.directory / "container.json"
        written.write_text(json.dumps(self._description(spec, image, sandbox, words, mounts)), encoding="utf-8")
        with sandbox.log.open("ab") as log:
            if image.unreadable:
                user = spec.security_context.run_as_user
                log.write(f"stand-in: not as user {user}, who could not read {image.unreadable}\n".encode())
                log.flush()
            self._launcher = subprocess.Popen(
                [*sandbox.enter, sys.executable, "-I", "-S", LAUNCHER, str(written)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _description(
        self, spec: PodSpec, image: Image, sandbox: Sandbox, words: Sequence[str], mounts: Sequence[Mounted]
    ) -> dict[str, object]:
        """What container.py reads."""
        user, group = spec.security_context.run_as_user, spec.security_context.run_as_group
        root = sandbox.directory / "root"
        root.mkdir(exist_ok=True)
        hosts = Mounted("/etc/hosts", str(sandbox.hosts), read_only=False)
        trees = [Mounted(target, source, read_only=True) for target, source in image.trees.items()]
        return {
            "root": str(root),
            "hostname": sandbox.hostname,
            "files": machine_files(user, group),
            "links": dict(image.links),
            "directories": {"/tmp": (0o1777, 0), "/var/tmp": (0o1777, 0), "/root": (0o755, 0), HOME: (0o755, user)},
            "mounts": [asdict(each) for each in (*trees, hosts, *mounts)],
            "directory": image.directory,
            "privileges": self._privileges,
            "words": list(words),
            "env": self._environment,
            "pid_file": str(self._pid_file),
        }

    @property
    def exit_code(self) -> int | None:
        """How it ended (128 + signal where one ended it); None while it runs."""
        return self._launcher.poll()

    @property
    def pid(self) -> int | None:
        """Its first process as this machine numbers it; None before it is there."""
        return int(self._pid_file.read_text(encoding="ascii")) if self._pid_file.exists() else None

    def send(self, number: signal.Signals) -> bool:
        """Signal its first process; False while that is not there yet. With its end all others in the container end."""
        pid = self.pid
        if pid is None or self.exit_code is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def inside(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The words that run ``words`` in the container, as its user, and their environment."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        return [*enter, "--", "setpriv", *self._privileges, *words], self._environment

    def end(self) -> None:
        """End it at once, and all that it started."""
        self._launcher.kill()  # the container ends with it
        self._launcher.wait()
