"""What the user wants run: a ready-made task, a job file or a script, as torchrun takes it.

Reads files to find mistakes before any process is started. *Fails by* ConfigError; DataError where a ready-made task
lacks its data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer import jobs
from elastic_trainer.errors import ConfigError

CHECKPOINT_DIRECTORY = "checkpoint.directory"


def entry(words: Sequence[str], run_dir: Path) -> tuple[str, ...]:
    """What torchrun runs for ``words`` (what, then its arguments); tasks keep their checkpoints below ``run_dir``."""
    if not words:
        raise ConfigError("nothing to run was given", hint="end with: -- TASK, -- JOB.yaml or -- SCRIPT.py")
    what, arguments = words[0], list(words[1:])
    if what.endswith(".py"):
        return (_readable(what), *arguments)
    if (script := jobs.script(what)) is not None:
        jobs.ensure_data(what, {})
        return (str(script), f"--directory={run_dir / 'checkpoints'}", *arguments)
    if not places_checkpoints(what, arguments):
        arguments.insert(0, f"{CHECKPOINT_DIRECTORY}={run_dir / 'checkpoints'}")
    from elastic_trainer.jobs.config import load_job

    job = load_job(what, arguments)
    jobs.ensure_data(job.task, job.data)
    return ("-m", "elastic_trainer.training", what, *arguments)


def _readable(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"script {path!r} does not exist", hint="check its path")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script {path!r} cannot be read", hint="check its permissions")
    return path


def places_checkpoints(what: str, arguments: Sequence[str]) -> bool:
    """Whether the user says where checkpoints go: in an argument, or in a job file of their own."""
    from elastic_trainer.jobs.config import read_job_file

    if any(argument.startswith(f"{CHECKPOINT_DIRECTORY}=") for argument in arguments):
        return True
    _, values = read_job_file(what)
    section = values.get("checkpoint")
    own = what.endswith((".yaml", ".yml")) or "/" in what
    return own and isinstance(section, dict) and section.get("directory") is not None
