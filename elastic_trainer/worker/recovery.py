"""What happens to a training when its round ends, in the order in which it happens.

A collective has failed: is that the end of the round? Then leave it, undo the step unless it was committed, offer the
state to the agent, form the next round, bring its ranks to one state, and repeat the call or the batch cut off.
All waits are in four ports: the agent's link, the process groups, their collectives (``Control``) and the state.

:class:`Recovery` is that of a process whose one round is its life, alone or started again by its launcher.
:class:`InPlaceRecovery` carries the process and its loop from round to round.

*Runs in* the worker's main thread; what the agent says arrives in one of the link's. *Owns* the link, whether the state
held here is whole, and the count of completed calls.
*Fails by* any error that does not come from the end of a round; NonFiniteError for a state that must not continue;
SystemExit if the process leaves by a planned change. The link ends the process when the run is closed.
*Invariant*: only a whole state is ever reported or sent to another rank, and training continues only when all ranks
hold one state.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar, cast

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import (
    EXIT_FAILURE,
    CheckpointError,
    ConfigError,
    RejoinError,
    RoundBrokenError,
    StepGivenUpError,
    TransientError,
)
from elastic_trainer.ipc import channel as messages
from elastic_trainer.ipc.channel import ChannelClosedError, Identity, Ready, connect
from elastic_trainer.ipc.mutex import LifeMutex
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import final_message, logger
from elastic_trainer.worker.comm.control import Codec, Control, is_collective_failure, summary, trail, tried
from elastic_trainer.worker.comm.groups import Group, RankAssignment, StoreAddress
from elastic_trainer.worker.state.restore import heal, identity
from elastic_trainer.worker.state.training_state import Position

# ---- the ports


Result = TypeVar("Result")
_LASTING = (Phase.CHECKPOINT, Phase.EVALUATION)
"""Phases of the script that continue after a round ended in the middle of them."""


class Batch(Protocol):
    """What data.sampler.Batch is; ``used``: a committed step has been about it, here or on other ranks."""

    used: bool


class Step(Protocol):
    """A worker.steps.engine.Step as its end of the round sees it; the identity is that of its rank when it began."""

    number: int
    generation: int
    rank: int
    world_size: int
    committed: bool

    @property
    def batch(self) -> Batch | None: ...


class Groups(Protocol):
    """The process groups of one round at a time; :class:`~elastic_trainer.worker.comm.groups.ElasticGroups`."""

    @property
    def number(self) -> int:
        """The round that this worker is or was last in."""

    @property
    def in_round(self) -> bool:
        """Whether it is in that round."""

    @property
    def leave_garbage(self) -> bool:
        """Whether an operation that the end of the round cuts off ends without an error, and with any output."""

    def form(self, assignment: RankAssignment, broken: Callable[[int], str | None]) -> Group:
        """Enter the round of ``assignment`` and form its groups; ``broken`` says why a round is over already."""

    def sever(self) -> None:
        """Cut the connections of the round, so that its other ranks notice at network speed that this one leaves."""

    def abandon(self, *, planned: bool = False) -> None:
        """Leave the round and drop its groups without waiting for peers; ``planned``: no peer waits in it either."""


class State(Protocol):
    """What is trained here; :class:`~elastic_trainer.worker.steps.training.Training`."""

    @property
    def position(self) -> Position: ...
    @property
    def whole(self) -> bool:
        """Whether it is the state behind some step, and not half of an update."""

    @property
    def sharded(self) -> bool:
        """Whether this rank holds one of several shards."""

    @property
    def apart(self) -> bool:
        """Whether the end of the round undoes committed steps, back to the last one that all ranks synchronised."""

    @property
    def prepared(self) -> int:
        """The step that peers of the shard group may have committed without this rank; 0: none."""

    @property
    def next_size(self) -> int:
        """Samples of the next step, if known."""

    @property
    def span_s(self) -> float:
        """Smoothed seconds per step."""

    @property
    def leaves(self) -> bool:
        """Whether this process is asked to leave."""

    def show(self, phase: Phase) -> Phase:
        """Report that this process is in ``phase``; returns the one before."""

    # ---- the end of a round

    def parted_by(self, error: BaseException) -> ConfigError | None:
        """Why the ranks cannot go on, if ``error`` is due to their being at different points of the script."""

    def gives_up(self, step: Any, error: BaseException) -> BaseException:
        """``error``, or StepGivenUpError if it is one after which all ranks repeat the step (too little memory)."""

    def undo(self) -> None:
        """Undo what an uncommitted step left behind."""

    def release(self) -> None:
        """Let go of the groups of the round."""

    def rewind(self) -> None:
        """The round is left: go back to the last synchronisation. NonFiniteError if the state must not go on."""

    # ---- the next one

    def join(self, group: Group) -> None:
        """The groups of a round were formed."""

    def alike(self, control: Control) -> Control:
        """The ranks that must hold what this one holds."""

    def settle(self, *, committed: bool) -> Step | None:
        """Make the prepared update if peers have ``committed`` it, else undo it; the step that is committed now."""

    def committed(self) -> Mapping[str, Any]:
        """The parts that only commits change, and all ranks alike."""

    def notes(self) -> dict[str, Any]:
        """What a rank learns that is healed from this one."""

    def collect(self) -> dict[str, Any]: ...

    def take_over(self, state: Mapping[str, Any], *, first_rank: bool = False) -> None:
        """Adopt the ``state`` of another rank; it is not whole while this runs."""

    def healed(self, notes: Mapping[str, Any]) -> None:
        """The state of a peer was adopted, with its ``notes``."""

    def resume(self, group: Group, unfit: CheckpointError | None) -> None:
        """Bring all ranks to one state from storage, and take part; ``unfit``: why not from the state held here."""

    def resume_alone(self) -> None:
        """:meth:`resume` with the ranks that have met already."""

    def take_part(self, group: Group, generation: int, given: Mapping[str, Any] | None) -> None:
        """All ranks hold one state: train in the round; ``given`` are the notes of the peer that healed this rank."""

    def agree_on_batch(self, control: Control) -> None:
        """All ranks hold one state: pass over or divide a batch for which a rank had too little memory."""

    def redraw(self) -> None:
        """The ranks changed between a batch and its step."""

    def record(self, step: Any) -> None:
        """Write a committed step to the ledger, once."""

    # ---- saving and leaving

    def save_due(self, step: int) -> None:
        """Save behind ``step`` if that is due and this rank is alone."""

    def save_alone(self) -> None:
        """Save what is only in memory, without a round."""

    def save_before_waiting(self) -> None:
        """Save what is only in memory while all ranks of the round wait."""

    def leave_now(self) -> NoReturn:
        """Leave the job: raises SystemExit."""

    def doubts_gradients(self) -> bool:
        """After a wait for the device: whether a sum that was cut off may have left gradients without an error."""


# ---- the agent's word, and what it is told


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

    def take_assignment(self, formation: messages.Formation) -> RankAssignment:
        """This worker's assignment in the round of ``formation``, which it is about to enter."""
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

    def why_over(self, round: int) -> str | None:
        """Why ``round`` is over, or None."""
        return self._over_reason if round and round <= self.over else None

    def drain(self, number: int) -> messages.Drain | None:
        """The planned change that ends round ``number``, or None."""
        drain = self._drain
        return drain if drain is not None and drain.number == number else None

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
                return self.take_assignment(found)
            if self.over >= number:
                return None
            idle()

    def await_over(self, number: int) -> None:
        """Wait until round ``number`` is known to be over; the agent may end the process instead.

        The wait may last as long as an outage of the store, without which no other round can form.
        """
        self.wait(lambda: self.over >= number, None)

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
    """The link to the agent of this node, through all rounds of the process.

    The thread ``session-link`` reads the agent's messages and holds the life mutex, by which the kernel reports this
    process's death to the agent at once. It exits the process: with the agent's code on its request, with 1 when the
    agent is gone (an orphan would hold its device for ever). ``on_over(round)`` is called from it when rounds up to
    ``round`` are over.
    """

    def __init__(self, environment: WorkerEnvironment, on_over: Callable[[int], None]) -> None:
        if environment.channel is None:
            raise ConfigError("in-place recovery needs an agent, and there is none", hint="start the job with torchrun")
        super().__init__()
        self._environment, self._on_over = environment, on_over
        self._changed = threading.Condition()
        self._welcome: messages.Welcome | None = None
        self._closing = False
        self._connection = connect(environment.channel)
        self._mutex: LifeMutex | None = None
        try:
            self._mutex = LifeMutex(environment.channel.parent / f"life-{os.getpid()}")
        except (OSError, AttributeError) as error:
            logger().info("mutex.unavailable", error=str(error))
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
        well = status in ("done", "stopped", "restarted")
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


