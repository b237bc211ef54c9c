"""Checks of a real machine: shared memory, processors, ports, a directory and what may be wrong with it."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.local.hosts import free_ports
from elastic_trainer.preflight import directory
from elastic_trainer.preflight import examination as gpu
from elastic_trainer.preflight.examination import (
    Neighbor,
    host_name,
    listening,
    open_files,
    processors,
    reaching,
    shared_memory,
    usable_cores,
)
from elastic_trainer.preflight.judge import MIB, Finding, FitLimits, Status
from tests.support.small_disk import fill, mounted, run

OK, WARN, BAD, SKIPPED = Status.OK, Status.WARN, Status.BAD, Status.SKIPPED
LIMITS = FitLimits()


def checked(path: Path, limits: FitLimits = LIMITS) -> dict[str, Finding]:
    return {finding.name: finding for finding in directory.check(path, limits)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 8 * MIB) as path:
        yield path


# ---- a directory


def test_a_good_directory_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be written and renamed in, has room, and its speeds are numbers; no file stays. One that is yet to be made
    is measured where it will be, and is not made."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    found = checked(Path("runs"))
    assert list(found) == ["disk", "disk.space", "disk.write", "disk.read"]
    assert (found["disk"].status, found["disk"].text) == (OK, "runs can be written")
    for name in ("disk.write", "disk.read"):
        assert (found[name].value or 0) > 0
        assert found[name].unit == "MB/s"
    later = checked(tmp_path / "runs" / "one" / "two")["disk"]
    assert later.status is OK
    assert f"be created in {tmp_path / 'runs'}" in later.text
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "name", "status"),
    [
        (FitLimits(disk_bytes=1 << 60), "disk.space", BAD),
        (FitLimits(disk_doubtful_bytes=1 << 60), "disk.space", WARN),  # without a known need it is a guess
        (FitLimits(disk_speed=1e15), "disk.write", WARN),
        (FitLimits(disk_speed=1e15), "disk.read", WARN),
    ],
)
def test_a_disk_below_the_limits(tmp_path: Path, limits: FitLimits, name: str, status: Status) -> None:
    found = checked(tmp_path, limits)[name]
    assert found.status is status
    assert ("are needed" in found.text) is (status is BAD)


@pytest.mark.parametrize("path", ["file/checkpoints", "/proc/checkpoints"])
def test_a_place_that_nobody_can_write_to_is_bad(path: str, tmp_path: Path) -> None:
    """Not even root: a file in its way, a file system of the kernel."""
    (tmp_path / "file").write_text("")
    (found,) = directory.check(tmp_path / path, LIMITS)
    assert (found.name, found.status) == ("disk", BAD)
    assert "cannot be written" in found.text
    assert found.hint


@pytest.mark.root
@pytest.mark.parametrize(("fault", "said"), [("full", "no space left on device"), ("read-only", "read-only")])
def test_a_disk_that_takes_nothing_is_bad(small_disk: Path, fault: str, said: str) -> None:
    """The sentence says why."""
    if fault == "full":
        fill(small_disk)
    else:
        run("mount", "-o", "remount,ro", str(small_disk))
    (found,) = directory.check(small_disk / "checkpoints", LIMITS)
    assert found.status is BAD
    assert said in found.text


@pytest.mark.root
def test_a_small_disk_is_not_filled_by_measuring_it(small_disk: Path) -> None:
    """Half of what is free is used at most, for a moment."""
    fill(small_disk, but_bytes=3 * MIB)
    found = checked(small_disk)
    assert (found["disk.space"].status, found["disk.write"].status) == (WARN, SKIPPED)


# ---- shared memory, processors and limits


@pytest.mark.root
def test_shared_memory_that_is_small_full_or_missing(small_disk: Path) -> None:
    """The 64 MiB of a container are a warning, none at all is bad; both with how to get more."""
    small = shared_memory(LIMITS, small_disk)
    assert small.status is WARN
    assert "--shm-size" in small.hint
    assert shared_memory(FitLimits(shm_bytes=MIB), small_disk).status is OK
    fill(small_disk)
    assert shared_memory(LIMITS, small_disk).status is BAD
    assert shared_memory(LIMITS, small_disk / "nowhere").status is BAD


def test_more_threads_than_cores_are_a_warning(tmp_path: Path) -> None:
    """Also where only a quota of the container is small, which torch does not see."""
    cores, none, quota = len(os.sched_getaffinity(0)), tmp_path / "none", tmp_path / "cpu.max"
    for workers, threads, status in ((1, cores, OK), (1, None, OK), (cores, None, OK), (2, cores, WARN)):
        found = processors(workers, threads, none)  # without a number torchrun gives each of several one thread
        assert found.status is status
        assert ("OMP_NUM_THREADS" in found.hint) is (status is WARN)
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 0.5
    assert processors(1, None, quota).status is WARN
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == cores


def test_few_open_files_are_a_warning() -> None:
    """Each rank of a big job has sockets to many others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        assert open_files(LIMITS).status is WARN
        assert open_files(FitLimits(open_files=512)).status is OK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_machine_without_the_driver_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known of its devices."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.status for finding in gpu.gpus(Deadline.after(5.0), {})] == [SKIPPED]


