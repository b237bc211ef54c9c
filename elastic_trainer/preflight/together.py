"""Measures the network with other nodes: meets them, runs the all-reduces in a child process, judges the times.

To meet, each node writes a leased key with the address of its own TCP store. The first one waits for enough nodes and
writes the list of members into its key: one node decides, so all have the same list. The rendezvous of training cannot
be used: it would leave documents in the user's run and close it for good, and the etcd user has no rights on another
run.

*Runs in* the caller's thread and a lease keeper's. *Owns* the child and the lease of the meeting during the call.
*Fails by* findings for measurements; raises AbsentError at the deadline, ConfigError if nodes expect different counts
or two have the same name, and the store's errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError, LeaseLostError, PermanentError, StoreUnavailableError
from elastic_trainer.membership.documents import Document, DocumentError
from elastic_trainer.preflight.child import Child, ChildError, Doing
from elastic_trainer.preflight.examination import Neighbor, reaching
from elastic_trainer.preflight.judge import (
    Finding,
    FitLimits,
    Measured,
    Pair,
    Status,
    judge_pairs,
    judged_clocks,
    together_finding,
)
from elastic_trainer.store.api import KeyValue, Order, Put, RunKeys, Store, absent, created_at
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.wording import counted

_MODULE = "elastic_trainer.preflight.collective"


def measured_together(
    store: Store,
    keys: RunKeys,
    node: str,
    address: str,
    count: int,
    limits: FitLimits,
    deadline: Deadline,
    doing: Doing,
) -> list[Finding]:
    """Findings about the network between ``count`` nodes, including this one."""
    with Child(_MODULE, [f"{deadline.remaining_s():.3f}", address]) as child:
        try:
            mine = Neighbor(node, address, port_of(child, deadline, doing))
            with attended(store, keys, mine, count, deadline, doing) as meeting:
                return _measured(child, meeting, node, limits, deadline, doing)
        except (AbsentError, ChildError) as error:
            return [Finding.of_error("allreduce", error)]
        except StoreUnavailableError:
            if not deadline.expired:
                raise
            text = "no time was left to meet the other nodes: the earlier checks took all of it"
            return [Finding("allreduce", Status.BAD, text, hint="use a longer --timeout")]


def port_of(child: Child, deadline: Deadline, doing: Doing) -> int:
    """The port of the child's TCP store, which is its first message."""
    for message in child.messages(deadline):
        if "port" in message:
            return int(message["port"])
        if "doing" in message:
            doing(str(message["doing"]))
    raise ChildError("the measuring process ended before it started to measure")


def _measured(
    child: Child, meeting: Attendance, node: str, limits: FitLimits, deadline: Deadline, doing: Doing
) -> list[Finding]:
    names, first = [member.node for member in meeting.members], meeting.members[0]
    me = names.index(node)
    others = [each for each in meeting.members if each.node != node]
    found = [reaching("peers.connect", others, deadline)]
    meet_at = {"host": first.address, "port": first.port, "nonce": meeting.nonce}
    child.send({**meet_at, "rank": me, "names": names, "limit_s": deadline.remaining_s()})
    heard = Heard()
    try:
        for message in child.messages(deadline):
            heard.take(message)
            if "doing" in message:
                doing(str(message["doing"]))
    except ChildError as error:  # earlier results still count
        found.append(Finding.of_error("allreduce", error))
    if heard.ahead_s:
        found.append(judged_clocks("peers.clock", heard.ahead_s, limits))
    found += judge_pairs(names, me, heard.pairs, limits)
    if len(names) > 2 and heard.pairs:
        found.append(together_finding(heard.all, len(names)))
    return found


class Heard:
    """The child's results so far."""

    def __init__(self) -> None:
        self.pairs: dict[Pair, Measured] = {}
        self.all = Measured(error="it was not measured")
        self.ahead_s: dict[str, float] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        if "pair" in message:
            low, high = message["pair"]
            self.pairs[low, high] = _as_measured(message)
        elif "together" in message:
            self.all = _as_measured(message["together"])
        elif "clock" in message:
            name, ahead_s = message["clock"]
            self.ahead_s[name] = ahead_s


