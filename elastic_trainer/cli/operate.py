"""``elastic-trainer stop``, ``drain``, ``pause``, ``resume`` and ``restart``: what operators ask of a run that trains.

All of it is planned: what was committed is kept, and no step is made twice. What is asked stands in etcd; the agents
read it every two seconds (later in runs of hundreds of nodes).

*Runs in* the process of the command. *Owns* nothing.
*Fails by* ConfigError for a run or a node that is not there, StoreUnavailableError when etcd does not answer, and exit
code 69 where the run has not done it within the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from elastic_trainer.agent.health.node_health import told_by_all
from elastic_trainer.cli import connection
from elastic_trainer.cli.checkpoints import require_save, require_training
from elastic_trainer.cli.main import seconds
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import EXIT_UNAVAILABLE, ConfigError
from elastic_trainer.membership.documents import LeaveRequest, NodeRecord, RankHealth, RoundDocument
from elastic_trainer.model import Phase, RunOrder
from elastic_trainer.store.api import Delete, Put, RunKeys, Store, created_at
from elastic_trainer.store.untrusted import plain
from elastic_trainer.wording import counted

LIMIT_S = 600.0
_LOOK_S = 0.5
_SAY_EVERY_S = 10.0


class Run:
    """A run that trains, as these commands see it."""

    def __init__(self, store: Store, keys: RunKeys, deadline: Deadline) -> None:
        self.store, self.keys, self.deadline = store, keys, deadline
        require_training(store, keys)

    def nodes(self) -> dict[str, tuple[NodeRecord, int]]:
        """The nodes that are there: their records, and the revisions at which their keys were created."""
        items = self.store.range(self.keys.nodes, self._soon()).items
        found = {}
        for item in items:
            name = self.keys.node_id(item.key)
            if name is not None:
                found[name] = NodeRecord.decode(item.value, item.key), item.create_revision
        return found

    def ranks(self) -> dict[int, RankHealth]:
        """The ranks of the newest round, as their nodes published them."""
        there = self.store.get(self.keys.round, self._soon()).first
        if there is None:
            return {}
        current = RoundDocument.decode(there.value, there.key)
        told = told_by_all(self.store, self.keys)
        members = [told[each.node] for each in current.members if each.node in told]
        return {rank.rank: rank for each in members if each.round == current.number for rank in each.ranks}

    def ask_nodes(self, names: Mapping[str, int], request: LeaveRequest) -> None:
        """Ask each node, unless another has come under its name since."""
        for name, created in names.items():
            guard = created_at(self.keys.node(name), created)
            self.store.transact([guard], [Put(self.keys.eviction(name), request.encode())], deadline=self._soon())

    def set_order(self, order: RunOrder | None) -> None:
        """What all ranks are to do; None: nothing any more."""
        key = self.keys.order
        write = Delete(key) if order is None else Put(key, order.encode())
        self.store.transact([], [write], deadline=self._soon())

    def wait(self, done: Callable[[], bool], what: str) -> bool:
        """Wait until it is done, saying so; whether it was in time."""
        said_at = SYSTEM.monotonic()
        while not done():
            if self.deadline.expired:
                return False
            if SYSTEM.monotonic() - said_at > _SAY_EVERY_S:
                said_at = SYSTEM.monotonic()
                print(f"waiting: {what}", file=sys.stderr, flush=True)
            pause(min(_LOOK_S, max(0.01, self.deadline.remaining_s())))
        return True

    def _soon(self) -> Deadline:
        return Deadline.after(connection.CONNECT_S)


def _of_node(run: Run, name: str) -> dict[str, int]:
    nodes = run.nodes()
    if name not in nodes:
        raise ConfigError(
            f"run {run.keys.run_id!r} has no node {name!r}",
            hint=f"one of: {', '.join(sorted(nodes)) or 'none is there'}",
        )
    return {name: nodes[name][1]}


def _stop(run: Run, arguments: argparse.Namespace) -> tuple[str, Callable[[], bool]]:
    nodes = run.nodes()
    asked = {name: created for name, (_, created) in nodes.items()}
    run.ask_nodes(asked, LeaveRequest(reason="an operator stops the run", ordered=True))
    return f"{counted(len(asked), 'node')} left with a checkpoint", lambda: not run.nodes()


def _drain(run: Run, arguments: argparse.Namespace) -> tuple[str, Callable[[], bool]]:
    asked = _of_node(run, arguments.node)
    run.ask_nodes(asked, LeaveRequest(reason="an operator drains this node", ordered=True))
    (created,) = asked.values()

    def gone() -> bool:
        there = run.nodes().get(arguments.node)
        return there is None or there[1] != created

    return f"node {plain(arguments.node)} left", gone


def _pause(run: Run, arguments: argparse.Namespace) -> tuple[str, Callable[[], bool]]:
    run.set_order(RunOrder.PAUSE)

    def paused() -> bool:
        ranks = run.ranks().values()
        return bool(ranks) and all(each.phase == Phase.WAITING for each in ranks)

    return f"all ranks wait; `elastic-trainer resume {plain(arguments.run)}` lets them go on", paused


def _resume(run: Run, arguments: argparse.Namespace) -> tuple[str, Callable[[], bool]]:
    run.set_order(None)
    return "the run trains", lambda: any(each.phase != Phase.WAITING for each in run.ranks().values())


def _restart(run: Run, arguments: argparse.Namespace) -> tuple[str, Callable[[], bool]]:
    before = run.ranks()
    if arguments.node is not None:
        asked = _of_node(run, arguments.node)
        run.ask_nodes(asked, LeaveRequest(reason="an operator restarts its workers", ordered=True, workers=True))
    else:
        require_save(run.store, run.keys, run.deadline)
        run.set_order(RunOrder.RESTART)
    pids = {(each.pid, each.rank) for each in before.values()}

    def anew() -> bool:
        ranks = run.ranks().values()
        new = [each for each in ranks if (each.pid, each.rank) not in pids]
        enough = 1 if arguments.node is not None else len(before)
        return len(new) >= enough and all(each.phase not in (Phase.STARTING, Phase.RENDEZVOUS) for each in ranks)

    return "the new workers train", anew


def _run(
    act: Callable[[Run, argparse.Namespace], tuple[str, Callable[[], bool]]], arguments: argparse.Namespace
) -> int:
    deadline = Deadline.after(seconds(arguments.timeout, "--timeout", above_zero=True))
    with connection.opened(arguments, arguments.run) as (store, settings):
        keys = RunKeys(settings.prefix, arguments.run)
        connection.require_run(store, settings, keys)
        run = Run(store, keys, deadline)
        what, done = act(run, arguments)
        name = plain(arguments.run)
        if arguments.no_wait:
            print(f"asked run {name}")
        elif run.wait(done, f"run {name} has not done it yet"):
            print(f"run {name}: {what}")
        else:
            print(
                f"elastic-trainer: run {name} has not done it within {arguments.timeout:g} s. It may yet;"
                f" `elastic-trainer status {name}` shows what its ranks do",
                file=sys.stderr,
            )
            return EXIT_UNAVAILABLE
    return 0


def run_stop(arguments: argparse.Namespace) -> int:
    """All nodes leave."""
    return _run(_stop, arguments)


def run_drain(arguments: argparse.Namespace) -> int:
    """One node leaves."""
    return _run(_drain, arguments)


def run_pause(arguments: argparse.Namespace) -> int:
    """All ranks wait."""
    return _run(_pause, arguments)


def run_resume(arguments: argparse.Namespace) -> int:
    """They go on."""
    return _run(_resume, arguments)


def run_restart(arguments: argparse.Namespace) -> int:
    """All workers, or those of a node, are started anew."""
    return _run(_restart, arguments)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's name (--rdzv-id)")
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait until it is done")
    limit = f"seconds to wait (default: {LIMIT_S:g})"
    parser.add_argument("--timeout", type=float, default=LIMIT_S, metavar="S", help=limit)
    connection.add_options(parser)


configure_stop = configure_pause = configure_resume = _configure


def configure_drain(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("--node", required=True, metavar="NAME", help="the node that is to leave")
    _configure(parser)


def configure_restart(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("--node", metavar="NAME", help="only the workers of this node, in place; else all, at one step")
    _configure(parser)
