"""Key points: pictures moved, drawn and read from COCO's files, heat maps, groups, the network and the task."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.data.seeds import SampleSeeds
from elastic_trainer.errors import EXIT_CONFIG, ConfigError, DataError
from elastic_trainer.jobs.config import MultiStepConfig, load_job
from elastic_trainer.jobs.digits import Digits, shipped_digits
from elastic_trainer.jobs.keypoints import (
    CANVAS,
    INK,
    CocoScenes,
    Counts,
    DigitScenes,
    Floats,
    HighResolutionNet,
    HrnetOptions,
    Instance,
    Keypoints,
    KeypointsData,
    Peak,
    Scene,
    StageOptions,
    Views,
    drawn,
    drawn_points,
    find_peaks,
    fitting,
    grouped,
    heat_losses,
    judge,
    mirror_order,
    moved,
    read_annotations,
    stroke_points,
    tag_losses,
    targets,
    with_coordinates,
)
from elastic_trainer.jobs.pillow import Image


class OneScene:
    """A white square in a black picture, points at its corners; a second thing, smaller, and something unknown."""

    names = ("left_top", "right_top", "bottom")

    def __init__(self, unknown: Floats | None = None) -> None:
        self.unknown = unknown if unknown is not None else np.zeros((0, 4))

    def __len__(self) -> int:
        return 1

    def scene(self, index: int) -> Scene:
        pixels = np.zeros((40, 40, 3), dtype=np.uint8)
        pixels[12:20, 16:26] = 255
        corners = [(16.5, 12.5, 1.0), (25.5, 12.5, 1.0), (21.0, 19.5, 1.0)]
        small = [(30.5, 30.5, 1.0), (34.5, 30.5, 1.0), (0.0, 0.0, 0.0)]
        return Scene(Image.fromarray(pixels), np.array([small, corners]), np.array([16.0, 80.0]), self.unknown)


def views(size: int = 40, most: int = 2, unknown: Floats | None = None, **moves: Any) -> Views:
    return Views(OneScene(unknown), KeypointsData(size=size, most=most, **moves), stride=2, moving=bool(moves))


def test_an_unmoved_picture_is_what_it_was() -> None:
    image, points, sizes, known = views(most=3)[0]
    assert torch.equal(image[:, 12:20, 16:26], torch.full((3, 8, 10), 255, dtype=torch.uint8))
    assert int((image > 0).sum()) == 3 * 80
    assert points.shape == (3, 3, 3)
    assert points[0, 1].tolist() == [25.5, 12.5, 1.0]
    assert points[1, 2].tolist() == [0.0, 0.0, 0.0]
    assert not points[2].any()
    assert sizes.tolist() == [pytest.approx(math.sqrt(80)), 4.0, 0.0]
    assert known.shape == (20, 20)
    assert known.all()
    assert drawn(KeypointsData(size=50))[0].tolist() == np.eye(3).tolist()


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_points_move_with_the_picture(seed: int, flip: float) -> None:
    """After any scaling, turn, shift and mirroring, the centre of the white pixels is that of the square."""
    random.seed(seed)
    image, points, sizes, _ = views(80, scale=(0.8, 1.4), rotation=40.0, shift=0.1, flip=flip)[0]
    rows, columns = np.nonzero(image[0].numpy() > 127)
    # The middle of the upper corners is 3.5 original pixels above the centre, the lowest point as far below.
    middle = ((points[0, 0] + points[0, 1]) / 2 + points[0, 2]) / 2
    assert [columns.mean() + 0.5, rows.mean() + 0.5] == pytest.approx(middle[:2].tolist(), abs=0.3)
    assert len(rows) == pytest.approx(float(sizes[0]) ** 2, rel=0.05)


def test_in_a_mirrored_picture_left_is_left() -> None:
    assert mirror_order(["nose", "left_eye", "right_eye", "left", "right", "lefty"]) == [0, 2, 1, 4, 3, 5]
    assert mirror_order(["eye_left", "eye_right"]) == [1, 0]
    _, points, _, _ = views(most=1, flip=1.0)[0]
    assert points[0, :, 0].tolist() == pytest.approx([14.5, 23.5, 19.0])


def test_a_sample_moves_alike_wherever_it_is_drawn() -> None:
    moving, seeds, found = views(scale=(0.5, 1.5), rotation=180.0, shift=0.2, flip=0.5), SampleSeeds(1), []
    for epoch in (0, 1, 0):
        seeds.sample(epoch, 0)
        found.append(moving[0][0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_a_picture_fits_into_the_square_and_points_outside_are_not_visible() -> None:
    """Its longer side fills it, the other one is centred."""
    fit = fitting(200, 100, 50)
    corners = np.array([[(0.0, 0.0, 1.0), (199.9, 99.9, 1.0), (201.0, 0.0, 1.0), (9.0, 9.0, 0.0)]])
    first, last, *outside = moved(corners, fit, 50)[0].tolist()
    assert first + last == pytest.approx([0, 12.5, 1, 50, 37.5, 1], abs=0.1)
    assert outside == [[0.0, 0.0, 0.0]] * 2


def test_unknown_places_and_surplus_instances_are_masked() -> None:
    """In cells of the map; the larger instances are kept."""
    _, points, _, known = views(most=1, unknown=np.array([[0.0, 0.0, 7.0, 3.0]]))[0]
    assert points.shape == (1, 3, 3)
    assert points[0, 0, 0] == 16.5
    rows, columns = np.nonzero(known.numpy() == 0)
    masked = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert {(0, 0), (1, 3), (15, 15), (15, 17)} <= masked
    assert not {(0, 4), (2, 0), (15, 12), (10, 10)} & masked


def digits() -> Digits:
    return shipped_digits().take(np.arange(0, 5000, 250))


def strokes() -> NDArray[np.uint8]:
    """An upright bar with a foot to the right, of which one pixel is grey."""
    image = np.zeros((28, 28), dtype=np.uint8)
    image[5:15, 10] = 255
    image[14, 10:16] = INK
    image[4, 10] = INK - 1
    return image


def test_points_of_a_digit_follow_from_its_ink() -> None:
    """The middle of the first and last rows and columns with ink, and its centre; grey pixels are no ink."""
    top, bottom, left, right, centre = stroke_points(strokes()).tolist()
    assert top == [10.5, 5.5, 1.0]
    assert bottom == [13.0, 14.5, 1.0]
    assert left == [10.5, 10.0, 1.0]
    assert right == [15.5, 14.5, 1.0]
    assert centre == [pytest.approx(10.5 + 15 / 15), pytest.approx((95 + 5 * 14) / 15 + 0.5), 1.0]


def test_scenes_show_one_to_three_digits_by_seed_and_number_alone() -> None:
    """On the canvas, apart from each other, their points on ink; the same at each look."""
    scenes, again, other = (DigitScenes(digits(), 60, seed) for seed in (0, 0, 1))
    counts = set()
    for number in range(len(scenes)):
        scene = scenes.scene(number)
        counts.add(len(scene.points))
        pixels = np.array(scene.image)[..., 0]
        assert pixels.shape == (CANVAS, CANVAS)
        for x, y, _ in scene.points[:, 0]:  # the top: ink in its row, none of that digit's above it
            assert (pixels[int(y)] >= INK).any()
            assert 0 <= x < CANVAS
        assert scene.image.tobytes() == again.scene(number).image.tobytes()
        assert np.array_equal(scene.points, again.scene(number).points)
    assert counts == {1, 2, 3}
    assert scenes.scene(29).image.tobytes() != other.scene(29).image.tobytes()


def content() -> dict[str, Any]:
    """Four pictures: two persons and a crowd; an unlabelled person; a dog; nothing."""
    person = {"category_id": 1, "iscrowd": 0}
    return {
        "info": {"year": 2017},
        "categories": [
            {"id": 1, "name": "person", "keypoints": ["nose", "left_eye"], "skeleton": [[1, 2]]},
            {"id": 2, "name": "dog"},
        ],
        "images": [{"id": n, "file_name": f"{n}.png", "width": 20, "height": 10} for n in (7, 8, 9, 10)],
        "annotations": [
            {**person, "id": 1, "image_id": 7, "keypoints": [3, 4, 2, 5, 6, 1], "bbox": [1, 2, 10, 5], "area": 30.5},
            {**person, "id": 2, "image_id": 7, "keypoints": [0, 0, 0, 9, 1, 1], "bbox": [8, 0, 2, 4]},
            {**person, "id": 3, "image_id": 7, "keypoints": [0] * 6, "bbox": [0, 0, 4, 9], "iscrowd": 1},
            {**person, "id": 4, "image_id": 8, "keypoints": [0] * 6, "bbox": [1, 1, 3, 3], "num_keypoints": 0},
            {"category_id": 2, "id": 5, "image_id": 9, "bbox": [1, 1, 3, 3], "iscrowd": 0},
        ],
    }


def written(directory: Path, values: Any) -> tuple[Path, Path]:
    (directory / "images").mkdir(exist_ok=True)
    for number in (7, 8, 9, 10):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(directory / "images" / f"{number}.png")
    path = directory / "persons.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path, directory / "images"


def test_points_areas_and_unknown_places_are_read(tmp_path: Path) -> None:
    """Hidden but labelled points count, unlabelled ones do not; the middle of COCO's pixel 3 is at 3.5."""
    scenes = CocoScenes(*written(tmp_path, content()))
    assert (len(scenes), list(scenes.names)) == (1, ["nose", "left_eye"])
    scene = scenes.scene(0)
    assert scene.points.tolist() == [[[3.5, 4.5, 1.0], [5.5, 6.5, 1.0]], [[0.0, 0.0, 0.0], [9.5, 1.5, 1.0]]]
    assert scene.areas.tolist() == [30.5, 8.0]  # without an area that of the box
    assert scene.unknown.tolist() == [[0.0, 0.0, 4.0, 9.0]]  # the crowd
    assert scene.image.size == (20, 10)


