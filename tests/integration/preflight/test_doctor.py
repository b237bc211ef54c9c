"""``elastic-trainer doctor``: against real etcd, alone and with others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from elastic_trainer.cli.main import main
from elastic_trainer.clock import SYSTEM
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import free_ports
from tests.support.guarded import guard

LIMIT_S = 200.0
QUICK = ["doctor", "--no-compute", "--json"]


@dataclass(frozen=True, slots=True)
class Said:
    """What a doctor printed with ``--json``."""

    code: int
    values: dict[str, Any]

    def finding(self, name: str) -> dict[str, Any]:
        return next(each for each in self.values["findings"] if each["name"] == name)

    def has(self, name: str) -> bool:
        return any(each["name"] == name for each in self.values["findings"])


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The command sends its log to a standard error that is gone after the test."""
    yield
    structlog.reset_defaults()


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """In this process, without the part that needs torch."""
    code = main([*QUICK, *words])
    return Said(code, json.loads(capsys.readouterr().out))


def start(*words: str) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "elastic_trainer.cli.main", *QUICK, *words]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> Said:
    out, error = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in error, error
    return Said(process.returncode, json.loads(out))


def test_without_any_option_it_looks_at_this_machine() -> None:
    """Within seconds, with torch; what it was not asked for is skipped, with the reason."""
    begun = SYSTEM.monotonic()
    call = [sys.executable, "-m", "elastic_trainer.cli.main", "doctor"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("no --endpoint was given", "no checkpoint directory was given", "GFLOP/s", "GB/s", "is fit to train"):
        assert text in done.stdout
    assert "doctor: multiplying matrices" in done.stderr
    assert SYSTEM.monotonic() - begun < 100.0  # 4 s on two quiet cores


def test_a_healthy_etcd(etcd_endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its version and round trip, and the directory's speed, as JSON that a program can read."""
    said = doctor(capsys, "--endpoint", etcd_endpoint, "--checkpoint-dir", str(tmp_path))
    assert said.code == 0
    assert said.values["fit"] is True
    assert f"{etcd_endpoint}: etcd 3." in said.finding("etcd")["text"]
    assert said.finding("etcd.round_trip")["value"] > 0
    assert said.finding("disk.write")["unit"] == "MB/s"
    assert said.finding("compute")["status"] == "skipped"
    assert said.finding("peers")["text"] == "no --run-id was given"


def test_an_etcd_that_is_not_there_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest is looked at all the same; the hint says what to do."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    said = doctor(capsys, "--endpoint", endpoint, "--run-id", "check")
    assert said.code == 1
    assert said.finding("etcd")["status"] == "bad"
    assert f"nothing listens at {endpoint}" in said.finding("etcd")["text"]
    assert "start etcd" in said.finding("etcd")["hint"]
    assert said.has("shm")


def test_one_dead_endpoint_of_two_is_a_warning(etcd_endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each endpoint is told by itself."""
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    said = doctor(capsys, "--endpoint", f"{etcd_endpoint},{dead}")
    assert said.code == 0
    assert said.finding(f"etcd {etcd_endpoint}")["status"] == "ok"
    assert said.finding(f"etcd {dead}")["status"] == "warn"


def test_credentials_are_those_of_rdzv_conf(own_etcd: EtcdServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them the refusal is told; with them a user with no more rights than a job needs gets all findings."""
    guard(own_etcd, "secret")
    refused = doctor(capsys, "--endpoint", own_etcd.endpoint)
    assert refused.code == 1
    assert "user" in refused.finding("etcd")["text"]
    conf = "user=trainer,password=secret"
    let_in = doctor(capsys, "--endpoint", own_etcd.endpoint, "--run-id", "check", "--rdzv-conf", conf)
    assert let_in.code == 0, let_in.values
    assert "etcd 3." in let_in.finding("etcd")["text"]
    assert "secret" not in json.dumps(let_in.values)


def test_an_unusable_directory_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason."""
    said = doctor(capsys, "--checkpoint-dir", "/proc/checkpoints")
    assert said.code == 1
    assert said.values["fit"] is False
    assert "cannot be written" in said.finding("disk")["text"]


def test_too_little_space_is_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``--min-disk`` is in GiB."""
    said = doctor(capsys, "--checkpoint-dir", str(tmp_path), "--min-disk", "1e9")
    assert said.code == 1
    assert said.finding("disk.space")["status"] == "bad"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--peers", "2"], "--peers needs --endpoint"),
        (["--run-id", "r"], "--run-id needs --endpoint"),
        (["--peers", "2", "--endpoint", "h"], "--peers needs --run-id"),
        (["--peers", "1", "--endpoint", "h", "--run-id", "r"], "--peers 1 is below 2"),
        (["--timeout", "0"], "--timeout 0.0 is not a number of seconds above 0"),
        (["--min-disk", "-1"], "--min-disk -1.0 is not a number of GiB"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0 is below 1"),
        (["--rdzv-conf", "interfac=x"], "unknown key 'interfac'"),
        (["--run-id", "a/b", "--endpoint", "h"], "run id (--run-id) 'a/b' is not valid"),
        (["--endpoint", "h:port"], "store endpoint 'h:port' is not host:port"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And exit code 78, before anything is looked at."""
    assert main(["doctor", *words]) == 78
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_doctors_that_meet_measure_their_network(etcd_endpoint: str, run_id: str) -> None:
    """Three on one machine: each has its pairs' rate and the time of all together, and has compared itself."""
    words = ["--endpoint", etcd_endpoint, "--run-id", run_id, "--peers", "3", "--timeout", "150"]
    words += ["--rdzv-conf", "preflight_ratio=0.01"]  # three measure at the same time on this machine
    said = [outcome(process) for process in [start(*words) for _ in range(3)]]
    for each in said:
        assert each.code == 0, each.values
        assert each.finding("peers.connect")["value"] == 2
        assert each.finding("allreduce.pairs")["value"] > 0
        assert "16 MiB" in each.finding("allreduce.all3")["text"]
        assert each.finding("peers.clock")["status"] == "ok"
        assert not each.has("allreduce.node")
    assert len({each.values["node"] for each in said}) == 3


def test_a_doctor_that_stays_alone_says_so(etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How many came, who, and what to do; its key goes, so that a later meeting does not count on it."""
    words = ["--endpoint", etcd_endpoint, "--run-id", run_id, "--peers", "2", "--rdzv-conf", "node_id=lonely"]
    said = doctor(capsys, *words, "--timeout", "40")  # on a busy machine the other checks take more than half of it
    assert said.code == 1
    assert "1 of 2 nodes joined within" in said.finding("allreduce")["text"]
    assert "lonely" in said.finding("allreduce")["text"]
    assert "--timeout" in said.finding("allreduce")["hint"]


def test_a_doctor_compares_itself_with_earlier_ones(
    etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each found stays in the run for some minutes."""
    words = ["--endpoint", etcd_endpoint, "--run-id", run_id, "--checkpoint-dir", "/tmp"]
    for node in ("a", "b"):
        doctor(capsys, *words, "--rdzv-conf", f"node_id={node}")
    third = doctor(capsys, *words, "--rdzv-conf", "node_id=c,preflight_ratio=0.001")
    assert "of the median of 2 other nodes" in third.finding("peers.disk.write")["text"]
    assert third.finding("run.clock")["status"] == "ok"
