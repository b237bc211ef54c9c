"""Random numbers of a sample, keyed by (seed, epoch, sample number): its augmentation is the same wherever it is drawn.

So it does not depend on the number of ranks, on what was drawn before it, or on the process that draws it.
"""

from __future__ import annotations

import _random
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
_AUGMENT: Final = 5
_COLLATE: Final = 6
"""Purposes, different from those in ``worker.seeds``: each has a stream of its own."""


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


def seed_host(value: int) -> None:
    """Seed python's, numpy's and torch's default generators of this process (about 12 us between other work).

    As ``random.seed(value)`` and so on; ``torch.manual_seed`` would cost 120 us.
    """
    _seed_python(_PYTHON, value)
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]  # a number kept for the next gauss()
    _NUMPY.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


class SampleSeeds:
    """Seeds the three generators for one sample after another. Numbers drawn on an accelerator are not keyed."""

    def __init__(self, seed: int) -> None:
        self._augment, self._collate = key(_AUGMENT, seed), key(_COLLATE, seed)

    def sample(self, epoch: int, number: int) -> None:
        """What follows augments sample ``number`` in ``epoch``."""
        seed_host(key(epoch, number, start=self._augment))

    def collate(self, epoch: int, first: int) -> None:
        """What follows puts together the samples of which ``first`` is the first (it may mix them at random)."""
        seed_host(key(epoch, first, start=self._collate))


@contextmanager
def undisturbed() -> Iterator[None]:
    """The three generators are afterwards as they were: a step that draws data goes on with numbers of its own."""
    python, legacy, default = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(default)