def test_pictures_without_points_are_kept_on_request(tmp_path: Path) -> None:
    """What is unlabelled in them is unknown; where there is nothing all is known to be nothing."""
    scenes = CocoScenes(*written(tmp_path, content()), "person", empty=True)
    assert len(scenes) == 4
    unlabelled, dog = scenes.scene(1), scenes.scene(2)
    assert (unlabelled.points.shape, unlabelled.unknown.tolist()) == ((0, 2, 3), [[1.0, 1.0, 4.0, 4.0]])
    assert (dog.points.shape, dog.unknown.shape) == ((0, 2, 3), (0, 4))


def changed(*path: Any, value: Any = None) -> dict[str, Any]:
    """The content with the value at ``path`` replaced, or removed (None)."""
    whole: Any = content()
    inner = whole
    for part in path[:-1]:
        inner = inner[part]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return dict(whole)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_that_windows_has_written_is_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "coco.json").write_text(json.dumps(content()), encoding)
    assert read_annotations(tmp_path / "coco.json").images


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("{", "not valid JSON"),
        ([], "a list instead of an object"),
        (changed("annotations"), "'annotations' is missing"),
        (changed("categories"), "'categories' is missing"),
        (changed("images", 1, "file_name"), r"images\[1\]\.file_name is missing"),
        (changed("annotations", 0, "bbox"), r"annotations\[0\]\.bbox is missing"),
        (changed("annotations", 0, "bbox", 2, value=-1), r"annotations\[0\]\.bbox\[2\] is wrong"),
        (changed("annotations", 1, "keypoints", value=[1, 2, 2]), r"annotations\[1\]\.keypoints has 3 .* of 6"),
        (changed("annotations", 1, "keypoints", value="x"), r"annotations\[1\]\.keypoints is wrong"),
        (changed("annotations", 1, "image_id", value=99), r"annotations\[1\] is of image 99"),
        (changed("categories", 0, "keypoints"), "no category has 'keypoints'"),
        (changed("annotations", value=[]), "no picture with key points of 'person'"),
        (changed("images", 0, "file_name", value="lost.png"), r"lost\.png: there is no such image file"),
        (changed("images", 0, "file_name", value="lost/7.png"), r"images/lost: No such file"),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(tmp_path: Path, values: Any, complaint: str) -> None:
    """With the name of the file and the place in it, and exit code 78."""
    with pytest.raises(DataError, match=complaint) as caught:
        CocoScenes(*written(tmp_path, values))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


