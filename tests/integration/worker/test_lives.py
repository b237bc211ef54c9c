"""Jobs that are killed, resumed, and moved to other numbers of ranks and other launchers."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.local.ledger import LedgerTail, Line, LineKind, audit
from tests.integration.worker.launch import finished, free_port, plain, run, standalone, started, tail, torchrun

SAMPLES = 86


def final(directory: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(directory / f"final-{rank}.pt", weights_only=True)
    return loaded


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def opened(directory: Path) -> list[Line]:
    lines = sorted(LedgerTail(directory / "ledger").read(), key=lambda line: line.t)
    return [line for line in lines if line.event is LineKind.OPENED and line.rank == 0]


def assert_each_sample_once(directory: Path) -> None:
    """In both epochs; what followed the state that a life began from does not count."""
    found = audit(LedgerTail(directory / "ledger").read(), SAMPLES)
    assert found.exact, found.reason
    assert (found.steps, found.unrecorded, [each.used for each in found.epochs]) == (12, 0, [SAMPLES] * 2)


def ledger(directory: Path) -> dict[str, str]:
    return {"ELASTIC_TRAINER_LEDGER_DIR": str(directory / "ledger")}


def test_one_script_runs_alone_under_torchrun_and_on_two_nodes(tmp_path: Path) -> None:
    """Plain python, --standalone with two workers, and the c10d backend with two agents: same steps, all exact."""
    for name in ("plain", "standalone", "nodes"):
        (tmp_path / name).mkdir()
    run(plain("train.py", tmp_path / "plain", 2), tmp_path / "log", ledger(tmp_path / "plain"))
    two = standalone(2, "train.py", tmp_path / "standalone", 2)
    run(two, tmp_path / "log", ledger(tmp_path / "standalone"))
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    node = torchrun([*options, "--rdzv-id=job", "--local-addr=127.0.0.1"], "train.py", tmp_path / "nodes", 2)
    logs = [tmp_path / "log-a", tmp_path / "log-b"]
    extra = ledger(tmp_path / "nodes")
    with started(node, logs[0], extra) as first, started(node, logs[1], extra) as second:
        assert finished(first, logs[0]) == 0, tail(logs[0])
        assert finished(second, logs[1]) == 0, tail(logs[1])
    for name, ranks in (("plain", 1), ("standalone", 2), ("nodes", 2)):
        assert_each_sample_once(tmp_path / name)
        parameters = [final(tmp_path / name, rank)["4.weight"] for rank in range(ranks)]
        assert all(torch.equal(each, parameters[0]) for each in parameters)
    assert equal(final(tmp_path / "standalone"), final(tmp_path / "nodes"))


def test_a_killed_worker_changes_no_bit_of_the_result(tmp_path: Path) -> None:
    """SIGKILL in mid-epoch; with dropout, random augmentation, BatchNorm, AdamW and a schedule, two ranks.

    torchrun starts all again; without it the other rank fails too, and somebody starts both at the same address.
    """
    for name in ("whole", "torchrun", "alone"):
        (tmp_path / name).mkdir()
    common = ["2", "--save-every", "4", "--micro-batch", "4"]
    run(standalone(2, "train.py", tmp_path / "whole", *common), tmp_path / "log")
    dying = [*common, "--die-at", "9", "--die-rank", "1", "--mark", str(tmp_path / "mark")]
    killed = standalone(2, "train.py", tmp_path / "torchrun", *dying, restarts=1)
    run(killed, tmp_path / "log", ledger(tmp_path / "torchrun"))
    address = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2"]
    dying[-1] += "-alone"
    for code in (-signal.SIGKILL, 0):
        first, second = (plain("train.py", tmp_path / "alone", *dying, *address, "--rank", rank) for rank in (0, 1))
        extra = ledger(tmp_path / "alone")
        with started(first, tmp_path / "log-0", extra) as zero, started(second, tmp_path / "log-1", extra) as one:
            assert finished(one, tmp_path / "log-1") == code, tail(tmp_path / "log-1")
            assert finished(zero, tmp_path / "log-0") == (1 if code else 0), tail(tmp_path / "log-0")
    for name in ("torchrun", "alone"):
        assert [(line.round, line.step) for line in opened(tmp_path / name)] == [(0, 0), (1, 8)]
        assert equal(final(tmp_path / "whole"), final(tmp_path / name))
        assert_each_sample_once(tmp_path / name)


def test_each_sample_is_used_once_when_a_killed_job_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Three ranks, killed in mid-epoch; then two, killed again; then one process alone ends it."""
    (tmp_path / "job").mkdir()
    common = ["2", "--save-every", "2", "--micro-batch", "4"]
    for world, step in ((3, 3), (2, 7)):
        dying = ["--die-at", str(step), "--die-rank", "1", "--mark", str(tmp_path / f"mark-{world}")]
        command = standalone(world, "train.py", tmp_path / "job", *common, *dying)
        run(command, tmp_path / "log", ledger(tmp_path / "job"), expected=1)
    run(plain("train.py", tmp_path / "job", *common), tmp_path / "log", ledger(tmp_path / "job"))
    lives = [(line.round, line.world, line.step) for line in opened(tmp_path / "job")]
    assert lives == [(0, 3, 0), (1, 2, 2), (2, 1, 6)]
    assert_each_sample_once(tmp_path / "job")
    newest = CheckpointManager(tmp_path / "job" / "checkpoints").newest()
    assert newest is not None
    assert (newest.step, newest.round, newest.manifest.world_size) == (12, 2, 1)
