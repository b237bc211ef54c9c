"""Key points: heat maps, peaks and groups, the network, and the task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.jobs.config import JobConfig, MultiStepConfig, load_job
from elastic_trainer.jobs.keypoints import (
    Counts,
    Fusion,
    HighResolutionNet,
    HrnetOptions,
    Instance,
    Keypoints,
    Peak,
    StageOptions,
    drawn_points,
    find_peaks,
    grouped,
    heat_losses,
    judge,
    tag_losses,
    tags_at,
    targets,
    with_coordinates,
)
from elastic_trainer.jobs.pillow import Image


def test_a_target_is_one_at_the_point_and_falls_as_a_gaussian() -> None:
    """The middle of cell (row 2, column 3) at stride 4 is pixel (14, 10); hidden points leave nothing."""
    points = torch.tensor([[[[14.0, 10.0, 1.0], [14.0, 10.0, 0.0]]]])
    maps = targets(points, (6, 8), stride=4, sigma=1.5)
    assert maps.shape == (1, 2, 6, 8)
    assert float(maps[0, 0, 2, 3]) == 1.0
    assert float(maps[0, 0, 2, 5]) == pytest.approx(math.exp(-4 / (2 * 1.5**2)))
    assert float(maps[0, 0, 4, 4]) == pytest.approx(math.exp(-5 / (2 * 1.5**2)))
    assert not maps[0, 1].any()


def test_of_two_instances_the_larger_value_counts() -> None:
    """Peaks stay 1 where Gaussians meet; absent instances change nothing."""
    one, other = [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]
    both = targets(torch.tensor([[[one], [other], [[0.0, 0.0, 0.0]]]]), (1, 4), stride=2, sigma=1.0)
    apart = [targets(torch.tensor([[[each]]]), (1, 4), stride=2, sigma=1.0) for each in (one, other)]
    assert torch.equal(both, torch.maximum(*apart))


def test_cells_of_which_nothing_is_known_do_not_count() -> None:
    """The mean is over the others; a picture of which nothing is known has no loss."""
    wanted, heat = torch.zeros(2, 1, 2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 1, 2, 2)
    mask = torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert heat_losses(heat, wanted, mask).tolist() == [(1 + 4 + 16) / 3, 0.0]


def scene(*tags: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of tags, and points of two instances of two kinds at cells 0, 1 and 2, 3; the last one hidden."""
    maps = torch.tensor(tags).expand(1, 2, 1, 4)
    points = torch.tensor([[[[1, 1, 1], [3, 1, 1]], [[5, 1, 1], [7, 1, 0]], [[0, 0, 0], [0, 0, 0]]]])
    return maps, points.float()


def test_tags_are_read_where_points_are() -> None:
    maps, points = scene(1.0, 2.0, 5.0, 9.0)
    points[0, 0, 1, 0] = 400.0
    tags, known = tags_at(maps, points, stride=2)
    assert known.tolist() == [[[True, False], [True, False], [False, False]]]
    assert tags[known].tolist() == [1.0, 5.0]


def test_tag_losses_pull_within_and_push_between_instances() -> None:
    pull, push = tag_losses(*scene(1.0, 2.0, 3.5, 9.0), stride=2)
    assert pull.tolist() == [pytest.approx((0.25 + 0.0) / 2)]
    assert push.tolist() == [pytest.approx(math.exp(-(2.0**2) / 2))]


def test_pictures_with_one_instance_or_none_have_nothing_to_push() -> None:
    """And no division by zero, forward or backward."""
    maps, points = scene(1.0, 2.0, 3.0, 4.0)
    points[:, 1:] = 0.0
    leaf = maps.clone().requires_grad_()
    pull, push = tag_losses(leaf.expand(2, -1, -1, -1), torch.cat([points, torch.zeros_like(points)]), stride=2)
    assert pull.tolist() == [0.25, 0.0]
    assert push.tolist() == [0.0, 0.0]
    (pull + push).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def peak(x: float, tag: float = 0.0, score: float = 1.0) -> Peak:
    return Peak(x, 0.0, score, tag)


def test_peaks_are_local_maxima_above_the_threshold() -> None:
    heat, tags = torch.zeros(1, 2, 8, 8), torch.arange(128.0).view(1, 2, 8, 8)
    heat[0, 0, 2, 3], heat[0, 0, 2, 4], heat[0, 0, 6, 6], heat[0, 0, 0, 0] = 0.9, 0.5, 0.95, 0.05
    ((first, second),) = find_peaks(heat, tags, stride=4, threshold=0.1, most=5)
    assert [each.score for each in first] == pytest.approx([0.95, 0.9])
    assert [each.tag for each in first] == [6 * 8 + 6, 2 * 8 + 3]
    assert second == []
    assert len(find_peaks(heat, tags, stride=4, threshold=0.1, most=1)[0][0]) == 1


