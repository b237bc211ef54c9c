"""COCO's annotation files are read as they mean, or refused with one sentence that names the file and the entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG, DataError
from elastic_trainer.jobs.pillow import Image
from elastic_trainer.jobs.scenes import CocoScenes


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
    assert scene.points.tolist() == [
        [[3.5, 4.5, 1.0], [5.5, 6.5, 1.0]],
        [[0.0, 0.0, 0.0], [9.5, 1.5, 1.0]],
    ]
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
