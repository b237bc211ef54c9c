"""Grants and revokes rights in etcd, as :mod:`elastic_trainer.store.rights` decides.

*Runs in* the main thread of a command. *Owns* nothing; it changes etcd step by step, and completed steps remain.
*Fails by* ConfigError.
*Invariant*: when repeated after a failure, each function continues where it stopped; authentication is enabled last.
"""

from __future__ import annotations

from elastic_trainer.errors import ConfigError
from elastic_trainer.store.accounts import ROOT, Accounts
from elastic_trainer.store.rights import Account, Known, RightsStep, account_of, monitors_account, steps


def known(accounts: Accounts) -> Known:
    """Read etcd's present users and roles; works also while authentication is disabled."""
    return Known(accounts.users(), accounts.roles())


def initialize(accounts: Accounts, prefix: str, root_password: str, monitor_password: str) -> Account:
    """Create ``root`` with ``root_password`` and the monitor's account, which is returned; enable authentication."""
    was_on = accounts.on
    present = known(accounts)
    if ROOT not in present.roles:
        accounts.add_role(ROOT)
    if ROOT not in present.users:
        accounts.add_user(ROOT, root_password)
    elif not was_on:  # while authentication is disabled the present password is unverified
        accounts.set_password(ROOT, root_password)
    if ROOT not in present.users.get(ROOT, ()):
        accounts.give_role(ROOT, ROOT)
    account = monitors_account(prefix)
    _perform(accounts, account, present, monitor_password)
    if not was_on:
        accounts.enable()
    return account


def grant(accounts: Accounts, prefix: str, run: str, password: str) -> Account:
    """Create the account of ``run`` with this password. Raises ConfigError while authentication is disabled."""
    account = account_of(prefix, run)
    _require_on(accounts)
    _perform(accounts, account, known(accounts), password)
    return account


def revoke(accounts: Accounts, prefix: str, run: str) -> None:
    """Remove the account of ``run``. Its keys stay. Raises ConfigError if there is none."""
    account = account_of(prefix, run)
    _require_on(accounts)
    present = known(accounts)
    rights = present.roles.get(account.name)
    if account.name not in present.users and rights is None:
        raise ConfigError(f"no rights were granted to run {run!r}", hint="see elastic-trainer admin list")
    if rights and account.right not in rights:
        raise ConfigError(f"etcd's role {account.name!r} is not for {account.right.key}", hint="pass its --prefix")
    if account.name in present.users:
        accounts.remove_user(account.name)
    if rights is not None:
        accounts.remove_role(account.name)


def _require_on(accounts: Accounts) -> None:
    if not accounts.on:
        raise ConfigError(
            "authentication is disabled: everybody can read and write everything in etcd",
            hint="run elastic-trainer admin init first",
        )


def _perform(accounts: Accounts, account: Account, present: Known, password: str) -> None:
    name = account.name
    for step in steps(account, present):
        match step:
            case RightsStep.ADD_ROLE:
                accounts.add_role(name)
            case RightsStep.GIVE_RIGHT:
                accounts.give_right(name, account.right)
            case RightsStep.ADD_USER:
                accounts.add_user(name, password)
            case RightsStep.SET_PASSWORD:
                accounts.set_password(name, password)
            case RightsStep.GIVE_ROLE:
                accounts.give_role(name, name)
