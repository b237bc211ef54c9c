"""Each labelled fault strikes a job of real nodes; its verdict names what failed, where, and what to do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastic_trainer.cli.main import key_values
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.membership.documents import Incident
from elastic_trainer.model import Cause
from tests.drills.endings.job import Job
from tests.drills.verdicts.faults import FAULTS, Labelled
from tests.drills.verdicts.other import OTHER

SCRIPT = Path(__file__).with_name("train.py")
KMSG = "kmsg"
PLANNED = (Cause.NODE_JOINED, Cause.NODE_LEFT)
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("etcd_binary")]


class Struck(Job):
    """A job of two or three nodes that a labelled fault strikes."""

    def __init__(self, directory: Path, endpoint: str, run: str, fault: Labelled) -> None:
        mode = {"recovery": "restart", "ttl": "20"} if fault.restart else {}
        options = {
            "hang_timeout": "6",
            "form_timeout": "3",
            "regroup_grace": "10",
            "sick_machines": "off",
            **key_values(fault.options),
            **mode,
        }
        self.fault = fault
        entry = [str(SCRIPT), str(directory), *fault.flags.split()]
        super().__init__(directory, endpoint, run, least=1, most=3, options=options, entry=entry)

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

    def await_more(self, known: int) -> None:
        """Wait until there are more than ``known`` incidents."""
        self.wait_for(lambda: len(self.told()) > known, f"no incident after {self.fault.name}")

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
    worker = job.node("n1").worker()
    assert worker is not None
    job.log_kernel(f"Memory cgroup out of memory: Killed process {worker.pid} (python3) total-vm:81920kB")
    worker.kill()


def _with_line(line: str, number: int) -> Callable[[Struck], None]:
    def act(job: Struck) -> None:
        job.log_kernel(line)
        job.await_logged()
        worker = job.node("n1").worker()
        assert worker is not None
        worker.send_signal(number)

    return act


def _freeze(job: Struck) -> None:
    worker = job.node("n1").worker()
    assert worker is not None
    worker.send_signal(signal.SIGSTOP)


def _part(job: Struck) -> None:
    segment = job.segment
    if segment is None:
        pytest.skip("needs hosts of their own")
    job.add()
    for one, other in (("n1", "n2"), ("n2", "n1")):
        segment.part(one, other)


ACTS: Mapping[str, Callable[[Struck], object]] = {
    "begin": lambda job: None,
    "oom": _oom,
    "xid": _with_line("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", signal.SIGABRT),
    "machine_check": _with_line(
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: dc00008001010090", signal.SIGBUS
    ),
    "disk": _with_line("blk_update_request: I/O error, dev sdb, sector 12345", signal.SIGBUS),
    "kill_worker": _kill,
    "kill_node": lambda job: job.node("n1").kill(),
    "freeze_worker": _freeze,
    "terminate_node": lambda job: job.node("n1").terminate(),
    "join": lambda job: job.add(),
    "part_newcomer": _part,
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


@pytest.mark.parametrize("fault", [*FAULTS, *OTHER], ids=lambda each: f"{each.kind}: {each.name}")
def test_the_verdict_names_what_failed(tmp_path: Path, etcd_endpoint: str, run_id: str, fault: Labelled) -> None:
    """The culprit, the node, and what to do; the run goes on unless it cannot. The verdict is written within seconds of
    the step that ends the incident."""
    with Struck(tmp_path, etcd_endpoint, run_id, fault) as job:
        if fault.act == "begin":
            job.break_it()
        kernel = fault.act in ("oom", "xid", "machine_check", "disk")
        if kernel and job.segment is not None:
            job.hosts["n1"] = job.segment.attach("n1", [tmp_path], job.spec.ledger)
            own_kernel_log(job, "n1")
        elif kernel:
            pytest.skip("needs hosts of their own")
        job.start(fault.start)
        known = 0
        if fault.act != "begin":
            job.await_world(*(node.name for node in job.nodes))
            job.await_steps(20)  # by then it is told how they came together
        for _ in range(1 if "again" in fault.code else fault.times):
            known = len(job.told())
            if fault.act != "begin":
                job.break_it()
            job.await_more(known)
            if not fault.ends and fault.times > 1:
                job.await_steps(5)
        if "again" in fault.code and fault.times > 1:
            job.wait_for(lambda: len(job.told()) >= fault.times, f"not {fault.times} incidents")
        incident = job.told()[known if fault.times == 1 or not fault.ends else -1]
        verdict = incident.verdict
        report = f"{incident.reason}\n{verdict}"
        print(f"VERDICT {fault.kind}: {fault.name}: {verdict.culprit if verdict else None} {report}")
        assert verdict is not None, report
        assert verdict.culprit is fault.culprit, report
        assert fault.nodes is None or verdict.nodes == fault.nodes, report
        assert verdict.advice is fault.advice, report
        assert verdict.sentence.endswith("."), report
        if fault.ends:
            assert set(job.exit_codes().values()) != {0}
        else:
            job.await_steps(3)
            assert os.path.exists(tmp_path)
