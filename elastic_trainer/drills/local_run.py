"""One local run from start to summary: an etcd, nodes, faults when they are due, a view, a verdict.

*Runs in* the main thread of ``elastic-trainer local`` (it handles signals).
*Owns* the run directory; all processes are gone when :func:`run_local` returns.
*Fails by* ConfigError or StoreUnavailableError before anything runs; a job that fails is a summary, not an error.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from elastic_trainer import jobs
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.drills import faults, report
from elastic_trainer.drills.display import Display, Picture, ShownIncident, display
from elastic_trainer.drills.faults import Fault
from elastic_trainer.drills.harness import Harness, harness, new_directory
from elastic_trainer.drills.report import Ending, Summary, summarize
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.cluster import ClusterSpec
from elastic_trainer.local.hosts import PRIVATE, Segment, check_possible
from elastic_trainer.local.ledger import FileTail, end_of, last_error
from elastic_trainer.local.processes import Interrupts
from elastic_trainer.membership.documents import added_up
from elastic_trainer.wording import counted

POLL_S = 0.05
STOP_GRACE_S = 10.0
"""How long nodes get to end by themselves when the run is stopped."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What to run and what to do to it."""

    words: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    start: int
    workers: int = 1
    max_restarts: int = 3
    faults: tuple[Fault, ...] = ()
    run_dir: Path | None = None
    keep: bool = False
    hosts: bool = False
    """Whether each node gets a host of its own."""
    backend: str = "etcd3"
    options: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


def run_local(options: LocalOptions, console: Console) -> Summary:
    """Run it, show it, write ``summary.json``; the summary's verdict is the exit status."""
    faults.check(options.faults, options.start, options.min_nodes, options.workers)
    run = f"local-{secrets.token_hex(4)}"
    if options.hosts:
        check_possible()
        if str(Path.cwd()) in PRIVATE:
            raise ConfigError(f"with --hosts each node has its own {Path.cwd()}", hint="start it in another directory")
    directory = run_directory(options, run)
    spec = ClusterSpec(
        run=run,
        directory=directory,
        endpoint="",
        entry=entry(options.words, directory),
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        workers=options.workers,
        max_restarts=options.max_restarts,
        backend=options.backend,
        options=options.options,
    )
    new_directory(directory)
    where = ", each on a host of its own" if options.hosts else ""
    report.say("starting", f"etcd and {counted(options.start, 'node')}{where}; logs in {spec.logs}", console)
    with Interrupts() as interrupts, ExitStack() as stack:
        if options.hosts:
            stack.enter_context(Segment(named_directories(spec.entry)))
        opened = stack.enter_context(harness(spec))
        if options.backend != "c10d":
            report.say("status", f"elastic-trainer status {run} --endpoint {opened.cluster.spec.endpoint}", console)
        summary = Following(opened, options, interrupts).to_the_end(display(console))
    shutil.rmtree(directory / "etcd" / "data", ignore_errors=True)  # larger than all that is worth keeping
    report.write(summary, directory / "summary.json")
    report.show_summary(summary, console)
    if summary.verdict.exit_code != 0:
        failed = [node.name for node in summary.nodes if not node.struck and node.exit_code not in (0, None)]
        chosen = f" --node {failed[0]}" if len(failed) == 1 else ""  # whose failure decided, if it is one node
        report.say("log", f"elastic-trainer logs {shlex.quote(str(directory))}{chosen}", console)
    if options.run_dir is None and not options.keep and summary.verdict.exit_code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        report.say("kept", str(directory), console)
    return summary


def named_directories(words: Sequence[str]) -> list[Path]:
    """The directories that the job's command names, or in which it names a file: all hosts see them. Of files directly
    in a directory that each host has for itself, the files."""
    paths = [Path(word.rpartition("=")[2]).absolute() for word in words]
    found = [path if path.is_dir() or str(path.parent) in PRIVATE else path.parent for path in paths]
    return [path for path in dict.fromkeys(found) if path.exists() and str(path) not in PRIVATE]


def run_directory(options: LocalOptions, run: str) -> Path:
    """Where the run keeps its files: as asked, else below ``runs`` (kept) or the system's temporary directory."""
    if options.run_dir is not None:
        return options.run_dir.absolute()
    if options.keep:
        return (Path("runs") / run).absolute()
    return Path(tempfile.gettempdir()) / f"elastic-trainer-{run}"


