"""All checks of one node, from quick to slow: network, shared memory, processors, files, GPUs, directory, computing.

*Runs in* the caller's thread, and in short-lived threads for connections to many nodes; checks that may hang run in
child processes. *Owns* these during the call. *Fails by* findings only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.address import is_loopback, leads_here, listen
from elastic_trainer.preflight.child import BURIAL_S, Doing, findings_of
from elastic_trainer.preflight.judge import Finding, FitLimits, Status, size_text
from elastic_trainer.settings import gloo_interfaces, worker_threads
from elastic_trainer.wording import counted

DIRECTORY_S = 60.0
"""Seconds for all checks of the directory or URL; one that needs longer counts as dead."""
GPU_S, GPU_SHARE = 10.0, 0.25
"""Seconds, and share of what is left, in which the driver must answer; the longer one holds. Without persistence mode
it initializes each device first."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to examine. ``address`` is this node's address for others."""

    address: str
    directory: str | None = None
    """A path or URL."""
    workers: int = 1
    compute: bool = True
    limits: FitLimits = field(default_factory=FitLimits)


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings, and the versions that nodes should agree on."""

    findings: tuple[Finding, ...]
    versions: dict[str, str]


def examine(subject: Subject, deadline: Deadline, doing: Doing = lambda _: None) -> Examination:
    """Examine this node; checks that are unfinished at ``deadline`` are bad."""
    limits, versions = subject.limits, dict[str, str]()
    doing("checking this machine")
    found = [
        host_name(socket.gethostname(), subject.address),
        listening(subject.address),
        shared_memory(limits),
        processors(subject.workers, worker_threads()),
        open_files(limits),
    ]
    if subject.directory is None:
        found.append(Finding("disk", Status.SKIPPED, "no checkpoint directory was given"))
    else:
        limit = deadline.at_most(min(DIRECTORY_S, deadline.remaining_s() / 2))  # leaves time for the other checks
        words = [subject.directory, str(limits.disk_bytes), f"{limit.remaining_s():.3f}"]
        found += findings_of("disk", "elastic_trainer.preflight.directory", words, limit, doing, versions)
    found += gpus(deadline.at_most(max(GPU_S, GPU_SHARE * deadline.remaining_s())), versions)
    if subject.compute:
        words = [f"{deadline.remaining_s():.3f}"]
        found += findings_of("compute", "elastic_trainer.preflight.compute", words, deadline, doing, versions)
    else:
        found.append(Finding("compute", Status.SKIPPED, "not requested"))
    return Examination(tuple(found), versions)


# ---- this machine

SHARED_MEMORY = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHM_HINT = "docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def shared_memory(limits: FitLimits, directory: Path = SHARED_MEMORY) -> Finding:
    """Whether shared memory is usable, and its free space."""
    name = "shm"
    if not directory.exists() and platform.system() != "Linux":
        return Finding(name, Status.SKIPPED, f"there is no {directory} on {platform.system()}")
    try:
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, limits.shm_least_bytes)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        return Finding(name, Status.BAD, f"{directory} cannot be used: {said}", hint=_SHM_HINT)
    found = Finding(name, Status.OK, f"{directory}: {size_text(free)} free", float(free), "B", float(limits.shm_bytes))
    return found.but(Status.WARN, _SHM_HINT) if free < limits.shm_bytes else found


def open_files(limits: FitLimits) -> Finding:
    """The limit of open files and sockets of a process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = float(limits.open_files)
    if soft == resource.RLIM_INFINITY:
        return Finding("open_files", Status.OK, "no limit", None, "files", least)
    found = Finding("open_files", Status.OK, f"{soft} at a time", float(soft), "files", least)
    return found if soft >= least else found.but(Status.WARN, f"raise it: ulimit -n {limits.open_files}")


def _seen_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(quota: Path = CPU_QUOTA) -> float:
    """The cores that this process may use: those of its affinity, limited by the cgroup's quota."""
    allowed = float(_seen_cores())
    try:
        share, period = quota.read_text().split()
        return allowed if share == "max" else min(allowed, int(share) / int(period))
    except (OSError, ValueError):
        return allowed


def processors(workers: int, threads: int | None, quota: Path = CPU_QUOTA) -> Finding:
    """Whether ``workers`` processes of ``threads`` threads each have a core for each thread.

    ``threads`` None: OMP_NUM_THREADS is not set. Then torchrun sets it to 1 for several workers, while a single
    worker uses all visible cores.
    """
    cores, seen = usable_cores(quota), _seen_cores()
    each = threads if threads is not None else (seen if workers == 1 else 1)
    wanted = each * workers
    text = f"{cores:.3g} cores for {workers} x {each} threads"
    found = Finding("cpu", Status.OK, text, float(wanted), "threads", cores)
    hint = f"set OMP_NUM_THREADS to {max(1, int(cores // workers))}, or start fewer workers"
    return found.but(Status.WARN, hint) if wanted > cores else found


# ---- GPUs

_TOOL = "nvidia-smi"
_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active"
_SLOWED = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""NVML's nvmlClocksThrottleReasons; idling, or running at the configured power cap, is no fault."""


