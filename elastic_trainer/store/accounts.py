"""This package's users and roles in etcd: which there are, the steps that create them, and etcd's Auth API.

``root`` may do everything. ``monitor`` reads all runs. ``run-<run>`` reads and writes only the keys of that run.

*Runs in* the main thread of a command. *Owns* one connection; it changes etcd step by step, and completed steps remain.
*Fails by* ConfigError, AccessDeniedError for a user without the role ``root``, otherwise as any call to the store.
*Invariant*: when repeated after a failure, each function continues where it stopped; authentication is enabled last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import AccessDeniedError, ConfigError, OutcomeUnknownError
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store.api import RunKeys, prefix_end
from elastic_trainer.store.etcd import StoreConnection
from elastic_trainer.store.retry import within

MONITOR = "monitor"
RUN_PREFIX = "run-"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """The right to read, and with ``write`` to write, the keys from ``key`` up to but not including ``range_end``."""

    key: str
    range_end: str
    write: bool


@dataclass(frozen=True, slots=True)
class Account:
    """A user and a role of the same name that has exactly this right."""

    name: str
    right: Right


@dataclass(frozen=True, slots=True)
class Known:
    """The present state of etcd: the roles of each user, the rights of each role."""

    users: Mapping[str, Iterable[str]]
    roles: Mapping[str, frozenset[Right]]


def account_of(prefix: str, run: str) -> Account:
    """The account of one run. Raises ConfigError for an invalid run name."""
    root = RunKeys(prefix, run).root
    return Account(f"{RUN_PREFIX}{run}", Right(root, prefix_end(root), write=True))


def monitors_account(prefix: str) -> Account:
    """The monitor's account, which reads all runs."""
    root = f"{prefix}/"
    return Account(MONITOR, Right(root, prefix_end(root), write=False))


def steps(account: Account, known: Known, password: str) -> list[tuple[str, dict[str, Any]]]:
    """The methods of etcd's Auth API with their fields, in order, that create ``account`` with this new password.

    The user comes last: without its role it can do nothing, but with a role of unknown rights it might do anything.
    Raises ConfigError if a role of this name has other rights, which another application may need.
    """
    name, rights, user = account.name, known.roles.get(account.name), known.users.get(account.name)
    if rights is not None and rights - {account.right}:
        other = sorted(rights)[0]
        other_right = f"{'read and write' if other.write else 'read'} {other.key} up to {other.range_end}"
        raise ConfigError(
            f"etcd has a role {name!r} with other rights: {other_right}",
            hint="another --prefix uses this etcd: use other run names, or remove the role with etcdctl",
        )
    if user is not None and set(user) - {name}:
        raise ConfigError(
            f"etcd's user {name!r} has the role {sorted(set(user) - {name})[0]!r} too",
            hint="revoke that role with etcdctl, or remove the user",
        )
    found: list[tuple[str, dict[str, Any]]] = [("RoleAdd", {"name": name})] if rights is None else []
    if not rights:
        key, range_end = account.right.key.encode(), account.right.range_end.encode()
        kind = _READWRITE if account.right.write else _READ
        found.append(
            ("RoleGrantPermission", {"name": name, "perm": {"permType": kind, "key": key, "range_end": range_end}})
        )
    found.append(("UserAdd" if user is None else "UserChangePassword", {"name": name, "password": password}))
    if name not in (user or ()):
        found.append(("UserGrantRole", {"user": name, "role": name}))
    return found


def granted(known: Known, prefix: str) -> dict[str, bool]:
    """The runs below ``prefix`` that have an account; False for an incomplete or wrong account."""
    found = dict[str, bool]()
    for name in sorted({*known.users, *known.roles}):
        if not name.startswith(RUN_PREFIX):
            continue
        try:
            account = account_of(prefix, name.removeprefix(RUN_PREFIX))
        except ConfigError:
            continue
        rights = known.roles.get(name, frozenset())
        if rights and account.right not in rights:
            continue  # of another prefix
        found[name.removeprefix(RUN_PREFIX)] = rights == {account.right} and set(known.users.get(name, ())) == {name}
    return found


