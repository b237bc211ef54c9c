"""Admission to a run: check its spec, refuse another job, refuse a closed run or reopen it on request.

What else keeps a node out of a round: its preflight (agent.rendezvous.restart), a key that another node has
(membership.member), workers that are not ready (membership.cluster_view, ``candidates``), and the rules of who is in
the next round (membership.rules).

*Runs in* the agent's main thread, once at the start.
*Fails by* SpecMismatchError, RunClosedError; ConfigError for a finished run that somebody starts again.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, SpecMismatchError, StoreUnavailableError
from elastic_trainer.membership.documents import (
    OWNER_FIELDS,
    PROTOCOL_VERSION,
    JournalEntry,
    RoundDocument,
    RoundState,
    RunResult,
    Spec,
    VersionError,
)
from elastic_trainer.membership.member import closed_error
from elastic_trainer.membership.writes import event_number
from elastic_trainer.store.api import KeyValue, Put, RunKeys, Store, absent, none_below, unchanged
from elastic_trainer.telemetry.logs import logger

ATTEMPTS = 20


def admit(
    store: Store,
    keys: RunKeys,
    spec: Spec,
    *,
    reopen: bool,
    deadline: Deadline,
    allowed: Collection[str] = (),
    watched: bool = False,
) -> None:
    """Check ``spec`` against the run's.

    The first node writes it. A node whose spec differs raises SpecMismatchError, unless no node of the run is present:
    then its spec replaces the run's, as a job may be continued with another ``--nnodes`` or other arguments. Its user
    and checkpoint directory stay. ``allowed`` names fields of the job that may differ.

    A closed run raises RunClosedError, unless ``reopen``: then its next epoch begins. One that has succeeded raises
    ConfigError instead where this is no late node of the same job: it has another command, or a person ``watched`` the
    start and would take silence for a training.

    A run of another protocol version always raises: this version cannot read its documents, so it must not replace any.
    """
    try:
        for _ in range(ATTEMPTS):
            found = store.get(keys.spec, deadline).first
            theirs = Spec.decode(found.value, found.key) if found is not None else spec
            changed = theirs.changed(spec, allowed)
            if not _settle_closed(store, keys, changed, reopen=reopen, watched=watched, deadline=deadline):
                continue
            if _settle_spec(store, keys, found, theirs, spec, changed, deadline):
                return
            if deadline.expired:
                break
    except VersionError as error:
        raise other_version(error.found, keys.run_id) from error
    raise StoreUnavailableError("the run's spec changed too often to agree on it in time")


def confirm(store: Store, keys: RunKeys, spec: Spec, allowed: Collection[str], deadline: Deadline) -> None:
    """Check ``spec`` again once this node's key is there, by which no other spec replaces the run's any more.

    Between a node's admission and its key another job may have been admitted. Raises SpecMismatchError.
    """
    found = store.get(keys.spec, deadline).first
    theirs = Spec.decode(found.value, found.key) if found is not None else spec
    if changed := theirs.changed(spec, allowed):
        raise _another_job(keys.run_id, changed)
    if difference := theirs.disagreement(spec):
        raise _other_limits(difference)


def other_version(found: int, run_id: str) -> SpecMismatchError:
    """The error for a node that meets a run of protocol version ``found``."""
    which = "a newer" if found > PROTOCOL_VERSION else "an older"
    return SpecMismatchError(
        f"run {run_id!r} was started by {which} elastic_trainer: it has protocol version {found}, "
        f"this node has {PROTOCOL_VERSION}",
        hint="start all nodes of a run with the same version; to continue the run with this version, stop its nodes, "
        f"run 'elastic-trainer forget {run_id} --unfinished', and start it again from its checkpoints",
    )


def _settle_closed(
    store: Store, keys: RunKeys, changed: Mapping[str, str], *, reopen: bool, watched: bool, deadline: Deadline
) -> bool:
    """Whether the run is open, or was reopened by this call."""
    found = store.get(keys.round, deadline).first
    if found is None:
        return True
    current = RoundDocument.decode(found.value, keys.round)
    if current.state is not RoundState.CLOSED:
        return True
    if not reopen:
        if current.result is RunResult.SUCCEEDED and (changed or watched):
            raise _finished(store, keys, current, changed, deadline)
        raise closed_error(current)
    if any(name in changed for name in OWNER_FIELDS):
        raise _another_job(keys.run_id, changed)
    opened = RoundDocument(
        epoch=current.epoch + 1,
        number=current.number,
        nonce=secrets.token_hex(8),
        state=RoundState.BROKEN,
        members=(),
        reason="the run was reopened",
    )
    guards = [unchanged(keys.round, found.mod_revision)]
    done = store.transact(guards, [Put(keys.round, opened.encode())], deadline=deadline).succeeded
    if done:
        logger().info("run.reopened", epoch=opened.epoch)
    return done


def _settle_spec(
    store: Store,
    keys: RunKeys,
    found: KeyValue | None,
    theirs: Spec,
    spec: Spec,
    changed: Mapping[str, str],
    deadline: Deadline,
) -> bool:
    """Whether the run's spec, as ``found``, lets this node in, or was written by this call."""
    if found is None:
        return store.transact([absent(keys.spec)], [Put(keys.spec, spec.encode())], deadline=deadline).succeeded
    if any(name in changed for name in OWNER_FIELDS):
        raise _another_job(keys.run_id, changed)
    difference = theirs.disagreement(spec)
    differs = theirs.changed(spec)  # what is allowed to, too
    if difference is None and not differs and not theirs.knows_less(spec):
        return True
    guards = [unchanged(keys.spec, found.mod_revision), none_below(keys.nodes)]
    if store.transact(guards, [Put(keys.spec, spec.encode())], deadline=deadline).succeeded:
        if difference is not None or differs:
            logger().info("spec.replaced", difference="; ".join(filter(None, (difference, *differs.values()))))
        return True
    if not store.range(keys.nodes, deadline, limit=1).items:
        return False
    if changed:
        raise _another_job(keys.run_id, changed)
    if difference is not None:
        raise _other_limits(difference)
    return True


def _other_limits(difference: str) -> SpecMismatchError:
    return SpecMismatchError(
        f"this node disagrees with the run: {difference}",
        hint="start all nodes with the same --nnodes and --rdzv-conf, or use another --rdzv-id",
    )


def _another_job(run_id: str, changed: Mapping[str, str]) -> SpecMismatchError:
    """The error for a node of another job than the run's."""
    return SpecMismatchError(
        f"run {run_id!r} is another job's: {'; '.join(changed.values())}",
        hint="give this job a name of its own (--rdzv-id; elastic-trainer run --name), or, if it is the same job, "
        f"add --rdzv-conf allow_different={':'.join(changed)}",
    )


def _finished(
    store: Store, keys: RunKeys, closed: RoundDocument, changed: Mapping[str, str], deadline: Deadline
) -> ConfigError:
    """The error for a start of a run that has succeeded, when it would be taken for a new training."""
    found = store.get(keys.event(event_number(closed)), deadline).first
    wall = JournalEntry.decode(found.value, found.key).wall if found is not None else None
    at = f" at {datetime.fromtimestamp(wall, UTC):%Y-%m-%d %H:%M:%S} UTC" if wall is not None else ""
    other = f" This start is another job: {'; '.join(changed.values())}." if changed else ""
    return ConfigError(
        f"run {keys.run_id!r} has finished{at} with success, and nothing is left to train.{other}",
        hint="name this training otherwise (--rdzv-id; elastic-trainer run --name), or add --rdzv-conf reopen=true to "
        "continue the run",
    )
