"""Measures the network with other nodes: meets them, runs the all-reduces in a child process, judges the times.

*Runs in* the caller's thread. *Owns* the child and the lease of the meeting during the call.
*Fails by* findings for measurements; raises ConfigError and the store's errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.preflight import clocks, pairs
from elastic_trainer.preflight.child import Child, ChildError, Doing
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.preflight.meeting import AbsentError, Meeting, attended
from elastic_trainer.preflight.network import Neighbor, reaching
from elastic_trainer.preflight.pairs import Measured, Pair
from elastic_trainer.store.api import RunKeys, Store

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
            place = Neighbor(node, address, port_of(child, deadline, doing))
            with attended(store, keys, place, count, deadline, doing) as meeting:
                return _measured(child, meeting, node, limits, deadline, doing)
        except (AbsentError, ChildError) as error:
            return [Finding.failed("allreduce", error)]
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
    child: Child, meeting: Meeting, node: str, limits: FitLimits, deadline: Deadline, doing: Doing
) -> list[Finding]:
    me, first = meeting.rank(node), meeting.members[0]
    names = [member.node for member in meeting.members]
    others = [each for each in meeting.members if each.node != node]
    found = [reaching("peers.connect", others, deadline)]
    child.send(
        {
            "host": first.address,
            "port": first.port,
            "nonce": meeting.nonce,
            "rank": me,
            "names": names,
            "limit_s": deadline.remaining_s(),
        }
    )
    heard = Heard()
    try:
        for message in child.messages(deadline):
            heard.take(message)
            if "doing" in message:
                doing(str(message["doing"]))
    except ChildError as error:  # earlier results still count
        found.append(Finding.failed("allreduce", error))
    if heard.ahead_s:
        found.append(clocks.judged("peers.clock", heard.ahead_s, limits))
    found += pairs.judge(names, me, heard.pairs, limits)
    if len(names) > 2 and heard.pairs:
        found.append(pairs.together(heard.all, len(names)))
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
