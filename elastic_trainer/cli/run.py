"""Commands that start jobs from here: ``run``, ``local``, ``drill``; and ``plot``, which draws what became of one.

``run`` prints torchrun's command, with the etcd rendezvous and defaults for long jobs, and becomes it, so that signals
and exit codes are its own. The work of the others is that of drills/local_run, drills/run and local/timeline.

*Runs in* the process of the command. *Fails by* ConfigError for options that cannot be meant.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.cli.main import (
    PROGRAM,
    at_least,
    console,
    ensure_torch,
    key_values,
    output_options,
    seconds,
    written,
)
from elastic_trainer.drills.faults import Fault, FaultKind, parse_fault
from elastic_trainer.errors import EXIT_FAILURE, ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import SECRETS, parse_endpoints, rendezvous_options, store_endpoint

MAX_RESTARTS = 100
"""A job of weeks outlives many failures; one that fails at its start, or again at one step, ends by its own limits."""
PACKAGE = "elastic_trainer"
_TRAINING = f"{PACKAGE}.training"
_OPENERS = frozenset({"Session", "Trainer"})
"""What of this package lives through rounds in one process."""
_SECRET = re.compile(rf"\b({'|'.join(SECRETS)})=[^,]*")
_EXAMPLE = "example: elastic-trainer run --nodes 2:4 --endpoint etcd:2379 -- train.py --epochs 10"


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--nodes", default="1", metavar="MIN:MAX", help="fewest and most nodes that the job trains with (default: 1)")
    add("--endpoint", metavar="HOST:PORT", help="etcd (default: ELASTIC_TRAINER_ENDPOINT, else this machine)")
    add("--name", metavar="RUN", help="the run's name, the same on all nodes (default: that of the script)")
    add("--nproc-per-node", type=int, metavar="P", help="workers of this node (default: one for each GPU, else 1)")
    add(
        "--recovery",
        choices=[str(mode) for mode in RecoveryMode],
        help=("restart or in_place; by default in_place for a script that imports a Session or Trainer"),
    )
    add(
        "--max-restarts",
        type=int,
        default=MAX_RESTARTS,
        metavar="N",
        help=f"worker failures that this node survives (default: {MAX_RESTARTS}); those at one step end the run",
    )
    add("--rdzv-conf", default="", metavar="K=V,...", help="options of the rendezvous, as for torchrun")
    add("--dry-run", action="store_true", help="print the command and end")
    what = "a script.py, -m module, a job.yaml or a ready-made task"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)


def run_run(arguments: argparse.Namespace) -> int:
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
    from elastic_trainer.drills.local_run import entry

    low, high = nodes(arguments.nodes)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    module = words[:1] == ["-m"] and words[1:]
    stem = words[1].rpartition(".")[2] if module else Path(next(iter(words), "")).stem
    name = arguments.name or stem or "run"
    job = words if module else entry(words, Path("runs") / name)
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


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


# ---- local

ALL_THERE_S = 60.0
"""How long the first round waits for the nodes that are started together, where no more than these may come."""
_LOCAL_EXAMPLE = "example: elastic-trainer local --nodes 1:3 --kill-worker-at 20 --kill-node-at 60 -- mnist"


def configure_local(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _LOCAL_EXAMPLE
    add = parser.add_argument
    add("--nodes", required=True, metavar="MIN:MAX", help="fewest and most nodes that the job trains with")
    add("--start", type=int, metavar="N", help="nodes to start with (default: MAX, less one for each --join-at)")
    add("--nproc-per-node", type=int, default=1, metavar="P", help="workers of each node (default: 1)")
    for kind, where, help_ in (
        (FaultKind.KILL_NODE, "STEP[:NODE]", "SIGKILL a whole node once STEP is committed (default: the last node)"),
        (FaultKind.KILL_WORKER, "STEP[:NODE[:LOCAL_RANK]]", "SIGKILL one worker process once STEP is committed"),
        (FaultKind.JOIN, "STEP", "start one more node once STEP is committed"),
    ):
        add(f"--{kind}-at", action="append", default=[], metavar=where, help=f"{help_}; may be repeated")
    add("--recovery", choices=[str(mode) for mode in RecoveryMode], help="how nodes recover (default: restart)")
    add(
        "--hosts",
        action="store_true",
        help=(
            "give each node a host of its own: network and address, process ids, host name, /tmp and "
            "/dev/shm, on a network that reaches nothing but the other nodes and etcd (Linux, needs "
            "root). Directories there are seen by all if the command names them, or a file in them. "
            "Without it all share this machine's loopback"
        ),
    )
    add("--max-restarts", type=int, default=3, metavar="N", help="worker failures that each node survives (default: 3)")
    add("--run-dir", type=Path, metavar="DIR", help="where logs, ledger, checkpoints and summary.json go")
    add("--keep", action="store_true", help="keep the run directory of a success (--run-dir and failures always are)")
    conf = "options of the rendezvous, as for torchrun; last_call is 60 where all nodes that may come start at once"
    add("--rdzv-conf", default="", metavar="K=V,...", help=conf)
    add("--timeout", type=float, metavar="SECONDS", help="stop the run when it takes longer")
    add("--backend", choices=("etcd3", "c10d"), default="etcd3", help=argparse.SUPPRESS)
    what = "a ready-made task, a job.yaml or a script.py"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)


def run_local(arguments: argparse.Namespace) -> int:
    """Run the job and report; the exit code is the job's."""
    from elastic_trainer.drills.local_run import LocalOptions, run_local
    from elastic_trainer.local import agents

    ensure_torch()
    low, high = nodes(arguments.nodes)
    wanted = faults(arguments)
    start = starting(arguments.start, low, high, sum(fault.kind is FaultKind.JOIN for fault in wanted))
    conf = rendezvous(arguments.rdzv_conf, arguments.recovery, arguments.backend)
    timeout: float | None = arguments.timeout
    options = LocalOptions(
        words=tuple(arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words),
        min_nodes=low,
        max_nodes=high,
        start=start,
        workers=at_least(1, arguments.nproc_per_node, "--nproc-per-node"),
        max_restarts=at_least(0, arguments.max_restarts, "--max-restarts"),
        faults=wanted,
        run_dir=arguments.run_dir,
        keep=arguments.keep,
        hosts=arguments.hosts,
        backend=arguments.backend,
        options=patient(conf) if start == high and arguments.backend == "etcd3" else conf,
        timeout_s=timeout if timeout is None else seconds(timeout, "--timeout", above_zero=True),
    )
    agents.preload()  # its nodes share one import of torch
    return run_local(options, console()).verdict.exit_code