ROOT = "root"
"""The user and the role that may do everything; etcd requires both before authentication can be enabled."""
_READ, _READWRITE = 0, 2  # authpb.Permission.Type


class Accounts:
    """etcd's accounts. A context manager: the connection is closed on exit."""

    def __init__(self, settings: StoreSettings, deadline: Deadline) -> None:
        self._settings, self._deadline = settings, deadline
        self._connection = StoreConnection(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def on(self) -> bool:
        """Whether authentication is enabled. Raises ConfigError if the user of the settings is refused."""
        return within(self._deadline, lambda: self._connection.asks_who_it_is(self._deadline))

    def known(self) -> Known:
        """Read etcd's present users and roles; works also while authentication is disabled."""
        users = {name: tuple(self.ask("UserGet", name=name).roles) for name in self.ask("UserList").users}
        roles = {
            name: frozenset(map(_right, self.ask("RoleGet", role=name).perm)) for name in self.ask("RoleList").roles
        }
        return Known(users, roles)  # etcd lists no rights of ``root``, which has all

    def initialize(self, prefix: str, root_password: str, monitor_password: str) -> Account:
        """Create ``root`` with ``root_password`` and the monitor's account (returned); enable authentication."""
        was_on = self.on
        present = self.known()
        if ROOT not in present.roles:
            self.ask("RoleAdd", name=ROOT)
        if ROOT not in present.users:
            self.ask("UserAdd", name=ROOT, password=root_password)
        elif not was_on:  # while authentication is disabled the present password is unverified
            self.ask("UserChangePassword", name=ROOT, password=root_password)
        if ROOT not in present.users.get(ROOT, ()):
            self.ask("UserGrantRole", user=ROOT, role=ROOT)
        account = monitors_account(prefix)
        self._create(account, present, monitor_password)
        if not was_on:
            self.ask("AuthEnable")
        return account

    def grant(self, prefix: str, run: str, password: str) -> Account:
        """Create the account of ``run`` with this password. Raises ConfigError while authentication is disabled."""
        account = account_of(prefix, run)
        self._require_on()
        self._create(account, self.known(), password)
        return account

    def revoke(self, prefix: str, run: str) -> None:
        """Remove the account of ``run``. Its keys stay. Raises ConfigError if there is none."""
        account = account_of(prefix, run)
        self._require_on()
        present = self.known()
        rights = present.roles.get(account.name)
        if account.name not in present.users and rights is None:
            raise ConfigError(f"no rights were granted to run {run!r}", hint="see elastic-trainer admin list")
        if rights and account.right not in rights:
            raise ConfigError(f"etcd's role {account.name!r} is not for {account.right.key}", hint="pass its --prefix")
        if account.name in present.users:
            self.ask("UserDelete", name=account.name)  # with its tokens
        if rights is not None:
            self.ask("RoleDelete", role=account.name)

    def _require_on(self) -> None:
        if not self.on:
            raise ConfigError(
                "authentication is disabled: everybody can read and write everything in etcd",
                hint="run elastic-trainer admin init first",
            )

    def _create(self, account: Account, present: Known, password: str) -> None:
        for method, fields in steps(account, present, password):
            self.ask(method, **fields)

    def ask(self, method: str, **fields: Any) -> Any:
        """Call ``method`` of etcd's Auth API; repeat it only if it certainly had no effect."""
        request = getattr(self._connection.rpc, f"Auth{method.removeprefix('Auth')}Request")(**fields)

        def attempt() -> Any:
            try:
                return self._connection.call(attrgetter(f"auth.{method}"), request, self._deadline, write=True)
            except OutcomeUnknownError as error:
                raise ConfigError(error.message, hint="run the command again: it continues where it stopped") from error

        try:
            return within(self._deadline, attempt)
        except AccessDeniedError as error:
            who = "nobody" if self._settings.user is None else repr(self._settings.user)
            raise AccessDeniedError(
                f"etcd at {self._connection.where} does not let {who} administer users",
                hint="pass --user root with --password-file",
            ) from error


def _right(permission: Any) -> Right:
    key, range_end = (each.decode(errors="replace") for each in (permission.key, permission.range_end))
    return Right(key, range_end, permission.permType == _READWRITE)
