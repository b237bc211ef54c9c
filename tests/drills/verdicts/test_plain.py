"""The verdict on a script without a Session, whose workers tell an agent nothing: plain DistributedDataParallel."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import Incident, Verdict
from elastic_trainer.model import Culprit
from tests.drills.endings.job import LASTING, Job

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("etcd_binary")]

PLAIN = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

def train(here, name):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(100_000):
        model(torch.ones(2, 4)).sum().backward()
        (here / f"trains-{name}-{os.getpid()}").touch()
        fault = here / f"fault-{name}"
        if fault.exists():
            what = fault.read_text()
            fault.unlink()
            exec(what)
        time.sleep(0.02)

dist.init_process_group("gloo")
train(Path(sys.argv[1]), os.environ["ELASTIC_TRAINER_NODE"])
"""

ABORTS = "import ctypes\nctypes.CDLL('libstdc++.so.6')._Znwm(ctypes.c_size_t(1 << 62))"


def verdicts_on(job: Job, kind: str) -> list[Verdict]:
    """On incidents of this kind; an early one may be replaced."""
    items = job.store.range(job.keys.incidents, Deadline.after(10.0)).items
    known = [Incident.decode(item.value, item.key) for item in items]
    return [each.verdict for each in known if each.kind == kind and not each.planned and each.verdict is not None]


@pytest.mark.parametrize("name", ["n0", "n1"])
@pytest.mark.parametrize(
    ("fault", "culprit", "says"),
    [
        ("", Culprit.OUTSIDE, "was killed by SIGKILL"),
        ("raise ValueError('no such class: 11')", Culprit.SCRIPT, "exit code 1: ValueError: no such class: 11, at "),
        ("raise OSError(28, 'No space left on device')", Culprit.STORAGE, "No space left on device, at "),
        (ABORTS, Culprit.MEMORY, "was killed by SIGABRT: uncaught std::bad_alloc"),
        ("import sys\nsys.exit('the licence has expired')", Culprit.SCRIPT, "exit code 1: the licence has expired"),
        ("import argparse\nargparse.ArgumentParser(prog='x').error('no --lr2')", Culprit.SCRIPT, "x: error: no --lr2"),
    ],
)
def test_the_verdict_names_who_failed_and_not_who_lost_its_peer(
    tmp_path: Path, etcd_endpoint: str, run_id: str, fault: str, culprit: Culprit, says: str, name: str
) -> None:
    """Each worker's error output goes to a file of its own, where two of the faults leave their only words."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    options = {"recovery": "restart", **LASTING}
    with Job(
        tmp_path,
        etcd_endpoint,
        run_id,
        least=1,
        most=2,
        options=options,
        entry=[str(script), str(tmp_path)],
        environment={"PET_REDIRECTS": "2", "PET_LOG_DIR": str(tmp_path / "output")},
    ) as job:
        job.start(2)
        job.wait_for(lambda: len(list(tmp_path.glob("trains-*"))) == 2, "the two do not train")
        if fault:
            begun = tmp_path / "begun"
            begun.write_text(fault)
            begun.rename(tmp_path / f"fault-{name}")
        else:
            killed = job.node(name).worker()
            assert killed is not None
            killed.send_signal(signal.SIGKILL)
        for kind in ("worker_died", *(["round"] if not fault else [])):  # the round's comes a minute later

            def right(kind: str = kind) -> bool:
                return any(
                    (each.culprit, each.nodes) == (culprit, (name,)) and says in each.sentence
                    for each in verdicts_on(job, kind)
                )

            job.wait_for(right, f"there is no such verdict on {kind}")
            print(verdicts_on(job, kind))
        job.wait_for(lambda: len(list(tmp_path.glob("trains-*"))) >= 4, "the two do not go on")
