"""What a fault cost, from the ledger of a job, and what must hold of the job after all its faults. Pure.

Of a drill the survivors are known, and each is followed (:class:`Effect`). Of a user's job all ranks are taken together
(:class:`Recovery`): in restart mode nobody survives. Times are monotonic seconds of one host. Samples must be exact,
states of ranks equal, and round numbers only grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_trainer.drills.faults import FaultKind, Injected
from elastic_trainer.local.ledger import Line, LineKind, audit, lineage
from elastic_trainer.membership.documents import RoundDocument


def worker_name(node: str, local_rank: int) -> str:
    """``n0`` for the first worker of node n0, and ``n0/1`` for the next."""
    return f"{node}/{local_rank}" if local_rank else node


def split_worker(name: str) -> tuple[str, int]:
    """Node and local rank of the worker called ``name``."""
    node, _, local_rank = name.partition("/")
    return node, int(local_rank or 0)


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest round in which a step was committed. ``nodes`` are in rank order.

    ``pids`` and ``steps`` (of this round) are by worker, see :func:`worker_name`.
    """

    round: int
    world: int
    nodes: tuple[str, ...]
    pids: Mapping[str, int]
    steps: Mapping[str, int]

    def least_steps(self) -> int:
        """The steps that all of them have committed in this round."""
        return min(self.steps.values(), default=0)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one fault did to those who survived it, in seconds and committed steps."""

    what: str
    recovery_s: float
    """From the fault to the next step that all survivors have committed."""
    gap_s: float
    """The longest time between two committed steps of one survivor around the fault."""
    steps_lost: int
    """Steps that a survivor had committed and committed again."""
    details: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def amended(self, details: Mapping[str, float], problems: Iterable[str]) -> Effect:
        """The same with more ``details``, and these ``problems`` instead."""
        return replace(self, details={**self.details, **details}, problems=tuple(problems))


class Book:
    """The ledger lines of a run, kept so that questions are cheap while it grows."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.lines: list[Line] = []
        self._steps: dict[int, list[Line]] = {}
        self._in_round: dict[int, dict[str, list[Line]]] = {}
        self._opened: set[int] = set()
        self.add(lines)

    def add(self, lines: Iterable[Line]) -> None:
        """Take in what was written since."""
        for line in lines:
            self.lines.append(line)
            if line.event is LineKind.OPENED:
                self._opened.add(line.pid)
            if line.event is LineKind.STEP:
                self._steps.setdefault(line.pid, []).append(line)
                name = worker_name(line.node, line.local_rank)
                self._in_round.setdefault(line.round, {}).setdefault(name, []).append(line)

    def standing(self) -> Standing | None:
        """Who trains now; None before the first step."""
        if not self._in_round:
            return None
        number = max(self._in_round)
        last = {name: lines[-1] for name, lines in self._in_round[number].items()}
        return Standing(
            round=number,
            world=max(line.world for line in last.values()),
            nodes=tuple(dict.fromkeys(line.node for line in sorted(last.values(), key=lambda line: line.rank))),
            pids={name: line.pid for name, line in last.items()},
            steps={name: len(lines) for name, lines in self._in_round[number].items()},
        )

    def has_opened(self, pid: int) -> bool:
        """Whether process ``pid`` has ever held the training state."""
        return pid in self._opened

    def first_step(self, node: str, round_: int) -> float | None:
        """When ``node`` had committed its first step in ``round_``; None if it has not."""
        steps = self._in_round.get(round_, {}).get(node)
        return steps[0].t if steps else None

    def steps_after(self, pid: int, t: float, round_: int = 0) -> list[Line]:
        """Steps of process ``pid`` recorded after ``t`` in ``round_`` or later."""
        return [line for line in self._steps.get(pid, []) if line.t > t and line.round >= round_]

    def resumed_at(self, pids: Collection[int], t: float, round_: int = 0, count: int = 1) -> float | None:
        """When all of ``pids`` had committed ``count`` steps after ``t`` in ``round_`` or later; None if not yet."""
        steps = [self.steps_after(pid, t, round_) for pid in pids]
        if not steps or any(len(each) < count for each in steps):
            return None
        return max(each[count - 1].t for each in steps)

    def gap(self, pids: Collection[int], begin: float, end: float) -> float:
        """The longest time between two steps in a row of one of ``pids`` that reaches into ``begin`` to ``end``."""
        spans = [
            later.t - earlier.t
            for pid in pids
            for earlier, later in pairwise(self._steps.get(pid, []))
            if later.t > begin and earlier.t < end
        ]
        return max(spans, default=0.0)

    def committed_again(self, pids: Collection[int] | None = None) -> int:
        """Steps that one of ``pids``, or any process, committed more than once.

        A step that only a worker had committed that then died is not among them: the others make it for the first time.
        """
        numbers = {
            pid: [line.step for line in self._steps.get(pid, [])] for pid in (self._steps if pids is None else pids)
        }
        return max((len(steps) - len(set(steps)) for steps in numbers.values()), default=0)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The first step after a fault in a later round. ``steps_repeated`` were committed before and thrown away."""

    recovery_s: float
    """From the fault to that step."""
    pause_s: float
    """From the last step of the earlier rounds to that step: what the surviving members stood still."""
    round: int
    step: int
    steps_repeated: int
    world: int


def recovery(injected: Injected, lines: Sequence[Line]) -> Recovery | None:
    """The recovery from ``injected`` as far as ``lines`` go; None while there is none."""
    steps = [line for line in lines if line.event is LineKind.STEP]
    round_ = max((line.round for line in steps if line.t <= injected.t), default=injected.round)
    joined = injected.fault.kind is FaultKind.JOIN
    answers = {line.round for line in lines if not joined or line.node == injected.node}
    later = [line for line in steps if line.t > injected.t and line.round > round_ and line.round in answers]
    if not later:
        return None
    first = min(later, key=lambda line: line.t)
    earlier = [line for line in steps if line.round < first.round]
    reached = lineage(earlier)[-1].step if earlier else first.step - 1
    return Recovery(
        recovery_s=first.t - injected.t,
        pause_s=first.t - max((line.t for line in earlier), default=injected.t),
        round=first.round,
        step=first.step,
        steps_repeated=max(0, reached - first.step + 1),
        world=first.world,
    )


# ---- what must hold


class Digest(BaseModel):
    """A digest of everything that one rank had trained, as it wrote it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: Literal["step", "end"]
    """When it was taken: every few steps, and at the end of a process."""
    node: str
    pid: int
    round: int
    step: int
    digest: str
    shard_rank: int = 0
    """With a sharded model; ranks with the same shard rank hold the same."""


