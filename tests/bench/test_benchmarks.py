"""Every benchmark still runs: at toy size, with a report of the published shape; what is absent is named."""

from __future__ import annotations

import json
import math
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.local.ledger import Line, LineKind, audit
from elastic_trainer.local.tail import LedgerTail
from elastic_trainer.variables import ENV_LEDGER_DIR, ENV_NODE
from tests.bench import goodput_job
from tests.bench.goodput import judged, numbered, stalls
from tests.bench.goodput_peers import Struck
from tests.bench.programs import Outcome, musts, reason, repeated
from tests.bench.programs_job import SAVE_EVERY
from tests.bench.programs_known import STANDINS, chosen
from tests.bench.recovery_torchft import TorchftJob, lighthouse_command, look, peers
from tests.bench.themes import Theme, themes
from tests.drills.cluster.schedule import STORM, Blow, poisson
from tests.integration.training.launch import ran
from tests.support.plainjob import Step

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0
STORMY = ("samples lost or repeated", "faults that happened")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("theme", themes(), ids=lambda theme: str(theme.name))
def test_a_benchmark_runs_at_toy_size_and_reports(theme: Theme) -> None:
    """It exits 0, and its last line is one JSON object with figures and with musts that carry a verdict."""
    done = ran(["-m", f"tests.bench.{theme.name}", "--quick", "--json"], ROOT, LIMIT_S)
    assert done.code == 0, done.err[-4000:]
    shape = json.loads(done.out.splitlines()[-1])
    assert set(shape) == {"benchmark", "machine", "versions", "command", "figures", "musts"}
    assert shape["benchmark"] == theme.name
    assert shape["figures"]
    assert set(shape["machine"]["calibration"]) == {"sum_us", "memcpy_us", "product_us", "scale"}
    assert all(set(must) == {"name", "value", "limit", "ok"} for must in shape["musts"])
    if theme.name == "goodput":
        counts = {must["name"]: must["ok"] for must in shape["musts"] if not must["name"].endswith("goodput")}
        assert counts == {f"{peer}: {what}": True for peer in ("in_place", "restart_warm") for what in STORMY}
        assert all(each["exact"] and each["steps"] for each in shape["figures"]["found"].values())
    if theme.name == "programs":
        (faults,) = shape["figures"]["programs"]["ddp"]["etcd3_restart"]
        assert list(faults) == ["node_join", "worker_kill", "node_kill"]
        assert all(each["went_on"] for each in faults.values()), faults
        assert all(each["steps_repeated"] <= 2 * SAVE_EVERY for each in faults.values()), "it resumes"


def test_goodput_is_the_time_of_steps_that_count() -> None:
    """Steps thrown away by a later round do not count, nor does standing still; the undisturbed step is the measure."""
    calm = [_line(0.1 * n, 1, n) for n in range(1, 101)]  # 10 s
    storm = [_line(10.0 + 0.1 * n, 1, 100 + n) for n in range(1, 51)]  # 5 s, the last 10 steps of it are lost
    again = [_line(17.0 + 0.1 * n, 2, 140 + n) for n in range(1, 31)]  # 3 s, after 2 s in which nothing happened
    done = [Struck(Blow.WORKER_KILL, "n0", 15.0), Struck(Blow.OUTAGE, "", 18.0)]
    found = judged([*calm, *storm, *again], done, (0.0, 10.0), (10.05, 20.05), 1000)
    assert found["goodput"] == pytest.approx(0.7)
    assert found["lost_s_per_fault"] == pytest.approx(1.5)
    assert (found["steps"], found["steps_repeated"], found["samples_repeated"], found["exact"]) == (70, 10, 0, True)
    assert found["median_stall_s"] == pytest.approx({"etcd-outage": 0.0, "worker-kill": 3.0})
    lost = judged([*calm, *storm[1:]], done, (0.0, 10.0), (10.05, 20.05), 1000)
    assert (lost["exact"], lost["checkpoints_cost_percent"]) == (False, pytest.approx(0.0, abs=1e-6))


