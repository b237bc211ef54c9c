"""A worker's link to its node's agent in place, through all rounds of the process.

*Runs in* a worker: the thread ``session-link`` reads the agent's messages and holds the life mutex, by which the kernel
reports this process's death to the agent at once.
*Owns* the connection, the mutex and the thread.
*Fails by* exiting the process: with the agent's code on its request, with 1 when the agent is gone (an orphan would
hold its device for ever).
*Invariant*: messages about a round never undo those about a later one, in whatever order they arrive.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import EXIT_FAILURE, ConfigError, RejoinError
from elastic_trainer.ipc import channel as messages
from elastic_trainer.ipc.channel import ChannelClosedError, connect
from elastic_trainer.ipc.mutex import LifeMutex
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import final_message, logger
from elastic_trainer.worker.comm.groups import RankAssignment, StoreAddress
from elastic_trainer.worker.state.training_state import Position

WELCOME_TIMEOUT_S = 30.0
REPORT_EVERY_S = 0.2
IDLE_EVERY_S = 1.0
FAREWELL_TIMEOUT_S = 60.0
"""Limit for the agent's answer. It answers at once unless it is frozen, and then torchrun is frozen too."""
GIVEN_UP_S = 5.0
"""The same for a failed script, whose death gives the agent the same information."""
CLOSE_LIMIT_S = 15.0
"""Time for a failed script to exit; its node waits for that."""


