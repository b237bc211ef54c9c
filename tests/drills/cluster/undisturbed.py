"""What a drill's job computes when nothing goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from elastic_trainer.drills.job import DIGESTS
from elastic_trainer.drills.stage import JOB, Setting
from tests.integration.training.launch import LIMIT_S, ran


def undisturbed(setting: Setting, directory: Path, steps: int, limit_s: float = LIMIT_S) -> dict[int, str]:
    """Digests of the job of ``setting`` on one process without any delay, by step."""
    job = replace(setting, pause_s=0.0, entry=JOB).job(directory)
    done = ran([*job, "--steps", str(steps)], limit_s=limit_s)
    assert done.code == 0, done.err
    (file,) = (directory / DIGESTS).iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["step"]: line["digest"] for line in lines}
