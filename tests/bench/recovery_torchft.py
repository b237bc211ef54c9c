"""torchft as a peer of the recovery benchmark: is it there, its lighthouse, and its nodes.

torchft lives in an environment of its own, whose python the user names: its dependencies are none of this project's.
Each node is a replica group of one worker, and its launcher is torchrun, as torchft's manual has it: it starts a killed
worker again. Each job has a lighthouse, which listens before the first node starts (as etcd does for this project).
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.cluster import ClusterSpec
from elastic_trainer.local.etcd import spawn
from tests.bench.recovery_jobs import Column, Job

SCRIPT = Path(__file__).with_name("recovery_torchft_job.py")
LIGHTHOUSE = {"heartbeat_timeout_ms": 200, "join_timeout_ms": 1000, "quorum_tick_ms": 10}
MANAGER = {"timeout": 5.0, "quorum_timeout": 20.0, "connect_timeout": 5.0, "heartbeat_interval": 0.05}
"""As fast as torchft is on a busy machine of 2 cores without losing living members: survivors wait until the dead one's
heartbeat has run out. A ``join_timeout_ms`` below that would be faster, but throws out whoever is late for a step."""
START_LIMIT_S, IMPORT_LIMIT_S = 60.0, 120.0
_VERSIONS = """
from importlib.metadata import distributions
import torch, torchft, torchft.ddp, torchft.manager, torchft.optim, torchft.process_group
names = [d.name + ' ' + d.version for d in distributions() if d.name.startswith('torchft')]
print(*names, 'torch ' + torch.__version__, sep=', ')
"""


@dataclass(frozen=True, slots=True)
class Presence:
    """What an environment offers: the versions of torchft and torch, or the reason why torchft is not measured."""

    versions: str = ""
    skipped: str = ""

    def as_json(self) -> dict[str, str]:
        return {"skipped": self.skipped} if self.skipped else {"versions": self.versions}


def look(python: Path | None) -> Presence:
    if python is None:
        return Presence(skipped="not asked for: --torchft-python names no environment")
    try:
        asked = subprocess.run(
            [str(python), "-c", _VERSIONS], capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Presence(skipped=f"{python}: {error}")
    if asked.returncode != 0:
        return Presence(skipped=f"{python}: {_last_line(asked.stderr) or f'exit code {asked.returncode}'}")
    if not lighthouse(python).is_file():
        return Presence(skipped=f"{python}: there is no {lighthouse(python).name} beside it")
    return Presence(versions=_last_line(asked.stdout))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def lighthouse(python: Path) -> Path:
    return python.with_name("torchft_lighthouse")


@dataclass(frozen=True, slots=True)
class Torchft(Column):
    """torchft with these options of its lighthouse and its Manager (seconds); without any, its defaults."""

    python: Path = Path("python")
    lighthouse: Mapping[str, int] = field(default_factory=dict)
    manager: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {"backend": self.backend, "lighthouse": dict(self.lighthouse), "manager_s": dict(self.manager)}

    def job(self, place: Path) -> Job:
        """A job launched in this way, with a lighthouse of its own; nothing runs yet."""
        return TorchftJob(self, place)


def peers(python: Path, quick: bool) -> dict[str, Torchft]:
    """The configurations, by name: tuned, and at full size torchft's defaults."""

    default = Torchft("torchft_default", "torchft", script=SCRIPT, in_place=True, python=python)
    tuned = replace(default, name="torchft_tuned", lighthouse=LIGHTHOUSE, manager=MANAGER)
    return {column.name: column for column in ([tuned] if quick else [tuned, default])}


class TorchftJob(Job):
    """Nodes of ``column`` and their lighthouse. Leaving it kills everything at once."""

    def __init__(self, column: Torchft, place: Path, *, least: int = 2, most: int = 3) -> None:
        super().__init__(column, place, least=least, most=most)
        self._column = column
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self.spec.directory / "lighthouse.log").open("ab") as log:
            self._lighthouse = spawn(lighthouse_command(self._column, self.spec.endpoint, self.spec.min_nodes), log)
        host, port = self.spec.endpoint.split(":")
        deadline = Deadline.after(START_LIMIT_S)
        while not _listens(host, int(port)) and self._lighthouse.poll() is None and not deadline.expired:
            pause(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()

    def command(self, name: str) -> list[str]:
        """The launcher of one replica group, a torchrun of its own."""
        waits = [f"{name}={value:g}" for name, value in self._column.manager.items()]
        return [*launched(self._column.python, self.spec), f"http://{self.spec.endpoint}", *waits]


def launched(python: Path, spec: ClusterSpec) -> list[str]:
    """The program of one replica group, below a torchrun of its own."""
    launcher = [str(python), "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*launcher, "--nnodes=1", "--nproc-per-node=1", f"--max-restarts={spec.max_restarts}", *spec.entry]


def lighthouse_command(column: Torchft, endpoint: str, least: int) -> list[str]:
    flags = [f"--{name}={value}" for name, value in column.lighthouse.items()]
    return [str(lighthouse(column.python)), f"--bind={endpoint}", f"--min_replicas={least}", *flags]


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
