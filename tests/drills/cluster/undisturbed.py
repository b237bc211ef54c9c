"""What a drill's job computes when nothing goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from elastic_trainer.drills.job import DIGESTS
from elastic_trainer.drills.stage import JOB, Setting


def undisturbed(setting: Setting, directory: Path, steps: int, limit_s: float = 300.0) -> dict[int, str]:
    """Digests of the job of ``setting`` on one process without any delay, by step."""
    job = replace(setting, pause_s=0.0, entry=JOB).job(directory)
    command = [sys.executable, *job, "--steps", str(steps)]
    subprocess.run(command, check=True, timeout=limit_s, capture_output=True)
    (file,) = (directory / DIGESTS).iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["step"]: line["digest"] for line in lines}