def test_a_missing_file_or_category_is_named(tmp_path: Path) -> None:
    """Of several categories with key points one must be chosen: their points have other meanings."""
    path, images = written(tmp_path, content())
    with pytest.raises(DataError, match=r"absent\.json: No such file"):
        CocoScenes(tmp_path / "absent.json", images)
    with pytest.raises(DataError, match=r"no category 'dog' with 'keypoints'.*'person'"):
        CocoScenes(path, images, "dog")
    with pytest.raises(DataError, match=r"nowhere: No such file"):
        CocoScenes(path, tmp_path / "nowhere")
    written(tmp_path, changed("categories", 1, "keypoints", value=["snout"]))
    with pytest.raises(DataError, match=r"several categories have .*'person', 'dog'.*data\.category"):
        CocoScenes(path, images)
    assert len(CocoScenes(path, images, "person")) == 1


def test_a_target_is_one_at_the_point_and_falls_as_a_gaussian() -> None:
    """The middle of cell (row 2, column 3) at stride 4 is pixel (14, 10); hidden points leave nothing."""
    points = torch.tensor([[[[14.0, 10.0, 1.0], [14.0, 10.0, 0.0]]]])
    maps = targets(points, (6, 8), stride=4, sigma=1.5)
    assert maps.shape == (1, 2, 6, 8)
    assert float(maps[0, 0, 2, 3]) == 1.0
    assert float(maps[0, 0, 2, 5]) == pytest.approx(math.exp(-4 / (2 * 1.5**2)))
    assert float(maps[0, 0, 4, 4]) == pytest.approx(math.exp(-5 / (2 * 1.5**2)))
    assert not maps[0, 1].any()
    # Where two Gaussians meet the larger value counts, so that peaks stay 1; absent instances change nothing.
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


