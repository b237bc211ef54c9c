"""Admission to a run: check its spec, refuse a closed run or reopen it on request.

*Runs in* the agent's main thread, once at the start.
*Fails by* SpecMismatchError, RunClosedError.
"""

from __future__ import annotations

import secrets

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import SpecMismatchError, StoreUnavailableError
from elastic_trainer.membership.documents import PROTOCOL_VERSION, RoundDocument, RoundState, Spec, VersionError
from elastic_trainer.membership.member import closed_error
from elastic_trainer.store.api import Put, Store, absent, none_below, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.telemetry.logs import logger

ATTEMPTS = 20


def admit(store: Store, keys: RunKeys, spec: Spec, *, reopen: bool, deadline: Deadline) -> None:
    """Check ``spec`` against the run's.

    The first node writes it. A node whose spec differs raises SpecMismatchError, unless no node of the run is present:
    then its spec replaces the run's. A closed run raises RunClosedError, unless ``reopen``: then its next epoch begins.
    A run of another protocol version always raises: this version cannot read its documents, so it must not replace any.
    """
    try:
        _settle(store, keys, spec, reopen=reopen, deadline=deadline)
    except VersionError as error:
        raise other_version(error.found, keys.run_id) from error


def other_version(found: int, run_id: str) -> SpecMismatchError:
    """The error for a node that meets a run of protocol version ``found``."""
    which = "a newer" if found > PROTOCOL_VERSION else "an older"
    return SpecMismatchError(
        f"run {run_id!r} was started by {which} elastic_trainer: it has protocol version {found}, "
        f"this node has {PROTOCOL_VERSION}",
        hint="start all nodes of a run with the same version; to continue the run with this version, stop its nodes, "
        f"run 'elastic-trainer forget {run_id} --unfinished', and start it again from its checkpoints",
    )


def _settle(store: Store, keys: RunKeys, spec: Spec, *, reopen: bool, deadline: Deadline) -> None:
    for _ in range(ATTEMPTS):
        if _settle_closed(store, keys, reopen=reopen, deadline=deadline) and _settle_spec(store, keys, spec, deadline):
            return
        if deadline.expired:
            break
    raise StoreUnavailableError("the run's spec changed too often to agree on it in time")


def _settle_closed(store: Store, keys: RunKeys, *, reopen: bool, deadline: Deadline) -> bool:
    """Whether the run is open, or was reopened by this call."""
    found = store.get(keys.round, deadline).first
    if found is None:
        return True
    current = RoundDocument.decode(found.value, keys.round)
    if current.state is not RoundState.CLOSED:
        return True
    if not reopen:
        raise closed_error(current)
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


def _settle_spec(store: Store, keys: RunKeys, spec: Spec, deadline: Deadline) -> bool:
    """Whether the run's spec equals ours, or was written by this call."""
    found = store.get(keys.spec, deadline).first
    if found is None:
        return store.transact([absent(keys.spec)], [Put(keys.spec, spec.encode())], deadline=deadline).succeeded
    theirs = Spec.decode(found.value, keys.spec)
    difference = theirs.disagreement(spec)
    if difference is None:
        return True
    guards = [unchanged(keys.spec, found.mod_revision), none_below(keys.nodes)]
    if store.transact(guards, [Put(keys.spec, spec.encode())], deadline=deadline).succeeded:
        logger().info("spec.replaced", difference=difference)
        return True
    if store.range(keys.nodes, deadline, limit=1).items:
        raise SpecMismatchError(
            f"this node disagrees with the run: {difference}",
            hint="start all nodes with the same --nnodes and --rdzv-conf, or use another --rdzv-id",
        )
    return False
