"""Trains in place with audits: ``lying.py DIRECTORY PACE_S [STEP RANK]``; a bit flips in what that rank computes.

Rank 0 does not hear what the audit finds, as happens when the others leave the round before it has heard all.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.steps.audit import PassAudit, Results
from tests.integration.worker.scripts.audited import Fault, trained

STEPS = 240


def deafen() -> None:
    """Have rank 0 lose the results that decide, once: behind those of a step's trials come those of its judges."""
    computed, calls = PassAudit._computed, [0]

    def lost(audit: PassAudit, tasks: Sequence[tuple[int, int]], *given: Any) -> Results:
        results = computed(audit, tasks, *given)
        deciding = any(rank == worker for rank, worker in tasks)  # a rank repeats its own pass only then
        if audit._control.rank == 0 and deciding and not calls[0]:
            calls[0] = 1
            raise RoundBrokenError("a peer was lost")
        return results

    PassAudit._computed = lost  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, pace_s, *lie = sys.argv[1:]
    deafen()
    faults = [Fault(int(lie[0]), "activation", int(lie[1]), 20, 0.4)] if lie else []
    audited = 1 if lie else None
    module = trained(faults, STEPS, audited, "tree", float(pace_s), on_mismatch="repeat" if lie else "report")
    torch.save(
        [each.detach() for each in module.parameters()], Path(directory, f"result-{platform.node()}-{os.getpid()}")
    )
