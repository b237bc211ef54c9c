"""A node and etcd started as systemd would: the unit's own command line with its environment file; a node's stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT
from elastic_trainer.local.etcd import EtcdServer, find_binary, spawn
from elastic_trainer.local.hosts import HOST, free_ports
from tests.support.commands import quiet
from tests.support.platform import status
from tests.support.units import SYSTEMD, environment_file, unit

LIMIT_S = 120.0
NODE = unit(SYSTEMD / "elastic-trainer@.service")
ETCD = unit(SYSTEMD / "elastic-trainer-etcd.service")


def start(run: str, directory: Path, changes: dict[str, str]) -> subprocess.Popen[bytes]:
    """ExecStart= in the state directory, torchrun being that of this environment."""
    environment = environment_file(SYSTEMD / "run.env.example") | changes
    words = NODE.words(environment, instance=run)
    with (directory / "journal").open("ab") as journal:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]],
            cwd=directory,
            env=quiet(os.environ) | environment,
            stdout=journal,
            stderr=subprocess.STDOUT,
        )


def steps(directory: Path) -> bool:
    """Whether the job has made steps."""
    log = directory / "saved" / "steps.jsonl"
    return log.exists() and log.stat().st_size > 0


@pytest.mark.timeout(300)
def test_a_unit_trains_and_leaves_within_its_time(tmp_path: Path, etcd: EtcdServer, run_id: str) -> None:
    """``systemctl stop`` sends SIGTERM to the main process: it saves, and ends with the status that counts as success
    before TimeoutStopSec. Wrong limits for that run then end with the status that is not started again."""
    changes = {
        "NODES": "1:2",
        "ELASTIC_TRAINER_ENDPOINT": etcd.endpoint,
        "METRICS_PORT": str(free_ports(1)[0]),
        "TRAINING": "-m elastic_trainer.training mnist epochs=1000 checkpoint.directory=saved",
    }
    node = start(run_id, tmp_path, changes)
    try:
        deadline = Deadline.after(LIMIT_S)
        while not steps(tmp_path):
            assert node.poll() is None, (tmp_path / "journal").read_text()
            assert not deadline.expired, (tmp_path / "journal").read_text()
            pause(0.1)
        mistaken = start(run_id, tmp_path, changes | {"NODES": "1:3", "METRICS_PORT": str(free_ports(1)[0])})
        assert mistaken.wait(LIMIT_S) == EXIT_CONFIG
        node.send_signal(getattr(signal, NODE.one("KillSignal")))
        assert node.wait(NODE.seconds("TimeoutStopSec")) == EXIT_LEFT, (tmp_path / "journal").read_text()
    finally:
        node.kill()
        node.wait()
    assert list((tmp_path / "saved").glob("step-*")), (tmp_path / "journal").read_text()


def test_etcd_starts_with_its_unit_and_the_example(tmp_path: Path) -> None:
    """It takes the options and the variables together, and answers where the example says, but for ports that are free
    here and the directory."""
    client, peer = free_ports(2)
    example = environment_file(SYSTEMD / "etcd.env.example")
    variables = {name: value.replace(":2379", f":{client}") for name, value in example.items()}
    at = f"http://{HOST}:{peer}"
    variables |= {"ETCD_LISTEN_PEER_URLS": at, "ETCD_INITIAL_ADVERTISE_PEER_URLS": at}
    variables["ETCD_INITIAL_CLUSTER"] = f"{variables['ETCD_NAME']}={at}"
    options = [word.replace("/var/lib/etcd", str(tmp_path)) for word in ETCD.words(variables)[1:]]
    given = [f"{name}={value}" for name, value in variables.items()]
    log = tmp_path / "journal"
    with log.open("wb") as journal:
        process = spawn([shutil.which("env") or "/usr/bin/env", *given, find_binary(), *options], journal)
    try:
        deadline = Deadline.after(LIMIT_S)
        while status(f"http://{HOST}:{client}/health") != 200:
            assert process.poll() is None, log.read_text(errors="replace")
            assert not deadline.expired, log.read_text(errors="replace")
            pause(0.1)
    finally:
        process.kill()
        process.wait()
