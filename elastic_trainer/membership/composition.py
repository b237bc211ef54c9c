"""Builds round documents: the next round, a broken round, and the keys that it excludes. Pure."""

from __future__ import annotations

from elastic_trainer.membership.cluster_view import (
    ClusterView,
    NodeView,
    candidates,
    is_ghost,
    live_members,
    next_number,
)
from elastic_trainer.membership.documents import Ghost, NodeState, RoundDocument, RoundMember, RoundState, join_address
from elastic_trainer.membership.failure_budget import UNSPENT, FailureBudget
from elastic_trainer.model import Cause


def broken(
    current: RoundDocument,
    reason: str,
    *,
    worker_failed: bool = False,
    cause: Cause | None = None,
    suspects: tuple[Ghost, ...] = (),
    lost: tuple[str, ...] = (),
    unformed: bool = False,
) -> RoundDocument:
    """The round document after a failure; ``suspects`` are excluded until they write their keys.

    ``unformed``: ranks did not reach each other when its groups were to be formed.

    A planned change that was in progress counts as made, since some ranks may have switched already: the broken round
    is the one that it leads to.
    """
    base = current.next if current.next is not None else current
    ghosts = current.ghosts if current.next is not None else base.ghosts
    update = {
        "state": RoundState.BROKEN,
        "reason": reason,
        "next": None,
        "ghosts": (*ghosts, *suspects),
        "worker_failed": worker_failed,
        "unformed": base.unformed + 1 if unformed else 0,
        "cause": cause,
        "lost": lost or tuple(ghost.node for ghost in suspects),
    }
    return base.model_copy(update=update)


def compose(
    view: ClusterView,
    chosen: list[NodeView],
    reason: str,
    budget: FailureBudget = UNSPENT,
    *,
    left_out: str | None = None,
    cause: Cause | None = None,
) -> RoundDocument:
    """The next round, with ``chosen`` as members in this order; ``cause`` ended the previous one."""
    members, first_rank = [], 0
    for node in chosen:
        size = node.record.local_world_size
        members.append(
            RoundMember(
                node=node.id,
                create_revision=node.create_revision,
                life=node.record.life,
                first_rank=first_rank,
                local_world_size=size,
                role=node.record.role,
            )
        )
        first_rank += size
    head = chosen[0].record
    return RoundDocument(
        epoch=view.round.epoch if view.round else 1,
        number=next_number(view),
        nonce=view.nonce,
        state=RoundState.ACTIVE,
        members=tuple(members),
        store=join_address(head.address, head.store_port),
        ghosts=_ghosts(view, {node.id for node in chosen}),
        reason=reason,
        last_step=budget.step,
        failures=budget.failures,
        stalled=budget.stalled,
        fewest=min(budget.fewest or len(members), len(members)),
        unformed=view.round.unformed if view.round is not None and view.round.state is RoundState.BROKEN else 0,
        culprits=budget.culprits,
        left_out=left_out,
        cause=cause,
    )


def _ghosts(view: ClusterView, chosen: set[str]) -> tuple[Ghost, ...]:
    """Keys of members that the next round excludes although their leases are still alive."""
    left_out = {node.id: node for _, node in live_members(view)}
    left_out |= {node.id: node for node in view.nodes.values() if is_ghost(view, node)}
    present = {node.id for node in candidates(view)}
    present |= {node.id for node in view.nodes.values() if node.record.state is NodeState.WARMING}
    return tuple(node.ghost for name, node in sorted(left_out.items()) if name not in chosen and name not in present)
