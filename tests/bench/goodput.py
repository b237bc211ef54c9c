"""Goodput in a storm: one seeded schedule of faults over one real job, in place, restarted, and as others do it.

Goodput is the time of the steps that count over the time of the storm: the number of steps in it that were not thrown
away later, times the median step of the same job just before, undisturbed. A step takes as long on two nodes as on
three. Checkpoints, standing still, and steps made again all lower it; the capacity of lost nodes does not.

Nodes of all peers start at a low priority (as root, and not with ``--quick``), since each would have a machine of its
own: their imports take no core from those that train. From when a job begins to join it has the usual priority.

Faults come as a Poisson process, one every ``--mean`` seconds. Llama 3 had one every 3.1 h on 16,384 GPUs (419 in 54
days, arXiv:2407.21783): by ``--gpus`` the mean is scaled from that. A step waits most of its time, as a process does
for its accelerator, so that starting processes do not take the training's cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from statistics import StatisticsError
from typing import Any

import pytest
import structlog
import torch

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.drills.harness import Harness, harness
from elastic_trainer.drills.stage import IN_PLACE
from elastic_trainer.jobs.digits import shipped_digits, split
from elastic_trainer.jobs.mnist import as_tensors
from elastic_trainer.local import timeline
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node, torchrun
from elastic_trainer.local.etcd import EtcdServer, spawn
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.local.ledger import Commit, Line, LineKind, audit, lineage
from tests.bench import goodput_job
from tests.bench.goodput_job import CHECKPOINTS, DATA
from tests.bench.recovery import SHARED_STORE_OFF, TUNED
from tests.bench.recovery_jobs import LIGHTHOUSE, MANAGER, Torchft, launched, lighthouse_command, look
from tests.bench.report import (
    Calibration,
    Must,
    Report,
    alternate,
    at_least,
    at_most,
    calibrate,
    emit,
    median,
    note,
    parse,
)
from tests.drills.cluster.schedule import STORM, Blow, Timed, poisson
from tests.support.small_disk import fill, mounted

LLAMA3_MEAN_S, LLAMA3_GPUS = 54 * 86_400 / 419, 16_384
LENGTH_S, QUICK_LENGTH_S = 600.0, 14.0
MEAN_S, QUICK_MEAN_S = 20.0, 2.0
CALM_S, QUICK_CALM_S = 30.0, 3.0
STEP_S, SAVE_EVERY_S, DISK_BYTES = 0.1, 5.0, 64 << 20
SETTLED_STEPS, LAST_STEPS = 20, 100
AGAIN_S = 1.0
"""Ranks write the line of one step sooner after each other, and make it again later."""
QUICK_PEERS = ("in_place", "restart_warm")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("goodput", __doc__, argv, repeats=1, extend=_own_options)
    extra, quick = options.extra, options.quick
    length_s = extra.length or (QUICK_LENGTH_S if quick else LENGTH_S)
    mean_s = extra.mean or (QUICK_MEAN_S if quick else MEAN_S)
    if extra.gpus is not None:
        mean_s = LLAMA3_MEAN_S * LLAMA3_GPUS / extra.gpus
    torchft = look(extra.torchft_python)
    chosen = peers(None if "skipped" in torchft else extra.torchft_python)
    names = extra.peers or [name for name in chosen if not quick or name in QUICK_PEERS]
    if absent := [name for name in names if name not in chosen]:
        why = torchft.get("skipped") if absent[0] == "torchft" else f"the peers are {', '.join(chosen)}"
        raise SystemExit(f"goodput: --peers {absent[0]} cannot run here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no disk mounted, no node running
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, small_disk(Path(place)) as disk:
        kinds = {blow: weight for blow, weight in STORM.items() if blow is not Blow.FULL_DISK or disk is not None}
        schedule = poisson(extra.seed, length_s, max(len(kinds), round(length_s / mean_s)), kinds)
        low = os.geteuid() == 0 and not quick
        play = Play(Path(place), disk, schedule, length_s, QUICK_CALM_S if quick else CALM_S, extra.pictures, low=low)
        calls = {name: partial(play.of, chosen[name]) for name in names}
        found = {name: together(runs) for name, runs in alternate(calls, options.repeats).items()}
    figures = {
        "storm": {
            "seed": extra.seed,
            "length_s": length_s,
            "mean_s": length_s / len(schedule),
            "faster_than_llama3": LLAMA3_MEAN_S / (length_s / len(schedule)),
            "faults": Counter(str(each.blow) for each in schedule),
            "nodes_start_at_low_priority": low,
            "disk": "full" if disk is not None else "left out: a small disk takes root",
        },
        "torchft": torchft,
        "peers": {name: chosen[name].as_json() for name in names},
        "found": found,
    }
    return emit(Report(options, figures, musts(found, chosen, len(schedule)), calibrations=play.calibrations))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=float, help=f"seconds of storm for each peer ({LENGTH_S:g})")
    parser.add_argument("--mean", type=float, help=f"mean seconds between two faults ({MEAN_S:g})")
    parser.add_argument("--gpus", type=float, help="take the mean from Llama 3's rate, on that many GPUs")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (1)")
    parser.add_argument("--peers", nargs="+", metavar="PEER", help="only these")
    parser.add_argument("--pictures", type=Path, help="a directory for PEER.svg, ranks and steps over time")
    parser.add_argument("--torchft-python", type=Path, help="the python of an environment with torch and torchft")


class Play:
    """Plays one schedule to one peer after another. ``disk`` is one that can be filled, if there is any."""

    def __init__(
        self,
        place: Path,
        disk: Path | None,
        schedule: tuple[Timed, ...],
        length_s: float,
        calm_s: float,
        pictures: Path | None,
        *,
        low: bool,
    ) -> None:
        self._place, self._disk, self._schedule, self._pictures = place, disk, schedule, pictures
        self._length_s, self._calm_s, self._low = length_s, calm_s, low
        images, labels, _ = as_tensors(split(shipped_digits(), 1000, seed=0)[0]).tensors
        self._data = images / 255.0, labels
        self.calibrations: list[Calibration] = []

    def of(self, peer: Peer) -> dict[str, Any]:
        """What ``peer`` made of it; of another project's also that it did not start."""
        directory = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=self._place))
        torch.save(self._data, directory / DATA)
        checkpoints = self._disk if self._disk is not None else directory / f"{CHECKPOINTS}-of-its-own"
        checkpoints.mkdir(exist_ok=True)
        (directory / CHECKPOINTS).symlink_to(checkpoints)
        try:
            with running(peer, directory, STEP_S, SAVE_EVERY_S, low=self._low) as trial:
                trial.settle(SETTLED_STEPS)
                calm, storm = trial.calm(self._calm_s), trial.storm(self._schedule, self._length_s)
                trial.end()
            lines = numbered(trial.lines) if peer.way == "torchft" else trial.lines
            found = judged(lines, trial.done, calm, storm, len(self._data[1])) | {"operator": trial.helped}
        except (RuntimeError, StatisticsError) as error:
            if peer.ours:
                raise
            note(f"{peer.name}: {error}")
            return {"failed": str(error)}
        finally:
            for entry in checkpoints.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self.calibrations.append(calibrate())
        note(f"  goodput {found['goodput']:.3f}, stalls, s: {json.dumps(found['median_stall_s'])}, {found['samples']}")
        if self._pictures is not None:
            faults = []
            for each in trial.done:
                what = f"{each.node} started" if each.blow is Blow.JOIN else str(each.blow)  # a start is no fault
                faults.append({"what": what, "node": each.node, "t": each.t, "recovery": None})
            (directory / "summary.json").write_text(json.dumps({"faults": faults}))
            self._pictures.mkdir(parents=True, exist_ok=True)
            timeline.draw(directory, self._pictures / f"{peer.name}.svg")
        return found


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median goodput, the goodput of each, and the samples lost or repeated in all of them."""
    whole = sorted((run for run in runs if "failed" not in run), key=lambda run: float(run["goodput"]))
    if not whole:
        return runs[0]
    sums = {name: sum(run[name] for run in whole) for name in ("samples_lost", "samples_repeated")}
    return whole[len(whole) // 2] | sums | {"goodputs": [run["goodput"] for run in whole], "of": len(runs)}


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """A disk that can be filled; None where that takes more rights than there are."""
    with ExitStack() as stack:
        disk = None
        if os.geteuid() == 0 and shutil.which("mount") is not None:
            with suppress(pytest.skip.Exception):
                disk = stack.enter_context(mounted(place / "disk", DISK_BYTES))
        yield disk


def numbered(lines: Sequence[Line]) -> list[Line]:
    """With a round for each time at which new processes began at a step that was already made, a checkpoint's.

    torchft has no number for that. A process that stood still may write its line late: it is not a new one.
    """
    told, number, began, known = [], 1, dict[int, float](), set[int]()
    for line in sorted(lines, key=lambda each: each.t):
        if line.event is LineKind.STEP:
            if line.pid not in known and line.t - began.get(line.step, line.t) > AGAIN_S:
                number, began, known = number + 1, {}, set()
            began.setdefault(line.step, line.t)
            known.add(line.pid)
        told.append(line.model_copy(update={"round": number}))
    return told


def judged(lines: Sequence[Line], done: Sequence[Struck], calm: Span, storm: Span, size: int) -> dict[str, Any]:
    """The figures of a job with ``size`` samples, from its whole ledger and the faults that happened. Pure."""
    surviving, exactness = lineage(lines), audit(lines, size)
    steps = intervals(within(surviving, calm))
    step_s, length_s = median(steps), storm[1] - storm[0]
    counting = within(surviving, storm)
    goodput = len(counting) * step_s / length_s
    lost_s = (1.0 - goodput) * length_s / max(1, len(done))
    losses = [commit.loss for commit in counting[-LAST_STEPS:] if commit.loss is not None]
    return {
        "goodput": goodput,
        "lost_s_per_fault": lost_s,
        "goodput_at_llama3_rate": 1.0 - lost_s / LLAMA3_MEAN_S,
        "step_ms": 1e3 * step_s,
        "storm_step_ms": 1e3 * median(intervals(counting)) if len(counting) > 1 else None,
        "checkpoints_cost_percent": 100.0 * (sum(steps) / len(steps) / step_s - 1.0),
        "steps": len(counting),
        "steps_repeated": exactness.steps_rolled_back,
        "samples_lost": exactness.missing,
        "samples_repeated": exactness.repeated,
        "exact": exactness.exact,
        "samples": exactness.reason,
        "final_loss": sum(losses) / len(losses) if losses else None,
        "median_stall_s": stalls(done, [commit.t for commit in surviving], step_s, storm[1]),
        "faults": Counter(str(struck.blow) for struck in done),
    }


def within(commits: Sequence[Commit], span: Span) -> list[Commit]:
    return [commit for commit in commits if span[0] <= commit.t <= span[1]]


def intervals(commits: Sequence[Commit]) -> list[float]:
    return [later.t - earlier.t for earlier, later in pairwise(commits)]


def stalls(done: Sequence[Struck], times: Sequence[float], step_s: float, ended: float) -> dict[str, float]:
    """By kind of fault: the longest time without a step that counts until the next fault, beyond a step; medians.

    What begins with the step in which the next fault struck is the next one's alone.
    """
    found: dict[str, list[float]] = defaultdict(list)
    gaps = list(pairwise([*(t for t in times if t < ended), ended]))
    for struck, until in zip(done, [*(each.t for each in done[1:]), ended], strict=True):
        last = max(struck.t, until - 1.5 * step_s)
        longest = max((b - a for a, b in gaps if a < last and b > struck.t), default=0.0)
        found[str(struck.blow)].append(max(0.0, longest - step_s))
    return {kind: median(each) for kind, each in sorted(found.items())}


def musts(found: dict[str, dict[str, Any]], chosen: dict[str, Peer], faults: int) -> list[Must]:
    """What the project promises, of the peers that were measured."""
    limits = {"in_place": 0.95, "restart_warm": 0.7}
    ours = {name: each for name, each in found.items() if chosen[name].ours}
    promised = [at_least(f"{name}: goodput", ours[name]["goodput"], limits[name]) for name in limits if name in ours]
    for name, each in ours.items():
        wrong = each["samples_lost"] + each["samples_repeated"]
        promised.append(at_most(f"{name}: samples lost or repeated", wrong, 0))
        promised.append(at_least(f"{name}: faults that happened", sum(each["faults"].values()), faults))
    return promised


NODES, LEAST, MOST = 3, goodput_job.LEAST, 4
REPLACE_S, STUCK_S, START_LIMIT_S, RETRY_S = 5.0, 60.0, 180.0, 0.5
MANY = {"failure_limit": "100000", "ttl": "3"}
"""No number of failures ends the run: in a storm they are no sign of a poisoned batch."""
RESTART = MANY | {"last_call": "1", "join_interval": "1", "stop_grace": "1"}
WARM = RESTART | {"preload": "torch:torch._dynamo:elastic_trainer.worker.session"}
"""A new node's first workers start warm too: by itself a node learns only from them what to import."""


