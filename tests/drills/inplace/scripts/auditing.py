"""Trains in place with audits that repeat a step: ``auditing.py RESULT [STEP:KIND:RANK ...]``, each a flipped bit.

The node that is named like ``DIES_IN`` is killed while it repeats another one's pass for the fourth time.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from elastic_trainer.variables import ENV_NODE
from elastic_trainer.worker.steps.audit import PassDigests, PassRecorder
from tests.integration.worker.scripts.audited import Fault, trained

STEPS, DIES_IN = 12, "dying"
repeat = PassRecorder.repeat
repeated: list[int] = []


def repeat_and_die(self: PassRecorder, data: bytes, buffers: bytes = b"") -> PassDigests | None:
    """In place of PassRecorder.repeat."""
    repeated.append(len(data))
    if len(repeated) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return repeat(self, data, buffers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ[ENV_NODE] == DIES_IN:
        PassRecorder.repeat = repeat_and_die  # type: ignore[method-assign]
    cases = [each.split(":") for each in sys.argv[2:]]
    faults = [Fault(int(step), kind, int(rank), 20, 0.4) for step, kind, rank in cases]
    module = trained(faults, STEPS, 1, reduction="tree", on_mismatch="repeat")
    torch.save(list(module.state_dict().values()), f"{sys.argv[1]}-{os.getpid()}")
