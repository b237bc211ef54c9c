"""Strikes a job of real nodes with a labelled fault, and waits for the verdict on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from elastic_trainer.cli.main import key_values
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.local.ledger import LineKind
from elastic_trainer.membership.documents import Incident
from elastic_trainer.model import Cause, Culprit
from tests.drills.endings.job import Job
from tests.drills.verdicts.faults import Labelled
from tests.support.metadata import MetadataServer

SCRIPT = Path(__file__).with_name("train.py")
KMSG = "kmsg"
KERNEL = ("oom", "xid", "machine_check", "disk", "dimm", "pcie", "oom_loader", "ext4", "amdgpu", "apei")
TRACER = """
import ctypes, os, sys
library = ctypes.CDLL(None)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if library.ptrace(16, int(thread), None, None) == 0:  # PTRACE_ATTACH
        os.waitpid(int(thread), 0x40000000)  # __WALL
        print("stopped", flush=True)
try:
    while True:
        os.waitpid(-1, 0x40000000)
except ChildProcessError:
    pass
"""
"""What a debugger does whose user is away: it stops all threads of a process, and lets them go when that is killed."""
PLANNED = (Cause.NODE_JOINED, Cause.NODE_LEFT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``incident``: the one that is judged; ``verdict_s``: from the step that ended it until its verdict was there, if
    training went on; ``codes``: the nodes' exit codes, where the run ended."""

    incident: Incident
    verdict_s: float | None
    codes: frozenset[int | None] = frozenset()

    def mistakes(self, fault: Labelled) -> list[str]:
        """In what the verdict differs from the label; empty if it is right."""
        verdict = self.incident.verdict
        if verdict is None:
            return ["there is no verdict"]
        found = [
            ("culprit", str(verdict.culprit), str(fault.culprit)),
            ("advice", str(verdict.advice), str(fault.advice)),
        ]
        if fault.nodes is not None:
            found.append(("nodes", " ".join(verdict.nodes), " ".join(fault.nodes)))
        wrong = [f"{what} {said}, not {label}" for what, said, label in found if said != label]
        return wrong if fault.says in verdict.sentence else [*wrong, f"{fault.says} is not in: {verdict.sentence}"]


class Struck(Job):
    """A job of two or three nodes that a labelled fault strikes."""

    def __init__(self, directory: Path, endpoint: str, run: str, fault: Labelled, **more: str) -> None:
        mode = {"recovery": "restart", "ttl": "20"} if fault.restart else {}
        options = {
            "hang_timeout": "6",
            "form_timeout": "3",
            "regroup_grace": "10",
            **key_values(fault.options),
            **mode,
            **more,
        }
        self.fault = fault
        self.cloud = MetadataServer() if fault.act == "preempt" else None
        self.tracers: list[subprocess.Popen[bytes]] = []
        if self.cloud is not None:
            options["preemption"] = f"gce@{self.cloud.url}"
        entry = [str(SCRIPT), str(directory), *fault.flags.split()]
        least = fault.start if fault.act == "begin" else 1  # a slow node is to fail at its start with the others
        super().__init__(directory, endpoint, run, least=least, most=3, options=options, entry=entry)

    def __enter__(self) -> Self:
        if self.cloud is not None:
            self.cloud.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            if self.cloud is not None:
                self.cloud.__exit__(*error)
        for tracer in self.tracers:  # what they trace is dead
            tracer.communicate(timeout=30)

    def victim(self) -> psutil.Process:
        """The worker of n1."""
        worker = self.node("n1").worker()
        assert worker is not None
        return worker

    def break_it(self) -> None:
        """Do what the fault says, once."""
        fault = self.fault
        if fault.code:
            file = self.spec.directory / f"fault-{fault.on}"
            begun = file.with_suffix(".begun")
            begun.write_text(fault.code)
            begun.rename(file)
        if fault.act:
            ACTS[fault.act](self)

    def told(self) -> list[Incident]:
        """The incidents of the kind that is looked for, oldest first; not how the first nodes came together."""
        items = self.store.range(self.keys.incidents, Deadline.after(10.0)).items
        known = [Incident.decode(item.value, item.key) for item in items]
        wanted = [each for each in known if each.kind == self.fault.incident and not each.open]
        if self.fault.incident == "round":
            wanted = [each for each in wanted if (each.cause in PLANNED) == self.fault.planned]
        return wanted

    def await_more(self, known: int, act: Future[None] | None = None) -> None:
        """Wait until there are more than ``known`` incidents; ``act`` may last longer, but must not fail."""

        def more() -> bool:
            if act is not None and act.done():
                act.result()
            return len(self.told()) > known

        self.wait_for(more, f"no incident after {self.fault.name}")

    def settle(self, at: int) -> None:
        """Wait for a verdict with a culprit, if there is one within reason."""
        deadline = Deadline.after(20.0)
        while not deadline.expired:
            verdict = self.told()[at].verdict
            if verdict is not None and verdict.culprit is not Culprit.UNKNOWN:
                return
            pause(0.1)

    def log_kernel(self, line: str) -> None:
        """As the kernel of n1's host would."""
        with (self.spec.directory / KMSG).open("a") as file:
            file.write(f"3,1,1,-;{line}\n")

    def await_logged(self) -> None:
        pause(1.0)  # the agent reads it four times a second