class Following:
    """Watches a cluster until it has ended, carries out faults that are due, and updates the display."""

    def __init__(self, opened: Harness, options: LocalOptions, interrupts: Interrupts) -> None:
        self._harness, self._options, self._interrupts = opened, options, interrupts
        self._cluster = opened.cluster
        self._picture = Picture(opened.cluster.spec.run, SYSTEM.monotonic())
        self._logs: dict[str, FileTail] = {}
        self._ended: set[str] = set()
        self._pending = list(options.faults)
        self._timed_out = False

    def to_the_end(self, shown: Display) -> Summary:
        """Start the nodes and follow them until none runs, a signal or the time limit."""
        try:
            nodes, now = self._cluster.start(self._options.start), SYSTEM.monotonic()
            news = [each for node in nodes for each in self._picture.node_started(node.name, now)]
            while self._goes_on():
                shown.update(self._picture, [*news, *self._look(), *self._strike()], SYSTEM.monotonic())
                news = []
                pause(POLL_S)
            shown.update(self._picture, [*news, *self._look()], SYSTEM.monotonic())
            self._stop()
            shown.update(self._picture, self._look(), SYSTEM.monotonic())
        finally:
            shown.close()
        return self._summary()

    def _goes_on(self) -> bool:
        limit = self._options.timeout_s
        self._timed_out = limit is not None and SYSTEM.monotonic() - self._picture.started_at > limit
        return bool(self._cluster.running) and self._interrupts.signal is None and not self._timed_out

    def _look(self) -> list[ShownIncident]:
        """Take in what has changed since the last look."""
        # Exit codes first: a node that has ended has written its last line.
        ended = [(node.name, node.exit_code()) for node in self._cluster.nodes if node.name not in self._ended]
        news = self._picture.observe(self._harness.ledger.read())
        for document, t in self._harness.documents():
            news += self._picture.document(document, t)
        for node in self._cluster.nodes:
            tail = self._logs.setdefault(node.name, FileTail(node.log))
            said = [line for line in tail.read() if line.strip()]
            if said:
                self._picture.node_said(node.name, said[-1])
        for name, code in ended:
            if code is not None:
                self._ended.add(name)
                news += self._picture.node_ended(name, code, SYSTEM.monotonic())
        return news

    def _strike(self) -> list[ShownIncident]:
        """Carry out what is due. A fault whose victim is not there stays pending: a worker may be restarting.

        Where the choice is left to us, it is made once the job can lose a node, so perhaps behind a recovery.
        """
        news: list[ShownIncident] = []
        picture, options = self._picture, self._options
        at = (picture.round or 0, picture.step)
        for fault in faults.due(self._pending, picture.step):
            if fault.chooses and not picture.can_lose_one(options.min_nodes, options.max_nodes):
                continue
            injected = faults.perform(fault, self._cluster, picture.training, picture.first, at)
            if injected is not None:
                self._pending.remove(fault)
                news += picture.fault(injected)
        return news

    def _stop(self) -> None:
        """End what still runs; a second signal ends the patience."""
        for node in self._cluster.running:
            node.terminate()
        patience = Deadline.after(STOP_GRACE_S)
        while self._cluster.running and not patience.expired and not self._interrupts.again:
            pause(POLL_S)
        self._cluster.stop(grace_s=0.0)

    def _summary(self) -> Summary:
        picture = self._picture
        return summarize(
            run=picture.run,
            entry=self._cluster.spec.entry,
            duration_s=SYSTEM.monotonic() - picture.started_at,
            lines=picture.lines,
            documents=picture.documents,
            injected=picture.injected,
            ending=Ending(
                exit_codes={node.name: node.exit_code() for node in self._cluster.nodes},
                unmet=tuple(self._pending),
                signal=self._interrupts.signal,
                timed_out=self._timed_out,
                errors={node.name: last_error(end_of(node.log)) for node in self._cluster.nodes if node.exit_code()},
            ),
            counters=added_up(health.counters for health in self._harness.health().values()),
        )


# ---- what is run

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
    if not stores_checkpoints(what, arguments):
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


def stores_checkpoints(what: str, arguments: Sequence[str]) -> bool:
    """Whether the user says where checkpoints go: in an argument, or in a job file of their own."""
    from elastic_trainer.jobs.config import read_job_file

    if any(argument.startswith(f"{CHECKPOINT_DIRECTORY}=") for argument in arguments):
        return True
    _, values = read_job_file(what)
    section = values.get("checkpoint")
    own = what.endswith((".yaml", ".yml")) or "/" in what
    return own and isinstance(section, dict) and section.get("directory") is not None
