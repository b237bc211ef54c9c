"""Frameworks in place: a node joins, a worker is killed, a node is killed, and the program notices nothing.

``ELASTIC_TRAINER_FRAMEWORK_KILLS=N`` kills N more workers and prints the seconds from each kill to the next step.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.clock import SYSTEM
from elastic_trainer.local.ledger import LineKind, audit
from tests.drills.endings.job import LASTING, Job
from tests.drills.frameworks.train import PROGRAMS, SAMPLES
from tests.integration.training.launch import ran
from tests.support.requirements import missing

SCRIPT = Path(__file__).with_name("train.py")
KILLS = int(os.environ.get("ELASTIC_TRAINER_FRAMEWORK_KILLS", "0"))
STEPS = 600
CLOSE = 1e-4
"""What rounding sums in another order makes of that many steps."""
FREELY = {"regroup_grace": "10", "failure_limit": "100000"}


def killed(job: Job, number: int) -> float:
    """SIGKILL a worker; seconds until the others have made a step without it. They keep their processes."""
    victim = job.running[number % len(job.running)]
    others = [node for node in job.running if node is not victim]
    before, round_before = [each.worker(0) for each in others], max(line.round for line in job.lines())
    began = SYSTEM.monotonic()
    assert victim.kill_worker(0) is not None
    job.await_world(*(node.name for node in [*others, victim]), after=round_before)
    assert [each.worker(0) for each in others] == before
    names = {node.name for node in others}
    steps = (line for line in job.lines() if line.event is LineKind.STEP and line.node in names)
    return min(line.t for line in steps if line.t > began and line.round > round_before) - began


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parameters after the same training by hand, in one process."""
    directory = tmp_path_factory.mktemp("alone")
    assert ran([str(SCRIPT), "plain", str(directory), str(STEPS), "0"], limit_s=120.0).code == 0
    (result,) = (torch.load(path) for path in directory.glob("result-*"))
    return result["parameters"]


@pytest.mark.timeout(300 + 30 * KILLS)
@pytest.mark.parametrize("framework", [name for name in PROGRAMS if name != "plain"])
def test_a_program_of_a_framework_goes_on_in_place(
    tmp_path: Path, etcd_endpoint: str, run_id: str, undisturbed: dict[str, Any], framework: str
) -> None:
    """Each sample counts once, no step is made twice, and the result is that of an undisturbed run by hand."""
    needs_framework(framework)
    steps = 10**6 if KILLS else STEPS
    (directory := tmp_path / "job").mkdir()
    options = FREELY | LASTING
    entry = [str(SCRIPT), framework, str(directory), str(steps), "0.002" if KILLS else "0.05"]
    job = Job(directory, etcd_endpoint, run_id, entry=entry, least=1, most=2, options=options)
    with job:
        (first,) = (node.name for node in job.start(1))
        job.await_world(first)
        second = job.add().name
        job.await_world(first, second)
        took = [killed(job, number) for number in range(1 + KILLS)]
        if KILLS:
            print({framework: {"median_s": round(statistics.median(took), 3), "most_s": round(max(took), 3)}})
            return
        newest = max(line.round for line in job.lines())
        node = next(each for each in job.running if each.name == second)
        assert node.kill() is not None
        job.await_world(first, after=newest)
        assert job.newest() < steps
        (directory / "fast").touch()
        codes = job.exit_codes()
    assert codes[first] == 0, job.describe()
    found = audit(job.lines(), SAMPLES)
    assert found.exact, found.reason
    job.check_lossless()
    results = [torch.load(path) for path in directory.glob("result-*")]
    assert [each["step"] for each in results] == [steps]
    assert farthest(results[0]["parameters"], undisturbed) < CLOSE


def needs_framework(name: str) -> None:
    package = {"fabric": "lightning"}.get(name, name)
    try:
        __import__(package)
    except ImportError:
        missing(f"{package} is not installed")


def farthest(mine: dict[str, Any], others: dict[str, Any]) -> float:
    return max(float((mine[name] - others[name]).abs().max()) for name in others)