def nodes(text: str) -> tuple[int, int]:
    """Read ``MIN:MAX``, or one number for both."""
    low, separator, high = text.partition(":")
    high = high if separator else low
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--nodes {text!r} is not MIN:MAX", hint="two numbers from 1, such as 2:4")
    return int(low), int(high)


def faults(arguments: argparse.Namespace) -> tuple[Fault, ...]:
    """The faults that the options name."""
    given = vars(arguments)
    return tuple(parse_fault(kind, text) for kind in FaultKind for text in given[f"{kind}_at".replace("-", "_")])


def starting(asked: int | None, low: int, high: int, joins: int) -> int:
    """How many nodes to start with; by default room is left for those that join."""
    if asked is None:
        return max(low, high - joins)
    if not low <= asked <= high:
        raise ConfigError(f"--start {asked} is not between {low} and {high}", hint="see --nodes")
    return asked


def rendezvous(text: str, recovery: str | None, backend: str) -> dict[str, str]:
    """The options of ``--rdzv-conf`` with ``--recovery`` added, checked before any process sees them."""
    options = key_values(text)
    if "node_id" in options:
        raise ConfigError("--rdzv-conf: 'node_id' cannot be given", hint="nodes are named n0, n1, ...")
    if recovery is not None:
        options["recovery"] = recovery
    if backend == "etcd3":
        checked: dict[str, Any] = dict(options)
        rendezvous_options(checked)
    elif recovery is not None:
        raise ConfigError("--recovery needs the etcd3 backend", hint="leave --backend out")
    return options


def patient(conf: Mapping[str, str]) -> dict[str, str]:
    """``conf`` with a first round that waits for all nodes, unless it says how long to wait."""
    return {"last_call": f"{ALL_THERE_S:g}", **conf}


# ---- drill

_DRILL_EXAMPLE = "example: elastic-trainer drill worker-kill --repeats 5"


def configure_drill(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    from elastic_trainer.drills.run import DRILLS

    width = max(map(len, DRILLS))
    listed = "\n".join(f"  {drill.name:<{width}}  {drill.summary}" for drill in DRILLS.values())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"drills:\n{listed}\n\n{_DRILL_EXAMPLE}"
    add = parser.add_argument
    add("name", metavar="NAME", help="which drill, see below")
    add("--repeats", type=int, default=1, metavar="N", help="number of faults (default: 1)")
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long etcd-outage, and the load of busy-machine, last, 60",
    )
    add(
        "--slack",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds allowed beyond the limit of a drill, for a machine that is busy, 0",
    )
    output_options(parser)
    add("--run-dir", type=Path, metavar="DIR", help="where logs and ledger go; they are kept then")
    add("--keep", action="store_true", help="keep the run directory of a success too")


def run_drill(arguments: argparse.Namespace) -> int:
    """Play the drill and report; 0 only if all went as it must."""
    from elastic_trainer.drills.report import show
    from elastic_trainer.drills.run import DrillOptions, run_drill
    from elastic_trainer.local import agents

    options = DrillOptions(
        name=arguments.name,
        repeats=at_least(1, arguments.repeats, "--repeats"),
        seconds=seconds(arguments.seconds, "--seconds"),
        slack_s=seconds(arguments.slack, "--slack"),
        directory=arguments.run_dir,
        keep=arguments.keep,
    )
    agents.preload()  # its nodes share one import of torch
    report = run_drill(options, say=lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.output is not None:
        print(written(report.as_json(), arguments.output))
        if not report.ok:
            print(f"kept {report.directory}", file=sys.stderr)
    else:
        show(report, console())
    return 0 if report.ok else EXIT_FAILURE


# ---- plot


def configure_plot(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "example: elastic-trainer plot runs/mnist --output mnist.svg"
    parser.add_argument(
        "directory",
        type=Path,
        metavar="RUN_DIR",
        help=(
            "the checkpoint.directory of a job: draws its losses over steps; or the --run-dir of a "
            "local run: draws which node trained when, and each fault"
        ),
    )
    help_ = "file to write, .png, .svg or .pdf (default: curves.png, of a local run timeline.png, in RUN_DIR)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the loss of a job over steps, or the nodes of a local run over time, with rounds and faults marked."""
    from elastic_trainer.jobs.curves import check_drawable, draw, read_curves
    from elastic_trainer.local import timeline

    directory: Path = arguments.directory
    local = timeline.has_timeline(directory)
    output = (
        arguments.output if arguments.output is not None else directory / f"{'timeline' if local else 'curves'}.png"
    )
    check_drawable(output)
    if local:
        timeline.draw(directory, output)
    else:
        draw(read_curves(directory), str(directory), output)
    print(output)
    return 0
