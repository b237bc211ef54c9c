"""``elastic-trainer data`` and ``replay`` of a job on real etcd and torchrun that was killed in several ways."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.checkpoint.storage import open_storage
from elastic_trainer.cli.data import opened
from elastic_trainer.data.ledger import Kind
from tests.integration.worker.scripts import regression

SCRIPT = str(Path(regression.__file__))
LAST, EVERY, EPOCHS = 315, 50, 5

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("etcd_binary")]


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """``elastic-trainer WORDS``, in a process of its own."""
    whole = [sys.executable, "-m", "elastic_trainer.cli.main", *map(str, words)]
    return subprocess.run(whole, capture_output=True, text=True, check=False, timeout=300)


def trained(directory: Path, *options: str, reduction: str = "tree") -> Path:
    """The checkpoint directory of a job with faults, which has made all steps."""
    checkpoints = directory / "checkpoints"
    job = (SCRIPT, str(checkpoints), reduction, str(EPOCHS))
    ended = command("local", *options, "--run-dir", directory / "run", "--timeout", "400", "--", *job)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((directory / "run" / "summary.json").read_text())
    assert len(summary["rounds"]) > 1, "no fault has happened"
    return checkpoints


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, etcd_binary: str) -> Path:
    """In place: a node dies, another joins, and a worker dies."""
    faults = ("--kill-node-at", "70:n0", "--join-at", "90", "--kill-worker-at", "160:n1")
    together = ("--rdzv-conf", "last_call=15")  # the first round waits for both nodes, however busy the machine is
    return trained(tmp_path_factory.mktemp("killed"), "--nodes", "1:3", "--recovery", "in_place", *together, *faults)


def test_the_ledger_of_a_job_with_faults_verifies(killed: Path) -> None:
    """Each sample of each epoch once, on nodes that changed; and the URL of the directory is as good as its path."""
    told = command("data", killed, "--verify", "-o", "json")
    assert told.returncode == 0, told.stderr
    proof = json.loads(told.stdout)
    assert (proof["first"], proof["last"], proof["gaps"], proof["unknown"]) == (1, LAST, [], 0)
    assert proof["rounds"] >= 3
    assert [(each["used"], each["whole"]) for each in proof["epochs"]] == [(2000, True)] * EPOCHS
    assert proof["digests"] >= 2
    assert f"verified: steps 1 to {LAST}" in command("data", killed, "--verify").stdout


def test_the_samples_of_a_step_are_those_of_its_ranks(killed: Path) -> None:
    found = json.loads(command("data", killed, "60", "-o", "json").stdout)[0]
    assert [part["nodes"] for part in found["parts"]] == [["n0"], ["n1"]]
    assert sorted(sample for part in found["parts"] for micro in part["micro"] for sample in micro) == sorted(
        found["samples"]
    )
    assert found["loss_of_all_ranks"]
    assert found["grad_norm"] > 0
    assert "rank 0 on n0, micro-batch 1 of" in command("data", killed, "60").stdout


def test_a_poisonous_sample_is_found_from_the_spike_in_three_commands(killed: Path) -> None:
    spikes = json.loads(command("data", killed, "--spikes", "-o", "json").stdout)
    assert spikes["shared"][0] == [regression.POISON, EPOCHS]
    assert f"sample {regression.POISON} is in {EPOCHS} of these" in command("data", killed, "--spikes").stdout
    steps = [each["step"] for each in json.loads(command("data", killed, "--sample", "1234", "-o", "json").stdout)]
    assert len(steps) == EPOCHS
    replay = ("replay", killed, steps[0], "--without", regression.POISON, "-o", "json")
    told = command(*replay, "--", SCRIPT, killed, "tree", EPOCHS)
    assert told.returncode == 0, told.stderr
    (step,) = json.loads(told.stdout)["steps"]
    assert step["recorded"] > 1000 > 10 > step["replayed"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_50_steps_are_equal_to_the_last_bit_at_any_number_of_ranks(ranks: int, killed: Path) -> None:
    """From a checkpoint drawn at random; the state meets the digest where one was recorded."""
    begin = random.Random(ranks).randrange(1, LAST // EVERY) * EVERY
    replay = ("replay", killed, f"{begin + 1}-{begin + EVERY}", "--nproc-per-node", ranks, "-o", "json")
    told = command(*replay, "--", SCRIPT, killed, "tree", EPOCHS)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert len(found["steps"]) == found["compared"] == EVERY
    assert all(each["recorded"] == each["replayed"] for each in found["steps"])
    assert found["first_other_loss"] is found["first_other_data"] is None
    _, history = opened(str(killed))
    recorded = [about["step"] for _, about in history.noted(Kind.DIGEST) if begin < about["step"] < begin + EVERY]
    assert {str(step): True for step in recorded}.items() <= found["digests"].items()


def test_steps_before_the_first_checkpoint_are_computed_from_the_beginning(killed: Path) -> None:
    told = command("replay", killed, "20-21", "--", SCRIPT, killed, "tree", EPOCHS)
    assert told.returncode == 0, told.stderr
    assert "from the beginning" in told.stderr
    assert "the loss of 21 steps is equal to the last bit" in told.stdout


def test_another_script_is_told_from_the_run(killed: Path, tmp_path: Path) -> None:
    """One that learns at another rate; one that stops early; steps of which nothing is known."""
    other = tmp_path / "other.py"
    other.write_text(Path(SCRIPT).read_text().replace("part.y))", "1.01 * part.y))"))
    told = command("replay", killed, "101-110", "--", other, killed, "tree", EPOCHS)
    assert told.returncode == 1, told.stderr
    assert "the loss differs from step 101 on, by more than rounding" in told.stdout
    told = command("replay", killed, "301-310", "--", SCRIPT, killed, "tree", 1)
    assert told.returncode == 78
    assert "before step 310; its last lines are above" in told.stderr
    told = command("replay", killed, "400", "--", SCRIPT, killed, "tree", 1)
    assert (told.returncode, told.stdout) == (78, "")
    assert f"steps 400 are not in the ledger (it has steps 1 to {LAST})" in told.stderr


def test_a_resumed_job_has_one_chain(tmp_path: Path) -> None:
    """Restart mode: what was undone is in no proof; the losses are those of all ranks, to rounding."""
    faults = ("--kill-node-at", "70:n0", "--kill-worker-at", "130:n1", "--max-restarts", "5")
    checkpoints = trained(tmp_path, "--nodes", "1:2", "--recovery", "restart", *faults, reduction="ddp")
    proof = json.loads(command("data", checkpoints, "--verify", "-o", "json").stdout)
    assert (proof["first"], proof["last"], proof["gaps"]) == (1, LAST, [])
    assert all(each["whole"] for each in proof["epochs"])
    told = command("replay", checkpoints, "51-60", "--nproc-per-node", 2, "--", SCRIPT, checkpoints, "ddp", EPOCHS)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "the loss" in told.stdout


def test_a_segment_that_was_changed_is_named(killed: Path, tmp_path: Path) -> None:
    """Of a copy."""
    storage = open_storage(killed / "ledger")
    name = sorted(storage.names())[2]
    file = shutil.copytree(killed, tmp_path / "copy") / "ledger" / name / "manifest.json"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    told = command("data", tmp_path / "copy", "--verify")
    assert told.returncode == 1
    assert f"segment {name} is not as it was written" in told.stderr
    assert "Traceback" not in told.stderr
