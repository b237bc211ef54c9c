"""Runs that go through a night, and those who watch them: a monitor, Prometheus, Alertmanager, browsers, a command.

*Runs in* a test. *Owns* all of these, from entry to exit. *Fails by* AssertionError that says what was seen instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_UNAVAILABLE
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from elastic_trainer.local.etcd import EtcdServer
from tests.support.browsing import Overview, overviews
from tests.support.following import COMMAND, monitor
from tests.support.small_disk import mounted
from tests.support.watch import ALWAYS, WAIT_S, Message, Watch

SCALE = 1 / 20
"""Three seconds are a minute of the rules: still more than the two from one word of a node to the next."""
SCRAPE_S = 0.5
USUAL_LOAD, SLOWEST = 4.0, 4.0
"""With more processes than that for each processor all takes longer: a minute too, up to this factor."""
OPTIONS = {"ttl": "6", "last_call": "0.5", "preload": "off", "join_timeout": "300", "connect_timeout": "60"}
SLEEPS = """
import pathlib, sys, time
here = pathlib.Path(__file__)
while not here.with_name("end").exists():
    if here.with_name("wrong").exists():
        raise SystemExit("a wrong argument")
    time.sleep(0.1)
"""
"""A script without a Session, which needs nothing but Python: it ends, or fails, when a file says so."""

STEPS = """
import os, pathlib, time, torch
from elastic_trainer import Session
here = pathlib.Path(__file__)
data = torch.utils.data.TensorDataset(torch.randn(1200, 4), torch.randn(1200, 1))
with Session(seed=1) as session:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = session.wrap(model, optimizer=optimizer)
    for batch in session.batches(data, global_batch_size=12, epochs=1_000_000):
        with session.step() as step:
            slow = os.environ["LOCAL_RANK"] == "2" and here.with_name("slow").exists()
            time.sleep(0.12 if slow else 0.04)
            step.backward(torch.nn.functional.mse_loss(model(batch.x), batch.y))
            optimizer.step()
"""
"""A script with a Session, whose local rank 2 is slow while a file is there."""
SAVES = [
    "-m",
    "elastic_trainer.drills.job",
    "--directory",
    "{}",
    "--pause",
    "0.05",
    "--save-every",
    "1",
    "--width",
    "64",
]

NO_DISKS: Mapping[Path, int] = {}

Page = tuple[str, str]
"""An alert by name and run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the night. ``entry``: what torchrun starts; ``{}`` in it stands for the run's directory."""

    name: str
    nodes: int = 1
    least: int = 1
    most: int = 0
    workers: int = 1
    entry: Sequence[str] = ("{}/script.py",)
    script: str = SLEEPS
    options: Mapping[str, str] = field(default_factory=dict)

    def cluster(self, directory: Path, endpoint: str) -> LocalCluster:
        directory.mkdir(exist_ok=True)
        (directory / "script.py").write_text(self.script)
        return LocalCluster(
            ClusterSpec(
                self.name,
                directory,
                endpoint,
                [word.format(directory) for word in self.entry],
                self.least,
                self.most or max(self.nodes, self.least),
                workers=self.workers,
                options=OPTIONS | dict(self.options),
            )
        )