def test_a_stall_is_of_the_fault_that_it_begins_with_and_shared_by_those_in_it() -> None:
    """A fault that cost nothing has not the stall of the next one; two that strike in one stall both have it."""
    done = [Struck(Blow.OUTAGE, "", 1.0), Struck(Blow.WORKER_KILL, "n0", 2.05), Struck(Blow.NODE_KILL, "n1", 4.0)]
    times = [*(0.1 * n for n in range(21)), *(6.0 + 0.1 * n for n in range(40))]
    found = stalls(done, times, 0.1, 10.0)
    assert found == pytest.approx({"etcd-outage": 0.0, "worker-kill": 3.9, "node-kill": 3.9}, abs=1e-6)


def _line(t: float, round_: int, step: int, pid: int = 0) -> Line:
    named = {"node": "n0", "round": round_, "step": step, "pid": pid}
    return Line(event=LineKind.STEP, t=t, **named, samples=(step,), global_samples=1)


def test_only_new_processes_that_begin_at_an_old_step_make_a_round() -> None:
    """Peers that write a step soon after each other do not, nor one that is healed, nor one that writes late."""
    first = [(1.0, 1, 7), (1.01, 1, 8), (2.0, 2, 7), (9.5, 3, 9), (10.0, 2, 8)]
    again = [(20.0, 2, 10), (20.01, 2, 11), (21.0, 3, 11)]
    rounds = numbered([_line(t, 0, step, pid) for t, step, pid in first + again])
    assert [line.round for line in rounds] == [1] * len(first) + [2] * len(again)


def test_a_storm_has_every_kind_of_fault_and_is_the_same_again() -> None:
    """In order, within its length, for one seed; another seed has another."""
    schedule = poisson(3, 60.0, 12, STORM)
    assert {each.blow for each in schedule} == set(STORM)
    assert len(schedule) == 12
    assert [each.at_s for each in schedule] == sorted(each.at_s for each in schedule)
    assert 0.0 <= schedule[0].at_s <= schedule[-1].at_s <= 60.0
    assert poisson(3, 60.0, 12, STORM) == schedule != poisson(4, 60.0, 12, STORM)


def test_the_peer_s_script_resumes_at_its_checkpoint_with_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What c10d is measured with is exact by itself: steps after the checkpoint are made again, none is left out."""
    torch.save((torch.rand(80, 1, 28, 28), torch.arange(80) % 10), tmp_path / goodput_job.DATA)
    for name in (goodput_job.CHECKPOINTS, "ledger"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(ENV_NODE, "n0")
    monkeypatch.setenv(ENV_LEDGER_DIR, str(tmp_path / "ledger"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for ranks, steps, save_every_s in ((2, 3, 0.0), (2, 5, 600.0), (1, 6, 600.0)):
        options = {"step_s": 0.0, "save_every_s": save_every_s, "timeout_s": 60.0, "steps": steps}
        words = [str(ranks), goodput_job.__file__, "plain", str(tmp_path), json.dumps(options)]
        done = ran([*launcher, *words], ROOT, LIMIT_S)
        assert done.code == 0, done.err[-4000:]
    lines = LedgerTail(tmp_path / "ledger").read()
    made = [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 4), (3, 5), (3, 6)]
    assert sorted({(line.round, line.step) for line in lines if line.event is LineKind.STEP}) == made
    found = audit(lines, 80)
    assert found.exact, found.reason
    assert found.steps_rolled_back == 2


def _environment(directory: Path, script: str) -> Path:
    """A python of an environment that answers every question with ``script``."""
    python = directory / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def test_torchft_is_skipped_where_nobody_names_its_environment() -> None:
    """The report says that it was not asked for."""
    assert look(None).as_json() == {"skipped": "not asked for: --torchft-python names no environment"}


def test_torchft_is_skipped_where_it_cannot_be_imported(tmp_path: Path) -> None:
    """The report gives the last line of python's own words; an environment that is none is not a crash either."""
    python = _environment(tmp_path, "echo Traceback >&2; echo 'ImportError: no torchft' >&2; exit 1")
    assert look(python).as_json() == {"skipped": f"{python}: ImportError: no torchft"}
    assert "No such file" in look(tmp_path / "nothing").skipped


def test_torchft_is_measured_where_it_is_complete(tmp_path: Path) -> None:
    """Its versions are reported once its lighthouse lies beside python, and not before."""
    python = _environment(tmp_path, "echo a warning; echo 'torchft 1, torch 2'")
    assert look(python).as_json() == {"skipped": f"{python}: there is no torchft_lighthouse beside it"}
    (tmp_path / "torchft_lighthouse").touch()
    assert look(python).as_json() == {"versions": "torchft 1, torch 2"}


