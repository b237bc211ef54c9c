"""``elastic-trainer run``: torchrun with the etcd rendezvous and defaults for long jobs, printed before it starts.

The process becomes torchrun, so that signals and exit codes are its own. *Fails by* ConfigError for a wrong option.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.cli.local import nodes, rendezvous
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.cli.options import at_least, ensure_torch
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import SECRETS, parse_endpoints, store_endpoint

MAX_RESTARTS = 100
"""A job of weeks outlives many failures; one that fails at its start, or again at one step, ends by its own limits."""
PACKAGE = "elastic_trainer"
_TRAINING = f"{PACKAGE}.training"
_OPENERS = frozenset({"Session", "Trainer"})
"""What of this package lives through rounds in one process."""
_SECRET = re.compile(rf"\b({'|'.join(SECRETS)})=[^,]*")
_EXAMPLE = "example: elastic-trainer run --nodes 2:4 --endpoint etcd:2379 -- train.py --epochs 10"


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--nodes", default="1", metavar="MIN:MAX", help="fewest and most nodes that the job trains with (default: 1)")
    add("--endpoint", metavar="HOST:PORT", help="etcd (default: ELASTIC_TRAINER_ENDPOINT, else this machine)")
    add("--name", metavar="RUN", help="the run's name, the same on all nodes (default: that of the script)")
    add("--nproc-per-node", type=int, metavar="P", help="workers of this node (default: one for each GPU, else 1)")
    add(
        "--recovery", choices=[str(mode) for mode in RecoveryMode], help="default: in_place for a script with a Session"
    )
    add(
        "--max-restarts", type=int, default=MAX_RESTARTS, metavar="N", help=f"worker failures (default: {MAX_RESTARTS})"
    )
    add("--rdzv-conf", default="", metavar="K=V,...", help="options of the rendezvous, as for torchrun")
    add("--dry-run", action="store_true", help="print the command and end")
    what = "a script.py, -m module, a job.yaml or a ready-made task"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Print torchrun's command and become it."""
    if not arguments.dry_run:
        ensure_torch()
    words = command(arguments)
    shown = shlex.join([_SECRET.sub(r"\1=***", each) if each.startswith("--rdzv-conf=") else each for each in words])
    print(f"{PROGRAM}: torchrun {shown}", file=sys.stderr, flush=True)
    if not arguments.dry_run:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
    return 0


def command(arguments: argparse.Namespace) -> list[str]:
    """torchrun's arguments. Looks at the script, and for GPUs if the number of workers is left open."""
    from elastic_trainer.drills.user_job.job import entry

    low, high = nodes(arguments.nodes)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    name = arguments.name or _named_after(words)
    job = words if words[:1] == ["-m"] and words[1:] else entry(words, Path("runs") / name)
    recovery = arguments.recovery or ("in_place" if opens_session(job) else "restart")
    options = rendezvous(arguments.rdzv_conf, None, "etcd3")
    options = {"recovery": recovery, **options} if arguments.recovery is None else {**options, "recovery": recovery}
    endpoint = arguments.endpoint or store_endpoint()
    endpoint = ",".join(map(str, parse_endpoints(endpoint)))  # with the port that was left out
    workers = arguments.nproc_per_node
    return [
        f"--nnodes={low}:{high}",
        f"--nproc-per-node={_gpus() or 1 if workers is None else at_least(1, workers, '--nproc-per-node')}",
        f"--max-restarts={at_least(0, arguments.max_restarts, '--max-restarts')}",
        "--rdzv-backend=etcd3",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={name}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in options.items()),
        *job,
    ]


def opens_session(job: Sequence[str]) -> bool:
    """Whether what torchrun would run imports a Session or a Trainer of this package itself."""
    if job[0] == "-m":
        return job[1] == _TRAINING
    try:
        tree = ast.parse(Path(job[0]).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # the worker says what is wrong with it
    imports = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            if any(alias.name in _OPENERS for alias in node.names):
                return True
        elif isinstance(node, ast.Import):
            imports = imports or any(alias.name.partition(".")[0] == PACKAGE for alias in node.names)
    return imports and any(isinstance(node, ast.Attribute) and node.attr in _OPENERS for node in ast.walk(tree))


def session_directories(text: str) -> list[str]:
    """The ``checkpoint_dir`` of each Session in the script ``text`` that is written out there."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sessions = [each for each in calls if ast.unparse(each.func).rpartition(".")[2] == "Session"]
    named = [word.value for each in sessions for word in each.keywords if word.arg == "checkpoint_dir"]
    given = [*(each.args[0] for each in sessions if each.args), *named]
    return [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _named_after(words: Sequence[str]) -> str:
    if words[:1] == ["-m"] and words[1:]:
        return words[1].rpartition(".")[2]
    return Path(next(iter(words), "")).stem or "run"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
