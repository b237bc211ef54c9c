"""Trains in place with audits that repeat a step: ``auditing.py RESULT [STEP:KIND:RANK ...]``, each a flipped bit."""

from __future__ import annotations

import os
import sys

import torch

from tests.integration.worker.scripts.audited import Fault, trained

STEPS = 12

if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = [each.split(":") for each in sys.argv[2:]]
    faults = [Fault(int(step), kind, int(rank), 20, 0.4) for step, kind, rank in cases]
    module = trained(faults, STEPS, 1, reduction="tree", on_mismatch="repeat")
    torch.save(list(module.state_dict().values()), f"{sys.argv[1]}-{os.getpid()}")