@dataclass(frozen=True, slots=True)
class Night:
    runs: Mapping[str, LocalCluster]
    watch: Watch
    screens: Sequence[Overview]
    endpoint: str
    slower: float
    """How much longer all may take on a machine with this load."""

    @property
    def minute_s(self) -> float:
        return 60.0 * SCALE * self.slower

    def shows(self, sick: Mapping[str, str], healthy: Mapping[str, str]) -> None:
        """Wait until both screens and the command show the ``sick`` runs (run and what it needs), then the ``healthy``
        ones (run and state), in this order."""
        expected = [*sick.items(), *((run, "nothing") for run in healthy)]
        for screen in self.screens:

            def as_expected(screen: Overview = screen) -> bool:
                found = screen.rows()
                states = all(row.state.startswith(healthy.get(row.run, "")) for row in found)
                return states and [(row.run, row.needs) for row in found] == expected

            self._until(as_expected, f"{expected} at {screen.width} px", screen.rows)
            found = screen.rows()
            assert [row.run for row in found if row.sick] == list(sick)
            assert all(row.seen for row in found), f"at {screen.width} px it is out of sight what a run needs"
            assert screen.title.startswith(f"({len(sick)}) Runs" if sick else "Runs")
        shown = [(run, [] if needs == "nothing" else needs.split(", ")) for run, needs in expected]
        self._until(lambda: self.status() == shown, f"{shown} by the command", self.status)

    def status(self) -> list[tuple[str, list[str]]]:
        """Runs and what they need, as ``elastic-trainer status --json`` has them; none if etcd is slower than it
        waits."""
        command = [*COMMAND, "status", "--json", "--endpoint", self.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == EXIT_UNAVAILABLE:
            return []
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["runs"]
        return [(row["run"], [concern["words"] for concern in row["attention"]]) for row in rows]

    def goes_blind(self) -> None:
        """Wait until both screens say of every run that nothing is known, and why."""
        for screen in self.screens:

            def said(screen: Overview = screen) -> str:
                return str(screen.page.inner_text("body"))

            def blind(screen: Overview = screen, said: Callable[[], str] = said) -> bool:
                return "cannot reach the store" in said() and {row.needs for row in screen.rows()} == {"not known"}

            self._until(blind, f"blind at {screen.width} px", said)

    def messages(self, status: str = "firing") -> Counter[tuple[str, str, str]]:
        """What people were sent, and how often: receiver, alert, run."""
        return Counter(
            (each.receiver, short(each), each.labels.get("run", "")) for each in self._mail() if each.status == status
        )

    def pages(self, status: str = "firing") -> Counter[Page]:
        return Counter(
            {(name, run): times for (to, name, run), times in self.messages(status).items() if to == "on-call"}
        )

    def reopen(self, run: str) -> None:
        self.runs[run].spec = replace(self.runs[run].spec, options={**self.runs[run].spec.options, "reopen": "true"})
        self.runs[run].start(1)

    def until_paged(self, expected: set[Page], status: str = "firing") -> None:
        """Wait for these pages; none comes twice, nor another one."""
        self._until(lambda: self.pages(status).keys() >= expected, f"pages {expected} {status}", self.pages)
        assert self.pages(status) == Counter(expected), self._mail()

    def summaries(self) -> dict[Page, str]:
        return {
            (short(each), each.labels.get("run", "")): each.annotations["summary"]
            for each in self._mail()
            if each.receiver == "on-call"
        }

    def _until(self, look: Callable[[], bool], what: str, seen: Callable[[], object]) -> None:
        try:
            self.watch.wait(what, look, WAIT_S * self.slower)
        except AssertionError:
            raise AssertionError(f"not {what}, but {seen()}; sent: {self.messages()}") from None

    def _mail(self) -> list[Message]:
        return [each for each in self.watch.mailbox.messages if each.name != ALWAYS]


def short(message: Message) -> str:
    return message.name.removeprefix("ElasticTrainer")


def _await_training(address: str, runs: set[str]) -> None:
    deadline = Deadline.after(WAIT_S)
    while True:
        with urllib.request.urlopen(f"http://{address}/api/runs", timeout=30.0) as answer:
            states = {each["run"]: each["state"] for each in json.load(answer)["runs"]}
        if runs <= {run for run, state in states.items() if state == "training"}:
            return
        assert not deadline.expired, f"not all of {runs} train: {states}"
        pause(0.2)


def _slower() -> float:
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, load / USUAL_LOAD), SLOWEST)


@contextmanager
def night(
    etcd: EtcdServer, directory: Path, plans: Sequence[Plan], disks: Mapping[Path, int] = NO_DISKS
) -> Iterator[Night]:
    """Start the nodes of all runs, and whoever watches them; ``disks``: where small ones are, and their bytes."""
    with ExitStack() as stack:
        runs = {}
        for disk, size_bytes in disks.items():
            disk.parent.mkdir()
            stack.enter_context(mounted(disk, size_bytes))
        for plan in plans:
            runs[plan.name] = stack.enter_context(plan.cluster(directory / plan.name, etcd.endpoint))
            runs[plan.name].start(plan.nodes)
        _, port = stack.enter_context(monitor(etcd.endpoint))
        address = f"127.0.0.1:{port}"
        begun = {plan.name for plan in plans if plan.nodes}
        _await_training(address, begun)  # how long this machine takes to start nodes is nobody's fault
        slower = _slower()
        watch = stack.enter_context(
            Watch(
                directory / "watch",
                monitors=[address],
                nodes_from=f"http://{address}/sd/nodes",
                scale=SCALE * slower,
                scrape_s=SCRAPE_S * slower,
            )
        )
        screens = stack.enter_context(overviews(f"http://{address}/"))
        yield Night(runs, watch, screens, etcd.endpoint, slower)
