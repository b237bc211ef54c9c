"""Finds machines that compute wrong results silently: passes are repeated on other nodes and compared bit by bit.

In an audited step each rank's first pass through the model is repeated by a rank of another node, all at the same
time, behind the step's passes and before its update; so an audit costs one pass. Which node repeats whose pass changes
from audit to audit. Where the results differ, the rank repeats its own pass, a third rank does too, and most votes
decide.

All ranks come to the same verdicts, and rank 0 reports them. A rank may leave the round, to repeat the step, before
rank 0 has heard the last result; so the next round begins with what the ranks have heard, and rank 0 reports the rest.

Parameters are compared at the end of the step before (:mod:`elastic_trainer.worker.steps.engine`), so no state that
differs is audited, trained on, or adopted by others.

*Runs in* the worker's main thread of all ranks at once. *Owns* a hook of the optimizer.
*Fails by* RoundBrokenError when a peer is gone, StepGivenUpError when the step is to be repeated, ConfigError where a
pass cannot be repeated.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from elastic_trainer.errors import ConfigError, StepGivenUpError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.whereabouts import UNNAMED
from elastic_trainer.worker.model.arithmetic import arithmetic, check_ranks
from elastic_trainer.worker.model.replica import Replica
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.steps.recorded_pass import PassDigests, PassRecorder

_PROMISE = "audit_every compares bits"


@dataclass(frozen=True, slots=True)
class Trial:
    """The pass of ``rank`` is repeated by ``checker``; where they differ ``judge`` decides (None: no third rank)."""

    rank: int
    checker: int
    judge: int | None


def trials(nodes: Sequence[str], turn: int) -> list[Trial]:
    """Which rank repeats which pass at audit number ``turn``; ``nodes``: the node of each rank. Pure.

    Checker and judge are on other nodes, as far as there are enough; ranks of a single node check each other. After as
    many turns as there are other nodes, each node has checked each other one.
    """
    names = list(dict.fromkeys(nodes))
    groups = [[rank for rank, node in enumerate(nodes) if node == name] for name in names]
    if len(groups) == 1:
        groups = [[rank] for rank in groups[0]]
    count = len(groups)
    if count < 2:
        return []
    shift = 1 + turn % (count - 1)
    further = 1 + shift % (count - 1)
    found = []
    for place, group in enumerate(groups):
        for number, rank in enumerate(group):
            others = groups[(place + shift) % count]
            checker = others[number % len(others)]
            thirds = groups[(place + further) % count] if count > 2 else [*others, *group]
            judge = next((each for each in [*thirds[number:], *thirds] if each not in (rank, checker)), None)
            found.append(Trial(rank, checker, judge))
    return found


class AuditFinding(StrEnum):
    """What a difference means."""

    WRONG = "wrong"
    """The named rank has computed a wrong result."""
    ONE_OF_TWO = "one_of_two"
    """One of the two named ranks has, and there is no third to decide."""
    UNREPEATABLE = "unrepeatable"
    """No two results agree."""


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """What the results of one trial say."""

    finding: AuditFinding
    ranks: tuple[int, ...]
    reason: str


def verdict(
    trial: Trial, first: PassDigests, checked: PassDigests, again: PassDigests | None, third: PassDigests | None
) -> AuditVerdict:
    """Who is wrong where ``first``, the pass of a rank, and ``checked``, that of its checker, differ. Pure.

    ``again`` is the rank's own repetition, ``third`` the judge's, or without a judge another one of the checker's
    (None: it could not be computed).
    """
    rank, checker, judge = trial.rank, trial.checker, trial.judge
    if judge is None:
        if again == checked == third:
            return AuditVerdict(
                AuditFinding.WRONG, (rank,), f"rank {rank} agrees with rank {checker} only on its second try"
            )
        if again == first == third:
            return AuditVerdict(
                AuditFinding.WRONG, (checker,), f"rank {checker} agrees with rank {rank} only on its second try"
            )
        both = tuple(sorted((rank, checker)))
        return AuditVerdict(
            AuditFinding.ONE_OF_TWO, both, f"ranks {rank} and {checker} differ, and no third rank can decide"
        )
    if third == first:
        return AuditVerdict(
            AuditFinding.WRONG, (checker,), f"ranks {rank} and {judge} agree, and rank {checker} does not"
        )
    if third == checked:
        later = "agrees a second time" if again == checked else "does not agree a second time"
        reason = f"ranks {checker} and {judge} agree, and rank {rank} does not ({later})"
        return AuditVerdict(AuditFinding.WRONG, (rank,), reason)
    return AuditVerdict(
        AuditFinding.UNREPEATABLE, (), f"ranks {rank}, {checker} and {judge} have three different results"
    )


def together(verdicts: Sequence[AuditVerdict]) -> list[AuditVerdict]:
    """Each named rank once; what a wrong rank explains is left out. Pure."""
    wrong = {each.ranks: each for each in reversed(verdicts) if each.finding is AuditFinding.WRONG}
    named = {rank for ranks in wrong for rank in ranks}
    open_ = {each.ranks: each for each in reversed(verdicts) if not named.intersection(each.ranks)}
    return [*wrong.values(), *(each for ranks, each in open_.items() if ranks or not wrong)]


Results = Mapping[tuple[int, int], PassDigests | None]
"""What was computed, by (rank whose pass it is, rank that repeated it)."""


class PassAudit:
    """See the module. Every step whose number is a multiple of ``every`` is audited.

    ``repeats``: a step in which a rank was wrong is given up once, as at the end of a round, which repeats it.
    """

    def __init__(
        self,
        every: int,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        node: str,
        tracker: HeartbeatReporter,
        *,
        repeats: bool,
    ) -> None:
        self._repeats, self._repeated = repeats, 0
        self._every, self._device, self._tracker = every, device, tracker
        self._node = socket.gethostname() if node == UNNAMED else node
        self._control = Control()
        self._nodes: list[str] = []
        self._recorder = PassRecorder(replica.runner.called, replica.module, device)
        self._step: int | None = None
        """The audited step that is open."""
        self._model_alone = True
        """Whether gradients come through the model's calls alone, as far as that is known."""
        self._warned: set[str] = set()
        self._accusations: list[dict[str, Any]] = []
        """Of the open step: only when all have committed it, it is known that rank 0 has reported them."""
        self._reported = False
        """Whether this process has."""
        optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def bind(self, control: Control) -> None:
        """Audit the ranks of the present round. ConfigError for ranks that compute in different ways."""
        self._recorder.drop()
        self._control, self._step = control, None
        check_ranks(control, arithmetic(self._device), _PROMISE)
        told = json.dumps([self._node, self._accusations, self._reported]).encode()
        nodes, accusations, reported = zip(*map(json.loads, control.gather_bytes(told)), strict=True)
        self._nodes = list(nodes)
        if not any(reported):
            self._accuse(next(filter(None, accusations), []))
        self._accusations, self._reported = [], False

    def begin(self, step: int) -> None:
        """Step number ``step`` begins."""
        self._step, self._accusations, self._reported = None, [], False
        if step % self._every == 0 and not self._control.alone:
            self._step = step
            self._recorder.begin()

    def _before_update(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        try:
            self._audit(step, self._recorder.end())
        finally:
            self._recorder.drop()

    def _audit(self, step: int, mine: PassDigests | None) -> None:
        control, none = self._control, PassDigests(0, 0)
        data = self._recorder.packed() if mine is not None else b""
        buffers = self._recorder.packed_buffers() if data else b""
        rows = control.gather([*_numbers(mine or none), self._recorder.buffers(), len(data), len(buffers)])
        firsts = {rank: PassDigests(row[0], row[1]) for rank, row in enumerate(rows) if row[3]}
        if len({row[2] for row in rows if row[3]}) < 2:
            rows, buffers = [[*row[:4], 0] for row in rows], b""
        data, sizes = data + buffers, [(row[3], row[4]) for row in rows]
        tried = [each for each in trials(self._nodes, step // self._every) if each.rank in firsts]
        results = self._computed([(each.rank, each.checker) for each in tried], data, sizes)
        differing = [
            (each, first, checked)
            for each in tried
            if (checked := results[each.rank, each.checker]) is not None
            and self._seen(first := firsts[each.rank]) != self._seen(checked)
        ]
        if differing:
            self._judge(step, differing, len(tried), data, sizes)
        if self._recorder.problem and self._new(self._recorder.problem):
            logger().warning("audit.skipped", step=step, reason=self._recorder.problem)

    def _judge(
        self,
        step: int,
        differing: Sequence[tuple[Trial, PassDigests, PassDigests]],
        tried: int,
        data: bytes,
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        thirds = {each.rank: each.checker if each.judge is None else each.judge for each, _, _ in differing}
        results = self._computed([(rank, worker) for rank in thirds for worker in (rank, thirds[rank])], data, sizes)
        if len(differing) == tried > 1 and all(
            first.outputs == checked.outputs and results[each.rank, each.rank] == checked
            for each, first, checked in differing
        ):
            self._model_alone = False
            reason = "gradients do not come through the wrapped model's call alone (a penalty on its parameters?)"
            logger().warning("audit.reduced", step=step, reason=reason, compared="outputs")
            return
        found: dict[AuditVerdict, Mapping[str, PassDigests | None]] = {}
        for each, first, checked in differing:
            again, third = results[each.rank, each.rank], results[each.rank, thirds[each.rank]]
            seen = [None if result is None else self._seen(result) for result in (again, third)]
            judged = verdict(each, self._seen(first), self._seen(checked), *seen)
            found[judged] = {"first": first, "checked": checked, "again": again, "third": third}
        verdicts = together(list(found))
        named = [each for each in verdicts if each.finding is not AuditFinding.UNREPEATABLE]
        self._accusations = [self._accusation(step, each, found[each]) for each in named]
        self._accuse(self._accusations)
        if self._control.rank == 0:
            for reason in (each.reason for each in verdicts if each not in named and self._new(each.reason)):
                hint = "have the script ask for torch.use_deterministic_algorithms(True)"
                logger().warning("audit.unrepeatable", step=step, reason=reason, hint=hint)
        wrong = any(each.finding is AuditFinding.WRONG for each in verdicts)
        if wrong and self._repeats and self._repeated != step:
            self._repeated = step
            raise StepGivenUpError(f"an audit found a wrong result in step {step}, which is repeated")

    def _computed(self, tasks: Sequence[tuple[int, int]], data: bytes, sizes: Sequence[tuple[int, int]]) -> Results:
        """Have each pass repeated: a task is the rank whose pass it is and the rank that repeats it.

        ``data`` is this rank's pass with its buffers, and ``sizes`` are those of both parts for each rank.
        """
        me = self._control.rank
        sent = [(data, worker) for rank, worker in tasks if rank == me != worker]
        sources = [rank for rank, worker in tasks if worker == me != rank]
        arrived = dict(zip(sources, self._control.exchange(sent, [(sum(sizes[r]), r) for r in sources]), strict=True))
        width = max((sum(worker == each for _, each in tasks) for worker in range(self._control.world_size)), default=0)
        mine: list[int] = []
        for rank, worker in tasks:
            if worker == me:
                given, own = arrived.get(rank, data), sizes[rank][0]
                result = self._recorder.repeat(given[:own], given[own:])
                mine += [result is not None, *_numbers(result or PassDigests(0, 0))]
        rows = self._control.gather([*mine, *[0] * (3 * width - len(mine))])
        taken, found = [0] * len(rows), {}
        for rank, worker in tasks:
            valid, *numbers = rows[worker][taken[worker] : taken[worker] + 3]
            taken[worker] += 3
            found[rank, worker] = PassDigests(*numbers) if valid else None
        return found

    def _seen(self, result: PassDigests) -> PassDigests:
        return result if self._model_alone else replace(result, gradients=0)

    def _accusation(self, step: int, found: AuditVerdict, evidence: Mapping[str, PassDigests | None]) -> dict[str, Any]:
        """What is logged of it."""
        shown = [
            f"{name}: outputs {each.outputs:016x}, gradients {each.gradients:016x}"
            for name, each in evidence.items()
            if each is not None
        ]
        return {
            "step": step,
            "finding": found.finding.value,
            "ranks": list(found.ranks),
            "nodes": sorted({self._nodes[rank] for rank in found.ranks}),
            "reason": found.reason,
            "digests": "; ".join(shown),
        }

    def _accuse(self, accusations: Sequence[Mapping[str, Any]]) -> None:
        """Rank 0 reports them."""
        if self._control.rank != 0:
            return
        for each in accusations:
            logger().error("audit.mismatch", **each)
            self._tracker.accused(each["step"], each["ranks"], each["nodes"], each["reason"])
        self._reported = True

    def _new(self, reason: str) -> bool:
        """Whether nothing was logged for this ``reason`` before."""
        new = reason not in self._warned
        self._warned.add(reason)
        return new


def check_auditable(replica: Replica, *, several: bool, repeats: bool, device: torch.device) -> None:
    """ConfigError where a pass cannot be repeated by another rank alone, or not to the same bits."""
    if repeats and not replica.lasting:
        raise ConfigError(
            "on_mismatch='repeat' undoes a step, which in-place recovery does",
            hint="start the run with --rdzv-conf recovery=in_place, or say on_mismatch='report'",
        )
    for what, true in (
        ("a model that is sharded or in stages", replica.layout is not None),
        ("reduction='local_sgd' or 'diloco'", replica.apart),
        ("several models or optimizers", several),
        ("sync_batchnorm", replica.even),
    ):
        if true:
            raise ConfigError(f"audit_every does not go with {what}", hint="leave it out")
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            f"{_PROMISE}, and some CUDA kernels give other bits each time",
            hint="say torch.use_deterministic_algorithms(True) before session.wrap(), or leave audit_every out",
        )


def _numbers(result: PassDigests) -> tuple[int, int]:
    return result.outputs, result.gradients
