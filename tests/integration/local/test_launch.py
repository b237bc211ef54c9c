"""``elastic_trainer.launch``: functions in processes of this machine that are restarted, or recover in place."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer import Session, launch, resume
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.launch import LaunchError

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("etcd_binary", "local_function")]


@pytest.fixture
def local_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions below travel by value, as those of a notebook do, whose module nobody can import."""
    for each in (greet, fail_once, fail, train, newest_of_all):
        monkeypatch.setattr(each, "__module__", "__main__")


def greet(name: str) -> tuple[str, int]:
    print(f"{name} is rank {os.environ['RANK']}", flush=True)
    return name, int(os.environ["RANK"])


def fail_once(marker: Path) -> str:
    if os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def fail() -> None:
    raise ValueError("no good")


def train(directory: Path) -> tuple[int, float]:
    """Rank 1 is killed after step 20; the training ends when it has taken part again."""
    killed = directory / "killed"
    data = torch.utils.data.TensorDataset(torch.arange(256.0)[:, None] / 256)
    with Session(seed=1) as session:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=4, epochs=100_000):
            with session.step() as step:
                step.backward(wrapped(batch.x).mean())
                optimizer.step()
            if step.number == 20 and session.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number > 40 and session.world_size == 3:
                break
        return step.number, float(model.weight.detach())


def test_what_each_process_returns_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    """In the order of the processes; what they print is printed here."""
    assert launch(greet, ("she",), nprocs=2) == [("she", 0), ("she", 1)]
    said = capfd.readouterr().out
    assert "she is rank 0" in said
    assert "she is rank 1" in said


def test_all_start_again_when_one_is_killed(tmp_path: Path) -> None:
    assert launch(fail_once, (tmp_path / "marker",), nprocs=2) == ["1", "1"]


def test_in_place_the_others_go_on_and_the_killed_one_joins_them(tmp_path: Path) -> None:
    results = launch(train, (tmp_path,), nprocs=3, recovery="in_place", rdzv_conf={"join_interval": "0.5"})
    assert (tmp_path / "killed").exists()
    assert len(set(results)) == 1
    assert results[0][0] > 40


def newest_of_all(directory: Path) -> tuple[str | None, str]:
    """What this rank's node holds is below a directory of its own."""
    rank = os.environ["RANK"]
    torch.distributed.init_process_group("gloo")
    found = resume.latest(directory / rank, "step-*.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return (found.name if found else None), (found.parent.name if found else rank)


def test_all_ranks_resume_from_one_checkpoint(tmp_path: Path) -> None:
    """The newest that each of them has whole, although one has a newer, and another's copy of it was cut."""
    assert launch(newest_of_all, (tmp_path,), nprocs=2) == [(None, "0"), (None, "1")]
    for rank, steps in (("0", (1, 2, 3, 4)), ("1", (1, 2, 3))):
        (tmp_path / rank).mkdir()
        for step in steps:
            torch.save({"step": step}, tmp_path / rank / f"step-{step}.pt")
    cut = tmp_path / "1" / "step-3.pt"
    cut.write_bytes(cut.read_bytes()[:-20])
    assert launch(newest_of_all, (tmp_path,), nprocs=2) == [("step-2.pt", "0"), ("step-2.pt", "1")]


def test_a_process_that_fails_for_good_is_named_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exception in the message, its traceback as a note and printed, torchrun's not; the logs are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LaunchError, match="process 0 failed: ValueError: no good") as caught:
        launch(fail, max_restarts=0)
    assert "in fail" in caught.value.__notes__[0]
    said = capfd.readouterr()
    assert said.out.count("Traceback") == 1
    assert "ChildFailedError" not in said.out + said.err
    assert list(tmp_path.glob("*/logs/n0.log"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"nprocs": 0}, "nprocs is 0"),
        ({"recovery": "hot"}, "recovery is 'hot' .one of: restart, in_place"),
        ({"rdzv_conf": {"ttl": "3"}}, "rdzv_conf needs recovery='in_place'"),
        ({"recovery": "in_place", "rdzv_conf": {"ttl": "x"}}, "'ttl' is 'x'"),
        ({"args": (threading.Lock(),)}, "cannot be sent to other processes: cannot pickle '_thread.lock'"),
    ],
)
def test_what_cannot_be_started_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch(greet, **given)


def test_not_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would take themselves for those of the job around it."""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="in a process that a launcher has started"):
        launch(greet, ("she",))