def test_torchft_runs_in_its_own_environment_with_its_column_s_options(tmp_path: Path) -> None:
    """Lighthouse and nodes are the named environment's; the defaults' column passes no option at all."""
    columns = peers(tmp_path / "python", quick=False)
    for column in columns.values():
        job = column.job(tmp_path)
        assert isinstance(job, TorchftJob)
        lighthouse = lighthouse_command(column, "127.0.0.1:1", 2)
        node = job.command("n0")
        assert lighthouse[0] == str(tmp_path / "torchft_lighthouse")
        assert node[0] == str(tmp_path / "python")
        options = [*lighthouse[3:], *node[node.index(f"http://{job.spec.endpoint}") + 1 :]]
        assert bool(options) == (column.name == "torchft_tuned")
    assert "--heartbeat_timeout_ms=200" in lighthouse_command(columns["torchft_tuned"], "127.0.0.1:1", 2)
    assert list(peers(tmp_path / "python", quick=True)) == ["torchft_tuned"]


def test_a_program_whose_source_nobody_gave_is_named(tmp_path: Path) -> None:
    """The report says what is missing; with all files in its folder the program runs on copies of them."""
    (program,) = chosen(["multigpu_torchrun"])
    assert "source not given" in program.missing(None)
    (folder := tmp_path / program.name).mkdir()
    (folder / "datautils.py").write_text("a")
    assert program.missing(tmp_path) == f"source not given: {folder} has no multigpu_torchrun.py"
    (folder / "multigpu_torchrun.py").write_text("b")
    assert program.missing(tmp_path) == ""
    (work := tmp_path / "work").mkdir()
    program.place(work, tmp_path)
    assert Path(program.words(work)[0]).read_text() == "b"
    assert "needs a GPU" in chosen(["torchtitan"])[0].missing(tmp_path)


def test_steps_are_numbered_by_the_parameters_they_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that resumes from step 2 makes step 3 again; one that begins anew makes step 1."""
    spec = spec_from_file_location("watching", STANDINS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    watching: Any = module_from_spec(spec)
    spec.loader.exec_module(watching)
    for name, text in {
        "BENCH_STEPS": str(tmp_path),
        "ELASTIC_TRAINER_NODE": "n0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, text)

    def process(start: float, count: int) -> None:
        steps, weight = watching.Steps(), torch.nn.Parameter(torch.tensor([start]))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(count):
            weight.grad = torch.ones(1)
            steps.before(optimizer)
            optimizer.step()
            steps.after(optimizer)

    process(10.0, 4)  # 9, 8, 7, 6
    process(8.0, 1)
    process(50.0, 1)
    lines = [line.split() for line in (tmp_path / "n0-0.txt").read_text().splitlines()]
    assert [int(line[4]) for line in lines] == [1, 2, 3, 4, 3, 1]
    assert {(*line[1:4], int(line[5])) for line in lines} == {("0", "0", "1", os.getpid())}


def test_what_a_fault_has_cost_a_program_is_read_from_its_steps_and_logs() -> None:
    """Steps made again count from the newest one before; a fault that nobody survived misses the promise."""
    old = [Step(t, 1, 0, 2, 20 + t, 7) for t in range(5)]
    assert repeated([*old, Step(9, 2, 0, 2, 22, 8), Step(10, 2, 0, 2, 23, 8)], {(1, 7)}) == 3
    assert repeated([*old, Step(9, 2, 0, 2, 25, 7)], {(1, 7)}) == 0
    log = "[rank0]: RuntimeError: Connection closed by peer\nelastic-trainer: the run ended\n"
    assert reason([log, ""]) == "elastic-trainer: the run ended"
    assert reason(["fine\n"]) == "no step, and no error in the logs"
    lost = Outcome(math.inf, exit_codes={"n0": 1}, why="it failed")
    assert lost.as_json() == {"went_on": False, "exit_codes": {"n0": 1}, "why": "it failed"}
    turns = {"etcd3_restart": [{"node_join": Outcome(1.0, 3), "node_kill": lost}], "c10d_tuned": [{"node_join": lost}]}
    assert [(must.name, must.ok) for must in musts({"ddp": turns}, {})] == [
        ("ddp, etcd3_restart: faults survived", False)
    ]
