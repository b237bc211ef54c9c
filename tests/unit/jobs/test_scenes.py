"""Pictures with key points: moved, drawn, and read from COCO's files."""

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

from elastic_trainer.data.seeds import SampleSeeds
from elastic_trainer.errors import EXIT_CONFIG, DataError
from elastic_trainer.jobs.digits import Digits, shipped_digits
from elastic_trainer.jobs.keypoints import (
    CANVAS,
    INK,
    CocoScenes,
    DigitScenes,
    Floats,
    Moves,
    Scene,
    Views,
    after,
    drawn,
    fitting,
    ink_box,
    mirror_order,
    moved,
    stroke_points,
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


def test_an_unmoved_picture_is_what_it_was() -> None:
    image, points, sizes, known = Views(OneScene(), size=40, stride=2, most=3)[0]
    assert torch.equal(image[:, 12:20, 16:26], torch.full((3, 8, 10), 255, dtype=torch.uint8))
    assert int((image > 0).sum()) == 3 * 80
    assert points.shape == (3, 3, 3)
    assert points[0, 1].tolist() == [25.5, 12.5, 1.0]
    assert points[1, 2].tolist() == [0.0, 0.0, 0.0]
    assert not points[2].any()
    assert sizes.tolist() == [pytest.approx(math.sqrt(80)), 4.0, 0.0]
    assert known.shape == (20, 20)
    assert known.all()


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_points_move_with_the_picture(seed: int, flip: float) -> None:
    """After any scaling, turn, shift and mirroring, the centre of the white pixels is that of the square."""
    random.seed(seed)
    moves = Moves(scale=(0.8, 1.4), rotation=40.0, shift=0.1, flip=flip)
    image, points, sizes, _ = Views(OneScene(), size=80, stride=2, most=2, moves=moves)[0]
    rows, columns = np.nonzero(image[0].numpy() > 127)
    # The middle of the upper corners is 3.5 original pixels above the centre, the lowest point as far below.
    middle = ((points[0, 0] + points[0, 1]) / 2 + points[0, 2]) / 2
    assert (columns.mean() + 0.5, rows.mean() + 0.5) == (
        pytest.approx(float(middle[0]), abs=0.3),
        pytest.approx(float(middle[1]), abs=0.3),
    )
    assert len(rows) == pytest.approx(float(sizes[0]) ** 2, rel=0.05)


def test_in_a_mirrored_picture_left_is_left() -> None:
    assert mirror_order(["nose", "left_eye", "right_eye", "left", "right", "lefty"]) == [0, 2, 1, 4, 3, 5]
    _, points, _, _ = Views(OneScene(), size=40, stride=2, most=1, moves=Moves(flip=1.0))[0]
    assert points[0, :, 0].tolist() == [pytest.approx(14.5), pytest.approx(23.5), pytest.approx(19.0)]


def test_a_sample_moves_alike_wherever_it_is_drawn() -> None:
    views = Views(OneScene(), size=40, stride=2, most=2, moves=Moves((0.5, 1.5), 180.0, 0.2, 0.5))
    seeds = SampleSeeds(1)
    found = []
    for epoch in (0, 1, 0):
        seeds.sample(epoch, 0)
        found.append(views[0][0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_points_outside_are_not_visible() -> None:
    points = np.array([[(1.0, 1.0, 1.0), (9.0, 1.0, 1.0), (1.0, 1.0, 0.0)]])
    right = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    assert moved(points, right, 10).tolist() == [[[3.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]


def test_a_picture_fits_into_the_square() -> None:
    """Its longer side fills it, the other one is centred; maps can be joined."""
    fit = fitting(200, 100, 50)
    corners = np.array([[(0.0, 0.0, 1.0), (199.9, 99.9, 1.0)]])
    assert moved(corners, fit, 50)[0, :, :2].ravel().tolist() == pytest.approx([0, 12.5, 50, 37.5], abs=0.1)
    twice = after(fit, fit)
    assert twice[0, 0] == pytest.approx(1 / 16)
    transform, mirrored = drawn(Moves(), 50)
    assert transform.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert not mirrored


def test_unknown_places_and_surplus_instances_are_masked() -> None:
    """In cells of the map; the larger instances are kept."""
    views = Views(OneScene(np.array([[0.0, 0.0, 7.0, 3.0]])), size=40, stride=2, most=1)
    _, points, _, known = views[0]
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
    assert ink_box(strokes()) == (10, 4, 16, 15)


def test_scenes_depend_on_seed_and_number_alone() -> None:
    some = digits()
    scenes, again, other = DigitScenes(some, 30, 0), DigitScenes(some, 30, 0), DigitScenes(some, 30, 1)
    last = scenes.scene(29)
    for number in range(30):
        one, two = scenes.scene(number), again.scene(number)
        assert one.image.tobytes() == two.image.tobytes()
        assert np.array_equal(one.points, two.points)
    assert last.image.tobytes() == again.scene(29).image.tobytes()
    assert last.image.tobytes() != other.scene(29).image.tobytes()


def test_scenes_show_one_to_three_digits_whose_points_lie_on_ink() -> None:
    """On the canvas, apart from each other, none overlapping."""
    scenes = DigitScenes(digits(), 60, 0)
    counts = set()
    for number in range(len(scenes)):
        scene = scenes.scene(number)
        counts.add(len(scene.points))
        pixels = np.array(scene.image)[..., 0]
        assert pixels.shape == (CANVAS, CANVAS)
        for x, y, _ in scene.points[:, 0]:  # the top: ink in its row, none of that digit's above it
            assert (pixels[int(y)] >= INK).any()
            assert 0 <= x < CANVAS
    assert counts == {1, 2, 3}


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
    path, images = written(tmp_path, content())
    with pytest.raises(DataError, match=r"absent\.json: No such file"):
        CocoScenes(tmp_path / "absent.json", images)
    with pytest.raises(DataError, match=r"no category 'dog' with 'keypoints'.*'person'"):
        CocoScenes(path, images, "dog")
    with pytest.raises(DataError, match=r"nowhere: No such file"):
        CocoScenes(path, tmp_path / "nowhere")


def test_of_several_categories_with_key_points_one_must_be_chosen(tmp_path: Path) -> None:
    """Their points have other meanings."""
    path, images = written(tmp_path, changed("categories", 1, "keypoints", value=["snout"]))
    with pytest.raises(DataError, match=r"several categories have .*'person', 'dog'.*data\.category"):
        CocoScenes(path, images)
    assert len(CocoScenes(path, images, "person")) == 1
