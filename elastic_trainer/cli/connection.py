"""How commands that read the store reach it: the options they share, and the store that these name.

*Fails by* ConfigError for options that cannot be meant and a run that does not exist, StoreUnavailableError for an etcd
that does not answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from elastic_trainer.cli.main import RUN_NAMES
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import AccessDeniedError, ConfigError, StoreUnavailableError
from elastic_trainer.monitor.reading import MOST_RUNS, run_names
from elastic_trainer.settings import StoreSettings, resolved_store, store_endpoint
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import RunKeys, Store
from elastic_trainer.wording import named

CONNECT_S = 10.0
"""How long etcd may take to answer a command that a person waits for."""
DEFAULT_PREFIX = str(StoreSettings.model_fields["prefix"].default)
_SHOWN = 20
_LOOK_AGAIN_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where etcd is, and how to be let in."""
    group = parser.add_argument_group("etcd")
    add = group.add_argument
    group.description = "What is not given is taken from the environment: ELASTIC_TRAINER_ENDPOINT, _USER and so on."
    add("--endpoint", metavar="HOST:PORT,...", help="where etcd is (default: ELASTIC_TRAINER_ENDPOINT, this machine)")
    add("--prefix", default=DEFAULT_PREFIX, metavar="PREFIX", help=f"prefix of all keys (default: {DEFAULT_PREFIX})")
    add("--user", metavar="NAME", help="for an etcd that asks for one; by default ELASTIC_TRAINER_USER")
    add("--password-file", type=Path, metavar="FILE", help="holds the password of --user")
    add("--ca-cert", type=Path, metavar="FILE", help="for an etcd that speaks TLS: the CA that vouches for it")
    add("--client-cert", type=Path, metavar="FILE", help="a certificate for an etcd that asks for one")
    add("--client-key", type=Path, metavar="FILE", help="the key of --client-cert")


def add_run(parser: argparse.ArgumentParser, more: str = "", *, optional: bool = False) -> None:
    """The argument that names a run; shells complete it."""
    run = parser.add_argument(
        "run", nargs="?" if optional else None, metavar="RUN", help=f"the run's name (--rdzv-id){more}"
    )
    run.complete = RUN_NAMES  # type: ignore[attr-defined]  # shtab reads it


def store_settings(arguments: argparse.Namespace) -> StoreSettings:
    """The settings that the options say, and where they say nothing the environment."""
    if (arguments.client_cert is None) != (arguments.client_key is None):
        raise ConfigError("--client-cert and --client-key go together", hint="give both, or none of them")
    values = {
        "prefix": arguments.prefix,
        "user": arguments.user,
        "password_file": arguments.password_file,
        "ca_cert": arguments.ca_cert,
        "cert": arguments.client_cert,
        "key": arguments.client_key,
    }
    return resolved_store(arguments.endpoint or store_endpoint(), values, "etcd options")


@contextmanager
def opened(arguments: argparse.Namespace, run: str | None = None) -> Iterator[tuple[Store, StoreSettings]]:
    """A store that has answered a read of ``run``, or of all; closed in the end."""
    settings = store_settings(arguments)
    store = connect_checked(settings, Deadline.after(CONNECT_S), run=run)
    try:
        yield store, settings
    finally:
        store.close()


def require_run(store: Store, settings: StoreSettings, keys: RunKeys) -> None:
    """Raise ConfigError unless there is anything of the run."""
    if not _is_there(store, keys):
        raise no_run(store, settings, keys.run_id)


def await_run(store: Store, settings: StoreSettings, keys: RunKeys) -> None:
    """Wait until the run has keys, since its nodes may be starting, and print why; outages of etcd are waited out."""
    said = ""
    while True:
        try:
            if _is_there(store, keys):
                return
            reason, kind = str(no_run(store, settings, keys.run_id)) if said != "absent" else "", "absent"
        except StoreUnavailableError as error:
            reason, kind = str(error), "outage"
        if kind != said:
            print(f"waiting: {reason}", file=sys.stderr, flush=True)
        said = kind
        pause(_LOOK_AGAIN_S)


def _is_there(store: Store, keys: RunKeys) -> bool:
    return bool(store.range(keys.root, Deadline.after(CONNECT_S), limit=1, keys_only=True).items)


def no_run(store: Store, settings: StoreSettings, run: str) -> ConfigError:
    """The error for a run that is not there, with those that are."""
    where = ", ".join(str(endpoint) for endpoint in settings.endpoints)
    try:
        names = list(islice(run_names(store, settings.prefix, CONNECT_S), MOST_RUNS))
    except AccessDeniedError:
        hint = f"{settings.user or 'this user'} may not see which ones there are"
    else:
        hint = f"there are: {named(names, _SHOWN)}" if names else f"there are none below {settings.prefix}"
    return ConfigError(f"there is no run {run!r} in the etcd at {where}", hint=hint)
