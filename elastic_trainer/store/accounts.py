"""This package's users and roles in etcd: which there are, the steps that create them, and etcd's Auth API.

``root`` may do everything. ``monitor`` reads all runs. ``run-<run>`` reads and writes only the keys of that run.

*Runs in* the main thread of a command. *Owns* one connection; it changes etcd step by step, and completed steps remain.
*Fails by* ConfigError, AccessDeniedError for a user without the role ``root``, otherwise as any call to the store.
*Invariant*: when repeated after a failure, each function continues where it stopped; authentication is enabled last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
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


class RightsStep(StrEnum):
    """One step of creating an account."""

    ADD_ROLE = "add_role"
    GIVE_RIGHT = "give_right"
    ADD_USER = "add_user"
    SET_PASSWORD = "set_password"
    GIVE_ROLE = "give_role"


def account_of(prefix: str, run: str) -> Account:
    """The account of one run. Raises ConfigError for an invalid run name."""
    root = RunKeys(prefix, run).root
    return Account(f"{RUN_PREFIX}{run}", Right(root, prefix_end(root), write=True))


def monitors_account(prefix: str) -> Account:
    """The monitor's account, which reads all runs."""
    root = f"{prefix}/"
    return Account(MONITOR, Right(root, prefix_end(root), write=False))


def steps(account: Account, known: Known) -> tuple[RightsStep, ...]:
    """The steps, in order, that create ``account`` with a new password.

    The user comes last: without its role it can do nothing, but with a role of unknown rights it might do anything.
    Raises ConfigError if a role of this name has other rights, which another application may need.
    """
    name, rights = account.name, known.roles.get(account.name)
    if rights is not None and rights - {account.right}:
        raise ConfigError(
            f"etcd has a role {name!r} with other rights: {told(sorted(rights)[0])}",
            hint="another --prefix uses this etcd: use other run names, or remove the role with etcdctl",
        )
    user = known.users.get(name)
    if user is not None and set(user) - {name}:
        raise ConfigError(
            f"etcd's user {name!r} has the role {sorted(set(user) - {name})[0]!r} too",
            hint="revoke that role with etcdctl, or remove the user",
        )
    found = [RightsStep.ADD_ROLE] if rights is None else []
    if not rights:
        found.append(RightsStep.GIVE_RIGHT)
    found.append(RightsStep.ADD_USER if user is None else RightsStep.SET_PASSWORD)
    if user is None or name not in user:
        found.append(RightsStep.GIVE_ROLE)
    return tuple(found)


def told(right: Right) -> str:
    """``right`` in words."""
    return f"{'read and write' if right.write else 'read'} {right.key} up to {right.range_end}"


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
        self._rpc = self._connection.rpc

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
        return Known(self.users(), self.roles())

    def initialize(self, prefix: str, root_password: str, monitor_password: str) -> Account:
        """Create ``root`` with ``root_password`` and the monitor's account (returned); enable authentication."""
        was_on = self.on
        present = self.known()
        if ROOT not in present.roles:
            self.add_role(ROOT)
        if ROOT not in present.users:
            self.add_user(ROOT, root_password)
        elif not was_on:  # while authentication is disabled the present password is unverified
            self.set_password(ROOT, root_password)
        if ROOT not in present.users.get(ROOT, ()):
            self.give_role(ROOT, ROOT)
        account = monitors_account(prefix)
        self._perform(account, present, monitor_password)
        if not was_on:
            self.enable()
        return account

    def grant(self, prefix: str, run: str, password: str) -> Account:
        """Create the account of ``run`` with this password. Raises ConfigError while authentication is disabled."""
        account = account_of(prefix, run)
        self._require_on()
        self._perform(account, self.known(), password)
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
            self.remove_user(account.name)
        if rights is not None:
            self.remove_role(account.name)

    def _require_on(self) -> None:
        if not self.on:
            raise ConfigError(
                "authentication is disabled: everybody can read and write everything in etcd",
                hint="run elastic-trainer admin init first",
            )

    def _perform(self, account: Account, present: Known, password: str) -> None:
        name = account.name
        for step in steps(account, present):
            match step:
                case RightsStep.ADD_ROLE:
                    self.add_role(name)
                case RightsStep.GIVE_RIGHT:
                    self.give_right(name, account.right)
                case RightsStep.ADD_USER:
                    self.add_user(name, password)
                case RightsStep.SET_PASSWORD:
                    self.set_password(name, password)
                case RightsStep.GIVE_ROLE:
                    self.give_role(name, name)

    # ---- etcd's Auth API

    def users(self) -> dict[str, tuple[str, ...]]:
        """The roles of each user."""
        names = self._ask("UserList", self._rpc.AuthUserListRequest()).users
        return {name: tuple(self._ask("UserGet", self._rpc.AuthUserGetRequest(name=name)).roles) for name in names}

    def roles(self) -> dict[str, frozenset[Right]]:
        """The rights of each role. (etcd lists none for ``root``, which has all.)"""
        names = self._ask("RoleList", self._rpc.AuthRoleListRequest()).roles
        return {name: self._rights(name) for name in names}

    def add_user(self, name: str, password: str) -> None:
        self._ask("UserAdd", self._rpc.AuthUserAddRequest(name=name, password=password))

    def set_password(self, name: str, password: str) -> None:
        """Replace the user's password, which invalidates the user's tokens."""
        self._ask("UserChangePassword", self._rpc.AuthUserChangePasswordRequest(name=name, password=password))

    def give_role(self, user: str, role: str) -> None:
        self._ask("UserGrantRole", self._rpc.AuthUserGrantRoleRequest(user=user, role=role))

    def remove_user(self, name: str) -> None:
        """Remove the user, which invalidates its tokens."""
        self._ask("UserDelete", self._rpc.AuthUserDeleteRequest(name=name))

    def add_role(self, name: str) -> None:
        self._ask("RoleAdd", self._rpc.AuthRoleAddRequest(name=name))

    def remove_role(self, name: str) -> None:
        """Remove the role, also from its users."""
        self._ask("RoleDelete", self._rpc.AuthRoleDeleteRequest(role=name))

    def give_right(self, role: str, right: Right) -> None:
        permission = self._rpc.auth_pb2.Permission(
            permType=_READWRITE if right.write else _READ, key=right.key.encode(), range_end=right.range_end.encode()
        )
        self._ask("RoleGrantPermission", self._rpc.AuthRoleGrantPermissionRequest(name=role, perm=permission))

    def enable(self) -> None:
        """Enable authentication; does nothing if it is enabled."""
        self._ask("AuthEnable", self._rpc.AuthEnableRequest())

    def _rights(self, role: str) -> frozenset[Right]:
        found = self._ask("RoleGet", self._rpc.AuthRoleGetRequest(role=role)).perm
        return frozenset(
            Right(
                each.key.decode(errors="replace"), each.range_end.decode(errors="replace"), each.permType == _READWRITE
            )
            for each in found
        )

    def _ask(self, method: str, request: Any) -> Any:
        """Make one call, and repeat it only if it certainly had no effect."""

        def attempt() -> Any:
            chosen: Callable[[Any], Any] = lambda wire: getattr(wire.auth, method)  # noqa: E731 - a plain selector
            try:
                return self._connection.call(chosen, request, self._deadline, write=True)
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
