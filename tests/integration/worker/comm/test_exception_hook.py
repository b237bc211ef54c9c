"""Tracebacks of a process that has been in many rounds."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch.distributed as dist
from elastic_trainer.worker.comm.groups import ExceptionHook

hook = ExceptionHook()

def rounds():
    for _ in range(3):
        with hook.replaced():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()

def said_by_the_script(*error):
    print("the script's", file=sys.stderr)
    torchs(*error)

rounds()
torchs, sys.excepthook = sys.excepthook, said_by_the_script
rounds()
raise ValueError("at last")
"""


def test_a_traceback_has_its_rank_once_whatever_rounds_came_before_and_a_hook_of_the_scripts_stays() -> None:
    """torch's hook would otherwise call that of each earlier round, and after 1,000 rounds print nothing at all."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    lines = ended.stderr.splitlines()
    assert lines[0] == "[rank0]: the script's", ended.stderr
    assert lines[-1] == "[rank0]: [rank0]: ValueError: at last", ended.stderr
