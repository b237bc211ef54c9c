"""A node in restart mode: workers are started for each round, as its torchrun handler does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import LeaseLostError, TransientError
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember
from elastic_trainer.membership.documents import RoundState as State
from elastic_trainer.membership.round_write import RoundFailure, free_again
from elastic_trainer.model import Cause, Incarnation
from elastic_trainer.worker.recovery import Recovery
from tests.simulation.agents import Agent
from tests.simulation.loop import Process
from tests.simulation.node import SimNode
from tests.simulation.workers import FIRST_PID, SimPlace, SimWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

Going = Generator[Any, Any, bool]
"""A process's part; its answer is whether the process goes on."""


class Restart(Agent):
    """Workers are started for each round; one acts for those of a node."""

    team = 1

    def __init__(self, node: SimNode, watch: World, size: int) -> None:
        super().__init__(node, watch, size)
        self.world = watch
        self.workers: list[SimWorker] = []
        self.life, self.done = 0, False
        self._current: RoundDocument | None = None
        self._failed = False
        self._pids = itertools.count(FIRST_PID)
        node.start()
        self.host.start(self._run())

    def _takes(self, mine: RoundMember | None) -> bool:
        """Whether ``mine`` is this node's place in a round."""
        if mine is None or not self.node.key.is_mine(mine):
            return False
        self.watch.took(self.name, mine.incarnation, Incarnation(self.node.key.create_revision, self.life))
        return True

    def crash_worker(self) -> None:
        for worker in self.workers:
            worker.thread.strikes_in, worker.thread.strike = self.chance.randint(1, 12), lambda: worker.end(1)  # noqa: B023

    def ended(self, worker: SimWorker) -> None:
        if worker in self.workers and worker.code != -15:
            self._failed, self.done = worker.code != 0, worker.code == 0
            self.node.changed.fire()

    def evict(self) -> None:
        """SIGTERM: the node goes at once."""
        self.left = True
        self.leave()

    def _run(self) -> Process:
        while not self.node.started:
            yield 0.1
        while True:
            if not (yield from self._join()):
                return
            yield self.chance.uniform(0.2, 0.8)
            if self._current is not None and not self._failed and not self._over(self._current):
                self._begin(self._current)
            if not (yield from self._work()):
                return
            for worker in self.workers:
                worker.end(-15)
            yield self.chance.choice([0.01, 0.1, 0.5])

    def _begin(self, current: RoundDocument) -> None:
        nodes = tuple(member.node for member in current.members)
        worker = SimWorker(self, self.world, next(self._pids), 0)
        worker.assigned = SimPlace(
            current.number, nodes.index(self.name), len(nodes), 0, 1, nonce=current.nonce, nodes=nodes
        )
        self.workers = [worker]
        worker.begin(Recovery(worker.state))

    def _over(self, mine: RoundDocument) -> bool:
        seen = self.node.view.look().round
        if seen is None:
            return False
        ended = (State.BROKEN, State.DRAINING)
        return seen.number > mine.number or (seen.number == mine.number and seen.state in ended)

    def _join(self) -> Going:
        """Wait for a round of this node; False when the run is closed."""
        planned = True
        if self._current is not None and not self._over(self._current):
            planned = False
            failure = RoundFailure(self._current.number, f"workers of {self.name} failed", True, Cause.WORKER_LOST)
            yield from self._until_done(lambda: self.node.break_round(failure, None))
        self.life += 1
        self._failed = False
        free_for = self._current.number + 1 if self._current is not None else 0
        yield from self._announce(state=NodeState.READY, acknowledged=free_for, reported=free_for, planned=planned)
        while True:
            seen = self.node.view.look()
            current = seen.round
            if current is not None and current.state is State.CLOSED:
                return self._go()
            mine = current.member(self.name) if current is not None else None
            if current is not None and self._takes(mine):
                if current.state is State.ACTIVE:
                    self.node.key.at_work = True
                    self._current = current
                    return True
                shown = self.node.key.record
                record = free_again(shown, current.number) if shown is not None else None
                if record is not None:
                    yield from self._show(record)
            if self.node.view.look().serial == seen.serial:
                yield self.node.changed, 1.0

    def _work(self) -> Going:
        """Until the round is over; False when the run is closed."""
        while self._current is not None and not self._over(self._current) and not self._failed:
            seen = self.node.view.look()
            if seen.round is not None and seen.round.state is State.CLOSED:
                return self._go()
            record = self.node.key.record
            if self.done and record is not None and record.state is not NodeState.DONE:
                yield from self._show(record.model_copy(update={"state": NodeState.DONE, "planned": True}))
            if self.node.view.look().serial == seen.serial and not self._failed:
                yield self.node.changed, 1.0
        return True

    def _go(self) -> bool:
        self.left = True
        self.leave()
        return False

    def _announce(self, **fields: Any) -> Process:
        reached = next((each.step for each in self.workers), None)
        shown = {"life": self.life, "identity": None, "reached": reached, **fields}
        yield from self._show(self.base.model_copy(update=shown))

    def _show(self, record: NodeRecord) -> Process:
        yield from self._until_done(lambda: self.node.show(record))

    def _until_done(self, begin: Callable[[], Process]) -> Process:
        while True:
            try:
                yield from begin()
            except (TransientError, LeaseLostError):
                yield 0.1
            else:
                return
