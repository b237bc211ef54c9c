"""Peaks, their grouping and what is counted of them, by hand-made examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic_trainer.jobs.keypoints import Counts, Instance, Peak, find_peaks, grouped, judge, targets


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
