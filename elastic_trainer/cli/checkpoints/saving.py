"""``elastic-trainer checkpoints save RUN``: ask a run that trains for a checkpoint now, and wait until it is durable.

The request is one key of the run; the agent of rank 0's node passes it on to the worker, and writes the answer there.

*Runs in* the process of the command, its main thread. *Owns* nothing.
*Fails by* ConfigError for a run that is not there, NotTrainingError for one that cannot save,
StoreUnavailableError when etcd does not answer. A save that failed ends with the exit code that fits the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from typing import TypeVar

from elastic_trainer.cli import connection
from elastic_trainer.cli.checkpoints.places import add_json
from elastic_trainer.cli.options import seconds
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, PermanentError
from elastic_trainer.membership.documents import (
    Document,
    DocumentError,
    RoundDocument,
    RoundState,
    RunResult,
    SaveRequest,
)
from elastic_trainer.store.api import Delete, KeyValue, Put, Read, RunKeys, Store, prefix_end, unchanged
from elastic_trainer.store.untrusted import plain

DocumentT = TypeVar("DocumentT", bound=Document)
LIMIT_S = 600.0
_LOOK_S = 0.2
_SAY_EVERY_S = 10.0


class NotTrainingError(PermanentError):
    """The run does not train, so nobody can save its state."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("run", metavar="RUN", help="the run that is to save now")
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait for the checkpoint")
    parser.add_argument(
        "--timeout", type=float, default=LIMIT_S, metavar="S", help=f"seconds to wait (default: {LIMIT_S:g})"
    )
    add_json(parser)
    connection.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the run for a checkpoint and print its name; 0 once it is durable."""
    name: str = arguments.run
    deadline = Deadline.after(seconds(arguments.timeout, "--timeout", above_zero=True))
    with connection.opened(arguments, name) as (store, settings):
        keys = RunKeys(settings.prefix, name)
        connection.require_run(store, settings, keys)
        _require_training(store, keys)
        asked = _ask(store, keys)
        if arguments.no_wait:
            _print(arguments, name, None, f"asked run {plain(name)} for a checkpoint")
            return 0
        answer = _wait(store, keys, asked, deadline)
    if answer is None:
        print(
            f"elastic-trainer: run {plain(name)} has not saved within {arguments.timeout:g} s. Only a job with a"
            f" Session can be asked; `elastic-trainer status {plain(name)}` shows what its ranks do",
            file=sys.stderr,
        )
        return EXIT_UNAVAILABLE
    if answer.problem:
        print(f"elastic-trainer: run {plain(name)} cannot save: {plain(answer.problem)}", file=sys.stderr)
        return answer.code or EXIT_FAILURE
    _print(arguments, name, answer.name, plain(answer.name))
    return 0


def _print(arguments: argparse.Namespace, run: str, checkpoint: str | None, text: str) -> None:
    print(json.dumps({"run": run, "checkpoint": checkpoint}, indent=2) if arguments.json else text)


def _require_training(store: Store, keys: RunKeys) -> None:
    """NotTrainingError unless the run has a round, and a node."""
    reads = [Read(keys.round), Read(keys.nodes, prefix_end(keys.nodes), limit=1, keys_only=True)]
    round_, nodes = store.transact([], reads, deadline=Deadline.after(connection.CONNECT_S)).reads
    run, current = keys.run_id, _decoded(RoundDocument, round_.first)
    if current is not None and current.state is RoundState.CLOSED:
        how = "finished" if current.result is RunResult.SUCCEEDED else "failed"
        raise NotTrainingError(
            f"run {run!r} does not train: it has {how}", hint="its last state is among its checkpoints"
        )
    if not nodes.items:
        raise NotTrainingError(f"run {run!r} does not train: no node is in it", hint="start its nodes again")
    if current is None:
        raise NotTrainingError(f"run {run!r} does not train yet: its nodes are gathering", hint="ask it later")


def _decoded(kind: type[DocumentT], item: KeyValue | None) -> DocumentT | None:
    try:
        return kind.decode(item.value, item.key) if item is not None else None
    except DocumentError:
        return None


def _ask(store: Store, keys: RunKeys) -> SaveRequest:
    """The request that stands now: a new one, or one without an answer that somebody else waits for."""
    new = SaveRequest(id=uuid.uuid4().hex, wall=SYSTEM.wall())
    while True:
        there = store.get(keys.save, Deadline.after(connection.CONNECT_S)).first
        known = _decoded(SaveRequest, there)
        if known is not None and not known.answered:
            return known
        mine = new if known is None else new.model_copy(update={"before": known.model_copy(update={"before": None})})
        guard = unchanged(keys.save, there.mod_revision if there is not None else 0)
        write = [Put(keys.save, mine.encode())]
        if store.transact([guard], write, deadline=Deadline.after(connection.CONNECT_S)).succeeded:
            return mine


def _wait(store: Store, keys: RunKeys, asked: SaveRequest, deadline: Deadline) -> SaveRequest | None:
    """The answer; None if there was none by ``deadline``. A request that will have no answer is withdrawn."""
    said_at = SYSTEM.monotonic()
    while (request := _standing(store, keys, asked)) and not request.answered:
        try:
            _require_training(store, keys)
        except NotTrainingError:
            if (request := _standing(store, keys, asked)).answered:
                return request
            _withdraw(store, keys, asked)
            raise
        if deadline.expired:
            _withdraw(store, keys, asked)
            return None
        if SYSTEM.monotonic() - said_at > _SAY_EVERY_S:
            said_at = SYSTEM.monotonic()
            print(f"waiting: run {plain(keys.run_id)} has not answered yet", file=sys.stderr, flush=True)
        pause(min(_LOOK_S, max(0.01, deadline.remaining_s())))
    return request


def _standing(store: Store, keys: RunKeys, asked: SaveRequest) -> SaveRequest:
    """The request ``asked`` as it is now, or as it was answered if the next one has replaced it."""
    request = _decoded(SaveRequest, store.get(keys.save, Deadline.after(connection.CONNECT_S)).first)
    if request is not None and request.before is not None and request.before.id == asked.id:
        return request.before
    if request is None or request.id != asked.id:
        raise NotTrainingError(f"the request to run {keys.run_id!r} was removed", hint="ask it again")
    return request


def _withdraw(store: Store, keys: RunKeys, asked: SaveRequest) -> None:
    there = store.get(keys.save, Deadline.after(connection.CONNECT_S)).first
    if there is not None and _decoded(SaveRequest, there) == asked:
        guard = unchanged(keys.save, there.mod_revision)
        store.transact([guard], [Delete(keys.save)], deadline=Deadline.after(connection.CONNECT_S))
