"""What a round document says to one worker: which rounds it names, and the worker's place in them."""

from __future__ import annotations

from elastic_trainer.ipc.messages import Formation
from elastic_trainer.membership.documents import RoundDocument, RoundMember


def last_number(document: RoundDocument) -> int:
    """The number of the newest round that ``document`` may have put into effect."""
    return document.next.number if document.next is not None else document.number


def formation_of(document: RoundDocument, mine: RoundMember, local_rank: int) -> Formation:
    """The place of one worker in ``document``."""
    return Formation(
        number=document.number,
        nonce=document.nonce,
        store=document.store,
        rank=mine.first_rank + local_rank,
        world_size=document.world_size,
        nodes=tuple(member.node for member in document.members),
        reason=document.reason,
    )
