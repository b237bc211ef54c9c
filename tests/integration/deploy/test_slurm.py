"""The batch script for Slurm, with stand-ins for srun and scontrol: real nodes start, leave on SIGTERM, come back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.settings import RendezvousOptions
from tests.support.commands import quiet
from tests.support.deployment import DEPLOY, ran
from tests.support.requirements import needs

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")
LIMIT_S = 120.0
SRUN = """#!/bin/bash
# Starts as many tasks as the job has nodes, passes SIGTERM on, and ends with the highest status, as srun does.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
highest=0
for task in "${tasks[@]}"; do
    status=0
    wait "$task" || status=$?
    while kill -0 "$task" 2>/dev/null; do status=0; wait "$task" || status=$?; done
    ((status > highest)) && highest=$status
done
exit "$highest"
"""
SCONTROL = """#!/bin/sh
[ "$1" != show ] || echo "   JobState=$STATE Reason=None"
[ "$1" != requeue ] || echo "$2" >> requeued
"""


def directives() -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", TEXT, re.MULTILINE)
    return dict(found)


def test_the_script_is_good_bash() -> None:
    """bash and shellcheck have nothing to say."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    shellcheck = needs("shellcheck", "it reads the batch script")
    done = ran(shellcheck, "--shell=bash", SCRIPT)
    assert (done.returncode, done.stdout) == (0, "")


def test_nodes_are_told_early_enough_to_leave() -> None:
    """Slurm's notice comes before torchrun's patience ends, and that is longer than a worker gets to leave a round."""
    name, _, seconds = directives()["signal"].partition("@")
    (shutdown,) = re.findall(r"--shutdown-timeout=(\d+)", TEXT)
    defaults = RendezvousOptions()
    assert name == "TERM", "to the steps; with B: it would go to the script alone"
    assert int(seconds) >= int(shutdown) + 20
    assert int(shutdown) > defaults.sever_timeout + defaults.form_timeout
    assert {"no-kill", "requeue", "exclusive"} <= directives().keys()


def test_a_job_without_an_address_of_etcd_ends_before_it_starts_nodes(tmp_path: Path) -> None:
    """Loopback would be another machine for each node: one sentence and the exit code of a wrong configuration."""
    (tmp_path / "srun").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "r", "SLURM_JOB_ID": "1"}
    for endpoint in ({}, {"ELASTIC_TRAINER_ENDPOINT": ""}):
        done = ran("bash", SCRIPT, cwd=tmp_path, env=environment | endpoint)
        assert done.returncode == EXIT_CONFIG
        assert "ELASTIC_TRAINER_ENDPOINT is not set" in done.stderr
    assert not (tmp_path / "started").exists()


class Played:
    """The batch script of one job, as Slurm would start it on two nodes."""

    def __init__(self, directory: Path, endpoint: str, run: str, job: int, state: str = "RUNNING") -> None:
        tools = directory / "bin"
        tools.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.log = directory / f"{job}.log"
        environment = quiet(os.environ) | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NAME": run,
            "SLURM_NNODES": "2",
            "STATE": state,
            "TORCHRUN": f"{sys.executable} -m torch.distributed.run",
            "ELASTIC_TRAINER_ENDPOINT": endpoint,
            "TRAINING": "-m elastic_trainer.training mnist epochs=1000 checkpoint.directory=saved",
        }
        with self.log.open("wb") as log:
            self._batch = subprocess.Popen(
                ["bash", str(SCRIPT)],
                cwd=directory,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_said(self, what: str) -> None:
        deadline = Deadline.after(LIMIT_S)
        while what not in self.said():
            assert self._batch.poll() is None, self.said()
            assert not deadline.expired, self.said()
            pause(0.1)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def terminate(self) -> int:
        """What Slurm's notice does: SIGTERM to srun's tasks; the script's exit code."""
        for child in psutil.Process(self._batch.pid).children():
            child.send_signal(signal.SIGTERM)
        return self._batch.wait(LIMIT_S)

    def kill(self) -> None:
        if self._batch.poll() is None:
            os.killpg(self._batch.pid, signal.SIGKILL)
        self._batch.wait()


@pytest.mark.timeout(400)
def test_a_job_whose_time_is_over_is_queued_again_and_resumes(tmp_path: Path, etcd: EtcdServer, run_id: str) -> None:
    """Both nodes leave with 143 and a checkpoint, and the script has the job queued again; the second time it resumes
    from there. A job that somebody has canceled is not queued again."""
    first = Played(tmp_path, etcd.endpoint, run_id, 7)
    try:
        first.await_said("training.progressed")
        assert first.terminate() == EXIT_LEFT, first.said()
    finally:
        first.kill()
    assert (tmp_path / "requeued").read_text() == "7\n"
    saved = max(tmp_path.glob("saved/step-*")).name
    assert '"node": "job7-0"' in first.said()
    again = Played(tmp_path, etcd.endpoint, run_id, 7, state="CANCELLED")
    try:
        again.await_said(f'"resumed_from": "{saved}"')
        assert again.terminate() == EXIT_LEFT, again.said()
    finally:
        again.kill()
    assert (tmp_path / "requeued").read_text() == "7\n"
