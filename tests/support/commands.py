"""Command lines as the pages write them: understood by the real parsers, or carried out."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from elastic_trainer.errors import ConfigError

Words = Sequence[str]
LIMIT_S = 120.0
ANYTHING = frozenset({"openssl", "pip", "tensorboard"})
"""Programs of others, whose options are theirs to check."""


# ---- understanding


def understand(words: Words) -> None:
    """Raise ConfigError unless the command ``words`` is one that exists, with options that exist.

    Job files and scripts of one's own are looked for in the present directory.
    """
    match list(words):
        case ["elastic-trainer", *rest]:
            _understand_cli(rest)
        case ["torchrun", *rest]:
            _understand_torchrun(rest)
        case ["python", "-m", module, *rest]:
            _understand_module(module, rest)
        case ["python", script, *_]:
            _exists(script)
        case [program, *_] if program in ANYTHING:
            pass
        case _:
            raise ConfigError(f"no program is known for: {' '.join(words)}")


def _understand_cli(rest: Words) -> None:
    from elastic_trainer.cli import run
    from elastic_trainer.cli.main import COMMANDS, Parser
    from elastic_trainer.drills import faults
    from elastic_trainer.drills.local_run import entry

    homes = {command.name: f"elastic_trainer.cli.{command.home}" for command in COMMANDS}
    if rest[0] not in homes:
        raise ConfigError(f"there is no command {rest[0]}")
    parser = Parser(prog=rest[0])
    getattr(import_module(homes[rest[0]]), f"configure_{rest[0]}")(parser)
    parsed = parser.parse_args(rest[1:])
    if rest[0] == "local":
        low, high = run.nodes(parsed.nodes)
        wanted = run.faults(parsed)
        joins = sum(fault.kind is faults.FaultKind.JOIN for fault in wanted)
        faults.check(wanted, run.starting(parsed.start, low, high, joins), low, parsed.nproc_per_node)
        run.rendezvous(parsed.rdzv_conf, parsed.recovery, parsed.backend)
        started = entry(parsed.words[1:] if parsed.words[:1] == ["--"] else parsed.words, Path("runs"))
        if started[0] == "-m":
            _understand_module(started[1], started[2:])
        else:
            _understand_script(started)


def _understand_torchrun(rest: Words) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import get_args_parser

    from elastic_trainer.settings import rendezvous_options

    parsed = _strictly(lambda: get_args_parser().parse_args(list(rest)))
    if parsed.rdzv_backend == "etcd3":
        rendezvous_options(_parse_rendezvous_config(parsed.rdzv_conf))
    if parsed.module:
        _understand_module(parsed.training_script, parsed.training_script_args)
    else:
        _exists(parsed.training_script)


def _understand_module(module: str, rest: Words) -> None:
    if module == "elastic_trainer.training":
        _understand_job(rest)
    elif module == "elastic_trainer.jobs.gpt_sample":
        from elastic_trainer.jobs.gpt_sample import _parser

        _strictly(lambda: _parser().parse_args(list(rest)))
    elif module.startswith("elastic_trainer.jobs.scripts.") and (found := find_spec(module)) is not None:
        _understand_script([str(found.origin), *rest])
    else:
        raise ConfigError(f"there is no module {module} to be run")


def _understand_job(rest: Words) -> None:
    from elastic_trainer.jobs.config import load_job
    from elastic_trainer.jobs.main import _parser
    from elastic_trainer.jobs.task import find_task

    parsed = _parser().parse_intermixed_args(list(rest))
    config = load_job(parsed.job, parsed.overrides)
    find_task(config.task)(config)


def _understand_script(words: Words) -> None:
    """The options of a script of ours are those that its text adds."""
    text = Path(words[0]).read_text(encoding="utf-8")
    for word in words[1:]:
        option = word.partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in text:
            raise ConfigError(f"{words[0]} has no option {option}")


def _exists(script: str) -> None:
    if not Path(script).is_file() and script != "train.py":  # the script that readers have
        raise ConfigError(f"there is no script {script}")


def _strictly(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except SystemExit as error:
        raise ConfigError("argparse refuses the command line, see above") from error


# ---- carrying out


def carry_out(words: Words) -> int:
    """Run the command ``words`` in the present directory; its exit code.

    In this process where that is possible: loading torch takes longer than most examples.
    """
    match list(words):
        case ["elastic-trainer", *rest]:
            from elastic_trainer.cli.main import main

            return main(rest)
        case ["python", "-m", "elastic_trainer.training", *rest]:
            from elastic_trainer.jobs.main import main as train

            return train(rest)
        case ["python", "-m", "elastic_trainer.jobs.gpt_sample", *rest]:
            from elastic_trainer.jobs.gpt_sample import main as sample

            return sample(rest)
        case ["python", script, *rest] if script.endswith(".py"):
            return _run_script(script, rest)
        case ["torchrun", *rest]:
            command = [sys.executable, "-m", "torch.distributed.run", *rest]
            done = subprocess.run(command, timeout=LIMIT_S, check=False, env=quiet(os.environ))
            return done.returncode
    raise AssertionError(f"nobody carries out: {' '.join(words)}")


def _run_script(script: str, rest: Words) -> int:
    with mock.patch.object(sys, "argv", [script, *rest]):
        runpy.run_path(script, run_name="__main__")
    return 0


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with one thread for each process, and what this process can import."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