@pytest.mark.parametrize("x", [8.0, 9.3, 10.0, 10.9, 11.5])
def test_a_peak_is_found_where_the_point_is(x: float) -> None:
    maps = targets(torch.tensor([[[[x, 14.6, 1.0]]]]), (16, 16), stride=2, sigma=1.0)
    (((found,),),) = find_peaks(maps, maps, stride=2, threshold=0.1, most=4)
    assert found.x == pytest.approx(x, abs=0.51)
    assert found.y == pytest.approx(14.6, abs=0.51)


def test_of_equal_neighbours_one_is_the_peak() -> None:
    """As half precision makes them: two instances would come of one point."""
    heat = torch.zeros(1, 1, 6, 6)
    heat[0, 0, 2:4, 2:4] = 0.5
    (((found,),),) = find_peaks(heat, heat, stride=1, threshold=0.1, most=9)
    assert (found.x, found.y) == (2.75, 2.75)


def test_peaks_with_close_tags_become_instances() -> None:
    """Each kind of point once in an instance; a tag that fits none begins one."""
    peaks = [[peak(1, 0.0), peak(2, 5.0)], [peak(3, 5.2), peak(4, 0.1)], [peak(5, 9.0)]]
    instances = grouped(peaks, closeness=1.0)
    found = sorted(sorted((kind, each.x) for kind, each in instance.peaks.items()) for instance in instances)
    assert found == [[(0, 1), (1, 4)], [(0, 2), (1, 3)], [(2, 5)]]
    assert len(grouped(peaks, closeness=1.0, least_points=2)) == 2


def test_the_closest_pair_is_joined_first() -> None:
    """A peak does not take the instance that another one fits better; of equals the higher peak is first."""
    (best,) = grouped([[peak(1, 0.0)], [peak(2, 0.6, 1.0), peak(3, 0.1, 0.2)]], closeness=1.0, least_points=2)
    assert best.peaks[1].x == 3
    (alone,) = grouped([[peak(1, 0.0)], [peak(2, 0.02, 0.3), peak(3, 0.01, 0.9)]], closeness=1.0, least_points=2)
    assert alone.peaks[1].x == 3


def truth(*xs: tuple[float | None, ...]) -> np.ndarray:
    """(m, k, 3): instances with points at these places of a line; None is hidden."""
    return np.array([[(0.0, 0.0, 0.0) if x is None else (x, 0.0, 1.0) for x in each] for each in xs])


def instance(*xs: float | None) -> Instance:
    return Instance({kind: peak(x) for kind, x in enumerate(xs) if x is not None})


def counted(predicted: list[Instance], true: np.ndarray, size: float = 10.0) -> Counts:
    counts = Counts()
    judge(predicted, true, np.full(len(true), size), 0.2, counts)
    return counts


def test_a_perfect_prediction_has_ones_everywhere() -> None:
    counts = counted([instance(30, 40), instance(10, None)], truth((10, None), (30, 40)))
    assert counts == Counts(points=3, hit=3, found=3, instances_found=2)
    assert counts.ratios() == {"pck": (3, 3), "point_f1": (6, 6), "instance_f1": (4, 4)}


def test_points_are_met_within_a_part_of_the_size() -> None:
    """2.0 of 10 are still near enough, 2.1 are not: that is one missed and one invented."""
    counts = counted([instance(12.0, 17.9)], truth((10, 20)))
    assert (counts.found, counts.invented, counts.missed, counts.hit) == (1, 1, 1, 1)
    assert counts.instances_found == 1


def test_right_points_in_wrong_instances_are_found_but_not_hit() -> None:
    """Grouping that mixes two instances up costs PCK and not the score of points."""
    counts = counted([instance(10, 40, 50), instance(30, 20, 25)], truth((10, 20, 25), (30, 40, 50)))
    assert (counts.found, counts.invented, counts.missed) == (6, 0, 0)
    assert (counts.points, counts.hit) == (6, 4)


def test_nothing_is_met_twice() -> None:
    counts = counted([instance(11, 20), instance(10, 20)], truth((10, 20)))
    assert (counts.found, counts.invented, counts.instances_found, counts.instances_invented) == (2, 2, 1, 1)


