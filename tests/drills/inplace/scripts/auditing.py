"""Trains with the tree and audits that repeat a step: ``auditing.py RESULT ODD STEPS PACE_S [STEP:KIND:RANK ...]``.

Each fault is a flipped bit. ODD: ``dies`` (the node of this name is killed while it repeats another one's pass for the
fourth time), ``deaf`` (rank 0 does not hear what an audit finds, as happens when the others leave the round before it
has heard all) or ``alone`` (one process, which nobody can audit).
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.variables import ENV_NODE
from elastic_trainer.worker.steps.audit import PassAudit, PassDigests, PassRecorder, Results
from tests.integration.worker.scripts.audited import Fault, trained

repeat, computed = PassRecorder.repeat, PassAudit._computed
repeated: list[int] = []
lost: list[int] = []


def repeat_and_die(self: PassRecorder, data: bytes, buffers: bytes = b"") -> PassDigests | None:
    """In place of PassRecorder.repeat."""
    repeated.append(len(data))
    if len(repeated) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return repeat(self, data, buffers)


def lose_once(audit: PassAudit, tasks: Sequence[tuple[int, int]], *given: Any) -> Results:
    """In place of PassAudit._computed. Rank 0 loses what decides: behind the results of a step's trials come those of
    its judges."""
    results = computed(audit, tasks, *given)
    deciding = any(rank == worker for rank, worker in tasks)  # a rank repeats its own pass only then
    if audit._control.rank == 0 and deciding and not lost:
        lost.append(1)
        raise RoundBrokenError("a peer was lost")
    return results


def main(result: str, odd: str, steps: str, pace_s: str, *cases: str) -> None:
    torch.set_num_threads(1)
    if odd == "dies" == os.environ.get(ENV_NODE):
        PassRecorder.repeat = repeat_and_die  # type: ignore[method-assign]
    if odd == "deaf":
        PassAudit._computed = lose_once  # type: ignore[method-assign, assignment]
    faults = [Fault(int(step), kind, int(rank), 20, 0.4) for step, kind, rank in (each.split(":") for each in cases)]
    every, on_mismatch = (None, "report") if odd == "alone" else (1, "repeat")
    module = trained(faults, int(steps), every, "tree", float(pace_s), on_mismatch=on_mismatch)
    torch.save(list(module.state_dict().values()), f"{result}-{platform.node()}-{os.getpid()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
