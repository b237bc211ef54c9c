"""``elastic-trainer forget``: takes what etcd holds of runs that are over, or of machines that were repaired, out of
it; checkpoints stay.

*Runs in* the process of the command, its main thread. *Owns* nothing.
*Fails by* ConfigError for a run that is not there or must be kept, StoreUnavailableError when etcd does not answer.
"""

from __future__ import annotations

import argparse

from elastic_trainer.cli import connection
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership import forgetting
from elastic_trainer.monitor.reading import run_names
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import counted


def configure_forget(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    connection.add_run(parser, optional=True)
    add(
        "--unfinished",
        action="store_true",
        help="also a run that is not over, if no node is in it; also one of another protocol version",
    )
    add(
        "--older-than-days",
        type=float,
        metavar="N",
        help=("instead of one run: all that ended at least N days ago, by the clock of the node that ended them"),
    )
    add("--machine", metavar="NAME", help="instead of a run: the faults of this machine, which was repaired")
    add("--dry-run", action="store_true", help="say what would go, and remove nothing")
    connection.add_options(parser)


def run_forget(arguments: argparse.Namespace) -> int:
    """Do it, one line for each run."""
    logs.configure()
    days = arguments.older_than_days
    if arguments.machine is not None:
        return _forget_machine(arguments)
    if (arguments.run is None) == (days is None):
        raise ConfigError("forget takes a run, --older-than-days or --machine", hint="give one of them")
    if days is not None and (arguments.unfinished or not days >= 0.0):
        raise ConfigError(
            "--older-than-days takes a number of days from 0 on, and goes without --unfinished",
            hint="name a run that is not over",
        )
    with connection.opened(arguments) as (store, settings):
        if days is not None:
            _forget_old(store, settings.prefix, days, dry=arguments.dry_run)
        else:
            keys = RunKeys(settings.prefix, arguments.run)
            connection.require_run(store, settings, keys)
            remains = forgetting.look(store, keys, Deadline.after(connection.CONNECT_S))
            if (refused := forgetting.refusal(remains, unfinished=arguments.unfinished)) is not None:
                raise refused
            _forget(store, remains, dry=arguments.dry_run)
    return 0


def _forget_machine(arguments: argparse.Namespace) -> int:
    if arguments.run is not None or arguments.older_than_days is not None or arguments.unfinished:
        raise ConfigError("--machine goes without a run and other options", hint="give --machine NAME alone")
    with connection.opened(arguments) as (store, settings):
        deadline = Deadline.after(connection.CONNECT_S)
        known = forgetting.faults_of(store, settings.prefix, arguments.machine, deadline)
        if not known:
            raise ConfigError(f"no fault of machine {arguments.machine!r} is known", hint="see elastic-trainer why RUN")
        if not arguments.dry_run:
            forgetting.forget_machine(store, settings.prefix, arguments.machine, deadline)
        verb = "would forget" if arguments.dry_run else "forgot"
        print(f"{verb} {counted(len(known), 'fault')} of machine {arguments.machine}", flush=True)
    return 0


def _forget_old(store: Store, prefix: str, days: float, *, dry: bool) -> None:
    """All that are old enough; one that comes back to life meanwhile is kept."""
    gone = 0
    for name in list(run_names(store, prefix, connection.CONNECT_S)):
        remains = forgetting.look(store, RunKeys(prefix, name), Deadline.after(connection.CONNECT_S))
        if not forgetting.is_old(remains, SYSTEM.wall(), days):
            continue
        try:
            _forget(store, remains, dry=dry)
            gone += 1
        except ConfigError as error:
            print(f"kept {name}: {error.message}")
    if not gone:
        print(f"no run below {prefix} has been over for {days:g} days")


def _forget(store: Store, remains: forgetting.Remains, *, dry: bool) -> None:
    if not dry:
        forgetting.forget(store, remains, Deadline.after(connection.CONNECT_S))
    verb = "would forget" if dry else "forgot"
    print(f"{verb} {remains.keys.run_id}: {counted(remains.count, 'key')}", flush=True)