def test_empty_pictures_and_empty_predictions_count_too() -> None:
    """Nothing there and nothing said is no fault; what is said of nothing, and not said of something, is."""
    assert counted([], truth((10, 20))[:0]) == Counts()
    assert counted([instance(5, 6)], np.zeros((0, 2, 3))) == Counts(invented=2, instances_invented=1)
    assert counted([], truth((10, 20))) == Counts(points=2, missed=2, instances_missed=1)


def options(channels: tuple[int, ...], stages: list[tuple[int, int, int]], **more: Any) -> HrnetOptions:
    plans = tuple(StageOptions(branches=one, blocks=two, modules=three) for one, two, three in stages)
    return HrnetOptions(channels=channels, stages=plans, **{"stem_halvings": 1, **more})


@pytest.mark.parametrize(
    ("channels", "stages", "halvings", "size"),
    [((4,), [(1, 1, 1)], 1, 16), ((4, 6), [(1, 1, 1), (2, 2, 2)], 1, 16), ((4, 6, 8), [(1, 1, 1), (3, 1, 1)], 2, 32)],
)
def test_maps_have_the_resolution_of_the_first_branch(
    channels: tuple[int, ...], stages: list[tuple[int, int, int]], halvings: int, size: int
) -> None:
    """Heat maps and tags, one of each per kind of point. Every parameter has a part in them, which DDP insists on."""
    network = HighResolutionNet(5, options(channels, stages, stem_halvings=halvings))
    heat, tags = network(torch.rand(2, 3, size, size))
    assert heat.shape == tags.shape == (2, 5, size // 2**halvings, size // 2**halvings)
    (heat.square().sum() + tags.square().sum()).backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


def test_a_fusion_keeps_shapes_and_mixes_all_branches() -> None:
    """Each output follows each input, whichever resolution it has."""
    torch.manual_seed(0)  # with few channels every path of one branch may be below zero, which ReLU cuts off
    fusion = Fusion((2, 3, 4), targets=3).eval()
    inputs = [torch.rand(1, width, side, side, requires_grad=True) for width, side in ((2, 8), (3, 4), (4, 2))]
    outputs = fusion(inputs)
    assert [tuple(each.shape) for each in outputs] == [tuple(each.shape) for each in inputs]
    for output in outputs:
        slopes = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        assert all(bool(slope.any()) for slope in slopes)


def test_coordinates_go_from_one_corner_to_the_other() -> None:
    seen = with_coordinates(torch.zeros(2, 3, 3, 5))
    assert seen.shape == (2, 5, 3, 5)
    assert seen[1, 3:, 0, 0].tolist() == [-1.0, -1.0]
    assert seen[1, 3:, 2, 0].tolist() == [1.0, -1.0]
    assert seen[1, 3:, 1, 4].tolist() == [0.0, 1.0]


def test_only_with_coordinates_two_equal_things_get_different_tags() -> None:
    """A network without them says the same of both, far from the borders."""
    image = torch.zeros(1, 3, 64, 64)
    image[:, :, 28:32, 16:20] = image[:, :, 28:32, 48:52] = 1.0
    for coordinates in (False, True):
        torch.manual_seed(0)
        network = HighResolutionNet(1, options((4,), [(1, 1, 1)], coordinates=coordinates)).eval()
        with torch.no_grad():
            _, tags = network(image)
        alike = torch.allclose(tags[0, 0, 14:16, 8:10], tags[0, 0, 14:16, 24:26])
        assert alike is not coordinates


def test_with_coordinates_tags_begin_as_the_place() -> None:
    """Things apart differ from the start by more than what belongs together: training need not find that out."""
    torch.manual_seed(0)
    network = HighResolutionNet(2, options((4,), [(1, 1, 1)], coordinates=True)).eval()
    with torch.no_grad():
        _, tags = network(torch.zeros(1, 3, 64, 64))
    middle = tags[0, :, 16, 16]
    assert (tags[0, :, 16, 28] - middle > 2.0).all()
    assert (tags[0, :, 28, 16] - middle > 1.0).all()
    assert ((tags[0, :, 16, 18] - middle).abs() < 1.0).all()


SMALL = ("data.count=6", "data.test_count=5", "model.channels=[4]", "model.stages=[{branches: 1, blocks: 1}]")


def coco(directory: Path, points: tuple[str, ...] = ("nose", "left_eye", "right_eye")) -> list[str]:
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
