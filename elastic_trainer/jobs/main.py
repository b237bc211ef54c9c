"""``python -m elastic_trainer.training job.yaml key=value ...``: run a job, alone or under torchrun.

*Runs in* each worker process, main thread. *Owns* the process's exit status.
*Fails by* one line on standard error and the exit code of the error; a traceback means a bug, here or in the task.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.jobs.config import as_yaml, load_job
from elastic_trainer.telemetry import logs
from elastic_trainer.telemetry.logs import complain
from elastic_trainer.warm.template import skip_last_collection

_INTERRUPTED = 130
_PROGRAM = "python -m elastic_trainer.training"
_EPILOG = """\
examples:
  python -m elastic_trainer.training mnist
  python -m elastic_trainer.training mnist epochs=3 optimizer.lr=1e-3 precision=bf16
  python -m elastic_trainer.training job.yaml checkpoint.directory=/data/run-7
  torchrun --standalone --nproc-per-node 2 -m elastic_trainer.training mnist

Started again with the same checkpoint.directory, a job continues where its newest checkpoint left off.
exit status: 0 done, 1 failed, 73 cannot write, 78 wrong configuration or data, 143 stopped by SIGTERM (checkpointed)
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are configuration errors like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {_PROGRAM} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Train a job described by a YAML file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", nargs="?", help="a YAML file, or the name of a ready-made task such as mnist")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces one value, for example optimizer.lr=0.1"
    )
    parser.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="FIELD",
        help="what may differ from the run that is resumed: length, global_batch, micro_batch, ... (may be repeated)",
    )
    parser.add_argument("--print-config", action="store_true", help="print the effective configuration and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; the exit status."""
    logs.configure()
    try:
        _run(_parser().parse_intermixed_args(argv))
    except ElasticTrainerError as error:
        complain(error, sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before or after the session, which turns it into a checkpoint
        return _INTERRUPTED
    return 0


def _run(arguments: argparse.Namespace) -> None:
    if arguments.job is None:
        raise ConfigError("no job was given", hint=f"name a YAML file or a ready-made task: see {_PROGRAM} --help")
    overrides = list(arguments.overrides)
    if arguments.allow_changed:
        overrides.append(f"checkpoint.allow_changed=[{', '.join(arguments.allow_changed)}]")
    config = load_job(arguments.job, overrides)
    from elastic_trainer.jobs.task import find_task  # after the file is known to be right: this loads torch

    atexit.register(skip_last_collection)

    task = find_task(config.task)
    if arguments.print_config:
        print(as_yaml(task(config).config), end="")
        return
    from elastic_trainer.jobs.trainer import Trainer

    report = Trainer(task, config).run()
    if report["rank"] == 0:
        print(json.dumps(report), flush=True)
