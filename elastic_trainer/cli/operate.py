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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastic_trainer.cli import connection
from elastic_trainer.cli.checkpoints import require_save, require_training
from elastic_trainer.cli.main import seconds
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import EXIT_UNAVAILABLE, ConfigError
from elastic_trainer.membership.documents import (
    DocumentError,
    LeaveRequest,
    NodeHealth,
    RankHealth,
    RestartRequest,
    RoundDocument,
    RoundState,
    Spec,
)
from elastic_trainer.model import Phase, RecoveryMode
from elastic_trainer.store.api import Delete, Operation, Put, RunKeys, Store, created_at
from elastic_trainer.store.untrusted import plain
from elastic_trainer.wording import counted

LIMIT_S = 600.0
_LOOK_S = 0.5
_SAY_EVERY_S = 10.0
_NODES_PER_SECOND = 100.0
"""Whose documents a command reads, so that a run of thousands is not read twice a second."""


class Run:
    """A run that trains, as these commands see it."""

    def __init__(self, store: Store, keys: RunKeys, deadline: Deadline) -> None:
        self.store, self.keys, self.deadline = store, keys, deadline
        require_training(store, keys)

    def nodes(self) -> dict[str, int]:
        """The nodes that are there, and the revisions at which their keys were created."""
        items = self.store.range(self.keys.nodes, self._soon(), keys_only=True).items
        named = {self.keys.node_id(item.key): item.create_revision for item in items}
        return {name: created for name, created in named.items() if name is not None}

    def spec(self) -> Spec:
        """What all nodes of the run agreed on."""
        item = self.store.get(self.keys.spec, self._soon()).first
        if item is None:
            raise ConfigError(f"run {self.keys.run_id!r} has not begun", hint="ask it later")
        return Spec.decode(item.value, item.key)

    def round(self) -> RoundDocument | None:
        """The newest round."""
        item = self.store.get(self.keys.round, self._soon()).first
        return RoundDocument.decode(item.value, item.key) if item is not None else None

    def ranks(self) -> dict[int, tuple[str, RankHealth]]:
        """Each rank of the newest round, with its node; empty until all of them have published."""
        current, found = self.round(), dict[int, tuple[str, RankHealth]]()
        if current is None or current.state is not RoundState.ACTIVE:
            return {}
        for item in self.store.range(self.keys.health, self._soon()).items:
            with suppress(DocumentError):
                health = NodeHealth.decode(item.value, item.key)
                if health.round == current.number and current.member(health.node) is not None:
                    found |= {rank.rank: (health.node, rank) for rank in health.ranks}
        return found if len(found) == current.world_size else {}

    def ask(self, name: str, created: int, request: LeaveRequest) -> bool:
        """Ask the node; whether it is still the one whose key was created then."""
        guard, put = created_at(self.keys.node(name), created), Put(self.keys.eviction(name), request.encode())
        return self.store.transact([guard], [put], deadline=self._soon()).succeeded

    def write(self, *operations: Operation) -> None:
        self.store.transact([], list(operations), deadline=self._soon())

    def wait(self, done: Callable[[], bool], what: str) -> bool:
        """Wait until it is done, saying so; whether it was in time."""
        said_at = SYSTEM.monotonic()
        while not done():
            if self.deadline.expired:
                return False
            if SYSTEM.monotonic() - said_at > _SAY_EVERY_S:
                said_at = SYSTEM.monotonic()
                print(f"waiting: {what}", file=sys.stderr, flush=True)
            current = self.round()
            look_s = max(_LOOK_S, len(current.members) / _NODES_PER_SECOND) if current is not None else _LOOK_S
            pause(min(look_s, max(0.01, self.deadline.remaining_s())))
        return True

    def _soon(self) -> Deadline:
        return Deadline.after(connection.CONNECT_S)


