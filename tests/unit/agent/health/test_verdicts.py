"""Clues as a node gathers them, and what it does with a verdict."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.health.verdicts import (
    AGAIN_S,
    KEPT,
    Clues,
    KernelLog,
    VerdictLimits,
    VerdictPorts,
    Verdicts,
    _place_by_phase,
    collective_of,
    earlier,
    ensure_healthy,
    machine_name,
    stack_of,
)
from elastic_trainer.agent.workers.deaths import Death
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import UnfitError
from elastic_trainer.ipc.page import Heartbeat, Reading
from elastic_trainer.membership.documents import (
    Batch,
    ClueKind,
    Incident,
    NodeHealth,
    RoundDocument,
    RoundMember,
    RoundState,
    Verdict,
)
from elastic_trainer.membership.forgetting import faults_of, forget_machine
from elastic_trainer.model import Advice, Cause, Culprit, Phase, Place, PreflightMode
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

KEYS = RunKeys("/et", "job")
STACKS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 10 in __next__
  File "/home/u/train.py", line 31 in batches
  File "/home/u/train.py", line 60 in main
"""


def reading(pid: int = 7, **notes: Any) -> Reading:
    pulse = Heartbeat(rank=2, round=4, step=9, epoch=1, used=64)
    return Reading(Path("/page"), pulse, Phase.TRAINING, False, {"pid": pid, "length": 100, "batch": 32} | notes)


def clues(**more: Any) -> Clues:
    return Clues("a", lambda: 4, clock=ManualClock(), **more)


def test_a_death_becomes_a_clue_with_the_batch_and_the_place() -> None:
    known = clues()
    fault = {"types": ["ValueError"], "place": "data", "at": "train.py:31 in row", "because": "KeyError: 'jpg'"}
    known.died([Death(2, 0, 7, 1, False, "ended with exit code 1: ValueError: bad")], {7: reading(fault=fault)}, 4)
    (found,) = known.all()
    words = "rank 2 on a ended with exit code 1: ValueError: bad, because of KeyError: 'jpg', at train.py:31 in row"
    assert found.text == words
    assert (found.kind, found.place, found.batch) == (ClueKind.EXIT, Place.DATA, Batch(1, 64, 95))
    assert (found.step, found.round, found.types) == (9, 4, ("ValueError",))


def test_a_failed_session_is_known_before_its_process_has_exited() -> None:
    """And once, whatever its process exits with."""
    known = clues()
    fault = {"types": ["ValueError"], "place": "data", "at": "train.py:31 in row"}
    page = reading(fault=fault, error="ValueError: bad")
    known.failed(page)
    known.died([Death(2, 0, 7, 1, False, "ended with exit code 1: ValueError: bad")], {7: page}, 4)
    (found,) = known.all()
    assert found.text == "rank 2 on a ended with ValueError: bad, at train.py:31 in row"
    assert (found.place, found.step, found.round) == (Place.DATA, 9, 4)


def test_who_lost_its_peers_says_so() -> None:
    known = clues()
    known.died([Death(2, 0, 7, -6, False, "was killed by SIGABRT")], {7: reading(lost_peer=True)}, 4)
    assert known.all()[0].victim
    assert known.all()[0].kind is ClueKind.SIGNAL


def test_a_crash_becomes_a_clue_with_the_line_of_the_script() -> None:
    """The main thread's, if the one that crashed runs no Python: it is the last one, and what it did is no cause."""
    other, main = (part.partition("\n")[2] for part in STACKS.split("\n\n"))
    head = "Thread 0x{} (most recent call first):\n{}"
    threads = "\n\n".join((head.format(1, other), head.format(2, main)))
    without = f"Current {head.format(9, '  <no Python frame>')}".replace("Thread", "thread")
    by_phase = _place_by_phase(reading())
    for crash, at, place in (
        (STACKS, "train.py:31 in batches", Place.DATA),
        (threads, "train.py:31 in batches (main thread)", by_phase),
        (f"{without}\n\n{threads}", "train.py:31 in batches (main thread)", by_phase),
    ):
        known = clues()
        last = replace(reading(), crash=f"Aborted\n\n{crash}")
        known.died([Death(2, 0, 7, -6, False, "was killed by SIGABRT")], {7: last}, 4)
        (found,) = known.all()
        assert found.text == f"rank 2 on a was killed by SIGABRT, at {at}"
        assert (found.place, found.at) == (place, at)