def _kill(job: Struck) -> None:
    killed = job.node("n1").kill_worker()
    assert killed is not None


def _oom(job: Struck) -> None:
    worker = job.victim()
    job.log_kernel(f"Memory cgroup out of memory: Killed process {worker.pid} (python3) total-vm:81920kB")
    worker.kill()


def _oom_loader(job: Struck) -> None:
    worker = job.victim()

    def loaders() -> list[psutil.Process]:
        return [each for each in worker.children() if each.name() == "pt_data_worker"]

    [loader] = job.wait_for(loaders, "no process of a DataLoader")
    job.log_kernel(
        f"Out of memory: Killed process {loader.pid} (pt_data_worker) total-vm:98304kB, anon-rss:81920kB,"
        " file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:320kB oom_score_adj:0"
    )
    loader.kill()


def _with_line(line: str, number: int) -> Callable[[Struck], None]:
    def act(job: Struck) -> None:
        job.log_kernel(line)
        job.await_logged()
        worker = job.victim()
        worker.send_signal(number)

    return act


def _freeze(job: Struck) -> None:
    worker = job.victim()
    worker.send_signal(signal.SIGSTOP)


def _power_off(job: Struck) -> None:
    """Nothing is heard of n1 any more: no connection of its is closed."""
    if job.segment is None:
        pytest.skip("needs hosts of their own")
    job.segment.cut("n1")
    job.node("n1").kill()


def _part(job: Struck) -> None:
    segment = job.segment
    if segment is None:
        pytest.skip("needs hosts of their own")
    job.add()
    for one, other in (("n1", "n2"), ("n2", "n1")):
        segment.part(one, other)


def _part_for_a_while(job: Struck) -> None:
    segment = job.segment
    if segment is None:
        pytest.skip("needs hosts of their own")
    for one, other in (("n0", "n1"), ("n1", "n0")):
        segment.part(one, other)
    pause(15.0)  # longer than a collective may take
    for one, other in (("n0", "n1"), ("n1", "n0")):
        segment.reunite(one, other)


def _ordered(command: str) -> Callable[[Struck], None]:
    def act(job: Struck) -> None:
        words = [command, job.spec.run, "--node", "n1", "--endpoint", job.spec.endpoint]
        call = [sys.executable, "-m", "elastic_trainer", *words]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL, timeout=180)

    return act


def _preempt(job: Struck) -> None:
    assert job.cloud is not None
    job.cloud.preempt()


def _trace(job: Struck) -> None:
    worker = job.victim()
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(worker.pid)], stdout=subprocess.PIPE)
    job.tracers.append(tracer)
    assert tracer.stdout is not None
    if not tracer.stdout.readline():
        pytest.skip("needs the right to trace processes")