def read_digest(text: str) -> Digest | None:
    """The digest that a line of text holds, or None if it is torn."""
    try:
        return Digest.model_validate_json(text)
    except ValidationError:
        return None


def sample_problems(lines: Sequence[Line], size: int) -> list[str]:
    """Whether any sample was repeated or lost in what survives of the job's work."""
    found = audit(lines, size)
    return [] if found.exact else [f"the samples are not exact: {found.reason}"]


def state_problems(digests: Sequence[Digest], members: Iterable[str]) -> list[str]:
    """Whether ranks differed, on the way or at the end; every one of ``members`` must have come to the end."""
    problems = []
    common: dict[tuple[int, int, int], set[str]] = {}
    for each in digests:
        common.setdefault((each.round, each.step, each.shard_rank), set()).add(each.digest)
    apart = sorted(key for key, values in common.items() if len(values) > 1)
    if apart:
        round_, step, _ = apart[0]
        problems.append(f"the parameters of ranks differ at step {step} of round {round_} ({len(apart)} such steps)")
    ends = {(each.node, each.shard_rank): each for each in digests if each.event == "end"}
    absent = sorted(set(members) - {node for node, _ in ends})
    if absent:
        problems.append(f"no parameters were left by {', '.join(absent)}")
    finals = {(each.step, each.shard_rank, each.digest) for each in ends.values()}
    if len(finals) > len({shard_rank for _, shard_rank in ends}):
        told = ", ".join(f"{node} at step {each.step}: {each.digest[:8]}" for (node, _), each in sorted(ends.items()))
        problems.append(f"members ended with different parameters ({told})")
    return problems


def compared(digests: Sequence[Digest]) -> int:
    """At how many points the states of at least two ranks were compared."""
    writers: dict[tuple[int, int, int], set[int]] = {}
    for each in digests:
        writers.setdefault((each.round, each.step, each.shard_rank), set()).add(each.pid)
    return sum(len(pids) > 1 for pids in writers.values())


def round_problems(history: Sequence[RoundDocument]) -> list[str]:
    """Whether the round document, in the order of its versions, ever went back or named one round twice."""
    problems = []
    numbers = [each.number for each in history]
    if numbers != sorted(numbers):
        problems.append(f"round numbers went back: {numbers}")
    nonces: dict[int, set[str]] = {}
    for each in history:
        nonces.setdefault(each.number, set()).add(each.nonce)
    twice = sorted(number for number, names in nonces.items() if len(names) > 1)
    if twice:
        problems.append(f"there were two rounds of one number: {twice}")
    return problems
