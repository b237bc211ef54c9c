"""The gradient does not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.integration.worker.launch import plain, run, standalone


def test_gradients_and_losses_are_those_of_one_process_at_two_and_three_ranks(tmp_path: Path) -> None:
    """With tail batches, accumulation, and fewer micro-batches or samples than ranks; to 1e-6, on every rank."""
    log = tmp_path / "log"
    run(plain("gradients.py", tmp_path), log)
    for world in (2, 3):
        run(standalone(world, "gradients.py", tmp_path), log)
    expected = torch.load(tmp_path / "gradients-1-0.pt", weights_only=True)
    for world, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        found = torch.load(tmp_path / f"gradients-{world}-{rank}.pt", weights_only=True)
        for case, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert len(mine) == len(theirs)
            worst = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
            assert worst < 1e-6, f"case {case}, rank {rank} of {world}: {worst}"
