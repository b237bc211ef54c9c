"""SIGTERM before any worker was started: as an eviction does it to a pod that has just come, or that waits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_LEFT
from tests.support.forked import Forked
from tests.support.plainjob import LIMIT_S, PlainJob

SENTENCE = "elastic-trainer: SIGTERM came before the workers were started: this node leaves"


@pytest.mark.timeout(200)
def test_a_node_that_waits_for_others_leaves_when_it_is_told_to(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """In restart mode it waits in the rendezvous: it exits with 143, and its key goes with it, although its lease
    would last for ten minutes. The run is there for the next nodes."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, flags=["--alone"], options={"ttl": "600", "last_call": "1"}) as job:
        early = job.add()
        job.wait_for(lambda: job.present(early.name), "its key does not come")
        early.terminate()
        assert job.exit_code(early) == EXIT_LEFT, job.describe()
        assert not job.present(early.name)
        assert SENTENCE in job.log(early.name)
        assert "Traceback" not in job.log(early.name)
        others = [job.add().name for _ in range(2)]
        assert sorted(job.await_order()) == sorted(others)
        job.finish()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recovery", ["restart", "in_place"])
def test_a_node_that_waits_for_etcd_leaves_when_it_is_told_to(tmp_path: Path, recovery: str) -> None:
    """In both modes, long before ``connect_timeout`` is over."""
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LIMIT_S)
        command = ["-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3", "--rdzv-id=run"]
        command += ["--rdzv-backend=etcd3", f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"]
        command += [f"--rdzv-conf=recovery={recovery},connect_timeout=600", "no_script_is_ever_started.py"]
        process = Forked(command, os.environ, log, log)
        try:
            silent.accept()[0].close()
            process.terminate()
            assert process.wait(LIMIT_S) == EXIT_LEFT, log.read_text()
        finally:
            process.kill()
    assert SENTENCE in log.read_text()
    assert "Traceback" not in log.read_text()
