"""Finds machines that compute wrong results silently: passes are repeated on other nodes and compared bit by bit.

In an audited step each rank's first pass through the model is repeated by a rank of another node, all at the same
time, behind the step's passes and before its update; so an audit costs one pass. Which node repeats whose pass changes
from audit to audit. Where the results differ, the rank repeats its own pass, a third rank does too, and most votes
decide.

What is recorded of a pass is what the script gave the model and what its loss gave back: inputs, random numbers,
buffers and the gradient of the outputs. So a repetition needs nothing of the script. It leaves gradients, buffers and
random numbers as they are; hooks of the script's own on the model's modules and parameters run again.

All ranks come to the same verdicts, and rank 0 reports them. A rank may leave the round, to repeat the step, before
rank 0 has heard the last result; so the next round begins with what the ranks have heard, and rank 0 reports the rest.

Parameters are compared at the end of the step before (:mod:`elastic_trainer.worker.steps.engine`), so no state that
differs is audited, trained on, or adopted by others.

*Runs in* the worker's main thread of all ranks at once. *Owns* a hook of the optimizer; hooks on the model and its
parameters while it records, and until the recording is dropped copies of the inputs, buffers and gradients of one pass.
*Fails by* RoundBrokenError when a peer is gone, StepGivenUpError when the step is to be repeated, ConfigError where a
pass cannot be repeated.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from elastic_trainer.errors import CheckpointError, ConfigError, StepGivenUpError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.torch_internals import tree_map
from elastic_trainer.worker.comm.control import UNNAMED, Control
from elastic_trainer.worker.model import digests
from elastic_trainer.worker.model.replica import Buffers, Replica, Use
from elastic_trainer.worker.model.tree import arithmetic, check_ranks
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import packed, unpacked
from elastic_trainer.worker.state.training_state import random_state, set_random_state

_ALIGNED = 64
"""Bytes: some matrix kernels round differently where memory is not aligned to them."""


class PassDigests(NamedTuple):
    """63 bits each that depend on every bit of the outputs of a pass, and of its gradients of all parameters."""

    outputs: int
    gradients: int


class PassRecorder:
    """Records the first pass of a step through ``called``, whose parameters and buffers are those of ``module``."""

    def __init__(self, called: nn.Module, module: nn.Module, device: torch.device) -> None:
        self._called, self._module, self._device = called, module, device
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._start = Buffers(module)
        """The buffers as the recorded pass found them."""
        self._now = Buffers(module)
        self._handles: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._random: dict[str, Any] = {}
        self._autocast: list[Any] = []
        self._training: list[bool] = []
        self._outputs: digests.Numbers | None = None
        self._wanted: dict[int, torch.Tensor] = {}
        """The gradients of the outputs by number, as far as the loss depends on them."""
        self._gradients: dict[int, torch.Tensor] = {}
        """Those of the parameters, by number."""
        self.problem = ""
        """Why what was recorded cannot be compared; empty if it can."""

    def begin(self) -> None:
        """Record the next pass; the last one is dropped."""
        self.drop()
        self._handles = [
            self._called.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            self._called.register_forward_hook(self._after),
            *(_hooked(each, self._gradient_of(number)) for number, each in enumerate(self._parameters)),
        ]

    def end(self) -> PassDigests | None:
        """Remove all hooks; the digests of the pass, or None and a :attr:`problem`."""
        self._unhook()
        if not self.problem and (self._outputs is None or not self._gradients):
            self.problem = "the wrapped model was not called in the step, or no loss depends on what it gave"
        if self.problem or self._outputs is None:
            return None
        found = [self._gradients.get(number) for number in range(len(self._parameters))]
        return PassDigests(_joined(self._outputs()), _digest(found))

    def drop(self) -> None:
        self._unhook()
        self._inputs, self._wanted, self._gradients, self._outputs, self.problem = {}, {}, {}, None, ""

    def buffers(self) -> int:
        """The digest of the buffers as the pass found them."""
        return _digest(self._start.kept)

    def packed_buffers(self) -> bytes:
        """The buffers as the pass found them, for a rank that holds others."""
        return packed({"buffers": [_kept(each) for each in self._start.kept]})

    def packed(self) -> bytes:
        """What a rank with the same buffers needs to repeat the pass; empty, with a problem."""
        state = {
            "inputs": self._inputs,
            "wanted": {str(number): _kept(each) for number, each in self._wanted.items()},
            "random": self._random,
            "autocast": self._autocast,
            "training": self._training,
        }
        try:
            return packed(state)
        except CheckpointError as error:
            self.problem = f"the model is called with what cannot be sent to another rank: {error}"
            return b""

    def repeat(self, data: bytes, buffers: bytes = b"") -> PassDigests | None:
        """Repeat a pass that any rank has packed, and its ``buffers`` where they differ from those here.

        None, with a problem, where it cannot be repeated.
        """
        state, before = unpacked(data), random_state(self._device)
        modules = list(self._module.modules())
        flags = [each.training for each in modules]
        self._now.keep()
        try:
            self._start.undo()  # to the tensors that the recorded pass began with
            if buffers:
                theirs = [self._here(each) for each in unpacked(buffers)["buffers"]]
                torch._foreach_copy_(self._start.live, theirs)
            _set_training(modules, state["training"])
            set_random_state(state["random"], self._device)
            return self._computed(state)
        except (RuntimeError, ValueError) as error:  # a checkpoint inside the model that refuses it, or no memory left
            self.problem = f"the pass could not be repeated: {str(error).partition(chr(10))[0]}"
            return None
        finally:
            set_random_state(before, self._device)
            _set_training(modules, flags)
            self._now.undo()

    def _computed(self, state: Mapping[str, Any]) -> PassDigests:
        enabled, dtype, cached = state["autocast"]
        inputs, named = tree_map(self._here, state["inputs"]["all"], is_leaf=_is_kept)
        autocast = torch.autocast(
            self._device.type, getattr(torch, dtype), enabled=bool(enabled), cache_enabled=bool(cached)
        )
        with torch.enable_grad(), autocast:
            outputs = list(_tensors(self._called(*inputs, **named)))
        found = digests.begun([each.detach() for each in outputs])
        wanted = {int(number): self._here(each) for number, each in state["wanted"].items()}
        gradients = torch.autograd.grad(
            [outputs[number] for number in wanted], self._parameters, list(wanted.values()), allow_unused=True
        )
        return PassDigests(_joined(found()), _digest(gradients))

    # ---- hooks

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if self._inputs:
            if self._gradients:  # the next micro-batch
                self._unhook()
            else:
                self.problem = "the wrapped model is called several times for one backward pass"
            return
        kind = self._device.type
        self._autocast = [
            torch.is_autocast_enabled(kind),
            str(torch.get_autocast_dtype(kind)).removeprefix("torch."),
            torch.is_autocast_cache_enabled(),
        ]
        self._training = [each.training for each in self._module.modules()]
        self._random = random_state(self._device)
        self._start.keep()
        self._inputs = {"all": tree_map(lambda each: _kept(each), [list(args), kwargs])}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._outputs is not None or not self._inputs or not torch.is_grad_enabled():
            return
        outputs = list(_tensors(output))
        self._outputs = digests.begun([each.detach() for each in outputs])
        for number, each in enumerate(outputs):
            if each.requires_grad:
                self._handles.append(_hooked(each, self._wanted_of(number)))

    def _wanted_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if number in self._wanted:
                self.problem = _SEVERAL
            self._wanted[number] = gradient

        return hook

    def _gradient_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if gradient.layout is not torch.strided:
                self.problem = "a gradient is sparse"
            elif number in self._gradients:
                self.problem = _SEVERAL
            self._gradients[number] = gradient  # itself, or torch would add later gradients into its memory

        return hook

    def _unhook(self) -> None:
        for each in self._handles:
            each.remove()
        self._handles = []

    def _here(self, kept: Any) -> Any:
        """A tensor as it was where it was recorded, in memory of the same layout on this device."""
        if not _is_kept(kept):
            return kept
        return _laid_out(kept["tensor"].to(self._device), kept["strides"], kept["offset"]).requires_grad_(
            kept["requires_grad"]
        )


_SEVERAL = "one pass through the model has several backward passes"


def _hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    return tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _kept(value: Any) -> Any:
    """A tensor that may change meanwhile, with what its bits alone do not say."""
    if not isinstance(value, torch.Tensor):
        return value
    return {
        "tensor": value.detach().clone(),
        "strides": list(value.stride()),
        "offset": value.data_ptr() % _ALIGNED // value.element_size() if value.numel() else 0,
        "requires_grad": value.requires_grad,
    }


def _is_kept(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"tensor", "strides", "offset", "requires_grad"}


def _laid_out(tensor: torch.Tensor, strides: Sequence[int], offset: int) -> torch.Tensor:
    """A copy of ``tensor`` with these ``strides``, ``offset`` elements behind aligned memory."""
    once = tensor
    for axis, stride in enumerate(strides):
        if stride == 0 and once.shape[axis] > 1:
            once = once.narrow(axis, 0, 1)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, strides, strict=True))
    new = tensor
    with suppress(RuntimeError):  # elements that overlap in another way: their values alone must do
        memory = torch.empty(max(1, reach) + offset, dtype=tensor.dtype, device=tensor.device)
        memory.as_strided(once.shape, strides, offset).copy_(once)
        new = memory.as_strided(tensor.shape, strides, offset)
    return new


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in what a model gives."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for each, flag in zip(modules, flags, strict=True):
        each.training = flag


def _digest(tensors: Sequence[torch.Tensor | None]) -> int:
    """One number for all; None (a parameter without a gradient) differs from zeros."""
    given = [each for each in tensors if each is not None]
    return _joined([*digests.begun(given)(), *(number for number, each in enumerate(tensors) if each is None)])


def _joined(numbers: Sequence[int] | Callable[[], Sequence[int]]) -> int:
    found = numbers() if callable(numbers) else numbers
    return xxhash.xxh3_64_intdigest(np.array(list(found), np.uint64).tobytes()) >> 1


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
    for index, group in enumerate(groups):
        for number, rank in enumerate(group):
            others = groups[(index + shift) % count]
            checker = others[number % len(others)]
            thirds = groups[(index + further) % count] if count > 2 else [*others, *group]
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
        for one, other, said in ((rank, checker, checked), (checker, rank, first)):
            if again == said == third:
                reason = f"rank {one} agrees with rank {other} only on its second try"
                return AuditVerdict(AuditFinding.WRONG, (one,), reason)
        reason = f"ranks {rank} and {checker} differ, and no third rank can decide"
        return AuditVerdict(AuditFinding.ONE_OF_TWO, (min(rank, checker), max(rank, checker)), reason)
    if third == first:
        reason = f"ranks {rank} and {judge} agree, and rank {checker} does not"
        return AuditVerdict(AuditFinding.WRONG, (checker,), reason)
    if third == checked:
        later = "agrees a second time" if again == checked else "does not agree a second time"
        reason = f"ranks {checker} and {judge} agree, and rank {rank} does not ({later})"
        return AuditVerdict(AuditFinding.WRONG, (rank,), reason)
    reason = f"ranks {rank}, {checker} and {judge} have three different results"
    return AuditVerdict(AuditFinding.UNREPEATABLE, (), reason)


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
        rows = control.gather([*(mine or none), self._recorder.buffers(), len(data), len(buffers)])
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
                mine += [result is not None, *(result or PassDigests(0, 0))]
        rows = self._control.gather([*mine, *[0] * (3 * width - len(mine))])
        taken, found = [0] * len(rows), {}
        for rank, worker in tasks:
            valid, *numbers = rows[worker][taken[worker] : taken[worker] + 3]
            taken[worker] += 3
            found[rank, worker] = PassDigests(*numbers) if valid else None
        return found

    def _seen(self, result: PassDigests) -> PassDigests:
        return result if self._model_alone else PassDigests(result.outputs, 0)

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


def check_auditable(replica: Replica, *, repeats: bool, device: torch.device) -> None:
    """ConfigError where a pass cannot be repeated by another rank alone, or not to the same bits."""
    if repeats and not replica.in_place:
        raise ConfigError(
            "on_mismatch='repeat' undoes a step, which in-place recovery does",
            hint="start the run with --rdzv-conf recovery=in_place, or say on_mismatch='report'",
        )
    replica.check(Use.AUDIT)
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            f"{_PROMISE}, and some CUDA kernels give other bits each time",
            hint="say torch.use_deterministic_algorithms(True) before session.wrap(), or leave audit_every out",
        )