def gpus(deadline: Deadline, versions: dict[str, str]) -> list[Finding]:
    """One finding for each device; adds the driver's version to ``versions``."""
    tool = shutil.which(_TOOL)
    if tool is None:
        return [Finding("gpu", Status.SKIPPED, f"{_TOOL} is not installed")]
    call = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    limit_s = deadline.remaining_s()
    try:
        process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return [Finding("gpu", Status.SKIPPED, f"{_TOOL} cannot be started: {error.strerror}")]
    try:  # subprocess.run would wait forever for a process that is stuck in the kernel, as when the driver hangs
        out, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        hint = "the driver hangs: look at dmesg, restart the machine"
        return [Finding("gpu", Status.BAD, f"{_TOOL} gave no answer in {limit_s:.3g} s", hint=hint)]
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(BURIAL_S)
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()
    if code := process.returncode:
        said = (out + complaint).strip().splitlines()
        return [Finding("gpu", Status.WARN, f"{_TOOL} fails: {said[0] if said else code}", hint="see dmesg")]
    return understood(out.splitlines(), versions)


def understood(lines: Iterable[str], versions: dict[str, str]) -> list[Finding]:
    """The findings from the output lines of nvidia-smi. Fields that a device lacks are ``[N/A]``."""
    found: list[Finding] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            continue
        name, model, versions["driver"] = f"gpu{cells[0]}", cells[1], cells[2]
        errors, reasons = (_number(cell) for cell in cells[3:])
        slowed = [text for bit, text in _SLOWED.items() if (reasons or 0) & bit]
        counted_errors = None if errors is None else float(errors)
        if errors:
            text, hint = (
                f"{model}: {errors} uncorrected memory errors",
                "drain this machine and reset or replace the device",
            )
            found.append(Finding(name, Status.BAD, text, counted_errors, "errors", 0.0, hint))
        elif slowed:
            text = f"{model} is throttled: {', '.join(slowed)}"
            found.append(Finding(name, Status.WARN, text, hint="check cooling and power"))
        else:
            unknown = "" if errors is not None else ", memory errors are not counted"
            found.append(Finding(name, Status.OK, f"{model}{unknown}", counted_errors, "errors", 0.0))
    return found or [Finding("gpu", Status.SKIPPED, f"{_TOOL} lists no device")]


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


# ---- network

CONNECT_S = 2.0
AT_ONCE = 32
"""Simultaneous connections."""
MOST_ASKED = 64
"""Nodes to connect to: enough to detect that this node is cut off, and little load for the others."""
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Neighbor:
    """Another node's address."""

    node: str
    address: str
    port: int


def listening(address: str) -> Finding:
    """Whether a port of this node is reachable at its published address."""
    hint = "set --rdzv-conf interface to an address of this machine, and check its firewall"
    try:
        socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        with listen(address) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), CONNECT_S):
                return Finding("ports", Status.OK, f"listens on {address}")
    except socket.gaierror:
        return Finding("ports", Status.BAD, f"the address {address!r} of this node does not resolve", hint=hint)
    except OSError as error:
        said = error.strerror or str(error)
        return Finding("ports", Status.BAD, f"this node cannot be reached at {address}: {said.lower()}", hint=hint)


def host_name(host: str, address: str) -> Finding:
    """Whether others can use the ``address`` that this node announces, and the address of its own name.

    torch's gloo publishes the latter for groups that a script forms without a session.
    """
    hint = "correct /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME"
    if leads_here(address):
        text = f"this node would announce {address}, which leads every other machine to itself"
        return Finding(
            "name", Status.WARN, text, hint="give --local-addr or --rdzv-conf interface, unless all nodes are here"
        )
    if chosen := gloo_interfaces():
        return Finding("name", Status.OK, f"gloo uses {chosen}")
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return Finding("name", Status.WARN, f"the name {host!r} of this host has no address", hint=hint)
    if is_loopback(found):
        text = f"{host!r} resolves to {found}: gloo groups that a script forms without a Session fail across machines"
        return Finding("name", Status.WARN, text, hint=hint)
    return Finding("name", Status.OK, f"{host} is {found}")


def reaching(name: str, neighbors: Sequence[Neighbor], deadline: Deadline) -> Finding:
    """Whether the other nodes' hosts answer. A refused connection is an answer: only the process has ended."""
    if not neighbors:
        return Finding(name, Status.SKIPPED, "no other node is present")
    asked = neighbors[:MOST_ASKED]
    limit_s = deadline.at_most(CONNECT_S).remaining_s()
    with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="preflight-connect") as pool:
        answers = list(pool.map(lambda each: answers_at(each.address, each.port, limit_s), asked))
    silent = [each for each, answer in zip(asked, answers, strict=True) if not answer]
    answered = len(asked) - len(silent)
    text = f"{answered} of {counted(len(asked), 'node answers', 'nodes answer')}"
    found = Finding(name, Status.OK, text, float(answered), "nodes", float(len(asked)))
    if not silent:
        return found
    who = ", ".join(f"{each.node} ({each.address}:{each.port})" for each in silent[:_NAMED])
    more = ", ..." if len(silent) > _NAMED else ""
    text = f"{len(silent)} of {counted(len(asked), 'node does', 'nodes do')} not answer: {who}{more}"
    # One silent node may be faulty itself; if none of several answers, this one is cut off.
    status = Status.BAD if len(silent) == len(asked) > 1 else Status.WARN
    return found.but(status, "check network, firewall and network policies", text)


def answers_at(host: str, port: int, limit_s: float) -> bool:
    """Whether ``host`` answers within ``limit_s`` seconds. A refused connection is an answer too: only the process that
    listened there has ended."""
    try:
        with socket.create_connection((host, port), max(0.1, limit_s)):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
