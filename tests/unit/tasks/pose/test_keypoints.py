"""The key point task: sums that add up, pictures for people, options that are checked, job files that are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.jobs.config import JobConfig, MultiStepConfig, load_job
from elastic_trainer.jobs.keypoints import Instance, Keypoints, Peak, drawn_points
from elastic_trainer.jobs.pillow import Image

SMALL = ("data.count=6", "data.test_count=5", "model.channels=[4]", "model.stages=[{branches: 1, blocks: 1}]")


def coco(directory: Path, points: tuple[str, ...] = ("nose", "left_eye", "right_eye")) -> list[str]:
    """Overrides for two pictures in COCO's format."""
    directory.mkdir(exist_ok=True)
    numbers = [5, 5, 2, 8, 3, 2, 3, 3, 2][: 3 * len(points)]
    person = {"category_id": 1, "bbox": [1, 1, 9, 9], "keypoints": numbers}
    values: dict[str, Any] = {
        "categories": [{"id": 1, "name": "person", "keypoints": points}],
        "images": [{"id": number, "file_name": f"{number}.png"} for number in (1, 2)],
        "annotations": [{**person, "image_id": number} for number in (1, 2)],
    }
    for number in (1, 2):
        Image.new("RGB", (20, 10)).save(directory / f"{number}.png")
    (directory / "a.json").write_text(json.dumps(values))
    files = f"{{annotations: {directory / 'a.json'}, images: {directory}}}"
    return [f"data.train={files}", f"data.test={files}"]


def prepared(*overrides: str) -> tuple[Keypoints, Any, torch.nn.Module]:
    task = Keypoints(load_job("keypoints", [*SMALL, *overrides]))
    data = task.datasets()
    torch.manual_seed(0)
    return task, data, task.model().eval()


def test_the_network_and_the_identity_follow_the_points(tmp_path: Path) -> None:
    task, _, model = prepared()
    assert task.identity() == {"points": ("top", "bottom", "left", "right", "centre")}
    assert model(torch.zeros(1, 3, 64, 64))[0].shape == (1, 5, 32, 32)
    task, data, model = prepared(*coco(tmp_path))
    assert task.identity() == {"points": ("nose", "left_eye", "right_eye")}
    assert model(torch.zeros(1, 3, 64, 64))[1].shape == (1, 3, 32, 32)
    assert len(data.train) == 2


def test_metrics_are_sums_and_counts_that_add_up() -> None:
    task, data, model = prepared("options.threshold=0.00001")
    fetch = Fetcher(data.test, torch.device("cpu"))
    ids = np.arange(5)
    with torch.no_grad():
        whole, *parts = (task.metrics(model, Batch(fetch, part, part)) for part in (ids, ids[:2], ids[2:]))
        loss = task.loss(model, Batch(fetch, ids, ids))
    assert set(whole) == {"loss", "heat_loss", "ae_loss", "pck", "point_f1", "instance_f1"}
    for name, (total, count) in whole.items():
        assert sum(float(part[name][0]) for part in parts) == pytest.approx(float(total), rel=1e-5)
        assert sum(int(part[name][1]) for part in parts) == count
    assert float(whole["loss"][0]) / 5 == pytest.approx(float(loss), rel=1e-5)
    points = sum(int((data.test[number][1][:, :, 2] > 0).sum()) for number in range(5))
    assert whole["pck"][1] == points


def test_what_is_found_in_unknown_places_does_not_count() -> None:
    """Else a network would be blamed for what nobody labelled."""
    task, data, model = prepared("options.threshold=0.00001", "options.least_points=1")
    image, points, sizes, known = (part.unsqueeze(0) for part in data.test[0])
    batch = Batch(Fetcher(data.test, torch.device("cpu")), np.arange(1), np.arange(1))
    batch._data, batch._fetched = [image, torch.zeros_like(points), sizes, known], True
    with torch.no_grad():
        invented = task.metrics(model, batch)["point_f1"][1]
        batch._data[3] = torch.zeros_like(known)
        assert task.metrics(model, batch)["point_f1"] == (0, 0)
    assert invented > 0


def test_exhibits_are_pictures_of_the_first_samples() -> None:
    """At most four, bytes on the CPU, large enough to be looked at."""
    task, data, model = prepared()
    ids = np.arange(5)
    with torch.no_grad():
        shown = task.exhibits(model, Batch(Fetcher(data.test, torch.device("cpu")), ids, ids)).images
    assert list(shown) == ["test 0", "test 1", "test 2", "test 3"]
    assert {(tuple(image.shape), image.dtype) for image in shown.values()} == {((3, 256, 256), torch.uint8)}


def test_true_and_found_points_are_drawn_where_they_are() -> None:
    """A cross for what is there, a coloured dot for what was found, nothing for what is hidden."""
    points = torch.tensor([[[10.0, 20.0, 1.0], [50.0, 50.0, 0.0]]])
    picture = drawn_points(torch.zeros(3, 64, 64, dtype=torch.uint8), points, [Instance({0: Peak(40.0, 30.0, 1, 0)})])
    assert picture[:, 80, 40].tolist() == [255, 255, 255]
    assert picture[:, 120, 160].tolist() == [255, 0, 0]
    assert not picture[:, 190:210, 190:210].any()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["data.train={annotations: a, images: b}"], "'train' and 'test' go together"),
        (["data.train={annotations: a}", "data.test={annotations: a}"], r"data\.train\.images"),
        (["data.scale=[2, 1]"], "a least and a most"),
        (["model.channels=[4, 8]"], r"branches \[1\] must not fall and end with 2"),
        (["model.stages=[{branches: 2, blocks: 1}, {branches: 1, blocks: 1}]"], "must not fall"),
        (["model.stages=[]"], "model.stages"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Keypoints(load_job("keypoints", [*SMALL, *overrides]))


def test_a_size_that_the_branches_cannot_halve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"size 63 is not a multiple of 2.*set data\.size to 64"):
        prepared("data.size=63")


def test_training_and_test_points_must_be_the_same(tmp_path: Path) -> None:
    """The network knows them by number."""
    train, _ = coco(tmp_path / "one")
    _, test = coco(tmp_path / "other", points=("nose", "tail"))
    with pytest.raises(DataError, match="nose, tail, those of the training data nose, left_eye, right_eye"):
        prepared(train, test)


def test_the_defaults_make_a_network() -> None:
    """A job file needs no ``model:``; branches and channels of the defaults fit together, as in HRNet-W32."""
    task = Keypoints(JobConfig(task="keypoints", epochs=1, global_batch=2, data={"count": 2, "test_count": 1}))
    task.datasets()
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    assert parameters > 20e6


def test_the_job_file_for_coco_is_right(tmp_path: Path) -> None:
    task = Keypoints(load_job("keypoints_coco", coco(tmp_path)))
    data = task.datasets()
    with torch.device("meta"):
        model = task.model()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert 25 < millions < 32
    assert data.train[0][3].shape == (128, 128)  # type: ignore[index]
    assert task.config.sync_batchnorm
    assert isinstance(task.config.scheduler, MultiStepConfig)
