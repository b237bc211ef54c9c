"""The stand-in for nccl2 ends a process whose peer is lost unless it is told not to, as torch's does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from tests.support.like_nccl import LikeNccl2
rank = int(sys.argv[2])
group = LikeNccl2(dist.FileStore(sys.argv[1], 2), rank, 2, timedelta(seconds=60))
group.allreduce([torch.ones(1)]).wait()
if rank == 1:
    os._exit(7)
value = torch.ones(1)
try:
    group.allreduce([value]).wait(timedelta(seconds=5))
    print("ended", value.item())
except RuntimeError as error:
    print(error)
try:
    group.allreduce([torch.ones(1)])
except RuntimeError as error:
    print(error)
print(group.supports_reconfigure, flush=True)
"""


@pytest.mark.parametrize(
    ("handling", "code", "said"),
    [
        ("0", 0, ["the kernel is still running", "NCCL communicator of rank 0 has failed.", "True"]),
        ("2", 0, ["ended nan", "NCCL communicator of rank 0 has failed.", "True"]),
        ("3", -signal.SIGABRT, []),
        (None, -signal.SIGABRT, []),
    ],
)
def test_a_lost_peer_ends_the_process_unless_it_is_told_not_to(
    tmp_path: Path, handling: str | None, code: int, said: list[str]
) -> None:
    """The agent says 0: the process lives, and the next operation says what has happened."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": ""}
    environment.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    if handling is not None:
        environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = handling
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    gone = subprocess.Popen([*command, "1"], env=environment)
    stays = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert gone.wait(60) == 7
    assert (stays.returncode, stays.stdout.splitlines()) == (code, said), stays.stderr