class AgentLink:
    """What the agent has said of rounds, in whatever order it arrived, and what this worker says of them.

    Subclasses carry messages (:meth:`send`) and wait (:meth:`wait`); what arrives they give to :meth:`hear`.
    """

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._formation: messages.Formation | None = None
        self._drain: messages.Drain | None = None
        self._round = 0
        self.nonce = ""
        """Of the round that this worker has entered last."""
        self._over_reason = ""
        self._reported_at = -math.inf
        self.over = 0
        """The newest round known to be over; 0 for none."""

    def send(self, message: messages.Message) -> None:
        raise NotImplementedError

    def wait(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Until ``holds()`` after a message was heard, or ``timeout_s`` seconds have passed."""
        raise NotImplementedError

    def place(self, formation: messages.Formation) -> RankAssignment:
        """This worker's place in the round of ``formation``, which it is about to enter."""
        self._round, self.nonce = formation.number, formation.nonce
        return self.assignment(formation)

    def assignment(self, formation: messages.Formation) -> RankAssignment:
        raise NotImplementedError

    def hear(self, message: messages.Message) -> None:
        """``message`` has arrived. What is said of a round never undoes what is known of a later one."""
        if isinstance(message, messages.Formation):
            if self._formation is None or message.number > self._formation.number:
                self._formation = message
        elif isinstance(message, messages.Drain):
            if self._drain is None or message.number > self._drain.number:
                self._drain = message
        elif isinstance(message, messages.Over) and message.number > self.over:
            self.over, self._over_reason = message.number, message.reason

    def broken(self, round: int) -> str | None:
        """Why ``round`` is over, or None."""
        return self._over_reason if round and round <= self.over else None

    def drain(self, number: int) -> messages.Drain | None:
        """The planned change that ends round ``number``, or None."""
        drain = self._drain
        return drain if drain is not None and drain.number == number else None

    def ready(self, offer: messages.Ready) -> None:
        self.send(offer)

    def await_formation(self, number: int, idle: Callable[[], None] = lambda: None) -> RankAssignment | None:
        """Wait for a round of at least ``number`` that is not broken yet, without limit.

        Returns None when round ``number`` ends before this worker joined it: the worker must then announce that it is
        ready for a later one. ``idle()`` is called about once a second. If the run fails, the agent ends the process.
        """

        def usable() -> messages.Formation | None:
            found = self._formation
            return found if found is not None and found.number >= number and found.number > self.over else None

        while True:
            self.wait(lambda: usable() is not None or self.over >= number, IDLE_EVERY_S)
            found = usable()
            if found is not None:
                return self.place(found)
            if self.over >= number:
                return None
            idle()

    def await_over(self, number: int) -> None:
        """Wait until round ``number`` is known to be over; the agent may end the process instead.

        The wait may last as long as an outage of the store, without which no other round can form.
        """
        self.wait(lambda: self.over >= number, None)

    def failed(
        self,
        number: int,
        error: str,
        *,
        forming: bool = False,
        given_up: bool = False,
        tried: str = "",
        loopback: str = "",
    ) -> None:
        """Report what ended round ``number`` here; see :class:`~elastic_trainer.ipc.channel.Failed`."""
        self.send(
            messages.Failed(
                number=number, error=error, forming=forming, given_up=given_up, tried=tried, loopback=loopback
            )
        )

    def evicted(self, reason: str) -> None:
        self.send(messages.Evicted(reason=reason))

    def report(self, position: Position, step_s: float) -> None:
        """Send the progress a few times a second; dropped if the channel is closed."""
        now = self._clock.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        self.send(
            messages.Progress(
                round=self._round,
                step=position.step,
                epoch=position.cursor.epoch,
                samples=position.cursor.samples,
                step_time_s=step_s,
            )
        )


class ChannelLink(AgentLink):
    """See the module. ``on_over(round)`` is called from the link's thread when rounds up to ``round`` are over."""

    def __init__(self, environment: WorkerEnvironment, on_over: Callable[[int], None]) -> None:
        if environment.channel is None:
            raise ConfigError("in-place recovery needs an agent, and there is none", hint="start the job with torchrun")
        super().__init__()
        self._environment, self._on_over = environment, on_over
        self._changed = threading.Condition()
        self._welcome: messages.Welcome | None = None
        self._closing = False
        self._connection = connect(environment.channel)
        self._mutex = self._make_mutex(environment.channel.parent)
        self._thread = threading.Thread(target=self._listen, name="session-link", daemon=True)
        self._thread.start()
        self.wait(lambda: self._welcome is not None, WELCOME_TIMEOUT_S)
        if self._welcome is None:
            raise RejoinError("the node's agent did not answer in time")

    def close(self, status: str) -> None:
        """Send how this worker ended, and disconnect."""
        if self._closing:
            return
        self._closing = True
        well = status in ("done", "stopped")
        self.send(messages.Leaving(status=status if well else "failed", step=0))
        # The agent disconnects when it has read this. If the worker exited earlier, its death might precede it.
        if self._thread is not threading.current_thread():
            self._thread.join(FAREWELL_TIMEOUT_S if well else GIVEN_UP_S)
        self._connection.close()
        if not well:
            last = threading.Timer(CLOSE_LIMIT_S, self._end, (EXIT_FAILURE, "the script failed, but did not exit"))
            last.daemon = True
            last.start()

    def descriptors(self) -> list[int]:
        return [self._connection.fileno()]

    def send(self, message: messages.Message) -> None:
        try:
            self._connection.send(message)
        except ChannelClosedError:
            logger().debug("link.unsent", kind=type(message).__name__)  # the reading thread also notices the lost link

    def wait(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(holds, timeout_s)

    def assignment(self, formation: messages.Formation) -> RankAssignment:
        host, _, port = formation.store.rpartition(":")
        return RankAssignment(
            round=formation.number,
            rank=formation.rank,
            world_size=formation.world_size,
            local_rank=self._environment.local_rank,
            local_world_size=self._environment.local_world_size,
            store=StoreAddress(host.strip("[]"), int(port), serve=False, prefix=formation.nonce),
            reason=formation.reason,
            address=self._environment.address,
        )

    # ---- the link's thread

    def _listen(self) -> None:
        if self._mutex is not None:
            self._mutex.hold()
        path = None if self._mutex is None else str(self._mutex.path)
        self.send(messages.Hello(pid=os.getpid(), local_rank=self._environment.local_rank, mutex=path))
        try:
            for line in self._connection.lines():
                self._take(messages.read_from_agent(line))
        except messages.MessageError as error:
            self._end(EXIT_FAILURE, str(error))
        if not self._closing:
            self._end(EXIT_FAILURE, "the node's agent is gone")

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.Exit):
            if not self._closing:  # otherwise the process exits by itself with its own reason, such as a traceback
                self._end(message.code, message.reason)
            return
        if isinstance(message, messages.Ping):
            self.send(messages.Pong())
            return
        with self._changed:
            if isinstance(message, messages.Welcome):
                self._welcome = message
            self.hear(message)
            self._changed.notify_all()
        if isinstance(message, messages.Over):
            self._on_over(message.number)

    def _end(self, code: int, reason: str) -> NoReturn:
        logger().warning("worker.ended", reason=reason, exit_code=code)
        final_message()
        os._exit(code)

    @staticmethod
    def _make_mutex(directory: Path) -> LifeMutex | None:
        try:
            return LifeMutex(directory / f"life-{os.getpid()}")
        except (OSError, AttributeError) as error:
            logger().info("mutex.unavailable", error=str(error))
            return None
