"""The replica whose gradients are added in one fixed order: a training has the same bits at any number of ranks.

The gradient of each micro-batch is a leaf of one binary tree. Floating point addition is not associative, so the sum of
V micro-batches has the same bits only if the same pairs are added in the same order. The tree over V leaves is fixed: a
node of level k begins at a multiple of 2^k and adds its two halves of level k - 1; if a half lies beyond V, the node is
its left half. Each rank has a contiguous run of leaves, and adds whole nodes of the tree within it: at most two per
level. Then each rank receives one slice of every rank's sums, adds these as the tree says, and all gather the finished
slices. With each gradient travel the moves of BatchNorm buffers, the weighted loss, and which parameters had a gradient
at all.

What one micro-batch computes must have the same bits on all hosts too: see :func:`arithmetic`. On CUDA devices some
kernels of torch are not deterministic in any case, unless the script asks for that
(torch.use_deterministic_algorithms).

*Runs in* the worker's main thread. *Owns* the gradients between a backward pass and the update.
*Fails by* ConfigError for gradients that have no place in the tree, and on each rank that computes otherwise than rank
0 or than the checkpoint; RoundBrokenError when the round is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elastic_trainer import torch_internals
from elastic_trainer.data.plan import cut
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control, Work, collective
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.replica import Buffers, DataPart, Pass, Replica, Use

FIELD = "arithmetic"
"""Its field in checkpoints, for ``allow_changed`` too."""
_TREE = "reduction='tree' promises equal bits"
_ADVICE = {
    "threads": "set OMP_NUM_THREADS to one value for all processes",
    "isa": "use hosts of one kind, or set ATEN_CPU_CAPABILITY to one value for all processes",
    "torch": "install the same version of torch everywhere",
    "device": "train on devices of one kind",
    "modes": "set torch's flags for arithmetic to the same values everywhere",
}


class TreeReplica(Replica):
    """See the module. Each micro-batch begins with the buffers that the step began with."""

    refused: Mapping[Use, tuple[str, str]] = {
        Use.HALVING: (
            "out_of_memory='halve' cannot go with reduction='tree', whose bits depend on the micro-batches",
            "use out_of_memory='skip', or a smaller micro_batch_size",
        )
    }
    fitted = True

    def __init__(self, module: nn.Module, placement: Placement, *, in_place: bool = False) -> None:
        super().__init__(module, placement, in_place=in_place)
        self._kept = self._buffers = self._buffers or Buffers(self.module)
        self.tree = TreeReduction(self.module, self._kept.live, self._kept.kept)

    def part(self, control: Control) -> DataPart:
        return DataPart(control.rank, control.world_size, fixed=True)

    def claims(self, control: Control, resumed: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
        mine = arithmetic(self._placement.device)
        check_ranks(control, mine)
        check_resumed(mine, resumed.get(FIELD), allowed)
        return {FIELD: mine}

    def bind(self, control: Control) -> None:
        self.release()
        super().bind(control)
        self.averaged_over = 1
        self.tree = TreeReduction(self.module, self._kept.live, self._kept.kept)
        self.tree.bind(control, None if control.alone else dist.group.WORLD)

    def release(self) -> None:
        self.tree.unbind()

    def begin_step(self, *, counts: bool = True) -> None:
        replaced = self._kept.keep()
        if replaced is not None:
            raise ConfigError(
                f"buffer {replaced!r} was replaced, and reduction='tree' needs the one that was wrapped",
                hint="change it in place, with copy_()",
            )
        self.tree.begin_step()

    def begin_micro_batch(self, *, counts: bool = True) -> None:
        self._kept.restore()

    def before_backward(self, part: Batch | None, done: Collection[int]) -> float:
        """The share of the micro-batch in the global batch, the same at any number of ranks."""
        if part is None or (part.number is None and part.weight):
            raise ConfigError(
                "reduction='tree' adds up micro-batches",
                hint="draw with session.batches(..., micro_batch_size=...), and loop over step.micro_batches()",
            )
        if part.start in done:
            raise ConfigError("a second backward pass of one micro-batch", hint="add the losses up first")
        return len(part.ids) / part.global_size

    def backward(self, loss: torch.Tensor, about: Pass | None = None) -> float | None:
        super().backward(loss)
        part = about.part if about is not None else None
        if about is None or part is None or part.number is None:
            self.tree.discard()
        else:
            self.tree.capture(part.number, len(part.ids) / part.global_size, about.loss * about.weight)
        if about is None or part is None or not about.last:
            return None
        self.tree.combine(part.parts)
        return self.tree.loss


def arithmetic(device: torch.device) -> dict[str, str]:
    """How this process computes: torch's version, threads, instruction set and device."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    modes = []
    if device.type == "cuda":
        modes += ["tf32"] if torch.backends.cuda.matmul.allow_tf32 else []
        modes += ["benchmark"] if torch.backends.cudnn.benchmark else []
    modes += ["deterministic"] if torch.are_deterministic_algorithms_enabled() else []
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "device": kind,
        "modes": " ".join(modes),
    }


