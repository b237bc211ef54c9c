"""Trains in place with audits: ``lying.py DIRECTORY PACE_S [STEP RANK]``; a bit flips in what that rank computes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.integration.worker.scripts.audited import Fault, trained

STEPS = 240

if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, pace_s, *lie = sys.argv[1:]
    faults = [Fault(int(lie[0]), "activation", int(lie[1]), 20, 0.4)] if lie else []
    audited = 1 if lie else None
    module = trained(faults, STEPS, audited, "tree", float(pace_s), on_mismatch="repeat" if lie else "report")
    torch.save([each.detach() for each in module.parameters()], Path(directory, f"result-{os.getpid()}"))
