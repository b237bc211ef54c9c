"""Runs with real Prometheus, Alertmanager and browsers: a night of faults, why workers died, and how nodes leave."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.cluster import ClusterSpec
from elastic_trainer.local.etcd import EtcdServer
from tests.drills.endings.job import Job
from tests.drills.operations.night import SAVES, STEPS, Night, Plan, night
from tests.support.networks import one_host
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


@pytest.mark.timeout(300)
def test_a_run_that_is_scaled_to_zero_is_stopped_and_comes_back(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM to all nodes is no fault. Started again it goes on where it was; killed, it is gathering, not stopped;
    and a node that waits in vain says that it gave up, with its exit code."""

    def status(command: str = "status") -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([command, run_id, "--endpoint", etcd_endpoint, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def state() -> str:
        return str(status()[0]["state"])

    options = {"join_timeout": "20", "ttl": "4"}
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=options) as job:
        job.start(2)
        first = job.await_world("n0", "n1", count=5)
        stood = job.newest()
        for name in ("n0", "n1"):
            job.node(name).terminate()
        assert [job.exit_code(job.node(name)) for name in ("n0", "n1")] == [EXIT_LEFT, EXIT_LEFT]
        assert state() == "stopped"
        (stopped,) = [each for each in status("events") if each.get("kind") == "run_stopped"]
        assert stopped["reason"] == "the last node left on request: SIGTERM"

        job.start(2)
        job.await_world("n2", "n3", after=first)
        assert state() == "training"
        assert job.newest() > stood
        for name in ("n2", "n3"):
            job.node(name).kill()
        job.wait_for(lambda: state() == "gathering", "killed nodes are not missed")

        job.start(1)
        assert job.exit_code(job.node("n4")) == 1
        assert state() == "abandoned"
        (gave_up,) = [each for each in status("events") if each.get("kind") == "node_gave_up"]
        assert gave_up["reason"].startswith("node n4 gave up: fewer than 2 nodes were ready within 20 s")
        assert gave_up["reason"].endswith("(exit code 1)")


@pytest.mark.timeout(300)
def test_a_run_whose_only_node_is_killed_records_it_when_another_comes(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody was left to break the round: its document is as it was, and the next node closes what is missing."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=1) as job:
        (first,) = job.start(1)
        number = job.await_world("n0")
        assert first.kill() is not None
        before = job.document()
        assert (before.number, before.state.value) == (number, "active")
        (second,) = job.start(1)
        following = job.await_world("n1", after=number)
        second.terminate()
        job.exit_code(second)
        job.start(1)
        job.await_world("n2", after=following)

        def incidents() -> list[tuple[str, int, str, list[str], bool]]:
            capsys.readouterr()
            assert main(["events", run_id, "--endpoint", etcd_endpoint, "--json"]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            mine = [line for line in lines if line["type"] == "incident"]
            return [(each["kind"], each["round"], each["reason"], each["nodes"], each["open"]) for each in mine]

        expected = [
            ("round", number, f"all nodes of round {number} were lost", ["n0"], False),
            ("run_stopped", following, "the last node left on request: SIGTERM", ["n1"], False),
        ]
        job.wait_for(lambda: len(incidents()) >= len(expected), "the lost round is not recorded")
        job.await_steps(20)
        assert incidents() == expected


LONG = os.environ.get("OPERATIONS_NIGHT", "") not in ("", "0")
PLANS = (
    Plan("ends"),
    Plan("fails", nodes=0),
    Plan("freezes", nodes=2, least=2),
    Plan("scales", nodes=2),
    Plan("shrinks", nodes=2, least=2),
    Plan("steady"),
    Plan("stops"),
)
SESSIONS = (
    Plan("disk", entry=SAVES),
    Plan("heals", nodes=2, entry=SAVES, options={"recovery": "in_place"}),
    Plan("straggles", workers=3, script=STEPS),
)
BELOW, FAILED, FULL, NO_ETCD = "BelowMinNodes", "RunFailed", "CheckpointFailing", "StoreUnreachable"
ENDED = {"ends": "Succeeded", "stops": "Stopped on request"}
SAID = {
    (BELOW, "freezes"): "Run freezes has too few nodes to train",
    (BELOW, "shrinks"): "Run shrinks has too few nodes to train",
    (FAILED, "fails"): "Run fails was closed as failed",
    (FULL, "disk"): "Run disk cannot save its checkpoints",
    (NO_ETCD, ""): "etcd does not answer: no run can change",
}


@pytest.mark.timeout(900)
def test_each_fault_pages_once(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """One run is stopped on purpose, one fails at its start, one loses a node for good, one has a frozen node for a
    while, one is scaled down, one ends well and one has nothing; then etcd is away for three minutes. In the morning
    what is missing is replaced, and all is well."""
    with night(own_etcd, tmp_path, PLANS) as watched:
        goes_by(watched, own_etcd)


@pytest.mark.skipif(not LONG, reason="OPERATIONS_NIGHT=1 lets ten runs go through a night, some three minutes")
@pytest.mark.timeout(900)
def test_ten_runs_go_through_a_night(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """The same with a full disk, which pages; a slow rank, which is a message for the morning; and a worker that dies
    and is replaced, of which nobody hears."""
    disk = tmp_path / "disk" / "checkpoints"
    with night(own_etcd, tmp_path, (*PLANS, *SESSIONS), {disk: 64 << 20}) as watched:
        goes_by(watched, own_etcd)
        assert watched.messages() - Counter({("on-call", *page): 1 for page in SAID}) == {
            ("team", "Straggler", "straggles"): 1
        }


def goes_by(night: Night, etcd: EtcdServer) -> None:
    """The night, from the evening on. ``on``: the runs that train, but for those with a fault."""
    runs = night.runs
    on = {name for name in runs if name != "fails"}
    night.shows({}, training(on))
    night.watch.wait_value(f"count(run:elastic_trainer_under_way:fresh == 1) == {len(on)}")
    pages = evening(night, on - {"ends", "stops"})
    etcd.kill()
    try:
        pages.add((NO_ETCD, ""))
        night.until_paged(pages)
        night.goes_blind()
        pause(night.minute_s)
    finally:
        etcd.start()
    night.until_paged({(BELOW, "freezes"), (NO_ETCD, "")}, "resolved")
    morning(night)
    night.until_paged(pages, "resolved")
    assert night.pages() == dict.fromkeys(pages, 1)
    assert night.summaries() == {page: SAID[page] for page in pages}


def evening(night: Night, on: set[str]) -> set[tuple[str, str]]:
    """What is planned wakes nobody, each fault one of on-call. The frozen node comes back."""
    runs, pages = night.runs, {(BELOW, "freezes"), (BELOW, "shrinks"), (FAILED, "fails")}
    few = "1 of 2 nodes needed"
    bad, warned = {"freezes": few, "shrinks": few}, {}
    mark(night, "fails", "wrong")
    runs["fails"].start(1)
    runs["stops"].node("n0").terminate()
    runs["scales"].node("n1").terminate()
    mark(night, "ends", "end")
    runs["shrinks"].node("n1").kill()
    frozen = runs["freezes"].node("n1")
    frozen.freeze()
    if "disk" in runs:
        fill(night)
        mark(night, "straggles", "slow")
        assert runs["heals"].node("n1").kill_worker() is not None
        bad, warned = {"disk": "saves fail", **bad}, {"straggles": "1 slow"}
        pages.add((FULL, "disk"))
    night.shows({**bad, "fails": "failed", **warned}, {**training(on - {*bad, *warned}), **ENDED})
    night.until_paged(pages)
    frozen.thaw()
    night.until_paged({(BELOW, "freezes")}, "resolved")
    del bad["freezes"]
    night.shows({**bad, "fails": "failed", **warned}, {**training(on - {*bad, *warned}), **ENDED})
    return pages


def morning(night: Night) -> None:
    """A node in the place of the lost one, the failed run opened again without its mistake, room on the disk."""
    runs = night.runs
    runs["shrinks"].start(1)
    assert runs["fails"].wait(Deadline.after(60.0))
    mark(night, "fails", "wrong", there=False)
    night.reopen("fails")
    if "disk" in runs:
        fill(night, there=False)
        mark(night, "straggles", "slow", there=False)
    night.shows({}, {**training(set(runs) - ENDED.keys()), **ENDED})


def training(runs: set[str]) -> dict[str, str]:
    return dict.fromkeys(sorted(runs), "Training")


def mark(night: Night, run: str, name: str, *, there: bool = True) -> None:
    file = night.runs[run].spec.directory / name
    file.touch() if there else file.unlink()


def fill(night: Night, *, there: bool = True) -> None:
    rest = night.runs["disk"].spec.directory / "checkpoints" / "rest"
    if not there:
        rest.unlink()
        return
    with suppress(OSError), rest.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
