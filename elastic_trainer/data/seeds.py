"""Random numbers of a sample, keyed by (seed, epoch, sample number): its augmentation is the same wherever it is drawn.

So it does not depend on the number of ranks, on what was drawn before it, or on the process that draws it.
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
_AUGMENT: Final = 5
_COLLATE: Final = 6
"""Purposes, different from those in ``worker.state.rng``: each has a stream of its own."""


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