def check_ranks(control: Control, mine: Mapping[str, str], promise: str = _TREE) -> None:
    """Raise on ranks that compute differently from rank 0, and only there: the others can continue without them.

    ``promise`` says what needs equal bits.
    """
    first = json.loads(control.broadcast_bytes(json.dumps(dict(mine)).encode(), 0))
    _check(mine, first, "on rank 0", promise=promise)


def check_resumed(mine: Mapping[str, str], saved: object, allow_changed: Collection[str]) -> None:
    """Raise if the checkpoint was computed differently, unless that is allowed."""
    if isinstance(saved, Mapping) and FIELD not in allow_changed:
        _check(mine, saved, "when the checkpoint was saved", f", or say allow_changed=[{FIELD!r}]")


def _check(
    mine: Mapping[str, str], other: Mapping[str, object], where: str, more: str = "", promise: str = _TREE
) -> None:
    for name, value in mine.items():
        if name in other and other[name] != value:
            raise ConfigError(
                f"{promise}, but '{name}' is {value} here and {other[name]} {where}",
                hint=f"{_ADVICE[name]}{more}",
            )


Value = TypeVar("Value")
Add = Callable[[Value, Value], Value]
"""Returns the sum of its arguments, possibly in the first one's memory."""


class Block(NamedTuple):
    """The node of the tree that begins at leaf ``start`` and spans up to 2^``level`` leaves."""

    start: int
    level: int

    @property
    def sibling(self) -> Block:
        return Block(self.start ^ (1 << self.level), self.level)


class Stack(Generic[Value]):
    """Adds the leaves of one rank, which come in order, as far as the tree allows.

    It holds at most two values per level, hence about log2 of the leaves.
    """

    def __init__(self, add: Add[Value]) -> None:
        self._add = add
        self.held: list[tuple[Block, Value]] = []
        """Blocks from left to right, with their sums."""

    def push(self, leaf: int, value: Value) -> None:
        block = Block(leaf, 0)
        while self.held and self.held[-1][0] == block.sibling and block.sibling.start < block.start:
            left, held = self.held.pop()
            block, value = Block(left.start, block.level + 1), self._add(held, value)
        self.held.append((block, value))


@lru_cache(maxsize=64)
def blocks_of(total: int, world: int, rank: int) -> tuple[Block, ...]:
    """The blocks that ``rank`` is left with when ``total`` leaves are dealt out as by :func:`plan.share`."""
    stack: Stack[None] = Stack(lambda left, right: None)
    for leaf in range(*cut(total, world, rank)):
        stack.push(leaf, None)
    return tuple(block for block, _ in stack.held)


def fold(total: int, found: Mapping[Block, Value], add: Add[Value]) -> Value:
    """The sum of all ``total`` leaves from the sums of blocks that cover them."""

    def summed(block: Block) -> Value:
        if block in found:
            return found[block]
        if block.level == 0:
            raise ValueError(f"leaf {block.start} of {total} is missing")
        middle = block.start + (1 << (block.level - 1))
        left = summed(Block(block.start, block.level - 1))
        return left if middle >= total else add(left, summed(Block(middle, block.level - 1)))

    return summed(Block(0, (total - 1).bit_length()))


_ALIGNED = 16
"""Tensors begin at multiples of this number of elements in a slice, as they do in memory of their own."""
SEGMENT_BYTES = 16 << 20
"""Size of one transfer: while one segment is added, the next travels."""
Leaf = list[torch.Tensor | None]
"""Gradients by parameter, and as the last entry all small values in one vector."""


