"""From maps to instances: peaks by non-maximum suppression, grouped by their tags. Then how well they meet the truth.

Newell, Huang and Deng, "Associative Embedding" (2016), https://arxiv.org/abs/1611.05424, section 3.3; the grouping here
takes the closest pair first instead of an optimal assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from elastic_trainer.tasks.pose.scenes import Floats


@dataclass(frozen=True, slots=True)
class Peak:
    """A place that may be a key point: in pixels of the picture, its height in the heat map, its tag."""

    x: float
    y: float
    score: float
    tag: float


@dataclass(slots=True)
class Instance:
    """One thing in the picture: at most one peak for each kind of point, by its number."""

    peaks: dict[int, Peak] = field(default_factory=dict)

    @property
    def tag(self) -> float:
        return sum(peak.tag for peak in self.peaks.values()) / len(self.peaks)

    @property
    def score(self) -> float:
        """The mean height of its peaks."""
        return sum(peak.score for peak in self.peaks.values()) / len(self.peaks)


def find_peaks(heat: Tensor, tags: Tensor, stride: int, *, threshold: float, most: int) -> list[list[list[Peak]]]:
    """For each of n pictures and k kinds of points the highest local maxima above ``threshold``, at most ``most``.

    ``heat`` and ``tags`` are (n, k, h, w); a maximum is the highest of its eight neighbours.
    """
    pictures, kinds, _, width = heat.shape
    candidates = torch.where(_are_maxima(heat), heat, -torch.inf).flatten(2)
    scores, places = candidates.topk(min(most, candidates.shape[2]))
    found = tags.flatten(2).gather(2, places)
    shift_x, shift_y = (each.flatten(2).gather(2, places) for each in _quarters(heat))
    x = (places % width + shift_x + 0.5) * stride
    y = (places.div(width, rounding_mode="floor") + shift_y + 0.5) * stride
    table = torch.stack([x, y, scores, found], dim=-1).cpu().tolist()
    return [
        [[Peak(*row) for row in table[picture][kind] if row[2] > threshold] for kind in range(kinds)]
        for picture in range(pictures)
    ]


def _are_maxima(heat: Tensor) -> Tensor:
    """Which cells are no lower than their neighbours; of equal ones, which half precision makes, the first alone."""
    height, width = heat.shape[-2:]
    padded = functional.pad(heat, (1, 1, 1, 1), value=-torch.inf)
    around = [padded[..., row : row + height, column : column + width] for row in range(3) for column in range(3)]
    before, behind = torch.stack(around[:4]).amax(0), torch.stack(around[5:]).amax(0)
    return (heat > before) & (heat >= behind)


def _quarters(heat: Tensor) -> tuple[Tensor, Tensor]:
    """A quarter of a cell towards the higher neighbour, to the sides and down; 0 between equal ones."""
    padded = functional.pad(heat, (1, 1, 1, 1), mode="replicate")
    right, left = padded[..., 1:-1, 2:], padded[..., 1:-1, :-2]
    below, above = padded[..., 2:, 1:-1], padded[..., :-2, 1:-1]
    return 0.25 * torch.sign(right - left), 0.25 * torch.sign(below - above)


def grouped(peaks: list[list[Peak]], closeness: float, least_points: int = 1) -> list[Instance]:
    """Instances out of the peaks of each kind of point, the best first; those of fewer than ``least_points`` not.

    One kind after the other: of all pairs of a peak and an instance whose tags differ by less than ``closeness`` the
    closest (in steps of 0.1, then the highest peak) comes first; peaks that are left begin instances of their own.
    """
    instances: list[Instance] = []
    for kind, candidates in enumerate(peaks):
        pairs = sorted(
            (round(abs(peak.tag - instance.tag), 1), -peak.score, i, j)
            for i, peak in enumerate(candidates)
            for j, instance in enumerate(instances)
            if abs(peak.tag - instance.tag) < closeness
        )
        taken, given = set[int](), set[int]()
        for _, _, i, j in pairs:
            if i not in taken and j not in given:
                instances[j].peaks[kind] = candidates[i]
                taken.add(i)
                given.add(j)
        instances += [Instance({kind: peak}) for i, peak in enumerate(candidates) if i not in taken]
    kept = [instance for instance in instances if len(instance.peaks) >= least_points]
    return sorted(kept, key=lambda instance: -instance.score)


@dataclass(slots=True)
class Counts:
    """What adds up over pictures. ``points`` there are, ``hit`` by the instance that belongs to theirs; ``found``,
    ``invented`` and ``missed`` regardless of instances; the same of whole instances."""

    points: int = 0
    hit: int = 0
    found: int = 0
    invented: int = 0
    missed: int = 0
    instances_found: int = 0
    instances_invented: int = 0
    instances_missed: int = 0

    def ratios(self) -> dict[str, tuple[int, int]]:
        """Numerators and denominators, to be added up: the part of the points that their instance has (PCK), and the
        F1 scores of points whatever their instance, and of instances."""
        wrong, wrong_instances = self.invented + self.missed, self.instances_invented + self.instances_missed
        return {
            "pck": (self.hit, self.points),
            "point_f1": (2 * self.found, 2 * self.found + wrong),
            "instance_f1": (2 * self.instances_found, 2 * self.instances_found + wrong_instances),
        }


def judge(instances: list[Instance], truth: Floats, sizes: Floats, within: float, counts: Counts) -> None:
    """Add to ``counts`` how ``instances`` meet one picture's ``truth``, (m, k, 3).

    A point is met where the distance is at most ``within`` times the size of its instance, of ``sizes`` (m,). Each
    prediction meets one point at most and each point is met once, the closest pair first. An instance is found by the
    one that meets most of its points, if these are at least half of them.
    """
    near = _nearness(instances, truth, sizes)
    _judge_points(near <= within, near, truth, instances, counts)
    _judge_instances((near <= within).sum(2), truth, len(instances), counts)


def _nearness(instances: list[Instance], truth: Floats, sizes: Floats) -> Floats:
    """(predicted, m, k): distances in sizes of the true instance, infinite where there is no such point."""
    kinds = truth.shape[1]
    places = np.full((len(instances), kinds, 2), np.inf)
    for number, instance in enumerate(instances):
        for kind, peak in instance.peaks.items():
            places[number, kind] = peak.x, peak.y
    visible = truth[None, :, :, 2] > 0
    with np.errstate(invalid="ignore"):
        distance = np.linalg.norm(places[:, None] - truth[None, :, :, :2], axis=-1) / sizes[None, :, None]
    near: Floats = np.where(visible & np.isfinite(distance), distance, np.inf)
    return near


def _judge_points(
    met: NDArray[np.bool_], near: Floats, truth: Floats, instances: list[Instance], counts: Counts
) -> None:
    for kind in range(truth.shape[1]):
        pairs = np.argwhere(met[:, :, kind])
        order = np.argsort([near[i, j, kind] for i, j in pairs], kind="stable")
        predicted, true = set[int](), set[int]()
        for i, j in pairs[order] if len(pairs) else []:
            if i not in predicted and j not in true:
                predicted.add(int(i))
                true.add(int(j))
        counts.found += len(true)
        counts.invented += sum(kind in instance.peaks for instance in instances) - len(true)
        counts.missed += int((truth[:, kind, 2] > 0).sum()) - len(true)


def _judge_instances(hits: NDArray[np.int64], truth: Floats, predicted: int, counts: Counts) -> None:
    """``hits``, (predicted, m): how many points of a true instance a predicted one meets."""
    visible = (truth[:, :, 2] > 0).sum(1)
    left, right = list(range(predicted)), [int(j) for j in np.flatnonzero(visible)]
    counts.points += int(visible.sum())
    found = 0
    while left and right:
        value, i, j = max((int(hits[i, j]), -i, -j) for i in left for j in right)
        if value == 0:
            break
        left.remove(-i)
        right.remove(-j)
        counts.hit += value
        found += 2 * value >= visible[-j]
    counts.instances_found += found
    counts.instances_invented += predicted - found
    counts.instances_missed += int((visible > 0).sum()) - found
