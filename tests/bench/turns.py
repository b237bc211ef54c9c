"""Runs a job whose rank 0 writes what each block of its loops took: the loops take turns in the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.machine import STEADY

ROOT = Path(__file__).parents[2]


def taken(job: Path, world: int, *words: object, limit_s: float) -> dict[str, list[float]]:
    """Run ``job RESULT words...`` on ``world`` ranks to its end; the seconds of each block, by loop."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
        result = Path(place, "result.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        done = subprocess.run(
            [*launcher, str(job), str(result), *map(str, words)],
            cwd=ROOT,
            env={**os.environ, **STEADY, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"the job did not end well:\n{done.stderr[-3000:]}")
        found: dict[str, list[float]] = json.loads(result.read_text())
        return found