def test_only_the_newest_clues_are_kept_and_each_once() -> None:
    woken: list[int] = []
    known = clues(wake=lambda: woken.append(1))
    for number in range(KEPT + 5):
        known.add(ClueKind.NOTICE, f"notice {number}")
        known.add(ClueKind.NOTICE, f"notice {number}")
    assert len(known.all()) == KEPT
    assert known.all()[-1].text == f"notice {KEPT + 4}"
    assert len(woken) == KEPT + 5


def test_a_kernel_that_says_much_pushes_nothing_out() -> None:
    known = clues()
    known.add(ClueKind.EXIT, "rank 0 on a ended with exit code 1", rank=0)
    known.logged(f"blk_update_request: I/O error, dev sdb, sector {number}" for number in range(50))
    assert len(known.all()) == 2
    known.logged(f"blk_update_request: I/O error, dev sd{letter}, sector 1" for letter in "cdefghijkl")
    assert len(known.all()) == 5
    assert known.all()[-1].kind is ClueKind.EXIT


def test_stacks_name_the_line_of_the_script_and_what_it_waits_for() -> None:
    files, at = stack_of(STACKS)
    assert at == "train.py:31 in batches"
    assert "dataloader" in files[0]
    spied = 'Thread 8 (idle): "pin"\n    f (p.py:1)\nThread 7 (idle): "MainThread"\n    row (/home/u/train.py:9)\n'
    assert stack_of(spied) == (["/home/u/train.py"], "train.py:9 in row")
    assert stack_of("none: the process is stopped") == ([], "")
    generated = 'File "/tmp/torchinductor_root/ab/cabc.py", line 7 in call'
    assert (
        stack_of(f'Current thread 0x1:\n  {generated}\n  File "/home/u/train.py", line 3 in f')[1] == "train.py:3 in f"
    )


def test_a_hang_names_its_place() -> None:
    known = clues()
    known.hung(reading(), 2, "no progress for 5.0 s", "sleeping", STACKS)
    (found,) = known.all()
    assert (found.kind, found.place, found.at) == (ClueKind.HANG, Place.DATA, "train.py:31 in batches")
    assert found.text == "rank 2 on a hung: no progress for 5.0 s, in train.py:31 in batches"


def dump(path: Path, value: object) -> dict[str, str]:
    path.with_name(path.name + "2").write_bytes(pickle.dumps(value))
    return {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(path)}


def test_a_flight_recorder_dump_names_the_collective(tmp_path: Path) -> None:
    entries = [
        {"state": "completed", "profiling_name": "nccl:all_reduce", "collective_seq_id": 6, "input_sizes": [[8]]},
        {"state": "started", "profiling_name": "nccl:all_gather", "collective_seq_id": 7, "input_sizes": [[4, 1024]]},
    ]
    named = dump(tmp_path / "fr_", {"version": "2.9", "entries": entries})
    assert collective_of(2, named) == "nccl:all_gather number 7 of 4x1024 elements"
    assert collective_of(3, named) == ""
    assert collective_of(2, {}) == ""


def test_a_dump_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    assert collective_of(2, dump(tmp_path / "fr_", OrderedDict(entries=[]))) == ""


