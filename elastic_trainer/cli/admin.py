"""``elastic-trainer admin``: options in, a password or a list out; the work is store/accounts'.

*Runs in* the process of the command. *Owns* the file of ``--output``, which only its owner can read.
*Fails by* ConfigError; StorageError where a password is set and its output then fails.
*Invariant*: a password is written to its output, and nowhere else; to a file before it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_trainer.cli import connection
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import AccessDeniedError, ConfigError, StorageError
from elastic_trainer.settings import StoreSettings, secret
from elastic_trainer.store import connect_checked
from elastic_trainer.store.accounts import MONITOR, ROOT, Accounts, granted

LIMIT_S = 60.0
"""How long etcd may take for everything: it takes a tenth of a second for each password by design."""
PASSWORD_BYTES = 24
SECRET_PREFIX = "etcd-user-"
_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,51}[a-z0-9])?")
_EXAMPLE = """examples:
  elastic-trainer admin init --user root --password-file root-password --output monitor-password
  elastic-trainer admin grant my-run --user root --password-file root-password --output my-run-password
  elastic-trainer admin grant my-run --format kubernetes | kubectl apply -n elastic-trainer -f -"""
_ACTIONS = """init: create root with the given password and a user 'monitor' that reads all runs, enable authentication;
grant: create a user 'run-RUN' that may read and write only that run's keys; revoke: remove it; list: show all.
init and grant set a new password each time"""


def configure_admin(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("action", choices=("init", "grant", "revoke", "list"), help=_ACTIONS)
    connection.add_run(parser, ", for grant and revoke", optional=True)
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help=(
            "write the new password there, mode 0600, not to standard output. It is durable beside that "
            "file before it is set; exit code 73 if it is set and cannot take its place, with the path "
            "where it is"
        ),
    )
    what = "text: the password alone; kubernetes: a Secret"
    add("--format", choices=("text", "kubernetes"), default="text", metavar="FORMAT", help=what)
    add("--json", action="store_true", help="list: one JSON object instead of lines")
    connection.add_options(parser)


def run_admin(arguments: argparse.Namespace) -> int:
    """Do it."""
    _check(arguments)
    settings = connection.store_settings(arguments)
    with suppress(AccessDeniedError):  # which is said better below
        connect_checked(settings, Deadline.after(connection.CONNECT_S)).close()
    run = arguments.run
    with Accounts(settings, Deadline.after(LIMIT_S)) as accounts:
        match arguments.action:
            case "init":
                _init(arguments, settings, accounts)
            case "grant":
                with _delivered(arguments, run) as password:
                    account = accounts.grant(settings.prefix, run, password)
                _say(f"user {account.name!r} may read and write {account.right.key}, with a new password")
            case "revoke":
                accounts.revoke(settings.prefix, run)
                _say(f"run {run!r} has no rights any more; its keys are still there")
            case _:
                _list(arguments, settings, accounts)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    of_run = arguments.action in ("grant", "revoke")
    if of_run and arguments.run is None:
        raise ConfigError(f"admin {arguments.action} needs the name of a run", hint="its --rdzv-id")
    if not of_run and arguments.run is not None:
        raise ConfigError(f"admin {arguments.action} takes no run", hint=f"leave out {arguments.run!r}")
    if arguments.action == "grant" and arguments.run == "monitor":
        raise ConfigError("a run called 'monitor' cannot have a user", hint="the monitor's own user has that name")
    if arguments.format == "kubernetes" and of_run and not _SECRET_NAME.fullmatch(arguments.run):
        raise ConfigError(
            f"{SECRET_PREFIX}{arguments.run} cannot be the name of a Secret",
            hint="on Kubernetes use at most 53 lower-case letters, digits, '-' and '.' for the name of a run",
        )


def _init(arguments: argparse.Namespace, settings: StoreSettings, accounts: Accounts) -> None:
    if settings.user != ROOT or settings.password_file is None:
        raise ConfigError(
            "admin init needs root's present password, or the one to set",
            hint="openssl rand -base64 24 > root-password, then --user root --password-file root-password",
        )
    root_password = secret(settings.password_file, "--password-file")
    with _delivered(arguments, "monitor") as password:
        account = accounts.initialize(settings.prefix, root_password, password)
    _say(f"etcd now requires authentication; user {account.name!r} may read {account.right.key}")


def _list(arguments: argparse.Namespace, settings: StoreSettings, accounts: Accounts) -> None:
    known = accounts.known()
    runs = granted(known, settings.prefix)
    monitor = MONITOR in known.users
    if arguments.json:
        print(json.dumps({"authentication": accounts.on, "monitor": monitor, "runs": runs}, indent=2))
        return
    print(f"authentication is {'on' if accounts.on else 'off'}; the monitor has {'a' if monitor else 'no'} user")
    for name, right in runs.items():
        print(f"run {name}: user run-{name}{'' if right else ', whose rights are wrong: grant again'}")


@contextmanager
def _delivered(arguments: argparse.Namespace, name: str) -> Iterator[str]:
    """A new password, which the block sets. Its output takes it before that, as far as an output can be asked.

    A password that only etcd knows would shut out who has the old one.
    """
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    user = name if arguments.action == "init" else f"run-{name}"
    text = password if arguments.format == "text" else manifest(name, user, password)
    if arguments.output is not None:
        with _private_file(arguments.output, f"{text}\n"):
            yield password
        return
    if sys.stdout is None:  # as Python has it where the descriptor is closed
        raise ConfigError("standard output is closed: the new password would be lost", hint="give --output FILE")
    yield password
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more when it ends
        cause = error.strerror or type(error).__name__
        raise StorageError(
            f"the new password of {user!r} is set, but standard output did not take it: {cause}",
            hint="the same command again, with --output FILE, sets another",
        ) from error


@contextmanager
def _private_file(path: Path, text: str) -> Iterator[None]:
    """A file with ``text`` that only its owner can read; durable before the block, in the place of ``path`` behind it.

    Until then ``path`` keeps what it has. What may hold a password that is set is not removed.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ConfigError(f"--output {str(path)!r} is not a file", hint="name one, which may be new")
    made: str | None = None
    try:
        descriptor, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if made is not None:
            os.unlink(made)
        cause = error.strerror or type(error).__name__
        raise ConfigError(f"--output {str(path)!r} cannot be written: {cause}", hint="check its directory") from error
    try:
        yield
    except ConfigError:  # etcd has refused
        os.unlink(made)
        raise
    except BaseException:
        _say(f"the new password may be set: it is in {made}")
        raise
    try:
        os.replace(made, target)
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise StorageError(
            f"the new password is set, and is in {made if os.path.exists(made) else target}: {str(path)!r}: {cause}",
            hint="take it from there",
        ) from error


def manifest(name: str, user: str, password: str) -> str:
    """The Secret of a user, as ``kubectl apply -f -`` takes it."""
    labels = {"app.kubernetes.io/part-of": "elastic-trainer"}
    if user != name:
        labels["elastic-trainer/run"] = name
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{SECRET_PREFIX}{name}", "labels": labels}}
    return json.dumps({**kind, "type": "Opaque", "stringData": {"username": user, "password": password}}, indent=2)


def _say(sentence: str) -> None:
    """To standard error: standard output is for results."""
    print(sentence, file=sys.stderr)