ACTS: Mapping[str, Callable[[Struck], object]] = {
    "begin": lambda job: None,
    "oom": _oom,
    "xid": _with_line("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", signal.SIGABRT),
    "machine_check": _with_line(
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: dc00008001010090", signal.SIGBUS
    ),
    "disk": _with_line("blk_update_request: I/O error, dev sdb, sector 12345", signal.SIGBUS),
    "dimm": _with_line(
        "Memory failure: 0x3a1b5c7: Sending SIGBUS to python3:4242 due to hardware memory corruption", signal.SIGBUS
    ),
    "pcie": _with_line(
        "pcieport 0000:80:01.1: AER: Uncorrectable (Fatal) error message received from 0000:81:00.0", signal.SIGABRT
    ),
    "oom_loader": _oom_loader,
    "ext4": _with_line("EXT4-fs (nvme1n1p1): Remounting filesystem read-only", signal.SIGBUS),
    "amdgpu": _with_line(
        "amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block", signal.SIGABRT
    ),
    "apei": _with_line(
        "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0\n"
        "3,2,2,-;{1}[Hardware Error]: event severity: recoverable",
        signal.SIGBUS,
    ),
    "kill_worker": _kill,
    "kill_node": lambda job: job.node("n1").kill(),
    "power_off": _power_off,
    "freeze_worker": _freeze,
    "terminate_node": lambda job: job.node("n1").terminate(),
    "join": lambda job: job.add(),
    "part_newcomer": _part,
    "part_for_a_while": _part_for_a_while,
    "drain": _ordered("drain"),
    "restart_node": _ordered("restart"),
    "preempt": _preempt,
    "trace_worker": _trace,
}


def own_kernel_log(job: Struck, name: str) -> None:
    """The host of ``name`` has a kernel's log of its own: all share this machine's."""
    host = job.hosts.get(name)
    if host is None:
        pytest.skip("needs hosts of their own")
    file = job.spec.directory / KMSG
    file.touch()
    command = ["nsenter", "-t", str(host.pid), "-m", "mount", "--bind", str(file), "/dev/kmsg"]
    subprocess.run(command, check=True)


def play(fault: Labelled, directory: Path, endpoint: str, run: str) -> Outcome:
    """Start the job, strike it, and wait for the verdict; the run goes on unless it cannot."""
    with Struck(directory, endpoint, run, fault) as job, ThreadPoolExecutor(1) as hand:
        starts = fault.act == "begin"
        if starts:
            job.break_it()
        if fault.act in KERNEL:
            if job.segment is None:
                pytest.skip("needs hosts of their own")
            job.hosts["n1"] = job.segment.attach("n1", [directory], job.spec.ledger)
            own_kernel_log(job, "n1")
        job.start(1 if fault.in_turn else fault.start)
        if fault.in_turn:
            job.wait_for(lambda: job.store.range(job.keys.nodes, Deadline.after(10.0)).items, "n0 did not register")
            job.start(fault.start - 1)
        if not starts:
            job.await_world(*(node.name for node in job.nodes))
            job.await_steps(20)  # by then it is told how they came together
        known, act = 0, None
        repeats = "again" in fault.code
        for _ in range(1 if repeats else fault.times):
            known = len(job.told())
            if not starts:
                act = hand.submit(job.break_it)  # the incident may be over before it is
            job.await_more(known, act)
            if not fault.ends and fault.times > 1:
                job.await_steps(5)
        if repeats:
            job.await_more(fault.times - 1)
        if repeats and fault.ends:  # the one before may be told first
            job.wait_for(lambda: job.told()[-1].next_round is None, f"the run does not end after {fault.name}")
        seen = SYSTEM.monotonic()
        at = -1 if repeats else known
        if (first_verdict := job.told()[at].verdict) is None or first_verdict.culprit is Culprit.UNKNOWN:
            job.settle(at)  # on a busy machine a process may need seconds to exit
            seen = SYSTEM.monotonic()
        incident = job.told()[at]
        if act is not None:
            act.result()
        if fault.ends:
            return Outcome(incident, None, frozenset(job.exit_codes().values()))
        job.await_steps(3)
        first = [line.t for line in job.lines() if line.event is LineKind.STEP and line.round == incident.next_round]
        return Outcome(incident, max(0.0, seen - min(first)) if first else None)
