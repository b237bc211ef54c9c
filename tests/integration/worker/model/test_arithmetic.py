"""The gradient does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.integration.worker.launch import plain, run, standalone


def test_gradients_and_losses_are_those_of_one_process_at_two_and_three_ranks(tmp_path: Path) -> None:
    """With tail batches, accumulation, and fewer micro-batches or samples than ranks; to 1e-6, on every rank.

    So are parameters where those are averaged after each step (``local_sgd``).
    """
    log = tmp_path / "log"
    run(plain("gradients.py", tmp_path, "gradients"), log)
    for world in (2, 3):
        run(standalone(world, "gradients.py", tmp_path, "gradients"), log)
    expected = torch.load(tmp_path / "gradients-1-0.pt", weights_only=True)
    for world, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        found = torch.load(tmp_path / f"gradients-{world}-{rank}.pt", weights_only=True)
        for case, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert len(mine) == len(theirs)
            worst = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
            assert worst < 1e-6, f"case {case}, rank {rank} of {world}: {worst}"


def leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{where}.{name}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{where}[{number}]")
    else:
        yield where, tree


def test_with_the_tree_all_bits_are_those_of_one_process_at_two_three_and_four_ranks(tmp_path: Path) -> None:
    """Parameters, buffers, optimizer, average, losses, evaluation and predictions: no difference in any of them.

    The model has convolution, BatchNorm, dropout and parameters without a gradient; there are clipping, counted losses,
    tails, and fewer micro-batches than ranks.
    """
    log = tmp_path / "log"
    run(plain("gradients.py", tmp_path, "bitwise"), log)
    for world in (2, 3, 4):
        run(standalone(world, "gradients.py", tmp_path, "bitwise"), log)
    expected = dict(leaves(torch.load(tmp_path / "bitwise-1-0.pt", weights_only=True)))
    assert len(expected) > 100
    for world, rank in ((2, 0), (2, 1), (3, 2), (4, 0), (4, 3)):
        found = dict(leaves(torch.load(tmp_path / f"bitwise-{world}-{rank}.pt", weights_only=True)))
        assert found.keys() == expected.keys()
        different = [name for name, value in found.items() if not same(value, expected[name])]
        assert not different, f"rank {rank} of {world}: {different}"


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return bool(value == other)