def _created(run: Run, name: str) -> int:
    nodes = run.nodes()
    if name not in nodes:
        known = ", ".join(sorted(nodes)) or "none is there"
        raise ConfigError(f"run {run.keys.run_id!r} has no node {name!r}", hint=f"its nodes: {known}")
    return nodes[name]


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked: the sentence for when it is done, whether it is, and what to do where it is not in time."""

    sentence: str
    done: Callable[[], bool]
    withdraw: Callable[[], None] = lambda: None


def _stop(run: Run, arguments: argparse.Namespace) -> Asked:
    request = LeaveRequest(reason="an operator stops the run", ordered=True)
    asked = set[tuple[str, int]]()

    def gone() -> bool:
        """Also nodes that come meanwhile, or whose lease was renewed, are asked."""
        nodes = run.nodes()
        for name, created in nodes.items():
            if (name, created) not in asked and run.ask(name, created, request):
                asked.add((name, created))
        return not nodes

    run.write(Delete(run.keys.pause))  # who starts it again wants it to train
    gone()
    return Asked(f"{counted(len({name for name, _ in asked}), 'node')} left with a checkpoint", gone)


def _drain(run: Run, arguments: argparse.Namespace) -> Asked:
    name, created = arguments.node, _created(run, arguments.node)
    others, least = len(run.nodes()) - 1, run.spec().min_nodes
    if not run.ask(name, created, LeaveRequest(reason="an operator drains this node", ordered=True)):
        raise ConfigError(f"node {name!r} has just left, or come back", hint="look at its status, and ask again")
    wait = f"; the other {others} wait for more, since the run needs {least}" if 0 < others < least else ""
    return Asked(f"node {plain(name)} left{wait}", lambda: run.nodes().get(name) != created)


def _pause(run: Run, arguments: argparse.Namespace) -> Asked:
    run.write(Put(run.keys.pause, b"an operator"))

    def paused() -> bool:
        ranks = run.ranks().values()
        return bool(ranks) and all(rank.phase == Phase.WAITING for _, rank in ranks)

    sentence = f"all ranks wait; `elastic-trainer resume {plain(arguments.run)}` lets them go on"
    return Asked(sentence, paused, lambda: run.write(Delete(run.keys.pause)))


def _resume(run: Run, arguments: argparse.Namespace) -> Asked:
    run.write(Delete(run.keys.pause))
    return Asked("the run trains", lambda: any(rank.phase != Phase.WAITING for _, rank in run.ranks().values()))


def _restart(run: Run, arguments: argparse.Namespace) -> Asked:
    if arguments.node is not None:
        return _restart_node(run, arguments.node, at_once=arguments.no_wait)
    require_save(run.store, run.keys, run.deadline)
    before, at = {rank.pid: node for node, rank in run.ranks().values()}, -1

    def anew() -> bool:
        """The order is for one round: where that ended for another reason, the next is asked."""
        nonlocal at
        ranks, current = run.ranks().values(), run.round()
        old = [rank for node, rank in ranks if before.get(rank.pid) == node]
        if old and current is not None and current.number != at:
            at = current.number
            run.write(Put(run.keys.restart, RestartRequest(round=at).encode()))
        return bool(ranks) and at >= 0 and not old

    anew()
    return Asked("the new workers train", anew, lambda: run.write(Delete(run.keys.restart)))


def _restart_node(run: Run, name: str, *, at_once: bool) -> Asked:
    if run.spec().recovery is not RecoveryMode.IN_PLACE:
        raise ConfigError(
            "in restart mode all workers start again with those of one node", hint="leave --node out to restart all"
        )
    created, before = _created(run, name), set[int]()
    request = LeaveRequest(reason="an operator restarts its workers", ordered=True, workers=True)

    def anew() -> bool:
        """Asked once its workers are known, by which the new ones can be told."""
        now = {rank.pid for node, rank in run.ranks().values() if node == name}
        if not before and (now or at_once):
            if not run.ask(name, created, request):
                raise ConfigError(f"node {name!r} has just left, or come back", hint="ask again")
            before.update(now)
        return bool(now) and not now & before

    anew()
    return Asked("its new workers train", anew)


def _run(act: Callable[[Run, argparse.Namespace], Asked], arguments: argparse.Namespace) -> int:
    deadline = Deadline.after(seconds(arguments.timeout, "--timeout", above_zero=True))
    with connection.opened(arguments, arguments.run) as (store, settings):
        keys = RunKeys(settings.prefix, arguments.run)
        connection.require_run(store, settings, keys)
        run = Run(store, keys, deadline)
        asked, name = act(run, arguments), plain(arguments.run)
        if arguments.no_wait:
            print(f"asked run {name}")
        elif run.wait(asked.done, f"run {name} has not done it yet"):
            print(f"run {name}: {asked.sentence}")
        else:
            asked.withdraw()
            print(
                f"elastic-trainer: run {name} has not done it within {arguments.timeout:g} s."
                f" `elastic-trainer status {name}` shows what its ranks do; to pause and restart takes a Session",
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
    connection.add_run(parser)
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
