"""Builds what an agent reads of its workers, without workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.ipc.page import PHASES, Heartbeat, Reading
from elastic_trainer.membership.documents import NodeHealth, RankHealth, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Phase


def reading(
    phase: Phase = Phase.TRAINING,
    *,
    pid: int = 1,
    slot: int = 0,
    born_at: float = 0.0,
    waits: bool = False,
    inside: bool = True,
    moment: Phase | None = None,
    seconds: Mapping[Phase, float] | None = None,
    notes: Mapping[str, Any] | None = None,
    **pulse: Any,
) -> Reading:
    """A page as it might be read. ``moment``: what it does in this moment, if that is not ``phase``."""
    spent = [(seconds or {}).get(each, 0.0) for each in PHASES]
    told = {"pid": pid, "local_rank": slot, "born_at": born_at, **(notes or {})}
    values: dict[str, Any] = {"rank": slot, "round": 1, "fresh": 5} | pulse
    pulse_ = Heartbeat(phase=phase, seconds=spent, **values)
    return Reading(Path(f"{slot}-{pid}"), pulse_, moment or phase, waits, told, inside)


def round_of(
    number: int, *nodes: str, state: RoundState = RoundState.ACTIVE, size: int = 1, life: int = 1, **more: Any
) -> RoundDocument:
    """A round of ``nodes`` in this order; of ``a!2`` in its second life."""
    members = []
    for index, each in enumerate(nodes):
        name, _, own = each.partition("!")
        key = 10 + ord(name[0])
        members.append(RoundMember(name, key, int(own or life), index * size, size))
    return RoundDocument(number=number, nonce=f"r{number}", state=state, members=tuple(members), **more)


def told_by(node: str, *ranks: RankHealth, number: int = 1, **more: Any) -> NodeHealth:
    return NodeHealth(node=node, wall=1.0, round=number, ranks=ranks, **more)


def rank(number: int, *, waits: bool = True, still_s: float = 500.0, waits_s: float | None = None) -> RankHealth:
    """One rank of it; it has waited all the time unless given."""
    waited_s = still_s if waits_s is None else waits_s
    who: dict[str, Any] = {"rank": number, "local_rank": 0, "pid": 1, "phase": "training", "phase_s": 1.0}
    return RankHealth(**who, still_s=still_s, step=5, step_s=1.0, compute_s=0.5, waits=waits, waits_s=waited_s)
