"""A job with data worker processes, and signals to it and to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_trainer.checkpoint import CheckpointManager
from tests.integration.worker.launch import Started, finished, started, tail
from tests.integration.worker.test_stopping import ledger, lines, steps_of
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("job.py")
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    process: Started
    workers: list[psutil.Process]
    connection: socket.socket
    log: Path

    def ended(self) -> None:
        assert not psutil.wait_procs(self.workers, LIMIT_S)[1], tail(self.log)


@contextmanager
def training(directory: Path) -> Iterator[Job]:
    log = directory / "log"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        command = [sys.executable, str(SCRIPT), str(directory), str(server.getsockname()[1])]
        with started(command, log, ledger(directory)) as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(LIMIT_S)
                with connection.makefile() as said:
                    workers = [psutil.Process(int(pid)) for pid in said.readline().split()]
                assert len(workers) == 2, tail(log)
                yield Job(process, workers, connection, log)


def test_a_job_that_is_killed_leaves_no_data_workers_and_no_connections(tmp_path: Path) -> None:
    """Its peers see the end of their connections at once, not when some orphan ends."""
    with training(tmp_path) as job:
        job.workers[0].suspend()  # cannot notice anything by itself
        job.process.kill()
        assert job.connection.recv(1) == b""  # the stopped worker would never let go of it
        job.ended()


def test_a_signal_to_a_data_worker_does_not_stop_the_job(tmp_path: Path) -> None:
    """It is no wish to evict the rank, and the worker goes on; a signal to all of them stops the job as usual."""
    with training(tmp_path) as job:
        for worker in job.workers:
            worker.send_signal(signal.SIGTERM)
        before = steps_of(tmp_path, 0)
        eventually(lambda: steps_of(tmp_path, 0) > before + 20, lambda: tail(job.log))
        assert "stop.requested" not in job.log.read_text()
        for pid in [*(worker.pid for worker in job.workers), job.process.pid]:
            os.kill(pid, signal.SIGTERM)  # as torchrun does: to the whole process group
        assert finished(job.process, job.log) == 143, tail(job.log)
        job.ended()
    newest = CheckpointManager(tmp_path / "checkpoints").newest()
    assert newest is not None
    (closed,) = (line for line in lines(tmp_path) if line["event"] == "closed")
    assert (closed["status"], closed["step"], closed["skipped_samples"]) == ("stopped", newest.step, 0)


def test_a_data_worker_that_is_killed_ends_the_job_with_a_clear_error(tmp_path: Path) -> None:
    """Soon, and the other one is gone too."""
    with training(tmp_path) as job:
        job.workers[1].kill()
        assert finished(job.process, job.log) == 1, tail(job.log)
        job.ended()
    assert "error: a data worker" in job.log.read_text()
    assert "was killed (signal 9)" in job.log.read_text()


def test_a_script_may_end_while_it_holds_a_loader_that_reads_ahead() -> None:
    """Its processes ignore SIGTERM, so Python would wait for them forever; here for no longer than this limit."""
    script = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "from elastic_trainer.data.sampler import begun, separate\n"
        "loader = DataLoader(torch.arange(100.0), num_workers=2, persistent_workers=True); separate(loader)\n"
        "held = begun(loader); print(float(next(held)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout) == (0, "0.0\n"), ended.stderr
