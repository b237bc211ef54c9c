"""A node in place: workers stay, and rounds come to them, as its agent's conductor leads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_trainer.errors import LeaseLostError, TransientError
from elastic_trainer.membership.cluster_view import ClusterView, NodeView, Sightings
from elastic_trainer.membership.documents import Ghost, NodeRecord, NodeState, RoundDocument, RoundMember
from elastic_trainer.membership.documents import RoundState as State
from elastic_trainer.membership.round_write import RoundFailure
from elastic_trainer.membership.shard_groups import has_places, move, place_of
from elastic_trainer.model import Cause
from tests.simulation.agents import Agent, Watcher
from tests.simulation.loop import Process, Signal
from tests.simulation.node import KEYS, SimNode

CHANNEL_S = 0.001
"""Between an agent and its worker."""
LOOK_AGAIN_S = 1.0
PATIENCE_S = 4.0
"""How long a spare that holds state waits for its place in a group to be made whole by others."""


class InPlace(Agent):
    """Workers stay; rounds come to them."""

    def __init__(self, node: SimNode, watch: Watcher, size: int) -> None:
        super().__init__(node, watch, size)
        self._document: RoundDocument | None = None
        self._acknowledged = 0
        self.evicted = self._quarantined = False
        self._ended = True
        self._unreachable: tuple[str, ...] = ()
        self._record: NodeRecord | None = None
        self._break: RoundFailure | None = None
        self._wanted = Signal()
        self._new_worker()
        node.see = self._see
        self._named_since: float | None = None
        node.start()
        self._look_for_place_later()
        self.host.start(self._write())
        self._publish()
        self._warm_up()

    def _new_worker(self) -> None:
        self.place, self.formed, self.flagged = None, False, None
        self._ready: int | None = None
        self._planned = self._newcomer = True
        self._told_over = self._told_form = self._told_drain = self._offered = self._inside = 0
        self._number = self._over_heard = self._said = 0
        self._waits = False
        """Whether the worker is free and waits for a place."""
        self._formation: RoundDocument | None = None
        self._take_place()

    def _take_place(self) -> None:
        """With shard groups of several nodes: as the agent does before its workers start."""
        if has_places(self.node.limits):
            place = place_of(self._run().nodes.values(), self.name, self.node.limits.shard_nodes)
            self.base = self.base.model_copy(update={"place": place})

    def _run(self) -> ClusterView:
        """What a read of the whole run gives."""
        read, reached = self.node.etcd.read, self.node.link.whole and not self.node.etcd.down
        nodes = {}
        for item in read(KEYS.nodes, KEYS.nodes + "\x7f") if reached else ():
            if (name := KEYS.node_id(item.key)) is not None:
                record = NodeRecord.decode(item.value, item.key)
                nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        found = read(KEYS.round, None) if reached else ()
        document = RoundDocument.decode(found[0].value, KEYS.round) if found else None
        return ClusterView(self.name, nodes, document, self.node.limits, Sightings(), "")

    def _look_for_place_later(self) -> None:
        if self.alive and has_places(self.node.limits):
            self.loop.after(LOOK_AGAIN_S, lambda: self.host.deliver(self._look_for_place))

    def _look_for_place(self) -> None:
        """Begin anew at another place if that makes one more group whole, and stays so."""
        self._look_for_place_later()
        found = move(self._run()) if self.place is None and not self._ended else None
        if found is None or found[0].id != self.name:
            self._named_since = None
        elif self._named_since is None:
            self._named_since = self.loop.now
        elif self.loop.now - self._named_since >= (PATIENCE_S if self.step is not None else 0.0):
            self._named_since, self.step = None, None
            self.crash_worker()

    def _warm_up(self) -> None:
        self.soon(self.chance.uniform(0.1, 0.8), self._start)

    def _start(self) -> None:
        self._take_place()
        self._ended = False
        self._worker_is_free(planned=False)

    # ---- what happens to it

    def crash_worker(self) -> None:
        current = self._document
        taking_part = self._entry(current) is not None
        self.life += 1
        self._ended = True
        if current is not None and taking_part:
            self._acknowledged = max(self._acknowledged, current.last_number + 1)
        self._new_worker()
        cause = "its worker was lost"
        if current is not None and taking_part:
            self._break_round(
                RoundFailure(current.last_number, f"{self.name}: {cause}", True, Cause.WORKER_LOST), cause
            )
        else:
            self._publish(cause=cause, planned=False)
        self._warm_up()

    def lose_contact(self, unreachable: tuple[str, ...]) -> None:
        place, self.place = self.place, None
        current = self._document
        if place is None:
            return
        if not self.formed:
            self._found(unreachable)
        on = current is not None and place.number in (current.number, current.last_number)
        if current is not None and on and current.state in (State.ACTIVE, State.DRAINING):
            self._acknowledged = max(self._acknowledged, current.last_number + 1)
            reason = f"node {self.name} lost contact with a peer"
            failure = RoundFailure(current.last_number, reason, False, Cause.CONTACT_LOST, unformed=not self.formed)
            self._break_round(failure, "", planned=False)
        if self._over_heard >= place.number:
            self._worker_is_free_soon()

    def accuse(self, suspects: tuple[Ghost, ...]) -> None:
        if self._document is not None and not self._ended:
            self._found(tuple(each.node for each in suspects))
            reason = "no answer from " + ", ".join(each.node for each in suspects)
            self._break_round(RoundFailure(self._document.last_number, reason, False, Cause.CONTACT_LOST, suspects), "")

    def evict(self) -> None:
        self.evicted = True
        self._publish()

    def finish(self) -> None:
        self.done = True
        self._publish()

    def switch(self, following: RoundDocument | None) -> None:
        self.place, self.flagged = None, None
        if following is not None and self._entry(following) is not None:
            self._worker_enters(following)
            self.soon(CHANNEL_S, lambda: self._hear_ready(following.number, planned=True))
        elif self.evicted:
            self.soon(CHANNEL_S, self._hear_farewell)
        else:
            self._worker_is_free(planned=True)

    def _hear_farewell(self) -> None:
        """Its worker has stopped by agreement: the node goes."""
        number = self._document.last_number + 1 if self._document is not None else 0
        self._hear_ready(number, planned=True)
        self.soon(0.3, self._go)

    def _go(self) -> None:
        self.left = True
        self.node.leave()

    # ---- what the run decides

    def _see(self, document: RoundDocument) -> None:
        self._document = document
        if self._ended:
            return
        mine = self._entry(document)
        if document.state is State.CLOSED:
            self.left = True
            self.place = None
            self.loop.after(0.1, self.node.leave)
        elif document.state is State.BROKEN:
            self._over(document, document.number)
        elif document.state is State.ACTIVE and mine is not None:
            self._form(document)
        elif document.state is State.ACTIVE:
            self._over(document, document.number - 1)
            if document.left_out == self.name and not self._quarantined:
                self._quarantined = True
                self._publish()
                self.soon(0.5, self._try_to_come_back)
        elif document.state is State.DRAINING:
            self._drain(document, mine)

    def _found(self, names: tuple[str, ...]) -> None:
        """These cannot be reached: look again until they can, or steps show it."""
        self._unreachable = names
        if names:
            self.soon(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        broken = self._document is not None and self._document.state is State.BROKEN
        if not self._unreachable or self._quarantined:
            return
        if broken and all(self.reaches(other) for other in self._unreachable):
            self._unreachable = ()
            self._publish()
        else:
            self.soon(LOOK_AGAIN_S, self._look_again)

    def _try_to_come_back(self) -> None:
        others = [member.node for member in self._document.members] if self._document is not None else []
        if any(not self.reaches(other) for other in others):
            self.soon(0.5, self._try_to_come_back)
            return
        self._quarantined, self._unreachable = False, ()
        self._publish()

    reaches: Callable[[str], bool] = staticmethod(lambda other: True)

    def _entry(self, document: RoundDocument | None) -> RoundMember | None:
        mine = document.member(self.name) if document is not None else None
        record = self.node.key.record
        current_life = record is not None and record.life == self.life
        return mine if current_life and self.takes(mine) else None

    def _over(self, document: RoundDocument, number: int) -> None:
        self._tell_over(number)
        waited_for = document.member(self.name) is not None or self.name in (ghost.node for ghost in document.ghosts)
        waited_for |= bool(self._told_form)
        if self._acknowledged <= number and waited_for:
            self._acknowledged = number + 1
            self._publish()

    def _tell_over(self, number: int) -> None:
        if self._told_over < number:
            self._told_over = number
            self.soon(CHANNEL_S, lambda: self._worker_hears_over(number))

    def _worker_hears_over(self, number: int) -> None:
        self._over_heard = max(self._over_heard, number)
        inside = self.place is not None
        if self.place is not None and self.place.number <= number:
            self.place = None
            self._worker_is_free_soon()
        elif not inside and (not self._waits or self._said <= number):
            self._worker_is_free_soon()

    def _form(self, document: RoundDocument) -> None:
        self._tell_over(document.number - 1)
        if self._ready is not None and self._told_form < document.number:
            self._told_form = self._inside = document.number
            self.soon(CHANNEL_S, lambda: self._worker_forms(document))

    def _worker_forms(self, document: RoundDocument) -> None:
        self._formation = document
        if self._waits and document.number >= self._said and document.number > self._over_heard:
            self._worker_enters(document)

    def _worker_enters(self, document: RoundDocument) -> None:
        self._waits, self._newcomer, self._number = False, False, document.number
        self.enter(document)

    def _drain(self, document: RoundDocument, mine: RoundMember | None) -> None:
        if mine is not None:
            self._form(document)
        following = document.next
        place = self._entry(following)
        if mine is not None and self._told_drain < document.number and self._ready is not None:
            self._told_drain = document.number
            if following is not None:
                self._told_form = following.number
            self._offered = following.number if following is not None and place is not None else 0
            self.soon(CHANNEL_S, lambda: self._worker_drains(document))
        elif mine is None and following is not None and place is not None and self._told_form < following.number:
            self._told_form = self._inside = following.number
            self.soon(CHANNEL_S, lambda: self._worker_forms(following))

    def _worker_drains(self, document: RoundDocument) -> None:
        if self.place is not None and self.place.number == document.number:
            self.flagged = (document.number, document.next)

    # ---- what the worker says

    def _worker_is_free_soon(self) -> None:
        self.soon(self.chance.choice([0.005, 0.02, 0.1, 0.6]), lambda: self._worker_is_free(planned=False))

    def _worker_is_free(self, *, planned: bool) -> None:
        if self.place is not None:
            return
        said = self._said = max(self._number, self._over_heard) + 1
        self._waits = True
        self.soon(CHANNEL_S, lambda: self._hear_ready(said, planned=planned))
        if self._formation is not None:
            self._worker_forms(self._formation)

    def _hear_ready(self, number: int, *, planned: bool) -> None:
        self._ready, self._planned = number, planned
        if planned and number == self._offered:
            self._inside = number
        self._publish()
        if self._document is not None:
            self._see(self._document)

    def _free_for(self) -> int:
        if self._ready is None:
            return 0
        return max(self._ready, self._told_over + 1 if self._inside < self._ready else 0)

    def _shown(self, *, planned: bool | None = None, cause: str = "") -> NodeRecord:
        complete = self._ready is not None and not self._ended and not self._quarantined
        state = NodeState.WARMING
        if self.done:
            state = NodeState.DONE
        elif complete:
            state = NodeState.DRAINING if self.evicted else NodeState.READY
        reported = self._free_for() if complete else 0
        fields: dict[str, Any] = {
            "state": state,
            "life": self.life,
            "reported": reported,
            "acknowledged": max(self._acknowledged, reported),
            "planned": self._planned if planned is None else planned,
            "identity": self.step if complete else None,
            "newcomer": self._newcomer,
            "committed": self.step.step if self.step is not None and not self._ended else 0,
            "reached": self.step,
            "unreachable": self._unreachable,
            "cause": cause,
            "passed": self.done,
        }
        return self.base.model_copy(update=fields)

    def made_step(self) -> None:
        self._unreachable = ()

    # ---- the record's writer

    def _publish(self, *, planned: bool | None = None, cause: str = "") -> None:
        self._record = self._shown(planned=planned, cause=cause)
        self._wanted.fire()

    def _break_round(self, failure: RoundFailure, cause: str, *, planned: bool | None = None) -> None:
        self._record, self._break = self._shown(planned=planned, cause=cause), failure
        self._wanted.fire()

    def _write(self) -> Process:
        while True:
            if self._record is None and self._break is None:
                yield self._wanted, float("inf")
            record, self._record = self._record, None
            failure, self._break = self._break, None
            while not self.node.started:
                yield 0.1
            try:
                if failure is not None:
                    yield from self.node.break_round(failure, record)
                if record is not None and record != self.node.key.published:
                    yield from self.node.show(record)
            except (TransientError, LeaseLostError):
                self._record = self._record or record
                self._break = self._break or failure
                yield 0.1
