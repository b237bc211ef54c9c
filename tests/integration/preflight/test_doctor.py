"""The command, its checks in processes of their own, and how nodes meet to measure their network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from elastic_trainer.cli.main import main
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import free_ports
from elastic_trainer.preflight.child import Child, findings_of
from elastic_trainer.preflight.comparison import report_of
from elastic_trainer.preflight.examination import Neighbor
from elastic_trainer.preflight.judge import FitLimits, Published, Status, bad, judge, judge_pairs, sentence
from elastic_trainer.preflight.together import AbsentError, Heard, attended, port_of
from elastic_trainer.store.api import RunKeys
from tests.support.etcd import guard
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

ILL = "tests.integration.preflight.illness"
LIMIT_S = 200.0


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_a_check_that_hangs_is_killed_and_named() -> None:
    """What it had found before counts; nothing is left of it."""
    clock, before, begun = ManualClock(), {each.pid for each in children()}, SYSTEM.monotonic()
    deadline = Deadline.after(LIMIT_S, clock)
    found = findings_of("check", ILL, ["hang"], deadline, lambda _: clock.advance(LIMIT_S), {})
    assert SYSTEM.monotonic() - begun < 60.0
    assert [finding.status for finding in found] == [Status.OK, Status.BAD]
    assert re.search(r"no answer in [\d.]+ s while doing hang", found[1].text), found[1].text
    assert {each.pid for each in children()} <= before


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "exited (exit code 1) while doing raise: RuntimeError: CUDA error: uncorrectable ECC error"),
        ("die", "exited (killed by SIGSEGV) while doing die"),
    ],
)
def test_a_check_that_crashes_is_named_with_its_last_words(how: str, text: str) -> None:
    """The exception, or the signal."""
    found = findings_of("check", ILL, [how], Deadline.after(LIMIT_S), lambda _: None, {})
    assert (found[-1].name, found[-1].status) == ("check", Status.BAD)
    assert text in found[-1].text


# ---- real measurements


def measured(node: str) -> Published:
    versions: dict[str, str] = {}
    module = "elastic_trainer.preflight.compute"
    found = findings_of("compute", module, [f"{LIMIT_S}"], Deadline.after(LIMIT_S), lambda _: None, versions)
    assert [finding for finding in found if finding.status is not Status.OK] == []
    return Published(report_of(node, "127.0.0.1", found, versions, 0.0), 1, 1)


def faster(measured: Published, node: str, times: float) -> Published:
    """A node like ``measured`` that is so many times as fast."""
    values = {name: value * times for name, value in measured.report.values.items()}
    return Published(measured.report.model_copy(update={"node": node, "values": values}), 1, 1)


def test_a_machine_that_is_slower_than_the_others_is_unfit() -> None:
    """It measures memory and matrices for real. The others are made of that: a second measurement would tell how busy
    this machine is by then."""
    slow = measured("slow")
    assert set(slow.report.values) == {"memory.cpu", "matmul.cpu.fp32"}
    assert slow.report.versions["torch"]
    good = [faster(slow, "a", 4.0), faster(slow, "b", 5.0)]
    verdict = judge(slow, good, FitLimits())
    assert "matmul.cpu.fp32" in sentence(bad(verdict))
    assert "of the median of 2 other nodes" in sentence(bad(verdict))
    assert not bad(judge(good[0], [good[1], slow], FitLimits()))
    assert not bad(judge(slow, [faster(slow, "a", 1.2), faster(slow, "b", 0.9)], FitLimits()))


# ---- all-reduces


def part(rank: int, port: int, limit_s: float) -> dict[str, Any]:
    place = {"host": "127.0.0.1", "port": port, "nonce": "n", "rank": rank}
    return {**place, "names": ["a", "b", "c"], "limit_s": limit_s, "wait_s": 4.0}


def test_a_node_that_dies_before_it_measures_is_named_by_the_others() -> None:
    """They measure each other, and wait for it once."""
    deadline = Deadline.after(LIMIT_S)
    with ExitStack() as stack:
        started = [
            stack.enter_context(Child("elastic_trainer.preflight.collective", [f"{LIMIT_S}", "127.0.0.1"]))
            for _ in range(3)
        ]
        ports = [port_of(child, deadline, lambda _: None) for child in started]
        started[2].end()
        for rank, child in enumerate(started[:2]):
            child.send(part(rank, ports[0], LIMIT_S))
        for rank, child in enumerate(started[:2]):
            heard = Heard()
            for message in child.messages(deadline):
                heard.take(message)
            assert (heard.pairs[0, 1].rate or 0) > 0
            assert "c did not join" in heard.pairs[0, 2].error
            assert "c did not join" in heard.all.error
            found = {finding.name: finding for finding in judge_pairs(["a", "b", "c"], rank, heard.pairs, FitLimits())}
            assert "c reached none of 2" in found["allreduce.node"].text


QUICK = ["doctor", "--no-compute", "--json"]


@dataclass(frozen=True, slots=True)
class Said:
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
    """Its version and round trip, and the directory's speed, as JSON that a program can read. One dead endpoint of two
    is a warning."""
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    said = doctor(capsys, "--endpoint", f"{etcd_endpoint},{dead}", "--checkpoint-dir", str(tmp_path))
    assert said.code == 0
    assert said.values["fit"] is True
    assert said.finding(f"etcd {etcd_endpoint}")["status"] == "ok"
    assert f"{etcd_endpoint}: etcd 3." in said.finding(f"etcd {etcd_endpoint}")["text"]
    assert said.finding(f"etcd {dead}")["status"] == "warn"
    assert said.finding("etcd.round_trip")["value"] > 0
    assert said.finding("disk.write")["unit"] == "MB/s"
    assert said.finding("compute")["status"] == "skipped"
    assert said.finding("peers")["text"] == "no --run-id was given"


def test_what_is_bad_is_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An etcd that is not there, with what to do, and too little space. The rest is looked at all the same."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    said = doctor(
        capsys, "--endpoint", endpoint, "--run-id", "check", "--checkpoint-dir", str(tmp_path), "--min-disk", "1e9"
    )
    assert said.code == 1
    assert said.finding("etcd")["status"] == "bad"
    assert f"nothing listens at {endpoint}" in said.finding("etcd")["text"]
    assert "start etcd" in said.finding("etcd")["hint"]
    assert said.finding("disk.space")["status"] == "bad"
    assert said.has("shm")


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


KEYS = RunKeys("/p", "run")


def neighbor(name: str) -> Neighbor:
    return Neighbor(name, "127.0.0.1", 1)


class Slow(MemoryStore):
    """Answers the first look, and is asked for the second one when no time is left."""

    looks = 0

    def range(self, prefix: str, deadline: Deadline, **options: Any) -> Any:
        self.looks += 1
        if self.looks > 1:
            assert isinstance(deadline.clock, ManualClock)
            deadline.clock.advance(deadline.remaining_s())
            raise StoreUnavailableError("no time was left to ask etcd")
        return super().range(prefix, deadline, **options)


def test_a_missing_node_is_told_though_etcd_cannot_be_asked_at_the_end() -> None:
    """On a busy machine a pause ends when the time is over: that etcd could not be asked then is no news."""
    clock = ManualClock()
    with (
        pytest.raises(AbsentError, match=r"1 of 3 nodes joined within [\d.]+ s: a \(start the same command"),
        attended(
            Slow(MemoryBackend()), KEYS, neighbor("a"), 3, Deadline.after(1.0, clock), lambda _: clock.advance(0.5)
        ),
    ):
        pytest.fail("the meeting took place")


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [("b", 2, "use the same --peers everywhere"), ("a", 3, "another node has the name 'a'")],
)
def test_nodes_that_do_not_fit_together_are_told(name: str, count: int, said: str) -> None:
    """While node a waits for two more. Of two that expect different numbers the first may have left when the second
    looks; two of one name could not be told apart."""
    backend, clock, waits, looked = MemoryBackend(), ManualClock(), threading.Event(), threading.Event()

    def attend(name: str, count: int, doing: Callable[[str], None]) -> str:
        limit = Deadline.after(2.0, clock)
        try:
            with attended(MemoryStore(backend), KEYS, neighbor(name), count, limit, doing):
                return "met"
        except (ConfigError, AbsentError) as error:
            return str(error)

    def wait(_: str) -> None:
        waits.set()
        looked.wait(LIMIT_S)
        clock.advance(1.0)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(attend, "a", 3, wait)
        assert waits.wait(LIMIT_S)
        told = {attend(name, count, lambda _: clock.advance(1.0))}
        looked.set()
        told.add(first.result(LIMIT_S))
    assert "met" not in told
    assert any(said in text for text in told), told