def test_the_kernels_log_is_read_from_now_on(tmp_path: Path) -> None:
    file = tmp_path / "kmsg"
    file.write_text("3,1,1,-;mce: old\n")
    log = KernelLog(file)
    assert log.read() == []
    with file.open("a") as more:
        more.write("3,2,5,-;mce: [Hardware Error]: CPU 3\n SUBSYSTEM=x\n6,3,6,-;usb 1-1: new\n")
    assert log.read() == ["mce: [Hardware Error]: CPU 3", "usb 1-1: new"]
    known = clues()
    known.logged(["mce: [Hardware Error]: CPU 3", "usb 1-1: new"])
    assert [each.text for each in known.all()] == ["the kernel of a logged: mce: [Hardware Error]: CPU 3"]
    log.close()
    assert log.read() == []
    assert KernelLog(tmp_path / "none").read() == []


def test_the_machine_is_called_as_the_environment_says() -> None:
    assert machine_name({"SLURMD_NODENAME": "n7", "ELASTIC_TRAINER_MACHINE": "rack-1"}) == "rack-1"
    assert machine_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert machine_name({}) == os.uname().nodename
    assert machine_name({"ELASTIC_TRAINER_MACHINE": "_my machine/7"}) == "my-machine-7"
    assert machine_name({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == ""
    ensure_healthy(MemoryStore(), KEYS, "", PreflightMode.REFUSE)


# ---- verdicts


class Bench:
    """Verdicts of node a, over a store in memory."""

    def __init__(self, *, evicts: bool = True) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(MemoryBackend())
        self.clues = Clues("a", lambda: 5, clock=self.clock)
        self.health = {"b": NodeHealth(node="b", wall=1.0, machine="rack-2")}
        self.asked: list[tuple[str, str]] = []
        self.stopped: list[tuple[int, str]] = []
        self.verdicts = self.of(KEYS, evicts=evicts)

    def of(self, keys: RunKeys, *, evicts: bool = True) -> Verdicts:
        limits, ports = VerdictLimits(evicts=evicts), VerdictPorts(lambda: self.health, self.ask, self.stop)
        return Verdicts(self.clues, self.store, keys, limits, ports, self.clock)

    def decide(self, incident: Incident, current: RoundDocument, verdicts: Verdicts | None = None) -> Verdict:
        """Judge and act; the verdict as it is told in the end."""
        verdicts = verdicts or self.verdicts
        judged = verdicts.judged(incident, current)
        assert judged is not None
        found = (verdicts.act("key", judged, current) or judged).verdict
        assert found is not None
        return found

    def ask(self, node: str, reason: str) -> bool:
        self.asked.append((node, reason))
        return True

    def stop(self, number: int, reason: str) -> None:
        self.stopped.append((number, reason))

    def faults(self, machine: str = "rack-2") -> int:
        return len(faults_of(self.store, "/et", machine, Deadline.after(1.0)))

    def blame(self, text: str = "CUDA error: uncorrectable ECC error", step: int = 7, number: int = 5) -> None:
        words = {"node": "b", "rank": 1, "round": number, "step": step, "code": 1}
        node = Clues("b", lambda: number, clock=self.clock)
        node.add(
            ClueKind.EXIT,
            f"rank 1 on b ended with exit code 1: {text}",
            **{k: v for k, v in words.items() if k != "node"},
        )
        known = self.health["b"]
        self.health["b"] = known.model_copy(update={"clues": (*known.clues, *node.all())})


def incident(number: int = 5, **more: Any) -> Incident:
    told = {"wall": float(number), "by": "a", "cause": Cause.WORKER_LOST, "round": number, "next_round": number + 1}
    return Incident.model_validate(told | {"reason": "its worker was lost", "step": 7} | more)


def following(*nodes: str) -> RoundDocument:
    members = tuple(RoundMember(name, 1, 0, rank, 1) for rank, name in enumerate(nodes))
    return RoundDocument(number=6, nonce="n", state=RoundState.ACTIVE, members=members)


def test_an_incident_waits_a_moment_for_its_clues() -> None:
    bench, one = Bench(), incident()
    assert bench.verdicts.judged(one, following("a", "b")) is None
    bench.blame()
    assert bench.decide(one, following("a", "b")).culprit is Culprit.MACHINE
    assert bench.verdicts.judged(incident(6), following("a", "b"), last=True) is not None


def test_a_verdict_without_its_clue_is_replaced_when_that_comes() -> None:
    """The process of a worker may need seconds to exit; what others see at once is that its connection is gone. Nothing
    is done then: the run has gone on."""
    bench, one, now = Bench(), incident(), following("a", "b")
    assert bench.verdicts.judged(one, now) is None
    bench.clock.advance(1.1)
    assert bench.decide(one, now).culprit is Culprit.UNKNOWN
    bench.blame()
    assert bench.verdicts.better(now) is None  # it looks every few seconds
    bench.clock.advance(AGAIN_S)
    better = bench.verdicts.better(now)
    assert better is not None
    key, before, again = better
    assert (key, before.round) == ("key", 5)
    assert again.verdict is not None
    assert again.verdict.culprit is Culprit.MACHINE
    bench.verdicts.drop_early("key")
    bench.clock.advance(AGAIN_S)
    assert bench.verdicts.better(now) is None
    assert bench.asked == []


def test_a_faulty_node_is_asked_to_leave_and_its_machine_recorded() -> None:
    bench = Bench()
    bench.blame()
    assert bench.decide(incident(), following("a", "b")).sentence.endswith("It was asked to leave.")
    assert [node for node, _ in bench.asked] == ["b"]
    (fault,) = faults_of(bench.store, "/et", "rack-2", Deadline.after(1.0))
    assert fault.left


@pytest.mark.parametrize(("evicts", "nodes"), [(False, ("a", "b")), (True, ("b",))])
def test_it_stays_if_it_is_needed_or_the_options_say_so(evicts: bool, nodes: tuple[str, ...]) -> None:
    bench = Bench(evicts=evicts)
    bench.blame()
    bench.decide(incident(by="b"), following(*nodes))
    assert bench.asked == []
    (fault,) = faults_of(bench.store, "/et", "rack-2", Deadline.after(1.0))
    assert not fault.left


def test_a_storm_ends_the_run() -> None:
    bench = Bench()
    for number in (2, 3, 4, 5):
        bench.blame("ValueError: bad", number=number)
    found = bench.decide(incident(resumed=False), following("a", "b"))
    assert found.advice is Advice.STOP
    assert bench.stopped == [(6, found.sentence)]


def test_earlier_incidents_come_newest_first() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        one = incident(number)
        put = Put(KEYS.incident(int(one.wall * 1000.0)), one.encode())
        bench.store.transact([], [put], deadline=Deadline.after(1.0))
    assert [each.round for each in earlier(bench.store, KEYS, incident(3))] == [2, 1]


def test_a_machine_that_failed_in_two_runs_stays_out_of_the_third(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    bench.blame()
    for run in ("one", "two"):
        keys = RunKeys("/et", run)
        ensure_healthy(bench.store, keys, "rack-2", PreflightMode.REFUSE)
        bench.decide(incident(), following("a", "b"), bench.of(keys))
    ensure_healthy(bench.store, RunKeys("/et", "four"), "rack-3", PreflightMode.REFUSE)
    with pytest.raises(UnfitError):  # which has left it out
        ensure_healthy(bench.store, RunKeys("/et", "one"), "rack-2", PreflightMode.REFUSE)
    with pytest.raises(
        UnfitError, match=r"machine rack-2 has failed 2 times \(runs: one, two\): it stays out"
    ) as refused:
        ensure_healthy(bench.store, KEYS, "rack-2", PreflightMode.REFUSE)
    assert "elastic-trainer forget --machine rack-2" in str(refused.value)
    ensure_healthy(bench.store, KEYS, "rack-2", PreflightMode.WARN)
    ensure_healthy(bench.store, KEYS, "rack-2", PreflightMode.OFF)
    ensure_healthy(bench.store, KEYS, "rack-20", PreflightMode.REFUSE)
    assert forget_machine(bench.store, "/et", "rack-2", Deadline.after(1.0)) == 2
    ensure_healthy(bench.store, KEYS, "rack-2", PreflightMode.REFUSE)
