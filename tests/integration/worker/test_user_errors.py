"""A mistake in a script with a Session: one sentence, and the documented exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from tests.integration.worker.launch import run

HEAD = """
import sys, torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from elastic_trainer import Session

@record
def main():
    with Session(device="cpu", seed=-1 if sys.argv[1] == "option" else 0) as session:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sys.argv[1] == "ddp within":
            model = DDP(model)
        model = session.wrap(model, optimizer=optimizer)
        if sys.argv[1] == "ddp around":
            model = DDP(model)
        session.wrap(model, optimizer=optimizer)

main()
"""
HINT = "(give session.wrap() the bare model and call what it returns: it averages the gradients of all ranks)"
INSIDE, OF_DDP = "DistributedDataParallel inside a session", "session.wrap() of a model in DistributedDataParallel"
MISTAKES = {
    "option": "seed is -1 (it must not be negative)",
    "ddp within": f"{INSIDE} {HINT}",
    "ddp around": f"{INSIDE} {HINT}",
    "twice": "session.wrap() was called before (wrap all models in one call: wrap({'name': model, ...}, ...))",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_alone_a_mistake_is_one_line_and_exit_code_78(mistake: str, tmp_path: Path) -> None:
    """Although the script's main() has torch's @record, which writes down tracebacks."""
    (tmp_path / "train.py").write_text(HEAD)
    run([sys.executable, str(tmp_path / "train.py"), mistake], tmp_path / "log", expected=EXIT_CONFIG)
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "session.opened" not in line]
    assert said == [f"error: {MISTAKES[mistake]}"]


@pytest.mark.parametrize(("mistake", "sentence"), [("ddp within", OF_DDP), ("ddp around", INSIDE)])
def test_under_torchrun_it_is_told_once_and_torchrun_repeats_it(mistake: str, sentence: str, tmp_path: Path) -> None:
    """Two ranks that have a process group, with which DDP itself can be made."""
    (tmp_path / "train.py").write_text(HEAD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*command, str(tmp_path / "train.py"), mistake], tmp_path / "log", expected=1)
    said = (tmp_path / "log").read_text()
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [f"error: {sentence} {HINT}"]
    assert "[rank" not in said
    assert f"exitcode  : {EXIT_CONFIG}" in said
    assert f"traceback : {sentence} {HINT}" in said
