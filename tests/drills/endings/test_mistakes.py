"""What a user may get wrong about in-place recovery: one sentence and status 78 within seconds, never a job of one.

A script that only takes too long to open its Session ends with 1: another try may help that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE
from tests.drills.endings.job import Job

NO_SESSION = "--rdzv-conf recovery=in_place needs a training script that opens an elastic_trainer.Session"
GROUP = "import torch.distributed as dist; dist.init_process_group('gloo'); print('trains alone')"
FOREVER = "from elastic_trainer.clock import pause; pause(600.0)"


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    sentence: str
    script: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    code: int = EXIT_CONFIG


MISTAKES = (
    Mistake(
        "no restarts",
        "torchrun's --max-restarts is 0 (add --max-restarts, for example 100)",
        None,
        (("max_restarts", 0),),
    ),
    Mistake("plain", NO_SESSION, GROUP),
    Mistake("idle", "no worker has opened an elastic_trainer.Session within 4 s, as", FOREVER, code=EXIT_FAILURE),
    Mistake("short", f"{NO_SESSION}: the script ended without one", "print('done')"),
)


@pytest.mark.timeout(300)
def test_mistakes_end_in_one_sentence(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Scripts without a Session, in three ways, and torchrun's default of no restarts. Two at a time."""
    for first in range(0, len(MISTAKES), 2):
        jobs = []
        for mistake in MISTAKES[first : first + 2]:
            name = mistake.name.replace(" ", "-")
            directory = tmp_path / name
            options = {"session_timeout": "4" if mistake.name == "idle" else "120"}
            job = Job(directory, etcd_endpoint, f"{run_id}-{name}", least=1, options=options, **dict(mistake.changes))
            jobs.append((mistake, job))
            script = directory / "script.py"
            script.write_text(mistake.script or "")
            job.add_with(**({"entry": [str(script)]} if mistake.script else {}))
        for mistake, job in jobs:
            with job:
                assert job.exit_code(job.nodes[0]) == mistake.code, job.describe()
                (said,) = job.sentences("n0")
                assert mistake.sentence in said
                assert "Traceback" not in job.log("n0")
                assert "trains alone" not in job.log("n0")
                assert job.newest() == 0