Span = tuple[float, float]
"""From when until when, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A blow that really happened, when, and the node that it hit or started ("": none)."""

    blow: Blow
    node: str
    t: float


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to run the job. ``ours``: with a session, whose samples must be exact."""

    name: str
    way: str
    backend: str = "etcd3"
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    python: Path | None = None
    """Of torchft's environment."""

    @property
    def ours(self) -> bool:
        return self.way == "session"

    def as_json(self) -> dict[str, Any]:
        shown = {"backend": self.backend, "rdzv_conf": dict(self.rendezvous), "workers": self.workers}
        return shown | {"job": dict(self.options)}


def peers(torchft_python: Path | None) -> dict[str, Peer]:
    """All of them, by name; torchft where ``torchft_python`` names an environment with it."""
    job = {"snapshot_every_s": "auto", "sharded": False}
    found = [
        Peer("in_place", "session", rendezvous=IN_PLACE | MANY, options=job),
        Peer("in_place_sharded", "session", rendezvous=IN_PLACE | MANY, workers=2, options=job | {"sharded": True}),
        Peer("restart_warm", "session", rendezvous=WARM, options=job | {"snapshot_every_s": 1.0}),
        Peer(
            "restart_cold", "session", rendezvous=RESTART | {"preload": "off"}, options=job | {"snapshot_every_s": 1.0}
        ),
        Peer("c10d", "plain", "c10d", TUNED, SHARED_STORE_OFF, options={"timeout_s": 10.0}),
    ]
    if torchft_python is not None:
        found.append(Peer("torchft", "torchft", "c10d", options={"manager": MANAGER}, python=torchft_python))
    return {peer.name: peer for peer in found}


