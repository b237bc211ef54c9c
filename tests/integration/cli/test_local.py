"""``elastic-trainer local`` and ``run`` on real etcd and torchrun: faults, recovery, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.measure import Book
from elastic_trainer.local import agents, processes
from elastic_trainer.local.ledger import LedgerTail, LineKind
from elastic_trainer.variables import ENV_LEDGER_DIR
from tests.support.requirements import needs_hosts

JOB = """
import sys, torch
from elastic_trainer import Session
from elastic_trainer.clock import pause

directory, steps, alone = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Session(checkpoint_dir=directory, device="cpu") as session:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = session.wrap(model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(4 * steps, 1))
    for batch in session.batches(data, global_batch_size=4, epochs=1):
        with session.step() as step:
            step.backward(model(batch.x).mean())
            optimizer.step()
        pause(1.0 if step.number >= alone and session.world_size == 1 else 0.05)
    print(f"the last step was {step.number}", flush=True)
"""
"""Behind step ``alone`` it is slow until another node is there."""
LIMIT_S = 450.0

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("etcd_binary")]


class Local:
    """The command as a user starts it."""

    def __init__(self, directory: Path, *options: str, job: tuple[str, ...]) -> None:
        self.run_dir = directory / "run"
        self.output = directory / "output"
        given = ["--run-dir", str(self.run_dir), "--rdzv-conf", "ttl=10", "--timeout", "400", *options]
        command = [sys.executable, "-m", "elastic_trainer.cli.main", "local", *given, "--", *job]
        self.process = agents.spawn(command, self.output, os.environ)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def said(self) -> str:
        return self.output.read_text()

    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return values

    def await_step(self, step: int) -> None:
        tail, reached, deadline = LedgerTail(self.run_dir / "ledger"), 0, Deadline.after(LIMIT_S)
        while reached < step:
            assert self.process.poll() is None, self.said()
            assert not deadline.expired, self.said()
            reached = max([reached, *(line.step for line in tail.read() if line.event is LineKind.STEP)])
            pause(0.05)

    def committed_again(self) -> int:
        return Book(LedgerTail(self.run_dir / "ledger").read()).committed_again()

    def left(self) -> list[Any]:
        """Processes of the run that still live: nodes, workers and the etcd."""
        nodes = processes.marked({ENV_LEDGER_DIR: str(self.run_dir / "ledger")})
        return nodes + [each for each in processes.tree(os.getpid())[1:] if self._is_mine(each)]

    def _is_mine(self, process: Any) -> bool:
        return processes.alive(process) and str(self.run_dir) in " ".join(process.cmdline())

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        mine = {ENV_LEDGER_DIR: str(self.run_dir / "ledger")}
        processes.kill_all(processes.marked(mine), mine, Deadline.after(10.0))


def begin(started: list[Local], directory: Path, *options: str, steps: int = 60, alone: int | None = None) -> Local:
    (directory / "job").mkdir()
    script = directory / "job" / "train.py"
    script.write_text(JOB)
    job = (str(script), str(directory / "job" / "state"), str(steps), str(steps if alone is None else alone))
    command = Local(directory, *options, job=job)
    started.append(command)
    return command


@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=pytest.mark.root)])
def test_faults_are_carried_out_and_survived(tmp_path: Path, started: list[Local], hosts: bool) -> None:
    """A worker dies, a node dies, another joins: the job ends with every sample used once, and the summary says it.

    With ``--hosts`` too, for a script and data below /tmp, of which each host has its own."""
    if hosts:
        needs_hosts()
    faults = ("--kill-worker-at", "10:n1", "--kill-node-at", "20", "--join-at", "50", *["--hosts"] * hosts)
    steps = 150
    command = begin(started, tmp_path, "--nodes", "1:2", "--start", "2", *faults, steps=steps, alone=100)
    assert command.wait() == 0, command.said()
    assert ("on a host of its own" in command.said()) == hosts
    summary = command.summary()
    assert [fault["what"].split(" ")[0] for fault in summary["faults"]] == ["worker", "node", "node"]
    struck = next(node for node in summary["nodes"] if node["struck"])
    assert struck["why"].startswith("killed on purpose at step ")
    assert summary["faults"][1]["step"] >= 20
    assert (summary["audit"]["exact"], summary["audit"]["steps"]) == (True, steps), summary["audit"]
    for fault in summary["faults"]:
        assert fault["recovery"] is not None, fault
        assert fault["recovery"]["recovery_s"] > 0
    assert summary["rounds"][0]["nodes"] == ["n0", "n1"]
    assert "n2" in summary["rounds"][-1]["nodes"]
    assert summary["verdict"] == {"exit_code": 0, "reason": "2 nodes finished the job"}
    assert "recovered" in command.said()
    assert command.left() == []


def test_a_fault_whose_step_never_comes_is_a_failure(tmp_path: Path, started: list[Local]) -> None:
    """A drill that did not happen must not look like one that was survived."""
    command = begin(started, tmp_path, "--nodes", "1:1", "--kill-worker-at", "500", steps=5)
    assert command.wait() == 1
    assert command.summary()["verdict"]["reason"] == "kill-worker at step 500 was never carried out"


def test_a_job_that_fails_gives_its_exit_code(tmp_path: Path, started: list[Local]) -> None:
    """With the node that failed; and the logs are kept."""
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)\n")
    command = Local(tmp_path, "--nodes", "1:1", "--max-restarts", "0", job=(str(script),))
    started.append(command)
    assert command.wait() == 1
    assert command.summary()["verdict"]["reason"] == "node n0 exited with 1"
    assert "kept" in command.said()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(signum: signal.Signals, tmp_path: Path, started: list[Local]) -> None:
    """Not of the nodes, not of the workers, not the etcd; the summary is still written."""
    command = begin(started, tmp_path, "--nodes", "2:2", steps=100_000)
    command.await_step(5)
    assert len(command.left()) >= 5  # the command, two torchruns, two workers
    command.process.send_signal(signum)
    assert command.wait(60.0) == 128 + signum
    assert command.left() == []
    assert command.summary()["verdict"]["reason"] == f"stopped by {signum.name}"
    assert "Traceback" not in command.said()


def test_when_the_command_itself_is_killed_its_nodes_die_too(tmp_path: Path, started: list[Local]) -> None:
    """Nobody is there to end them: the kernel tells them."""
    command = begin(started, tmp_path, "--nodes", "2:2", steps=100_000)
    command.await_step(5)
    command.process.kill()
    command.process.wait()
    deadline = Deadline.after(90.0)
    while command.left() and not deadline.expired:
        pause(0.1)
    assert command.left() == []


@pytest.mark.timeout(200)
def test_a_script_with_a_session_trains_in_place(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Its name and etcd are what was given; the exit code is torchrun's."""
    (tmp_path / "train.py").write_text(JOB)
    command = [sys.executable, "-m", "elastic_trainer", "run", "--endpoint", etcd_endpoint, "--name", run_id]
    words = [*command, "--", "train.py", "state", "2", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "recovery=in_place train.py state" in done.stderr
    assert "the last step was 2" in done.stdout


def test_completion_knows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    said = capsys.readouterr().out
    assert "checkpoints" in said
    assert "--kill-worker-at" in said
