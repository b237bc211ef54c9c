"""Several threads copy one state."""

from __future__ import annotations

import os

import numpy as np
import pytest

from elastic_trainer.checkpoint.memory import Parts


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_every_byte_is_copied_once_to_its_place(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces smaller and larger than what one thread copies at a time, at any number of cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    source = np.random.default_rng(1).integers(0, 256, 50 << 20, dtype=np.uint8)
    target = np.zeros(len(source) + 100, np.uint8)
    parts, position = Parts(target), 0
    for size in (1, 7, 4096, 5 << 20, 13 << 20, 1000, 31 << 20):
        parts.add(50 + position, source[position : position + size].data)
        position += size
    parts.copy()
    assert np.array_equal(target[50 : 50 + position], source[:position])
    assert not target[:50].any()
    assert not target[50 + position :].any()


def test_what_does_not_fit_is_raised() -> None:
    parts = Parts(np.zeros(10, np.uint8))
    for _ in range(20):
        parts.add(5, memoryview(bytes(4 << 20)))
    with pytest.raises(ValueError, match="broadcast"):
        parts.copy()