def test_tag_losses_pull_within_and_push_between_instances() -> None:
    maps, points = scene(1.0, 2.0, 3.5, 9.0)
    pull, push = tag_losses(maps, points, stride=2)
    assert pull.tolist() == [pytest.approx((0.25 + 0.0) / 2)]
    assert push.tolist() == [pytest.approx(math.exp(-(2.0**2) / 2))]
    points[0, 0, 1, 0] = 400.0  # not on the map
    pull, push = tag_losses(maps, points, stride=2)
    assert (pull.tolist(), push.tolist()) == ([0.0], [pytest.approx(math.exp(-(2.5**2) / 2))])


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
    heat[0, 0] = 0.0
    heat[0, 0, 2:4, 2:4] = 0.5  # equal, as half precision makes them: two instances would come of one point
    (((found,), _),) = find_peaks(heat, tags, stride=1, threshold=0.1, most=9)
    assert (found.x, found.y) == (2.75, 2.75)


@pytest.mark.parametrize("x", [8.0, 9.3, 10.0, 10.9, 11.5])
def test_a_peak_is_found_where_the_point_is(x: float) -> None:
    maps = targets(torch.tensor([[[[x, 14.6, 1.0]]]]), (16, 16), stride=2, sigma=1.0)
    (((found,),),) = find_peaks(maps, maps, stride=2, threshold=0.1, most=4)
    assert found.x == pytest.approx(x, abs=0.51)
    assert found.y == pytest.approx(14.6, abs=0.51)


def test_peaks_with_close_tags_become_instances() -> None:
    """Each kind of point once in an instance; a tag that fits none begins one."""
    peaks = [[peak(1, 0.0), peak(2, 5.0)], [peak(3, 5.2), peak(4, 0.1)], [peak(5, 9.0)]]
    instances = grouped(peaks, closeness=1.0)
    found = sorted(sorted((kind, each.x) for kind, each in instance.items()) for instance in instances)
    assert found == [[(0, 1), (1, 4)], [(0, 2), (1, 3)], [(2, 5)]]
    assert len(grouped(peaks, closeness=1.0, least_points=2)) == 2


