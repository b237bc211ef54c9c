"""Why a worker died, as the kernel or its own exception has it, in all places where people look at night."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.local.cluster import ClusterSpec
from elastic_trainer.local.hosts import one_host
from tests.support.requirements import needs, needs_root
from tests.support.running import Running
from tests.support.small_disk import mounted

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1 << 30
EATS = "import time; time.sleep(3); eaten = b'x' * (4 << 30)"
FILLS = """
import sys, time
from elastic_trainer import Session
with Session():
    with open(sys.argv[1], "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
"""
# A container's own /dev, with the file that Kubernetes mounts into it: $1 is a folder, $2 that file, $3 a cgroup.
CONTAINER = """
mount -t tmpfs dev "$1"
for each in null zero full random urandom; do touch "$1/$each"; mount --bind "/dev/$each" "$1/$each"; done
mkdir "$1/shm"; mount --rbind /dev/shm "$1/shm"; ln -s /proc/self/fd "$1/fd"
touch "$1/termination-log"; mount --bind "$2" "$1/termination-log"
mount --rbind "$1" /dev
echo $$ > "$3/cgroup.procs"
shift 3
exec "$@"
"""


class Contained(Running):
    """Nodes in a container with a limit of memory; their last words go to ``said``."""

    def __init__(self, spec: ClusterSpec, group: Path) -> None:
        super().__init__(spec)
        self._group, self.said = group, spec.directory / "termination-log"
        self.said.touch()

    def command(self, name: str) -> list[str]:
        dev = self.spec.directory / "dev"
        dev.mkdir()
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", CONTAINER, "sh"]
        return [*enter, str(dev), str(self.said), str(self._group), *super().command(name)]


@contextmanager
def limited(name: str) -> Iterator[Path]:
    """A cgroup of ours with a limit; skips the test where the machine has none that we may make."""
    needs_root("making a cgroup")
    version_1 = (MEMORY / "memory.limit_in_bytes").exists()
    group = (MEMORY if version_1 else MEMORY.parent) / name
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT_BYTES))
        with suppress(OSError):  # without swap there is nothing to limit
            (group / ("memory.memsw.limit_in_bytes" if version_1 else "memory.swap.max")).write_text(
                str(LIMIT_BYTES if version_1 else 0)
            )
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"this machine lets us make no cgroup with a limit of memory: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def spec(directory: Path, endpoint: str, run: str, script: str, *arguments: str) -> ClusterSpec:
    directory.mkdir(exist_ok=True)
    (directory / "script.py").write_text(script)
    entry = [str(directory / "script.py"), *arguments]
    return ClusterSpec(run, directory, endpoint, entry, 1, 1, max_restarts=0, options={"last_call": "0.5"})


def told(run: str, endpoint: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """The status of the run, and the reasons of its incidents."""
    found = []
    for words in (("status", run, "--json"), ("events", run, "--json")):
        capsys.readouterr()
        assert main([*words, "--endpoint", endpoint]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    return found[0][0], [each["reason"] for each in found[1] if each["type"] == "incident"]


@pytest.mark.timeout(300)
def test_a_kill_for_memory_is_called_so(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker uses up the memory of its container, and the kernel kills it: status, events and the pod's termination
    message say that it was for memory, and whose."""
    needs("unshare", "a container's own /dev")
    with limited(run_id) as group, Contained(spec(tmp_path / "job", etcd_endpoint, run_id, EATS), group) as job:
        job.start(1)
        assert job.exit_code(job.node("n0")) == 1
        how = "worker 0 (rank 0) was killed by SIGKILL, because its cgroup was out of memory"
        status, reasons = told(run_id, etcd_endpoint, capsys)
        assert status["state"] == "abandoned", job.describe()
        assert how in status["departure"]["reason"]
        assert any(how in reason for reason in reasons), reasons
        assert job.said.read_text() == status["departure"]["reason"]


@pytest.mark.timeout(300)
def test_a_full_disk_is_called_so(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker writes until its disk is full: its exception and what it means are in status and events. The command for
    logs finds where its node wrote, by the rank, although the node is gone."""
    with one_host(), mounted(tmp_path / "disk", 4 << 20) as disk:  # logs of other hosts are not at hand
        job_spec = spec(tmp_path / "job", etcd_endpoint, run_id, FILLS, str(disk / "file"))
        with Running(job_spec) as job:
            job.start(1)
            assert job.exit_code(job.node("n0")) == 1
            assert (disk / "file").stat().st_size >= 3 << 20
            how = "ended with exit code 1: OSError: [Errno 28] No space left on device"
            status, reasons = told(run_id, etcd_endpoint, capsys)
            assert how in status["departure"]["reason"], job.describe()
            assert main(["logs", run_id, "--rank", "0", "--since", "1h", "--endpoint", etcd_endpoint]) == 0
            assert "OSError: [Errno 28] No space left on device" in capsys.readouterr().out
            assert "(the disk is full)" in status["departure"]["reason"]
            assert any(how in reason for reason in reasons), reasons