# ---- calls of all ranks


NEWCOMER = -1
MOST_MET = 8
"""Rounds that a rank tells others to have met in."""


class CallReplay:
    """Replays calls that all ranks make together, when a round ends in the middle of one.

    Some ranks may have completed the call and continued, others not; simply repeating it would bring them out of step.
    So ranks count completed calls, and one that is behind receives the result from one that has completed it.
    ``count`` is NEWCOMER until this rank has met others.

    Ranks of one round differ by at most one call, since all of them are needed to complete the next. A rank that was a
    spare meanwhile, or is new, continues from where the others are.
    """

    def __init__(self) -> None:
        self.count = NEWCOMER
        self.inside = False
        """Whether the round ended here in the middle of a call."""
        self._last = b""
        self._answer: bytes | None = None

    @property
    def has_answer(self) -> bool:
        """Whether a peer has completed the call that this rank is in."""
        return self._answer is not None

    def completed(self, result: Any, codec: Codec) -> Any:
        """Count a call that completed here, and return its result."""
        self.count = max(0, self.count) + 1
        self._last = codec.encode(result)
        return result

    def answer(self, codec: Codec) -> Any:
        """The result that a peer sent; the call counts as completed here."""
        data, self._answer = cast("bytes", self._answer), None
        self.count += 1
        self._last = data
        return codec.decode(data)

    def meet(self, control: Control, counts: Sequence[int]) -> None:
        """At the start of a round, send the last result to the ranks that are behind."""
        most, self._answer = max(counts), None
        if any(0 <= count < most for count in counts):
            data = control.broadcast_bytes(self._last, counts.index(most))
            if self.count < most:
                self._last = data
                self._answer = data if self.inside else None
        self.count = max(0, most - self.has_answer)


