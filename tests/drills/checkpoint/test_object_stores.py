"""A training whose checkpoints go to S3, and what befalls the store or the process in the middle of an upload."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, Event, Transition, storage
from elastic_trainer.checkpoint.manifest import Kind, kind_of
from elastic_trainer.checkpoint.storage import open_storage
from elastic_trainer.checkpoint.storage.s3 import S3Bucket
from elastic_trainer.worker.session import Session
from tests.drills.checkpoint.killing import kill_savers, save_beside_for_ever
from tests.drills.checkpoint.remote_job import train
from tests.support.s3server import BUCKET, Fault, S3Server
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import newest_of

STEPS, SAVE_EVERY = 24, 4
LIMIT_S = 300.0
KILLS = 10

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    """The parameters at the end of the same training without checkpoints or faults."""
    return train(None, STEPS, SAVE_EVERY)[1]


def saved_steps(url: str) -> list[int]:
    return [entry.step for entry in CheckpointManager(url).entries()]


FAULTS = {
    "403": (Fault("^(PUT|POST) .*/step-", status=403), "permission denied .*allow s3:PutObject"),
    "500": (Fault("^(PUT|POST) .*/step-", status=500), "the store fails .InternalError"),
    "503": (Fault("^(PUT|POST) .*/step-", status=503), "the store fails .SlowDown"),
    "time-out": (Fault("^PUT .*partNumber=2", stall_s=3600.0), "did not answer in time"),
    "full outage": (Fault("", status=503), "the store fails .SlowDown"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_while_the_store_fails_and_the_next_save_works(
    s3: S3Server, s3_url: str, undisturbed: torch.Tensor, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The save that fails is an event with the reason, also raised by a save that waits; no step is lost or changed."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    usual = asdict(storage.LIMITS)
    limits = SimpleNamespace(**usual)
    monkeypatch.setattr(storage, "LIMITS", limits)
    injected, reason = FAULTS[fault]
    events: list[Event] = []
    met = []

    def failed() -> list[Event]:
        return [event for event in events if event.kind is Transition.FAILED]

    def after(session: Session, step: int) -> None:
        if step == 6:
            eventually(lambda: Transition.COMMITTED in [event.kind for event in events], "step 4 is not saved", LIMIT_S)
            s3.inject(injected)
            if fault == "time-out":  # no longer than the fault: a loaded machine may need more for a save
                limits.request_s = limits.part_s = 5.0
        if step == 10:
            eventually(failed, "no save fails", LIMIT_S)
            assert session.save(wait=True) is None
            met.append(s3.hits())
            s3.inject()
            vars(limits).update(usual)

    done, parameters = train(s3_url, STEPS, SAVE_EVERY, after, events.append)
    assert met[0] > 0
    assert [event.values["step"] for event in failed()] == [8, 10]
    assert all(re.search(reason, event.reason) for event in failed())
    assert done == list(range(1, STEPS + 1))
    assert torch.equal(parameters, undisturbed)
    assert saved_steps(s3_url) == [24, 20, 16, 12, 4]


@pytest.mark.usefixtures("s3")
def test_the_newest_checkpoint_survives_every_kill(s3_url: str) -> None:
    """As in a directory: at random moments of uploads, publications and removals, beside training."""
    kill_savers(s3_url, KILLS, seed=5, saver=save_beside_for_ever).check()
    CheckpointManager(s3_url).sweep()
    assert {kind_of(name) for name in open_storage(s3_url).names()} == {Kind.COMMITTED}


def test_a_training_killed_in_mid_upload_resumes_exactly_and_sweeps_what_it_left(
    s3: S3Server, s3_url: str, undisturbed: torch.Tensor
) -> None:
    """The second part of step 8's file is never answered when SIGKILL comes: step 4 is the newest, and whole."""
    s3.inject(Fault("^PUT .*/step-000000008.*partNumber=2", stall_s=3600.0))
    command = [sys.executable, "-m", "tests.drills.checkpoint.remote_job", s3_url, str(STEPS), str(SAVE_EVERY)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(s3.hits, "step 8 is not uploaded", LIMIT_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    s3.inject()
    bucket = S3Bucket(BUCKET, s3_url.removeprefix(f"s3://{BUCKET}/"), storage.LIMITS)
    assert saved_steps(s3_url) == [4]
    assert bucket._uploads("")
    assert Kind.TEMPORARY in map(kind_of, open_storage(s3_url).names())
    events: list[Event] = []
    done, parameters = train(s3_url, STEPS, SAVE_EVERY, on_event=events.append)
    assert done == list(range(5, STEPS + 1))
    assert torch.equal(parameters, undisturbed)
    assert [event.kind for event in events][:2] == [Transition.SWEPT, Transition.LOADED]
    assert saved_steps(s3_url) == [24, 20, 16, 12, 8, 4]
    assert not bucket._uploads("")
    assert {kind_of(name) for name in open_storage(s3_url).names()} == {Kind.COMMITTED, Kind.FOREIGN}
    loaded = newest_of(CheckpointManager(s3_url))
    assert torch.equal(torch.cat([each.reshape(-1) for each in loaded.state["model"].values()]), undisturbed)
