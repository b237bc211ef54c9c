"""This package's users and roles in etcd, and the steps to create them. Pure.

``root`` may do everything. ``monitor`` reads all runs. ``run-<run>`` reads and writes only the keys of that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.errors import ConfigError
from elastic_trainer.store.api import prefix_end
from elastic_trainer.store.keys import RunKeys

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
