"""``elastic-trainer local``: options in, exit code out; the work is drills/user_job's.

*Fails by* ConfigError for options that cannot be meant.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.cli.options import at_least, console, ensure_torch, key_values, seconds
from elastic_trainer.drills.faults import Fault, FaultKind, parse_fault
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import rendezvous_options

ALL_THERE_S = 60.0
"""How long the first round waits for the nodes that are started together, where no more than these may come."""
_EXAMPLE = "example: elastic-trainer local --nodes 1:3 --kill-worker-at 20 --kill-node-at 60 -- mnist"


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EXAMPLE
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
    add("--hosts", action="store_true", help="give each node a network and processes of its own (Linux, needs root)")
    add("--max-restarts", type=int, default=3, metavar="N", help="worker failures that each node survives (default: 3)")
    add("--run-dir", type=Path, metavar="DIR", help="where logs, ledger, checkpoints and summary.json go")
    add("--keep", action="store_true", help="keep the run directory of a success (--run-dir and failures always are)")
    add("--rdzv-conf", default="", metavar="K=V,...", help="options of the rendezvous, as for torchrun")
    add("--timeout", type=float, metavar="SECONDS", help="stop the run when it takes longer")
    add("--backend", choices=("etcd3", "c10d"), default="etcd3", help=argparse.SUPPRESS)
    what = "a ready-made task, a job.yaml or a script.py"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and report; the exit code is the job's."""
    from elastic_trainer.drills.user_job.run import LocalOptions, run_local
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
