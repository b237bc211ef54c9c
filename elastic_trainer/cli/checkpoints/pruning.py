"""``checkpoints prune DIR``: remove the checkpoints that no rule keeps; the rules are those of training."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from elastic_trainer.checkpoint import BestMode, CheckpointManager, Event, Owner, Retention, Transition
from elastic_trainer.checkpoint.faults import InUseError
from elastic_trainer.cli.checkpoints.places import add_json, directory, suggestion
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import EXIT_FAILURE, ConfigError
from elastic_trainer.telemetry import logs


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add("directory", metavar="DIR", help="a directory of checkpoints")
    add("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    add("--keep-every", type=int, metavar="N", help="keep those whose step is a multiple of N")
    add("--keep-best", type=int, metavar="N", help="keep the N best by --metric; the one saved as best stays anyway")
    add("--metric", metavar="NAME", help="the metric of --keep-best")
    add("--mode", choices=tuple(map(str, BestMode)), metavar="MODE", help="of --metric: min, the default, or max")
    add("--dry-run", action="store_true", help="say what would go, and remove nothing")
    add("--force", action="store_true", help="also while a job saves there")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """1 if one cannot be removed. Damaged ones stay: nobody knows what they are."""
    policy = _policy(arguments)
    storage = directory(arguments.directory)
    logs.configure(level="error")  # what happens is said below
    failed: list[Event] = []

    def heard(event: Event) -> None:
        if event.kind is Transition.REMOVAL_FAILED:
            failed.append(event)

    owner = None if arguments.force or arguments.dry_run else Owner(run=f"{PROGRAM} checkpoints prune")
    manager = CheckpointManager(storage.location, policy, heard, owner=owner, storage=storage)
    try:
        rulings = manager.prune(dry_run=arguments.dry_run)
    except InUseError as error:
        words = ("--keep-last", str(policy.keep_last), "--dry-run")
        hint = f"see what would go by {suggestion('prune', storage.location, *words)}; --force removes it all the same"
        raise InUseError(error.message, hint=hint) from error
    finally:
        manager.close()
    if arguments.json:
        problems = {event.name: event.reason for event in failed}
        values = [{**asdict(each), "problem": problems.get(each.name)} for each in rulings]
        print(
            json.dumps({"directory": storage.location, "dry_run": arguments.dry_run, "checkpoints": values}, indent=2)
        )
    else:
        verb = "would go" if arguments.dry_run else "removed"
        for each in rulings:
            print(f"{each.name}: {'stays' if each.keep else verb}, {each.reason}")
        for event in failed:
            print(f"{event.name} is still there: {event.reason}", file=sys.stderr)
    return EXIT_FAILURE if failed else 0


def _policy(arguments: argparse.Namespace) -> Retention:
    if (arguments.keep_best is None) != (arguments.metric is None):
        raise ConfigError("--keep-best and --metric need each other", hint="say --keep-best 2 --metric loss")
    return Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        metric=arguments.metric,
        mode=BestMode(arguments.mode or BestMode.MIN),
        keep_best=arguments.keep_best or 1,
    )
