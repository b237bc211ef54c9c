"""Random numbers of a sample and of a micro-batch, by keys: they are the same wherever and whenever they are drawn.

A sample's augmentation is keyed by (seed, epoch, sample number), what a micro-batch draws by (seed, epoch, position of
its first sample in the epoch), steps without a batch of the session's by (seed, step, rank). So a resumed step draws
what the lost one drew, at any number of ranks, and no rank's generator state needs saving.
"""

from __future__ import annotations

import _random
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
START, STEP, SAMPLE, LOADER = 1, 2, 4, 7
_AUGMENT, _COLLATE = 5, 6
"""Purposes: each has a stream of its own."""


def key(*parts: int, start: int = 0) -> int:
    """64 well-mixed bits that depend on all ``parts`` and their order (the SplitMix64 finalizer, chained).

    ``start`` is the key of parts that come before them.
    """
    state = start
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


_PYTHON: Final[random.Random] = random.seed.__self__  # type: ignore[attr-defined]
_NUMPY: Final[np.random.RandomState] = np.random.get_state.__self__  # type: ignore[attr-defined]
_seed_python = _random.Random.seed
"""The generators behind the functions of both modules. Those do more before they seed, which costs twice the time."""


def _python(value: int) -> None:
    _seed_python(_PYTHON, value)
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]  # a number kept for the next gauss()


def _numpy(value: int) -> None:
    _NUMPY.seed(value & 0xFFFFFFFF)


def _torch(value: int) -> None:
    torch.default_generator.manual_seed(value)


SEEDED: Final[dict[str, Callable[[int], None]]] = {"random": _python, "numpy": _numpy, "torch": _torch}
"""The default generators of this process by the name of their module, and what seeds each (5, 7 and 4 us between other
work; ``torch.manual_seed`` would cost 120 us)."""


def seed_host(value: int) -> None:
    """Seed python's, numpy's and torch's default generators of this process. As ``random.seed(value)`` and so on."""
    _python(value)
    _numpy(value)
    _torch(value)


_ON_DEVICE: Final[dict[str, Callable[[int], None]]] = {
    "cuda": lambda value: torch.cuda.manual_seed(value),
    "mps": lambda value: torch.mps.manual_seed(value & 0x7FFFFFFF),
}


def seeder(device: torch.device) -> Callable[[int], None]:
    """What seeds python's, numpy's and torch's generators of this process and ``device``."""
    on_device = _ON_DEVICE.get(device.type)
    if on_device is None:
        return seed_host

    def seed(value: int) -> None:
        seed_host(value)
        on_device(value)

    return seed


class SampleSeeds:
    """Seeds the generators for one sample after another. Numbers drawn on an accelerator are not keyed.

    ``generators`` are those that a sample draws from; what collates them may draw from all.
    """

    def __init__(self, seed: int, generators: Iterable[str] = SEEDED) -> None:
        self._augment, self._collate = key(_AUGMENT, seed), key(_COLLATE, seed)
        self._seeds = [SEEDED[each] for each in generators]

    def sample(self, epoch: int, number: int) -> None:
        """What follows augments sample ``number`` in ``epoch``."""
        value = key(epoch, number, start=self._augment)
        for seed in self._seeds:
            seed(value)

    def collate(self, epoch: int, first: int) -> None:
        """What follows puts together the samples of which ``first`` is the first (it may mix them at random)."""
        seed_host(key(epoch, first, start=self._collate))


_KEPT: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]] = {
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "torch": (torch.default_generator.get_state, torch.default_generator.set_state),
}


@contextmanager
def undisturbed(generators: Iterable[str] = SEEDED) -> Iterator[None]:
    """Restores these generators afterwards: a step that draws data continues with its own random numbers."""
    before = [(restore, state()) for state, restore in (_KEPT[each] for each in generators)]
    try:
        yield
    finally:
        for restore, state in before:
            restore(state)
