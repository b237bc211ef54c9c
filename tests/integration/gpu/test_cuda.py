"""The ready-made tasks and in-place recovery on a CUDA device. One is enough: ranks that share it use gloo.

``ELASTIC_TRAINER_TEST_DEVICE=cpu`` rehearses them without one, but for what only such a device has.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import Arena, BackgroundSaves, CheckpointManager, SaveInfo
from elastic_trainer.drills.measure import Book
from elastic_trainer.local.ledger import LedgerTail
from tests.integration.training.launch import LIMIT_S, QUICK, train
from tests.integration.worker.launch import environment

DEVICE = os.environ.get("ELASTIC_TRAINER_TEST_DEVICE", "cuda")
REHEARSAL = DEVICE == "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REHEARSAL and not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]

ON_CUDA = (
    *(f"device={DEVICE}", "pin_memory=true", "workers=2", "max_steps=10", "epochs=null"),
    *("logging.loss_every=1", "logging.tensorboard=false"),
)
GPT = ("options.max_tokens=null", "model.layers=1", "model.width=32", "model.heads=2")


def losses(directory: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "loss"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", ["mnist", "imagefolder", "keypoints", "gpt"])
def test_every_task_trains_on_cuda(task: str, precision: str, tmp_path: Path) -> None:
    """By the same job file as on the CPU, with data workers and copies through pinned memory; losses are numbers."""
    if precision == "fp16" and REHEARSAL:
        pytest.skip("fp16 needs a CUDA device")
    more = GPT if task == "gpt" else ()
    done = train(task, *ON_CUDA, *more, f"precision={precision}", f"checkpoint.directory={tmp_path}")
    assert done.code == 0, done.err
    assert done.report["step"] == 10
    found = losses(tmp_path)
    assert sorted(found) == list(range(1, 11))
    assert all(math.isfinite(loss) for loss in found.values())


def test_a_compiled_model_trains_and_its_checkpoint_fits_an_uncompiled_one(tmp_path: Path) -> None:
    """torch.compile with bf16, then on without it."""
    where = f"checkpoint.directory={tmp_path}"
    first = train("gpt", *ON_CUDA, *GPT, "precision=bf16", "compile=true", where)
    assert first.code == 0, first.err
    words = [word.replace("max_steps=10", "max_steps=12") for word in ON_CUDA]
    second = train("gpt", *words, *GPT, "precision=bf16", where)
    assert second.code == 0, second.err
    assert second.report["step"] == 12
    assert second.report["resumed_from"] is not None


def test_the_first_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    """fp32, the same samples and initial parameters: equal but for rounding."""
    for name, device in (("host", "cpu"), ("device", DEVICE)):
        words = [*QUICK, f"device={device}", "max_steps=5", f"checkpoint.directory={tmp_path / name}"]
        done = train("mnist", *words)
        assert done.code == 0, done.err
    cpu, cuda = losses(tmp_path / "host"), losses(tmp_path / "device")
    assert cpu.keys() == cuda.keys()
    assert all(math.isclose(cpu[step], cuda[step], rel_tol=2e-3) for step in cpu)


@pytest.mark.parametrize("reduction", ["ddp", "tree"])
def test_two_ranks_on_one_device_recover_in_place(reduction: str, tmp_path: Path) -> None:
    """A worker is killed while the optimizer may be at work on the device. Samples are exact, and no survivor makes a
    step again; one that only the dead had committed it makes for the first time."""
    words = ["mnist", f"device={DEVICE}", "backend=gloo", "epochs=4", f"reduction={reduction}", "micro_batch=16"]
    summary = run_local(tmp_path, ["--kill-worker-at", "60", "--kill-worker-at", "120"], words)
    assert all(fault["recovery"] for fault in summary["faults"])
    assert Book(LedgerTail(tmp_path / "run" / "ledger").read()).committed_again() == 0
    assert summary["audit"]["exact"], summary["audit"]["reason"]


def run_local(directory: Path, faults: list[str], words: list[str]) -> dict[str, Any]:
    options = ["--nodes", "1:2", "--start", "2", "--recovery", "in_place", "--run-dir", str(directory / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "elastic_trainer.cli.main", "local", *options, *faults, "--", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((directory / "run" / "summary.json").read_text())
    return summary


def test_a_save_of_tensors_on_cuda_is_the_state_at_the_call(tmp_path: Path) -> None:
    """Copies go to pinned memory behind what the device does; updates queued right after the save are not in it."""
    manager, arena = CheckpointManager(tmp_path), Arena()
    saves = BackgroundSaves(manager, arena)
    weights = torch.zeros(30_000_000, device=DEVICE)
    odd = torch.zeros(999, 77, device=DEVICE, dtype=torch.bfloat16).t()
    for step in (1, 2, 3):
        state = {"w": weights, "odd": odd, "host": torch.full((1000,), float(step))}
        weights.fill_(step)
        odd.fill_(step)
        save = saves.submit(manager.encode(state, SaveInfo(step)), manager.draft(SaveInfo(step)))
        weights.fill_(-1)
        odd.fill_(-1)
        saves.wait()
        assert save.committed is not None
        loaded = manager.load(save.committed.entry).state
        assert all(bool((each == step).all()) for each in loaded.values())
        assert REHEARSAL or torch.from_numpy(arena._slots[0]._array).is_pinned()
    saves.close()