# ---- the recovery


class Recovery:
    """The recovery of a process that is alone or restarted: the end of its round ends it, and its launcher starts
    another one, which resumes.
    """

    led = False
    """Whether the node's agent decides on rounds and on signals to workers."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.lost: BaseException | None = None
        """The end of the round, if the present step has met it inside its block."""

    def begin(self) -> None:
        """Bring all ranks to one state."""
        self._state.resume_alone()

    def postpone(self, error: BaseException) -> None:
        """The round has ended inside the block of a step, whose rest belongs to it: handle that behind the block."""
        self.lost = error

    def absorb(self, step: Step, error: BaseException) -> bool:
        """Whether ``error`` was the end of the round, and training goes on; behind the block of ``step``."""
        return False

    def call(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """Make a call of all ranks, through as many rounds as it takes; ``codec`` transfers its result."""
        return attempt()

    @contextmanager
    def deferring_changes(self) -> Iterator[None]:
        """In the body no planned change is agreed on."""
        yield

    def check_gradients(self) -> None:
        """RoundBrokenError unless the gradients are of all ranks."""

    def knows_change(self) -> bool:
        """Whether the agent has announced a planned change."""
        return False

    def note_change(self) -> None:
        """All ranks know it: make it before the next batch is drawn."""

    def make_change(self) -> bool:
        """Make the agreed change, if any; whether the ranks may have changed."""
        return False


class InPlaceRecovery(Recovery):
    """The recovery of a process that stays."""

    led = True

    def __init__(self, link: AgentLink, groups: Groups, state: State, clock: Clock = SYSTEM) -> None:
        super().__init__(state)
        self._link, self._groups, self._clock = link, groups, clock
        self._calls = CallReplay()
        self._valid = False
        """Whether other ranks may receive the state held here."""
        self._joinable, self._left_behind = True, False
        """Whether newcomers can follow this rank from where it is in the script; whether nobody can."""
        self._first_rank = self._alone = False
        """In the round that is being entered."""
        self._given_up: Step | None = None
        """The step that was undone when the last round ended."""
        self._met: tuple[str, ...] = ()
        """The nonces of the rounds that have met with this rank where it is in the script, and of the one before; the
        newest first."""
        self._met_at = (0, 0, 0)
        """Where that was, in the newest of them."""
        self._change_due = self._defers_changes = False

    def begin(self) -> None:
        self._enter()

    # ---- a collective has failed

    def _confirm_end(self, error: BaseException) -> bool:
        """Whether ``error`` comes from the end of the present round, which the agent has confirmed then; any other
        error is the script's. ConfigError if the ranks could not go on in the next round.

        The script may have met garbage (sizes of what was to come) in a round that is over. Else it raises again.
        """
        parted = self._state.parted_by(error)
        if parted is not None:
            raise parted from error
        number, groups = self._groups.number, self._groups
        misled = groups.leave_garbage and isinstance(error, Exception) and self._link.why_over(number) is not None
        if not groups.in_round or not (misled or is_collective_failure(error)):
            return False
        # Before the peers can notice: those who lose contact with a rank that gives its step up are not the cause.
        given_up = isinstance(error, StepGivenUpError)
        self._link.send(messages.Failed(number=number, error=summary(error), given_up=given_up))
        self._groups.sever()
        logger().warning("collective.failed", round=number, error=summary(error), trail=trail(error))
        self._link.await_over(number)
        return True

    def absorb(self, step: Step, error: BaseException) -> bool:
        state = self._state
        error = state.gives_up(step, error)
        if not self._confirm_end(error):
            return False
        if step.committed and not state.apart:
            state.record(step)
        else:
            self._give_up(step)
        self._valid = self._valid and state.whole
        was_committed, before = step.committed, self._script_position
        self._regroup(joinable=not was_committed)  # newcomers cannot repeat the script's code after a step
        after_step = before if was_committed else (step.generation, step.number, before[2])
        if step.committed and self._script_position != after_step:
            step.committed = False  # healed to another position: the code after this step must not run here
        if step.committed:
            state.save_due(step.number)
        return True

    @property
    def _script_position(self) -> tuple[int, int, int]:
        """Where this rank is in the script; a call whose result is here counts as completed."""
        position = self._state.position
        return position.lineage, position.step, self._calls.count + self._calls.has_answer

    @property
    def _rounds_met(self) -> tuple[str, ...]:
        """The rounds whose ranks stood where this one is in the script; any progress takes all ranks of the newest."""
        return self._met if self._script_position == self._met_at else self._met[:1]

    def _give_up(self, step: Step) -> None:
        """Undo ``step``; where ranks train apart, its batch and those before it come again if it was made."""
        if not step.committed:
            self._state.undo()
        elif step.batch is not None:
            step.batch.used = False
        step.committed = False
        self._given_up = step

    def call(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """``attempt()``, repeated after each round that ends in the middle of it.

        If a peer completed the same call, its result is used instead.
        """
        while True:
            try:
                return self._calls.completed(attempt(), codec)  # type: ignore[no-any-return]
            except (RejoinError, RuntimeError) as error:
                if not self._confirm_end(error):
                    raise
            self._calls.inside = True
            try:
                self._regroup(joinable=False)
            finally:
                self._calls.inside = False
            if self._calls.has_answer:
                return self._calls.answer(codec)  # type: ignore[no-any-return]

    def check_gradients(self) -> None:
        """On CUDA, which runs asynchronously, an update would use partial sums after an abort; a rank that is alone, or
        trains apart, has no sum that fails."""
        if self._state.doubts_gradients() or self._alone:
            self._require_round()

    def _require_round(self) -> None:
        number = self._groups.number
        reason = self._link.why_over(number)
        if reason is not None:
            raise RoundBrokenError(f"round {number} ended before its gradients were complete: {reason}")

    # ---- from one round to the next

    def _regroup(self, *, joinable: bool) -> None:
        self._change_due = False
        self._state.release()
        self._groups.abandon()
        self._state.rewind()
        self._enter(joinable=joinable)
        self._state.redraw()  # the script may open another step with the same batch

    def _enter(self, *, planned: bool = False, joinable: bool = True, assignment: RankAssignment | None = None) -> None:
        """Join the next round, through those that fail to form; ``assignment``: this rank's, if it is fixed already."""
        before, self._joinable = self._state.show(Phase.RENDEZVOUS), joinable
        while True:
            number = assignment.round if assignment is not None else max(self._groups.number, self._link.over) + 1
            self._link.send(self._offer(number, planned=planned))
            planned = False
            if assignment is None:
                assignment = self._link.await_formation(number, self._save_meanwhile)
            if assignment is not None and self._form(assignment):
                break
            assignment = None
        self._state.show(before if before in _LASTING else Phase.TRAINING)

    def _offer(self, number: int, *, planned: bool) -> Ready:
        position, held = self._state.position, None
        if self._valid:
            held = Identity(
                round=position.lineage,
                step=position.step,
                epoch=position.cursor.epoch,
                samples=position.cursor.samples,
                batch=self._state.next_size,
            )
        return Ready(
            number=number,
            state=held,
            planned=planned,
            joinable=self._joinable,
            in_call=self._calls.inside,
            left_behind=self._left_behind,
            met=self._rounds_met,
            step_time_s=self._state.span_s,
        )

    def _save_meanwhile(self) -> None:
        """Without a round for a second (too few nodes, or no store): save the state that is only in memory, and leave
        if this node is asked to: no round will bring the planned change in which it would."""
        self._state.show(Phase.WAITING)
        if self._valid:
            self._state.save_alone()
        if self._state.leaves:
            self._state.leave_now()

    def _form(self, assignment: RankAssignment) -> bool:
        """Form the round and bring its ranks to one state; False if it ended meanwhile."""
        self._state.show(Phase.RENDEZVOUS)
        began, formed = self._clock.monotonic(), None
        try:
            group = self._groups.form(assignment, self._link.why_over)
            formed = self._clock.monotonic()
            self._come_to_one_state(group)
        except (RejoinError, TransientError, RuntimeError) as error:
            if not is_collective_failure(error):
                raise
            logger().info("round.not_entered", round=assignment.round, error=summary(error), trail=trail(error))
            failed = messages.Failed(number=assignment.round, error=summary(error))
            if formed is None:  # else ranks reached each other
                forming = {"forming": True, "tried": tried(error), "loopback": assignment.misleads()}
                failed = failed.model_copy(update=forming)
            self._link.send(failed)
            self._groups.abandon()
            self._link.await_over(assignment.round)
            return False
        logger().info(
            "round.entered",
            round=assignment.round,
            rank=assignment.rank,
            world_size=assignment.world_size,
            form_s=round(formed - began, 4),
            settle_s=round(self._clock.monotonic() - formed, 4),
        )
        return True

    # ---- to one state

    def _come_to_one_state(self, group: Group) -> None:
        state, control, position = self._state, group.control, self._state.position
        state.show(Phase.HEALING)
        state.join(group)
        self._check_call(control)
        if state.sharded:
            self._meet_peers(control)
        mine = identity(state.committed(), position.lineage, position.step) if self._valid else None
        least = max(group.formation.round, position.generation + 1)
        attempted = self._given_up.number if self._given_up is not None else 0
        notes = {**state.notes(), "attempted": attempted}
        self._first_rank, self._alone = control.rank == 0, control.alone
        alike = state.alike(control) if state.sharded else None
        healed = heal(control, mine, least, state.collect, self._take_over, notes, self._calls.count, alike)
        behind = control.rank in healed.behind
        if behind:
            state.healed(healed.notes)
            if self._given_up is not None:
                self._count(self._given_up, attempted_since=healed.notes["attempted"] > attempted)
        self._calls.meet(control, healed.done)
        self._met = (self._link.nonce, *self._rounds_met)[:MOST_MET]
        self._met_at = self._script_position
        if healed.source is None:
            self._valid = False
            state.resume(group, self._unfit(torn=healed.torn))
            self._valid, self._met_at = True, self._script_position
        else:
            state.take_part(group, healed.generation, healed.notes if behind else None)
        state.agree_on_batch(control)
        self._given_up = None

    def _check_call(self, control: Control) -> None:
        """RoundBrokenError on all ranks if one is in the middle of a call, or behind the step that all go on from, and
        another has not met it there: the round was decided on before all was known. The next one is of those who can go
        on from there. Who is behind an earlier step is healed to another place of the script instead.

        Rounds may end while their ranks come to one state: then some have met in them, and others in one before. Who
        shares none with the rank that is furthest is left behind.
        """
        met = [zlib.crc32(each.encode()) for each in self._rounds_met]
        stands = [self._valid, *self._script_position]
        rows = control.gather([self._joinable, self._calls.inside, *stands, *met, *[0] * (MOST_MET - len(met))])
        mets = [set(row[6:]) - {0} for row in rows]
        first = max(range(len(rows)), key=lambda rank: rows[rank][2:6])
        bound = [row for row in rows if not row[0] and (row[1] or row[2:5] == rows[first][2:5])]
        counts = [row[5] for row in rows]
        parted = bool(bound) and (not set.intersection(*mets) or max(counts) - min(counts) > 1)
        self._left_behind = parted and not self._joinable and mets[first].isdisjoint(mets[control.rank])
        if parted:
            raise RoundBrokenError("some ranks are behind a step or in a call, and the others are not there")

    def _meet_peers(self, control: Control) -> None:
        """Shards of one group commit together: a prepared rank whose peer has committed the step commits it too.

        All sums of a prepared rank are complete, so what it commits has the bits of its replicas.
        """
        position = self._state.position
        rows = control.gather([position.lineage, position.step] if self._valid else [-1, -1])
        step = self._state.settle(committed=[position.generation, self._state.prepared] in rows)
        if step is not None:
            self._state.record(step)
            self._given_up = None

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Adopt the ``state`` of another rank. Until that is done this rank must not send its state to others."""
        self._valid = False
        self._state.take_over(state, first_rank=self._first_rank)
        self._valid = True

    def _count(self, step: Step, *, attempted_since: bool) -> None:
        """This rank was healed by a peer that may have committed the step that was undone here.

        Then its samples count as used. The script's code after the step runs here too, unless the peer's state already
        includes its effect because the peer was inside the next step (``attempted_since``).
        """
        position = self._state.position
        if (position.step, position.lineage) != (step.number, step.generation):
            return
        step.committed = not attempted_since
        if step.committed and step.batch is not None:
            step.batch.used = True
        self._state.record(step)

    def _unfit(self, *, torn: bool) -> CheckpointError | None:
        """Why training cannot start from this rank's state, if so."""
        if not torn and self._state.whole:
            return None
        return CheckpointError(
            "no shards are left that make one whole state, and there is no checkpoint"
            if torn
            else "no rank holds a whole state any more: the round ended while the optimizer was at work, and there is"
            " no checkpoint",
            hint="give Session a checkpoint_dir",
        )

    # ---- planned changes

    @contextmanager
    def deferring_changes(self) -> Iterator[None]:
        self._defers_changes = True
        try:
            yield
        finally:
            self._defers_changes = False

    def knows_change(self) -> bool:
        return not self._defers_changes and self._link.drain(self._groups.number) is not None

    def note_change(self) -> None:
        self._change_due = True

    def make_change(self) -> bool:
        """This happens before the next batch is drawn: the script's code after the step has run on all ranks by then,
        so newcomers start where the others are.
        """
        if not self._change_due:
            return False
        self._change_due = False
        drain = self._link.drain(self._groups.number)
        if drain is None:
            raise RuntimeError("a planned change was agreed on that this rank does not know")
        leaves = drain.next is None and self._state.leaves
        if drain.waits and not self._saved_together():
            if not leaves:
                self._regroup(joinable=True)
                return True
            self._state.save_alone()
        if leaves:
            self._state.leave_now()
        self._state.release()
        self._groups.abandon(planned=True)
        self._enter(planned=True, assignment=self._link.take_assignment(drain.next) if drain.next is not None else None)
        return True

    def _saved_together(self) -> bool:
        """Save before too few nodes remain; False if the round has ended in the middle of it."""
        try:
            self._state.save_before_waiting()
        except (RejoinError, RuntimeError) as error:
            if not self._confirm_end(error):
                raise
            return False
        return True
