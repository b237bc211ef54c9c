"""What must be true of a run whatever happens, checked at each write of the round and at each step of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic_trainer.ipc.channel import Formation
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.core import position
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Incarnation

if TYPE_CHECKING:
    from tests.simulation.workers import SimAssignment

ONE_ACTIVE = "at most one active round"
ONLY_GROW = "rounds only grow"
SAME_RANKS = "all members of a round read the same ranks"
NO_REPLACED = "an incarnation that was replaced never trains in a later round"
PRESENT = "only a node that is in the run writes a round"
STAYS_CLOSED = "a closed run stays closed"
KEEP_ORDER = "survivors keep their order, newcomers come behind"
WITHIN_LIMITS = "a round has a number of nodes that is allowed"
WHOLE_GROUPS = "a round is made of whole groups, and a node keeps its slot while its workers live"
ALIKE = "all ranks of a round hold one state, at one point of the script, and use each sample once"
NOTHING_LOST = "a round goes on from the newest state that a member or the storage holds"
ONE_ROUND = "workers that were started for a round are in no other one, in restart mode"
ONLY_ENDED = "no worker leaves a round that is not over"
NO_CRASH = "no turn of a thread fails"
NO_RESTART = "a worker that could stay is not ended"
NO_HEALTHY_KILLED = "a worker that is busy, or leaves its round in time, is not killed"
NO_FALSE_STOP = "no verdict ends a run that can go on"
LIVENESS = "training goes on, or the run is closed with a reason"


class Violation(BaseException):
    """``rule`` was broken. No edge of a thread of the product takes it for an error of its own."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Invariants:
    """Follows one run. A store that goes back begins a new history: revisions and numbers begin again from there.

    ``created(name)`` is the create-revision of the node's key in the store now; 0 if there is none. ``in_call``:
    whether some members of a round are in the middle of a call that they complete however few they are.
    """

    def __init__(self, limits: Limits, created: Callable[[str], int], in_call: Callable[[RoundDocument], bool]) -> None:
        self._limits, self._created, self._in_call = limits, created, in_call
        self._entered: dict[str, int] = {}
        self._former: set[str] = set()
        """Rounds of the store as it was before it went back."""
        self._members: dict[str, tuple[RoundMember, ...]] = {}
        """Of all rounds ever written, by nonce."""
        self._slots: dict[tuple[str, int], int | None] = {}
        """By node and life."""
        self._rounds: dict[int, tuple[str, tuple[RoundMember, ...]]] = {}
        self._started: dict[tuple[str, int], int] = {}
        """In restart mode: the round of each life."""
        self.restored()
        self._went_back = False

    def restored(self) -> None:
        """The store has gone back."""
        self._went_back = True
        self._newest: RoundDocument | None = None
        self._former |= {nonce for nonce, _ in self._rounds.values()}
        self._rounds = {}
        self._active: set[int] = set()
        self._incarnations: dict[str, Incarnation] = {}
        self._closed: int | None = None

    def shows(self, name: str, record: NodeRecord) -> None:
        """A node's key was written. A node may look for its slot until its workers have sharded the model."""
        if record.state is NodeState.WARMING:
            return
        known = self._slots.setdefault((name, record.life), record.shard_slot)
        if known != record.shard_slot:
            raise Violation(WHOLE_GROUPS, f"{name} goes from slot {known} to {record.shard_slot}")

    def wrote(self, document: RoundDocument) -> None:
        """The round document was written."""
        if self._closed is not None:
            raise Violation(STAYS_CLOSED, f"round {document.number} {document.state} after round {self._closed}")
        before, self._newest = self._newest, document
        self._members |= {each.nonce: each.members for each in (document, document.next) if each is not None}
        if self._is_put_back(document):
            self._rounds[document.number] = (document.nonce, document.members)
        else:
            self._know(document)
        if (
            before is not None
            and position(document) <= position(before)
            and not self._is_broken_again(document, before)
        ):
            raise Violation(ONLY_GROW, f"{_words(document)} after {_words(before)}")
        if document.next is not None:
            if document.next.number != document.number + 1:
                raise Violation(ONLY_GROW, f"round {document.next.number} is planned after {document.number}")
            self._know(document.next)
        if document.state is RoundState.ACTIVE:
            self._active.add(document.number)
        elif document.state is RoundState.CLOSED:
            self._closed = document.number

    def _is_put_back(self, document: RoundDocument) -> bool:
        """Whether it ends a round of the store as it was before it went back: nobody begins to train in it."""
        known = self._rounds.get(document.number)
        ended = document.state in (RoundState.BROKEN, RoundState.CLOSED)
        return self._went_back and ended and (known is None or known[0] != document.nonce)

    def _is_broken_again(self, document: RoundDocument, before: RoundDocument) -> bool:
        """Whether it breaks what is broken: a store that went back gives revisions to other writes than before, so one
        that was decided on before may find the revision that it expects. Who knows a later round puts that back."""
        return self._went_back and document.state is before.state is RoundState.BROKEN

    def _know(self, document: RoundDocument) -> None:
        is_new = document.number not in self._rounds
        known = self._rounds.setdefault(document.number, (document.nonce, document.members))
        if known[0] != document.nonce:
            raise Violation(ONE_ACTIVE, f"two rounds have number {document.number}")
        if known[1] != document.members:
            raise Violation(SAME_RANKS, f"round {document.number} has other members than it had")
        ranks = [rank for m in document.members for rank in range(m.first_rank, m.first_rank + m.local_world_size)]
        if ranks != list(range(document.world_size)):
            raise Violation(SAME_RANKS, f"round {document.number} has the ranks {ranks}")
        fits = self._limits.fitting(len(document.members)) == len(document.members)
        if is_new and document.members and not (fits or self._in_call(document)):
            raise Violation(WITHIN_LIMITS, f"round {document.number} has {len(document.members)} nodes")
        self._check_order(document)
        size = self._limits.shard_nodes
        for at, member in enumerate(document.members if size > 1 else ()):
            if (slot := self._slots.get((member.node, member.life))) != at % size:
                raise Violation(WHOLE_GROUPS, f"{_words(document)}: {member.node} of slot {slot} is number {at}")
        for member in document.members:
            if self._went_back and self._created(member.node) != member.create_revision:
                continue  # decided on what was seen before the restore: it means a key of the former history
            if self._started.get((member.node, member.life), document.number) < document.number and not self._went_back:
                raise Violation(ONE_ROUND, f"{_words(document)}: life {member.life} of {member.node}")
            newest = self._incarnations.get(member.node, member.incarnation)
            if member.incarnation < newest:
                raise Violation(NO_REPLACED, f"{member.node} as {member.incarnation} after {newest}")
            self._incarnations[member.node] = member.incarnation

    def _check_order(self, document: RoundDocument) -> None:
        """Of groups, those that both rounds have keep theirs; a round that was only planned orders nobody."""
        before = self._rounds[document.number - 1][1] if document.number - 1 in self._active else ()
        order = {group: at for at, group in enumerate(self._groups(before))}
        orders = [order.get(group, len(order)) for group in self._groups(document.members)]
        if orders != sorted(orders):
            raise Violation(KEEP_ORDER, f"{_words(document)}: {orders} of the round before")

    def _groups(self, members: Sequence[RoundMember]) -> list[tuple[tuple[str, int], ...]]:
        size, keys = self._limits.shard_nodes, [(member.node, member.create_revision) for member in members]
        return [tuple(keys[first : first + size]) for first in range(0, len(keys), size)]

    def entered(self, who: str, number: int) -> None:
        """The worker ``who`` has begun to form a round."""
        before = self._entered.get(who, 0)
        if number <= before:
            raise Violation(ONLY_GROW, f"{who} enters round {number} after round {before}")
        self._entered[who] = number

    def assigned(self, name: str, own: Incarnation, local_rank: int, formation: Formation) -> None:
        """The agent of node ``name``, being ``own``, has sent a worker its rank."""
        entry = next((each for each in self._members[formation.nonce] if each.node == name), None)
        if entry is None or formation.rank != entry.first_rank + local_rank:
            raise Violation(SAME_RANKS, f"worker {local_rank} of {name} is sent rank {formation.rank}, not of {entry}")
        self.took(name, entry.incarnation, own)

    def took(self, name: str, entry: Incarnation, own: Incarnation) -> None:
        """Node ``name``, being ``own``, takes the place of ``entry`` in a round."""
        if entry != own:
            raise Violation(NO_REPLACED, f"{name} is {own} and takes the place of {entry}")

    def told_over(self, name: str, number: int) -> None:
        """The agent of node ``name`` has told a worker that round ``number`` is over."""
        newest = self._newest
        if self._went_back or (newest is not None and newest.number > number):
            return
        if newest is None or newest.number < number or newest.state is not RoundState.BROKEN:
            raise Violation(ONLY_ENDED, f"{name} says that round {number} is over")

    def started(self, name: str, life: int, number: int) -> None:
        """Restart mode: the workers of ``life`` of node ``name`` start for round ``number``."""
        self._started[name, life] = number

    def stepped(self, read: Sequence[SimAssignment]) -> None:
        """All members of a round have made a step in it; ``read``: the round as each of them has read it."""
        number, nonce = read[0].number, read[0].nonce
        ranks = {each.rank for each in read}
        if len({each.nodes for each in read}) != 1 or len(ranks) != len(read) or max(ranks) >= read[0].world_size:
            raise Violation(SAME_RANKS, f"members of round {number} have read different ranks")
        known = self._rounds.get(number)
        if nonce in self._former:
            return
        if known is not None and known[0] != nonce:
            raise Violation(ONE_ACTIVE, f"two rounds {number} make steps")
        if self._closed is not None and number > self._closed:
            raise Violation(STAYS_CLOSED, f"round {number} trains after the end of round {self._closed}")


def _words(document: RoundDocument) -> str:
    return f"round {document.number} {document.state}"
