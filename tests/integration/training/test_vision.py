"""The tasks on images as users start them: they learn, alone and on two ranks alike, and mistakes are one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.jobs.pillow import Image
from tests.integration.training.launch import records, train

pytestmark = pytest.mark.timeout(900)

SMALL = (
    "data.size=16",
    "data.resize=16",
    "model.width=4",
    "global_batch=6",
    "epochs=2",
    "scheduler.warmup_steps=0",
    "optimizer.lr=0.01",
    "logging.loss_every=1",
)
"""For class folders of :func:`pictures`: 4 steps an epoch."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"data.cache={tmp_path_factory.mktemp('cache')}"


def pictures(root: Path, classes: str = "abc") -> Path:
    """Class folders of noise, 8 pictures to train on and 3 to test with for each class, the darker the earlier."""
    for number, name in enumerate(classes):
        for part, count in (("train", 8), ("val", 3)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                noise = bytes(80 * number + byte % 32 for byte in os.urandom(20 * 20))
                Image.frombytes("L", (20, 20), noise).save(folder / f"{index}.png")
    return root


def test_digits_in_class_folders_are_told_apart(tmp_path: Path, cache: str) -> None:
    """A small network on a quarter of the default data, with the best checkpoint kept by top1."""
    where = f"checkpoint.directory={tmp_path}"
    outcome = train("imagefolder", cache, where, "data.limit=1000", "epochs=4", "model.width=4")
    assert outcome.code == 0, outcome.err
    report = outcome.report
    assert report["metrics"]["top1"] > 0.8
    assert report["metrics"]["top5"] > 0.95
    assert report["best"]["top1"] == max(record["metrics"]["top1"] for record in records(tmp_path))


def test_key_points_of_digits_are_found(tmp_path: Path) -> None:
    """A small network on a fifth of the default data, in half precision, best by the score of points."""
    job = ("keypoints", "data.count=400", "data.test_count=60", "epochs=4", "global_batch=10", "precision=bf16")
    network = ("model.channels=[8, 16]", "model.stages=[{branches: 1, blocks: 1}, {branches: 2, blocks: 1}]")
    where = (f"checkpoint.directory={tmp_path}", "checkpoint.metric=point_f1", "scheduler.milestones=[3]")
    outcome = train(*job, *network, *where)
    assert outcome.code == 0, outcome.err
    assert outcome.report["metrics"]["point_f1"] > 0.6
    rates = [record["lr"] for record in records(tmp_path)]
    assert rates[:2] == [0.006, 0.006]
    assert rates[-1] == pytest.approx(0.0012)


@pytest.mark.parametrize("job", ["imagefolder", "keypoints"])
def test_two_ranks_train_as_one(tmp_path: Path, job: str) -> None:
    """With norms over all ranks and exact metrics, what differs is rounding; data workers change nothing either."""
    network = ("model.channels=[4, 8]", "model.stages=[{branches: 1, blocks: 1}, {branches: 2, blocks: 1}]")
    quick = {
        "imagefolder": (f"data.directory={pictures(tmp_path / 'pictures')}", *SMALL),
        "keypoints": ("data.count=20", "data.test_count=7", "epochs=1", "global_batch=5", "evaluation.batch_size=2"),
    }
    words = (job, *quick[job], *(network if job == "keypoints" else ()), "logging.loss_every=1", "max_steps=4")
    alone = train(*words, f"checkpoint.directory={tmp_path / 'one'}")
    two = train(*words, "workers=1", f"checkpoint.directory={tmp_path / 'two'}", world=2)
    assert (alone.code, two.code) == (0, 0), alone.err + two.err
    assert two.report["world_size"] == 2
    assert two.report["train_loss"] == pytest.approx(alone.report["train_loss"], rel=1e-3)
    assert two.report["metrics"]["loss"] == pytest.approx(alone.report["metrics"]["loss"], rel=2e-3)


def test_a_corrupt_image_is_left_out_on_request(tmp_path: Path) -> None:
    """It is named each epoch, and the others are trained on. In a test it is an error all the same."""
    root = pictures(tmp_path / "data")
    (root / "train" / "b" / "5.png").write_text("not an image")
    job = ("imagefolder", f"data.directory={root}", *SMALL, "bad_samples=skip")
    outcome = train(*job, f"checkpoint.directory={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.err
    told = outcome.events("data.sample_skipped")
    assert [each["epoch"] for each in told] == [0, 1]
    assert all(str(root / "train" / "b" / "5.png") in each["error"] for each in told)
    (root / "val" / "a" / "0.png").write_text("not an image")
    refused = train(*job, f"checkpoint.directory={tmp_path / 'other'}")
    assert refused.code == EXIT_CONFIG
    assert refused.complaints[0].startswith(f"error: {root / 'val' / 'a' / '0.png'}: not an image")
