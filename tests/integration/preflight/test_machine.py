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

LIMITS = FitLimits()
SMALL = 8 * MIB


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", SMALL) as path:
        yield path


# ---- a directory


def test_a_good_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """It can be written and renamed in, has room, and its speeds are numbers; no file stays."""
    found = by_name(directory.check(tmp_path, LIMITS))
    assert list(found) == ["disk", "disk.space", "disk.write", "disk.read"]
    assert found["disk"].status is Status.OK
    for name in ("disk.write", "disk.read"):
        assert (found[name].value or 0) > 0
        assert found[name].unit == "MB/s"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_yet_to_be_made_is_measured_where_it_will_be(tmp_path: Path) -> None:
    """And is not made."""
    wanted = tmp_path / "runs" / "one"
    found = by_name(directory.check(wanted, LIMITS))
    assert found["disk"].status is Status.OK
    assert f"be created in {tmp_path}" in found["disk"].text
    assert not (tmp_path / "runs").exists()


def test_a_relative_directory_is_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said to be made yet."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert by_name(directory.check(Path("runs"), LIMITS))["disk"].text == "runs can be written"


def test_too_little_space_is_bad_only_against_a_known_need(tmp_path: Path) -> None:
    """Without one it is a guess, hence a warning."""
    needed = by_name(directory.check(tmp_path, FitLimits(disk_bytes=1 << 60)))["disk.space"]
    assert needed.status is Status.BAD
    assert "are needed" in needed.text
    guessed = by_name(directory.check(tmp_path, FitLimits(disk_doubtful_bytes=1 << 60)))["disk.space"]
    assert guessed.status is Status.WARN


def test_a_slow_disk_is_a_warning(tmp_path: Path) -> None:
    """Against a limit that no disk reaches."""
    found = by_name(directory.check(tmp_path, FitLimits(disk_speed=1e15)))
    assert found["disk.write"].status is found["disk.read"].status is Status.WARN


@pytest.mark.parametrize("path", ["file/checkpoints", "/proc/checkpoints"])
def test_a_place_that_nobody_can_write_to_is_bad(path: str, tmp_path: Path) -> None:
    """Not even root: a file in its way, a file system of the kernel."""
    (tmp_path / "file").write_text("")
    (found,) = directory.check(tmp_path / path, LIMITS)
    assert (found.name, found.status) == ("disk", Status.BAD)
    assert "cannot be written" in found.text
    assert found.hint


@pytest.mark.root
def test_a_full_disk_is_bad(small_disk: Path) -> None:
    """The sentence says that it is full."""
    fill(small_disk)
    (found,) = directory.check(small_disk, LIMITS)
    assert found.status is Status.BAD
    assert "no space left on device" in found.text


@pytest.mark.root
def test_a_small_disk_is_not_filled_by_measuring_it(small_disk: Path) -> None:
    """Half of what is free is used at most, for a moment."""
    fill(small_disk, but_bytes=3 * MIB)
    found = by_name(directory.check(small_disk, LIMITS))
    assert found["disk.space"].status is Status.WARN
    assert found["disk.write"].status is Status.SKIPPED


@pytest.mark.root
def test_a_read_only_disk_is_bad(small_disk: Path) -> None:
    """As it becomes after errors."""
    run("mount", "-o", "remount,ro", str(small_disk))
    (found,) = directory.check(small_disk / "checkpoints", LIMITS)
    assert found.status is Status.BAD
    assert "read-only" in found.text


# ---- shared memory


@pytest.mark.root
def test_shared_memory_that_is_small_full_or_missing(small_disk: Path) -> None:
    """The 64 MiB of a container are a warning, none at all is bad; both with how to get more."""
    small = shared_memory(LIMITS, small_disk)
    assert small.status is Status.WARN
    assert "--shm-size" in small.hint
    assert shared_memory(FitLimits(shm_bytes=MIB), small_disk).status is Status.OK
    fill(small_disk)
    assert shared_memory(LIMITS, small_disk).status is Status.BAD
    assert shared_memory(LIMITS, small_disk / "nowhere").status is Status.BAD


# ---- processors and limits


def test_more_threads_than_cores_are_a_warning(tmp_path: Path) -> None:
    """Also where only a quota of the container is small, which torch does not see."""
    cores = len(os.sched_getaffinity(0))
    none = tmp_path / "none"
    assert processors(1, cores, none).status is Status.OK
    assert processors(1, None, none).status is Status.OK
    crowded = processors(2, cores, none)
    assert crowded.status is Status.WARN
    assert "OMP_NUM_THREADS" in crowded.hint
    assert processors(cores, None, none).status is Status.OK  # torchrun gives each one thread
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 0.5
    assert processors(1, None, quota).status is Status.WARN
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == cores


def test_few_open_files_are_a_warning() -> None:
    """Each rank of a big job has sockets to many others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        assert open_files(LIMITS).status is Status.WARN
        assert open_files(FitLimits(open_files=512)).status is Status.OK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_machine_without_the_driver_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known of its devices."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.status for finding in gpu.gpus(Deadline.after(5.0), {})] == [Status.SKIPPED]


# ---- network


def test_a_node_can_be_reached_at_its_own_address_only() -> None:
    """The address of another machine, and a name that nobody knows, are bad."""
    assert listening("127.0.0.1").status is Status.OK
    elsewhere = listening("192.0.2.1")  # TEST-NET-1: nobody's
    assert elsewhere.status is Status.BAD
    assert "interface" in elsewhere.hint
    unknown = listening("no-such-host.invalid")
    assert unknown.status is Status.BAD
    assert "does not resolve" in unknown.text


def test_a_host_name_that_others_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback under the host's own name is what many distributions set up."""
    found = host_name("localhost", "192.0.2.1")
    assert found.status is Status.WARN
    assert "'localhost' resolves to " in found.text
    assert "GLOO_SOCKET_IFNAME" in found.hint
    assert host_name("no-such-host.invalid", "192.0.2.1").status is Status.WARN
    assert host_name("192.0.2.1", "192.0.2.1").status is Status.OK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert host_name("localhost", "192.0.2.1").status is Status.OK


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_an_address_that_leads_every_machine_to_itself_is_a_warning(address: str) -> None:
    """The finding says what to do."""
    found = host_name(socket.gethostname(), address)
    assert found.status is Status.WARN
    assert f"announce {address}" in found.text
    assert "--local-addr" in found.hint


def test_other_nodes_are_asked() -> None:
    """A refusal is an answer of that host; an address that says nothing is not. Silence of all of several is bad."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive = Neighbor("alive", "127.0.0.1", server.getsockname()[1])
        gone = Neighbor("gone", "127.0.0.1", free_ports(1)[0])
        silent = [Neighbor(f"silent{number}", "no-such-host.invalid", 1) for number in range(2)]
        soon = Deadline.after(10.0)
        assert reaching("x", [alive, gone], soon).status is Status.OK
        some = reaching("x", [alive, *silent], soon)
        assert some.status is Status.WARN
        assert "2 of 3 nodes do not answer: silent0 (no-such-host.invalid:1), silent1" in some.text
        assert reaching("x", silent[:1], soon).status is Status.WARN
        assert reaching("x", silent, soon).status is Status.BAD
        assert reaching("x", [], soon).status is Status.SKIPPED


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
    assert (found.status, len(started)) == (Status.BAD, 1)
    assert "no answer" in found.text
