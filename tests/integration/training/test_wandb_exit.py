"""The exit of a process while W&B waits for a server that does not answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

WANDB = """
import atexit, pathlib, subprocess, threading

def Settings(**values):
    return values

def setup(settings):
    global service
    service = subprocess.Popen([pathlib.Path(__file__).with_name("wandb-core"), "300"])

def init(**values):
    atexit.register(service.wait)  # the last hook, so the first that runs
    pathlib.Path("starting").write_text(str(service.pid))
    threading.Event().wait()
"""
JOB = """
import pathlib, sys
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.telemetry import logs
from elastic_trainer.jobs.loggers import Loggers, Opening

logs.configure()
loggers = Loggers(["wandb"], Opening(pathlib.Path.cwd(), 0))
deadline = Deadline.after(60.0)
while not pathlib.Path("starting").exists() and not deadline.expired:
    pause(0.05)
sys.exit(3)
"""


def test_an_exit_while_wandb_starts_takes_seconds_and_keeps_its_code(tmp_path: Path) -> None:
    """A client whose hook waits for its service for 300 s stands for W&B, which does so for 90 s."""
    (tmp_path / "wandb.py").write_text(WANDB)
    shutil.copy("/bin/sleep", tmp_path / "wandb-core")
    (tmp_path / "job.py").write_text(JOB)
    # Not forked from a process of the tests: the exit of an interpreter is what this is about.
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150.0, check=False
    )
    assert done.returncode == 3, done.stderr
    assert not Path("/proc", (tmp_path / "starting").read_text()).exists()
    assert done.stderr.count("W&B is ended") == 1
