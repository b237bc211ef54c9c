"""A machine that failed in two runs takes no part in the third; commands say why, and forget it once it is repaired."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_LEFT, EXIT_UNFIT
from elastic_trainer.membership.forgetting import faults_of, forget_machine
from tests.drills.verdicts.faults import FAULTS
from tests.drills.verdicts.striking import Struck
from tests.support.requirements import needs_hosts

pytestmark = [pytest.mark.timeout(400), pytest.mark.root, pytest.mark.usefixtures("etcd_binary")]
BROKEN = next(each for each in FAULTS if each.name == "an ECC error")


def said(*words: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic_trainer", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_third_run_does_not_start_on_a_machine_that_failed_in_two(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """In each of two runs the node is asked to leave once its GPU reports an ECC error. In the third one it ends with a
    sentence and exit code 71 before it joins, and the other trains alone; ``forget --machine`` ends that."""
    needs_hosts()
    machine, where = "", ("--endpoint", etcd_endpoint)
    for number in (1, 2):
        directory, run = tmp_path / str(number), f"{run_id}-{number}"
        with Struck(directory, etcd_endpoint, run, BROKEN) as job:
            job.start(2)
            job.await_world("n0", "n1")
            for name in ("n0", "n1"):
                record = job.record(name)
                assert record is not None
                machine = record.host
                if number == 1:  # of other tests
                    forget_machine(job.store, "/elastic_trainer", machine, Deadline.after(10.0))
            job.break_it()
            assert job.exit_code(job.node("n1")) == EXIT_LEFT
            job.await_world("n0", after=1)
            why = " ".join(said("why", run, *where).split())
            assert "uncorrectable ECC error" in why.partition("Evidence:")[0]
            assert "It was asked to leave." in why
            told = json.loads(said("why", run, *where, "-o", "json"))
            assert told["verdicts"][0]["culprit"] == "machine"
            assert len(told["machines"][machine]) == number
    with Struck(tmp_path / "3", etcd_endpoint, f"{run_id}-3", BROKEN, sick_machines="refuse") as job:
        try:
            job.start(2)
            assert job.exit_code(job.node("n1")) == EXIT_UNFIT
            assert f"machine {machine} has failed 2 times" in job.log("n1")
            assert f"elastic-trainer forget --machine {machine}" in job.log("n1")
            job.await_world("n0")
            assert said("forget", "--machine", machine, *where).startswith("forgot 2 faults")
            assert faults_of(job.store, "/elastic_trainer", machine, Deadline.after(10.0)) == []
        finally:  # other tests have hosts of this name
            forget_machine(job.store, "/elastic_trainer", machine, Deadline.after(10.0))