class TreeReduction:
    """The gradients of ``module``. ``kept`` are copies of its ``buffers`` as they were when the step began."""

    def __init__(self, module: nn.Module, buffers: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        if not all(map(_fills_its_memory, self._parameters)):
            raise ConfigError("a parameter is a part of another tensor", hint="make it one of its own, with clone()")
        pairs = [(buffer, old) for buffer, old in zip(buffers, kept, strict=True) if buffer.is_floating_point()]
        self._moving, self._kept = [buffer for buffer, _ in pairs], [old for _, old in pairs]
        tensors = [*self._parameters, *self._moving]
        self.dtype = torch.float64 if any(each.dtype is torch.float64 for each in tensors) else torch.float32
        self._slices: list[slice] = []
        """Where each tensor of a leaf lies in the flat vector."""
        end = 0
        small = 1 + len(self._parameters) + sum(each.numel() for each in self._moving)
        for count in [*(each.numel() for each in self._parameters), small]:
            self._slices.append(slice(end, end + count))
            end += -(-count // _ALIGNED) * _ALIGNED
        self._length = end
        self._control = Control()
        self._group: Any = None
        self._stack: Stack[Leaf] = Stack(_added)
        self._rooms: dict[str, torch.Tensor] = {}
        self.loss: float | None = None
        """The mean loss over the global batch, once gradients are combined."""

    def bind(self, control: Control, group: Any) -> None:
        """Combine over this round's ranks; ``group`` sums gradients (None: alone)."""
        self._control, self._group = control, group

    def unbind(self) -> None:
        """Drop the round: its group is to end, and may still write to its memory."""
        self._control, self._group, self._rooms = Control(), None, {}

    def begin_step(self) -> None:
        self._stack = Stack(_added)
        self.loss = None

    def capture(self, number: int, fraction: float, loss: torch.Tensor) -> None:
        """Take the gradients of micro-batch ``number``, which is ``fraction`` of the global batch, off the module.

        ``loss`` is its mean times the fraction, as are the gradients.
        """
        leaf: Leaf = []
        for parameter in self._parameters:
            grad, parameter.grad = parameter.grad, None
            leaf.append(None if grad is None else self._dense(grad, parameter))
        present = [float(grad is not None) for grad in leaf]
        moved = [(new - old).to(self.dtype).mul_(fraction) for new, old in zip(self._moving, self._kept, strict=True)]
        first = self._parameters[0].device
        parts = [loss.detach().reshape(1).to(first, self.dtype), torch.tensor(present, dtype=self.dtype, device=first)]
        leaf.append(torch.cat([*parts, *(each.reshape(-1).to(first) for each in moved)]))
        self._stack.push(number, leaf)

    def discard(self) -> None:
        """Drop the gradients of a filler, which belongs to no micro-batch."""
        for parameter in self._parameters:
            parameter.grad = None

    def _dense(self, grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """``grad`` in the tree's precision and its parameter's memory layout."""
        if grad.layout is not torch.strided:
            raise ConfigError("a gradient is sparse", hint="use dense embeddings with reduction='tree'")
        if grad.dtype is self.dtype and grad.stride() == parameter.stride():
            return grad
        return torch.empty_like(parameter, dtype=self.dtype).copy_(grad)

    # ---- all leaves are there

    def combine(self, total: int) -> None:
        """Set the gradient of the global batch of ``total`` micro-batches, and move the buffers, on all ranks."""
        held = dict(self._stack.held)
        self._stack = Stack(_added)
        leaf = fold(total, held, _added) if self._control.alone else self._exchanged(total, held)
        small = leaf[-1]
        if small is None:
            raise RuntimeError("a leaf without its small values")
        count = len(self._parameters)
        loss, *present = small[: count + 1].tolist()
        self.loss = loss
        for parameter, grad, seen in zip(self._parameters, leaf[:-1], present, strict=True):
            parameter.grad = grad.to(parameter.dtype) if grad is not None and seen else None
        begin = count + 1
        with torch.no_grad():
            for buffer, old in zip(self._moving, self._kept, strict=True):
                moved = small[begin : begin + buffer.numel()].view(buffer.shape)
                buffer.copy_(old.to(self.dtype) + moved.to(buffer.device))
                begin += buffer.numel()

    # ---- between ranks

    def _exchanged(self, total: int, held: dict[Block, Leaf]) -> Leaf:
        world = self._control.world_size
        plan = [blocks_of(total, world, rank) for rank in range(world)]
        slice_size = -(-self._length // (world * _ALIGNED)) * _ALIGNED
        mine = self._room("mine", len(held) * world * slice_size).view(len(held), world * slice_size)
        for row, block in zip(mine, plan[self._control.rank], strict=True):
            self._write(held.pop(block), row)
        result = self._room("result", world * slice_size)
        most = max(_ALIGNED, SEGMENT_BYTES // result.element_size() // world)
        segments = [(begin, min(begin + most, slice_size)) for begin in range(0, slice_size, most)]
        sent = [self._send(mine.view(len(mine), world, slice_size), plan, *segment) for segment in segments]
        gathered = []
        for (begin, end), (work, received) in zip(segments, sent, strict=True):
            self._wait(work)
            summed = self._summed(total, plan, received, end - begin)
            whole = result if len(segments) == 1 else self._room(f"whole {begin}", world * (end - begin))
            with collective("tree"):
                work = torch_internals.all_gather_flat(self._group, whole, summed.contiguous())
            gathered.append((self._begun(work), whole, begin, end))
        for work, whole, begin, end in gathered:
            self._wait(work)
            if whole is not result:
                result.view(world, slice_size)[:, begin:end] = whole.view(world, end - begin)
        return self._read(result)

    def _room(self, name: str, count: int) -> torch.Tensor:
        """Memory for ``count`` elements, reused from step to step: fresh memory is slow."""
        room = self._rooms.get(name)
        if room is None or room.numel() != count:
            device = self._parameters[0].device
            room = self._rooms[name] = torch.zeros(count, dtype=self.dtype, device=device)
        return room

    def _send(
        self, mine: torch.Tensor, plan: Sequence[Sequence[Block]], begin: int, end: int
    ) -> tuple[Work, torch.Tensor]:
        """Start to send each rank its slice of all sums held here. Shape of ``mine``: (blocks, ranks, slice)."""
        part = mine[:, :, begin:end].transpose(0, 1)
        if not part.is_contiguous():
            part = self._room(f"out {begin}", part.numel()).view(part.shape).copy_(part)
        sizes = [len(blocks) * (end - begin) for blocks in plan]
        incoming = self._room(f"in {begin}", sum(sizes))
        with collective("tree"):
            work: Work = self._group.alltoall_base(
                incoming, part.view(-1), sizes, [mine.shape[0] * (end - begin)] * len(plan)
            )
        return self._begun(work), incoming

    def _begun(self, work: Work) -> Work:
        """Register the operation, except on CUDA, where a wait with a limit would abort it."""
        return work if self._parameters[0].is_cuda else self._control.works.begun(work)

    def _wait(self, work: Work) -> None:
        with collective("tree"):
            if self._parameters[0].is_cuda:
                work.wait()  # only the device waits; the session checks the round before the update
            else:
                self._control.works.wait(work)

    @staticmethod
    def _summed(total: int, plan: Sequence[Sequence[Block]], received: torch.Tensor, size: int) -> torch.Tensor:
        order = [block for blocks in plan for block in blocks]
        rows: tuple[torch.Tensor, ...] = received.view(len(order), size).unbind()
        return fold(total, dict(zip(order, rows, strict=True)), torch.Tensor.add_)

    def _write(self, leaf: Leaf, row: torch.Tensor) -> None:
        pairs = [(row[part], each) for part, each in zip(self._slices, leaf, strict=True)]
        for target in (target for target, each in pairs if each is None):
            target.zero_()
        torch._foreach_copy_(
            [target for target, each in pairs if each is not None],
            [_flat(each) for _, each in pairs if each is not None],
        )

    def _read(self, flat: torch.Tensor) -> Leaf:
        *gradients, small = [flat[part] for part in self._slices]
        shaped = [
            part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
            for part, parameter in zip(gradients, self._parameters, strict=True)
        ]
        return [*shaped, small]


def _added(left: Leaf, right: Leaf) -> Leaf:
    both = [(mine, other) for mine, other in zip(left, right, strict=True) if mine is not None and other is not None]
    if both:
        torch._foreach_add_([mine for mine, _ in both], [other for _, other in both])
    return [other if mine is None else mine for mine, other in zip(left, right, strict=True)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements are contiguous, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