def test_a_driver_tool_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the kernel, where no signal reaches it: waiting for its end would hold up the node for ever."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 120\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "BURIAL_S", 0.1)
    started: list[subprocess.Popen[str]] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: started.append(process))
    begun = SYSTEM.monotonic()
    try:
        (found,) = gpu.gpus(Deadline.after(0.5), {})
        assert SYSTEM.monotonic() - begun < 60.0
    finally:
        for process in started:
            kill(process)
            process.wait(60.0)
    assert (found.status, len(started)) == (BAD, 1)
    assert "no answer" in found.text


# ---- network


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("127.0.0.1", OK, "listens on 127.0.0.1"),
        ("192.0.2.1", BAD, "cannot be reached at"),  # TEST-NET-1: nobody's
        ("no-such-host.invalid", BAD, "does not resolve"),
    ],
)
def test_a_node_can_be_reached_at_its_own_address_only(address: str, status: Status, said: str) -> None:
    found = listening(address)
    assert found.status is status
    assert said in found.text
    assert ("interface" in found.hint) is (status is BAD)


@pytest.mark.parametrize(
    ("host", "address", "status", "said", "hint"),
    [
        ("localhost", "192.0.2.1", WARN, "'localhost' resolves to ", "GLOO_SOCKET_IFNAME"),  # as many systems set it up
        ("no-such-host.invalid", "192.0.2.1", WARN, "has no address", ""),
        ("192.0.2.1", "192.0.2.1", OK, "", ""),
        *((socket.gethostname(), each, WARN, f"announce {each}", "--local-addr") for each in ("127.0.0.1", "::1")),
        (socket.gethostname(), "localhost", WARN, "announce localhost", "--local-addr"),
    ],
)
def test_a_name_or_address_that_others_cannot_use_is_a_warning(
    host: str, address: str, status: Status, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = host_name(host, address)
    assert found.status is status
    assert said in found.text
    assert hint in found.hint
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert host_name("localhost", "192.0.2.1").status is OK


def test_other_nodes_are_asked() -> None:
    """A refusal is an answer of that host; an address that says nothing is not. Silence of all of several is bad."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive = Neighbor("alive", "127.0.0.1", server.getsockname()[1])
        gone = Neighbor("gone", "127.0.0.1", free_ports(1)[0])
        silent = [Neighbor(f"silent{number}", "no-such-host.invalid", 1) for number in range(2)]
        soon = Deadline.after(10.0)
        some = reaching("x", [alive, *silent], soon)
        assert some.status is WARN
        assert "2 of 3 nodes do not answer: silent0 (no-such-host.invalid:1), silent1" in some.text
        for asked, status in (([alive, gone], OK), (silent[:1], WARN), (silent, BAD), ([], SKIPPED)):
            assert reaching("x", asked, soon).status is status
