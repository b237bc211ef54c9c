"""This node's workers in one life: the messages of each, and the node's state that follows from them.

*Runs in* any thread, under the conductor's lock. Nothing here waits or sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_trainer.agent.workers.suspicion_rules import AnswerDelays
from elastic_trainer.ipc.channel import Connection
from elastic_trainer.ipc.messages import Leaving, Message, Ready
from elastic_trainer.membership.documents import Identity, NodeState


@dataclass(slots=True)
class Worker:
    """One connected worker and its last messages."""

    connection: Connection
    pid: int
    local_rank: int
    life: int
    ready: Ready | None = None
    left: Leaving | None = None
    sent_formation: int = 0
    sent_over: int = 0
    sent_drain: int = 0
    offered: int = 0
    """The round in which a planned change would give it a rank."""
    heard_at: float = 0.0
    """Monotonic time of its last message; 0 before the watchdog has seen it."""
    busy: str = ""
    """Why it is still in a round that is over, if known."""
    pinged_at: float = 0.0
    """Monotonic time of the first unanswered ping; 0: there is none."""
    queued: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each of its threads had waited for a CPU at that time."""
    delays: AnswerDelays = field(default_factory=AnswerDelays)
    """How long its answers have taken."""
    stuck: bool = False
    """Whether it hung while others waited for it, and has not been free since."""
    unread: deque[Message] = field(default_factory=deque)
    """What it has said behind a message that waits for an answer, and first that message."""
    inside: int = 0
    """The newest round that it may have entered: it was sent its rank and had no reason to refuse."""

    def ponged(self, now: float) -> None:
        if self.pinged_at:
            self.delays.note(now - self.pinged_at, now)
        self.pinged_at = 0.0

    def free_for(self) -> int:
        """The lowest round number that this worker is free for; 0 before it is ready.

        This skips a round that was over before the worker was sent its rank: it will report nothing about that one.
        """
        if self.ready is None:
            return 0
        unmet = self.sent_over + 1 if self.inside < self.ready.number else 0
        return max(self.ready.number, unmet)

    def stays_in(self, number: int) -> bool:
        """Whether it may still be in a round up to ``number``; one that joined a later round never reports that."""
        return 0 < self.inside <= number and self.free_for() <= number


@dataclass(slots=True)
class Life:
    """One start of this node's workers."""

    number: int
    size: int
    workers: dict[int, Worker] = field(default_factory=dict)
    ended: bool = False
    first_step: int | None = None
    reached: Identity | None = None
    """The known progress of the job in this life."""
    joins_at: float = 0.0
    """Monotonic time before which this node does not join."""

    @property
    def steps(self) -> int:
        """Steps known to have been committed in this life."""
        return 0 if self.first_step is None or self.reached is None else self.reached.step - self.first_step

    def note(self, place: Identity) -> None:
        """A worker has reported its progress."""
        self.first_step = place.step if self.first_step is None else self.first_step
        if self.reached is None or place.step >= self.reached.step:
            self.reached = place

    def came_to(self, number: int, step: int) -> None:
        """A worker of round ``number`` holds the state after ``step``, whatever its last report says."""
        if self.reached is None or step > self.reached.step:
            self.reached = Identity(round=number, step=step)

    # ---- the node's state

    @property
    def reports(self) -> list[Ready]:
        """The last reports of the workers that are ready."""
        return [worker.ready for worker in self.workers.values() if worker.ready is not None]

    def complete(self, now: float) -> bool:
        """Whether all workers are ready and the node may join at monotonic time ``now``."""
        whole = bool(self.workers) and len(self.reports) == self.size
        return whole and not self.ended and now >= self.joins_at

    def state(self, now: float, *, evicted: bool) -> NodeState:
        workers = self.workers.values()
        if workers and all(worker.left is not None and worker.left.status == "done" for worker in workers):
            return NodeState.FINISHING
        if not self.complete(now):
            return NodeState.WARMING
        return NodeState.DRAINING if evicted else NodeState.READY

    def shown(self, now: float) -> dict[str, object]:
        """The fields of the node's record that follow from the workers' messages."""
        reports = self.reports
        complete = self.complete(now)
        states = [report.state for report in reports if report.state is not None]
        newest = max(states, key=lambda each: (each.round, each.step)) if complete and states else None
        return {
            "life": self.number,
            "reported": min((worker.free_for() for worker in self.workers.values()), default=0) if complete else 0,
            "planned": all(report.planned for report in reports),
            "identity": Identity.model_validate(newest.model_dump()) if newest else None,
            "step_time_s": max((report.step_time_s for report in reports), default=0.0),
            "stuck": any(worker.stuck for worker in self.workers.values()),
            "joinable": all(report.joinable for report in reports),
            "newcomer": any(not report.met for report in reports),
            "met": min((report.met for report in reports), default=""),
            "busy": next((worker.busy for worker in self.workers.values() if worker.busy), ""),
            "committed": self.reached.step if self.reached is not None and not self.ended else 0,
        }