class Cluster(LocalCluster):
    """The nodes of ``peer``. The first one of a c10d job hosts its store, and a job of torchft has a lighthouse."""

    def __init__(self, spec: ClusterSpec, peer: Peer, *, low: bool) -> None:
        super().__init__(spec)
        self._peer = peer
        self._starter = ["nice", "-n", str(goodput_job.LOW_PRIORITY)] if low else []
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self.host: Node | None = None
        """A node that the job cannot do without."""

    def command(self, name: str) -> list[str]:
        if self._peer.python is None:
            return self._starter + torchrun(self.spec, name, first=not self.running)
        return self._starter + launched(self._peer.python, self.spec)

    def add(self) -> Node:
        alone = not self.running
        node = super().add()
        if alone and self._peer.way == "plain":
            self.host = node
        return node

    def serve(self) -> None:
        if self._peer.python is None or self._lighthouse is not None:
            return
        column = Torchft("torchft", "torchft", python=self._peer.python, lighthouse=LIGHTHOUSE)
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        with (self.spec.directory / "lighthouse.log").open("ab") as log:
            self._lighthouse = spawn(lighthouse_command(column, self.spec.endpoint, LEAST), log)

    def darken(self) -> bool:
        if self._lighthouse is None:
            return False
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._lighthouse = None
        return True

    def stop(self, grace_s: float = 10.0) -> None:
        super().stop(grace_s)
        self.darken()