def _as_measured(values: Mapping[str, Any]) -> Measured:
    seconds = {int(size): float(took_s) for size, took_s in values.get("seconds", {}).items()}
    return Measured(seconds, str(values.get("error", "")))


# ---- meeting

TTL_S = 5.0
LOOK_S = 0.25
_FEW = 64


class AbsentError(PermanentError):
    """Too few nodes joined in time."""


class Attendance(Document):
    """One node's key, with the address of its TCP store.

    The first node writes ``members``, in rank order: they use its store, with keys that begin with ``nonce``.
    """

    neighbor: Neighbor
    count: int
    members: tuple[Neighbor, ...] = ()
    nonce: str = ""


@contextmanager
def attended(
    store: Store, keys: RunKeys, own: Neighbor, count: int, deadline: Deadline, doing: Doing
) -> Iterator[Attendance]:
    """Take part until the context ends; yields the meeting once ``count`` nodes are present."""
    session = LeaseSession(store, TTL_S, deadline=deadline)
    try:
        mine = Attendance(neighbor=own, count=count)
        key = keys.preflight_meeting + own.node
        shown = store.transact([absent(key)], [Put(key, mine.encode(), session.lease_id)], deadline=deadline)
        if not shown.succeeded:
            raise ConfigError(f"another node has the name {own.node!r}", hint="set --rdzv-conf node_id on each")
        yield _awaited(store, keys, mine, session.lease_id, deadline, doing)
    finally:
        session.close()


def _awaited(store: Store, keys: RunKeys, mine: Attendance, lease: int, deadline: Deadline, doing: Doing) -> Attendance:
    waited_s = deadline.remaining_s()
    look_s = LOOK_S * max(1.0, mine.count / _FEW)  # every node reads all keys
    waiting: list[Attendance] = []
    while True:
        try:
            items = store.range(keys.preflight_meeting, deadline, order=Order.CREATE_REVISION).items
        except StoreUnavailableError:
            if not waiting or not deadline.expired:
                raise
            raise _absent(waiting, mine.count, waited_s) from None  # the last pause took longer than planned
        present: list[tuple[KeyValue, Attendance]] = []  # oldest first; what cannot be read is passed over
        for item in items:
            with suppress(DocumentError):
                present.append((item, Attendance.decode(item.value, item.key)))
        for _, each in present:
            if mine.neighbor.node in {member.node for member in each.members}:
                return each
        taken = {member.node for _, each in present for member in each.members}
        waiting = [each for _, each in present if each.neighbor.node not in taken]  # who is in no meeting yet
        for other in waiting:
            if other.count != mine.count:
                raise ConfigError(
                    f"this node waits for {mine.count} nodes, {other.neighbor.node} for {other.count}",
                    hint="use the same --peers everywhere",
                )
        if waiting and waiting[0].neighbor == mine.neighbor and len(waiting) >= mine.count:
            key, created = next(
                (item.key, item.create_revision) for item, each in present if each.neighbor == mine.neighbor
            )
            chosen = tuple(each.neighbor for each in waiting[: mine.count])
            plan = mine.model_copy(update={"members": chosen, "nonce": secrets.token_hex(8)})
            put = Put(key, plan.encode(), lease)
            if store.transact([created_at(key, created)], [put], deadline=deadline).succeeded:
                return plan
            raise LeaseLostError("this node's lease in etcd has expired because it was not refreshed")
        doing(f"waiting for other nodes: {len(waiting)} of {mine.count} are present")
        if deadline.remaining_s() <= look_s:
            raise _absent(waiting, mine.count, waited_s)
        pause(look_s)


def _absent(waiting: Sequence[Attendance], count: int, waited_s: float) -> AbsentError:
    names = ", ".join(each.neighbor.node for each in waiting)
    text = f"{len(waiting)} of {counted(count, 'node')} joined within {waited_s:.3g} s: {names}"
    return AbsentError(text, hint="start the same command on the others, or use a longer --timeout")
