"""One pass through the model, forward and back, recorded so that any rank can repeat it bit by bit.

What is recorded is what the script gave the model and what its loss gave back: inputs, random numbers, buffers and the
gradient of the outputs. So a repetition needs nothing of the script. It leaves gradients, buffers and random numbers as
they are; hooks of the script's own on the model's modules and parameters run again.

*Runs in* the worker's main thread. *Owns* hooks on the model and its parameters while it records, and until the
recording is dropped copies of the inputs, buffers and gradients of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from elastic_trainer.errors import CheckpointError
from elastic_trainer.torch_internals import tree_map
from elastic_trainer.worker.model import digests
from elastic_trainer.worker.model.buffers import Buffers
from elastic_trainer.worker.state.training_state import random_state, set_random_state
from elastic_trainer.worker.state.transfer import packed, unpacked

_ALIGNED = 64
"""Bytes: some matrix kernels round differently where memory is not aligned to them."""


@dataclass(frozen=True, slots=True)
class PassDigests:
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
    for place, stride in enumerate(strides):
        if stride == 0 and once.shape[place] > 1:
            once = once.narrow(place, 0, 1)
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