@contextmanager
def running(peer: Peer, directory: Path, step_s: float, save_every_s: float, *, low: bool) -> Iterator[Trial]:
    """The job of ``peer`` in ``directory``; its first nodes are starting. ``low``: nodes start at a low priority."""
    options = {"step_s": step_s, "save_every_s": save_every_s, **peer.options}
    spec = ClusterSpec(
        run=f"goodput-{peer.name}",
        directory=directory,
        endpoint="",
        entry=[str(Path(goodput_job.__file__)), peer.way, str(directory), json.dumps(options)],
        min_nodes=LEAST,
        max_nodes=MOST,
        workers=peer.workers,
        max_restarts=100_000,
        backend=peer.backend,
        options=peer.rendezvous,
        environment={"OMP_NUM_THREADS": "1", **peer.environment},
    )

    def cluster(spec: ClusterSpec) -> LocalCluster:
        if peer.python is not None:
            options = json.loads(spec.entry[-1]) | {"lighthouse": f"http://{spec.endpoint}"}
            spec = replace(spec, entry=[*spec.entry[:-1], json.dumps(options)])
        return Cluster(spec, peer, low=low)

    with harness(spec, cluster) as opened:
        yield Trial(peer, opened, directory)


class Trial:
    def __init__(self, peer: Peer, opened: Harness, directory: Path) -> None:
        assert isinstance(opened.cluster, Cluster)
        self.peer, self._harness, self._cluster = peer, opened, opened.cluster
        self._disk = directory / goodput_job.CHECKPOINTS
        self.lines: list[Line] = []
        self.done: list[Struck] = []
        self.helped: Counter[str] = Counter()
        """How often the operator had to act beyond replacing nodes that were killed, or could not strike."""
        self._repairs: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._killed: set[str] = set()
        self._frozen: set[str] = set()
        self._stepped_at = SYSTEM.monotonic()
        self._cluster.serve()
        self._cluster.start(NODES)

    def look(self) -> None:
        new = self._harness.ledger.read()
        self.lines += new
        if any(line.event is LineKind.STEP for line in new):
            self._stepped_at = SYSTEM.monotonic()

    def settle(self, steps: int) -> None:
        """Wait until all nodes have made ``steps`` steps together."""
        deadline, world = Deadline.after(START_LIMIT_S), NODES * self.peer.workers
        while True:
            self.look()
            whole = Counter((line.node, line.local_rank) for line in self.lines if line.world == world and line.step)
            if len(whole) >= world and min(whole.values()) >= steps:
                return
            if deadline.expired or not self._cluster.running:
                logs = [node.log.read_text(errors="replace")[-1500:] for node in self._cluster.nodes]
                raise RuntimeError(f"{self.peer.name} did not begin to train:\n" + "\n".join(logs))
            pause(0.05)

    def calm(self, length_s: float) -> Span:
        began, deadline = SYSTEM.monotonic(), Deadline.after(length_s)
        while not deadline.expired:
            pause(0.2)
        self.look()
        return began, SYSTEM.monotonic()

    def storm(self, schedule: tuple[Timed, ...], length_s: float) -> Span:
        """Strike as scheduled; from when until when.

        What cannot be done yet (no worker runs that could be killed) is tried again, also beyond the end, for as long
        as a start may take; what remains is missing in ``done``. It returns when the job steps again: only then is it
        known which steps the last fault has thrown away.
        """
        began, pending = SYSTEM.monotonic(), list(schedule)
        self._stepped_at, looked, end = began, began, began + length_s
        while (now := SYSTEM.monotonic()) < end + START_LIMIT_S:
            if now >= end and not pending and self._stepped_at > end:
                break
            for blow in [each for each in pending if began + each.at_s <= now]:
                pending.remove(blow)
                t = SYSTEM.monotonic()
                if (node := self._strike(blow)) is not None:
                    self.done.append(Struck(blow.blow, node, t))
                else:
                    pending.append(replace(blow, at_s=t - began + RETRY_S))
            while self._repairs and self._repairs[0][0] <= SYSTEM.monotonic():
                heappop(self._repairs)[2]()
            if now - looked >= RETRY_S:
                self.look()
                self._help()
                looked = now
            pause(0.02)
        return began, end

    def end(self) -> None:
        self._cluster.stop()
        self.look()

    # ---- blows

    def _later(self, seconds: float, repair: Callable[[], None]) -> None:
        heappush(self._repairs, (SYSTEM.monotonic() + seconds, next(self._numbers), repair))

    def _strike(self, blow: Timed) -> str | None:
        """Do it; the node that it struck ("" for none), or None if that is not possible at this moment."""
        match blow.blow:
            case Blow.JOIN:
                return self._cluster.add().name
            case Blow.OUTAGE:
                return self._outage(blow.lasts_s)
            case Blow.FULL_DISK:
                return self._fill(blow.lasts_s)
        awake = [node for node in self._cluster.running if node.name not in self._frozen]
        for node in (awake[(blow.pick + number) % len(awake)] for number in range(len(awake))):
            if blow.blow is Blow.WORKER_KILL and node.kill_worker(blow.pick % self.peer.workers) is None:
                continue
            if blow.blow is Blow.NODE_KILL:
                self._killed.add(node.name)
                if node.kill() is None:
                    continue
                self._later(REPLACE_S, self._replace)
            if blow.blow is Blow.FREEZE:
                if len(awake) == 1 or not node.freeze():
                    continue
                self._frozen.add(node.name)
                self._later(blow.lasts_s, lambda node=node: self._thaw(node))  # type: ignore[misc]
            return node.name
        return None

    def _thaw(self, node: Node) -> None:
        self._frozen.discard(node.name)
        node.thaw()

    def _replace(self) -> None:
        if len(self._cluster.running) < NODES:
            self._cluster.add()

    def _outage(self, lasts_s: float) -> str | None:
        """Of what nodes meet at, etcd or a lighthouse. A c10d job has it in one of its nodes, and is spared."""
        if self._harness.meeting is None:
            if self._cluster.darken():
                self._later(lasts_s, self._cluster.serve)
            else:
                self.helped["outages of a service that it has not"] += 1
            return ""
        server = self._harness.meeting.etcd
        assert isinstance(server, EtcdServer)
        if not server.is_healthy():
            return None  # the last outage goes on
        server.kill()
        assert not server.is_healthy(), "etcd answers although it was killed"
        self._later(lasts_s, server.restart)
        return ""

    def _fill(self, lasts_s: float) -> str | None:
        if (self._disk / "ballast").exists():
            return None
        self._later(lasts_s, fill(self._disk).unlink)
        return ""

    # ---- the operator

    def _help(self) -> None:
        """Replace nodes that have given up; start a job again that nothing else would bring back."""
        cluster = self._cluster
        for node in cluster.nodes:
            if not node.running and node.name not in self._killed:
                self._killed.add(node.name)
                self.helped["nodes that gave up"] += 1
                self._later(REPLACE_S, self._replace)
        lost = cluster.host is not None and not cluster.host.running
        if lost or SYSTEM.monotonic() - self._stepped_at > STUCK_S:
            self.helped["whole restarts"] += 1
            self._restart()

    def _restart(self) -> None:
        cluster, self._stepped_at = self._cluster, SYSTEM.monotonic()
        for node in cluster.running:
            self._killed.add(node.name)
            node.kill()
        self._frozen.clear()
        cluster.host = None
        if self.peer.way == "plain":
            cluster.spec = replace(cluster.spec, endpoint=f"{HOST}:{free_ports(1)[0]}")
        self._later(REPLACE_S, self._refill)

    def _refill(self) -> None:
        self._cluster.serve()
        while len(self._cluster.running) < NODES:
            self._cluster.add()


if __name__ == "__main__":
    raise SystemExit(main())
