"""Reads and changes etcd's users and roles, through etcd's own Auth API.

*Runs in* the main thread of a command. *Owns* one connection.
*Fails by* AccessDeniedError for a user without the role ``root``, otherwise as any call to the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import AccessDeniedError, ConfigError, OutcomeUnknownError
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store.connection import StoreConnection
from elastic_trainer.store.retry import within
from elastic_trainer.store.rights import Right

ROOT = "root"
"""The user and the role that may do everything; etcd requires both before authentication can be enabled."""
_READ, _READWRITE = 0, 2  # authpb.Permission.Type


class Accounts:
    """See the module. A context manager: the connection is closed on exit."""

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
            raise self._not_root() from error

    def _not_root(self) -> AccessDeniedError:
        who = "nobody" if self._settings.user is None else repr(self._settings.user)
        return AccessDeniedError(
            f"etcd at {self._connection.where} does not let {who} administer users",
            hint="pass --user root with --password-file",
        )
