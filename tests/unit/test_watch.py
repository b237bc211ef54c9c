"""What ``python -m elastic_trainer.watch`` counts, and how the script is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.watch import UpdateWatch
from elastic_trainer.worker.session import Session


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_updates_of_the_first_optimizer_are_steps_until_a_session_is_opened() -> None:
    """They are counted on from those that the run is known to have made."""
    watch = UpdateWatch(WorkerEnvironment(reached=7, rank=1, world_size=2, launched=True))
    first, second = optimizer(), optimizer()
    for each in (first, second, first, second):
        each.step()
    pulse = watch._tracker.pulse
    assert (pulse.step, pulse.steps, pulse.rank, pulse.world_size) == (9, 2, 1, 2)
    with Session(device="cpu"):
        first.step()
    assert pulse.step == 9
    watch.end()
    first.step()
    assert pulse.step == 9


def test_the_script_is_run_as_python_would(tmp_path: Path) -> None:
    """Its arguments, its directory, its exception and its exit code; without a script there is one sentence."""
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    (tmp_path / "train.py").write_text(
        "import sys, beside\nprint(sys.argv[1:], __name__, beside.word)\nsys.exit(int(sys.argv[1]))\n"
    )

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "elastic_trainer.watch", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = ran(str(tmp_path / "train.py"), "7", "--x")
    assert (done.returncode, done.stdout) == (7, "['7', '--x'] __main__ found\n"), done.stderr
    failed = ran(str(tmp_path / "train.py"), "x")
    assert failed.returncode == 1
    assert "elastic_trainer/watch.py" not in failed.stderr
    assert failed.stderr.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")
    lacking = ran()
    assert (lacking.returncode, lacking.stderr.count("\n")) == (78, 1)