def test_the_closest_pair_is_joined_first() -> None:
    """A peak does not take the instance that another one fits better; of equals the higher peak is first."""
    (best,) = grouped([[peak(1, 0.0)], [peak(2, 0.6, 1.0), peak(3, 0.1, 0.2)]], closeness=1.0, least_points=2)
    assert best[1].x == 3
    (alone,) = grouped([[peak(1, 0.0)], [peak(2, 0.02, 0.3), peak(3, 0.01, 0.9)]], closeness=1.0, least_points=2)
    assert alone[1].x == 3


def truth(*xs: tuple[float | None, ...]) -> np.ndarray:
    """(m, k, 3): instances with points at these places of a line; None is hidden."""
    return np.array([[(0.0, 0.0, 0.0) if x is None else (x, 0.0, 1.0) for x in each] for each in xs])


def instance(*xs: float | None) -> Instance:
    return {kind: peak(x) for kind, x in enumerate(xs) if x is not None}


def counted(predicted: list[Instance], true: np.ndarray, size: float = 10.0) -> Counts:
    counts = Counts()
    judge(predicted, true, np.full(len(true), size), 0.2, counts)
    return counts


@pytest.mark.parametrize(
    ("predicted", "true", "expected"),
    [
        ([instance(30, 40), instance(10, None)], truth((10, None), (30, 40)), Counts(3, 3, 3, instances_found=2)),
        # 2.0 of 10 are still near enough, 2.1 are not: that is one missed and one invented.
        ([instance(12.0, 17.9)], truth((10, 20)), Counts(2, 1, 1, 1, 1, 1)),
        # Grouping that mixes two instances up costs PCK and not the score of points.
        ([instance(10, 40, 50), instance(30, 20, 25)], truth((10, 20, 25), (30, 40, 50)), Counts(6, 4, 6, 0, 0, 2)),
        ([instance(11, 20), instance(10, 20)], truth((10, 20)), Counts(2, 2, 2, 2, 0, 1, 1)),  # nothing is met twice
        ([], truth((10, 20))[:0], Counts()),
        ([instance(5, 6)], np.zeros((0, 2, 3)), Counts(invented=2, instances_invented=1)),
        ([], truth((10, 20)), Counts(points=2, missed=2, instances_missed=1)),
    ],
)
def test_what_is_met_is_counted(predicted: list[Instance], true: np.ndarray, expected: Counts) -> None:
    counts = Counts()
    judge(predicted, true, np.full(len(true), 10.0), 0.2, counts)
    assert counts == expected


def test_counts_give_ratios() -> None:
    assert Counts(4, 3, 5, 1, 2, 2, 1).ratios() == {"pck": (3, 4), "point_f1": (10, 13), "instance_f1": (4, 5)}


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


def test_coordinates_go_from_one_corner_to_the_other() -> None:
    seen = with_coordinates(torch.zeros(2, 3, 3, 5))
    assert seen.shape == (2, 5, 3, 5)
    assert seen[1, 3:, 0, 0].tolist() == [-1.0, -1.0]
    assert seen[1, 3:, 2, 0].tolist() == [1.0, -1.0]
    assert seen[1, 3:, 1, 4].tolist() == [0.0, 1.0]


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
    picture = drawn_points(torch.zeros(3, 64, 64, dtype=torch.uint8), points, [{0: Peak(40.0, 30.0, 1, 0)}])
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
        (["data.size=63"], r"size 63 is not a multiple of 2.*set data\.size to 64"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        prepared(*overrides)


def test_training_and_test_points_must_be_the_same(tmp_path: Path) -> None:
    """The network knows them by number."""
    train, _ = coco(tmp_path / "one")
    _, test = coco(tmp_path / "other", points=("nose", "tail"))
    with pytest.raises(DataError, match="nose, tail, those of the training data nose, left_eye, right_eye"):
        prepared(train, test)


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
    # A job file needs no ``model:``; branches and channels of the defaults fit together, as in HRNet-W32.
    assert HrnetOptions() == task.model_options
