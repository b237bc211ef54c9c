"""Loss scaling for 16-bit floats inside a step: all that depends on how GradScaler keeps its state.

The user calls ``optimizer.step()`` or ``scaler.step(optimizer)``; unscaling happens before it and ``update()`` after
it. A step whose gradients overflowed changes no parameter, yet counts as committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from elastic_trainer import torch_internals


class Scaling:
    """The scaler of a session, or none.

    ``anywhere``: ranks that hold shards may find overflows in different ones; this says whether any of them has. The
    scaler asks in whatever way the script unscales: torch does so only over the mesh of the first gradient.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler | None,
        optimizer: torch.optim.Optimizer,
        anywhere: Callable[[bool], bool] | None = None,
    ) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer, self._anywhere = optimizer, anywhere
        if self.scaler is not None:
            torch_internals.require(torch_internals.LOSS_SCALING)
        if self.scaler is not None and anywhere is not None:
            self.scaler.unscale_ = partial(_unscale_alike, self.scaler, anywhere)  # type: ignore[method-assign]
        self._states: Any = None

    @property
    def enabled(self) -> bool:
        return self.scaler is not None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, outside: Sequence[torch.Tensor] = ()) -> None:
        """Unscale gradients once per step, also those of parameters ``outside`` the optimizer."""
        if self.scaler is None or self._stage() is not OptState.READY:
            return
        self.scaler.unscale_(self._optimizer)
        if outside:
            self._unscale(self.scaler, SimpleNamespace(param_groups=[{"params": outside}]))

    def _unscale(self, scaler: torch.amp.GradScaler, group: Any) -> None:
        found = self._state()["found_inf_per_device"]
        for device, overflow in torch_internals.unscaled(scaler, group).items():
            found[device] = torch.maximum(found[device], overflow) if device in found else overflow
        if self._anywhere is not None:
            _agree(found, self._anywhere)

    def before_update(self) -> None:
        """Right before the optimizer changes parameters: drop gradients that overflowed.

        A fused optimizer inside ``scaler.step`` unscales and skips by itself; its ``grad_scale`` says so.
        """
        if self.scaler is None or getattr(self._optimizer, "grad_scale", None) is not None:
            return
        self.unscale()
        if any(bool(found) for found in self._state()["found_inf_per_device"].values()):
            self._optimizer.zero_grad(set_to_none=True)

    def begin(self) -> None:
        self._states = None if self.scaler is None else torch_internals.scaler_states(self.scaler)

    def skipped(self) -> bool:
        """Whether ``scaler.step`` left the optimizer's step out, also if the script has called ``update()`` since."""
        if self.scaler is None:
            return False
        return self._states is not torch_internals.scaler_states(self.scaler) or self._stage() is OptState.STEPPED

    def after_update(self) -> None:
        """Adapt the scale, unless the user did."""
        if self.scaler is not None and self._state()["found_inf_per_device"]:
            self.scaler.update()

    def reset(self) -> None:
        if self.scaler is not None:
            torch_internals.scaler_states(self.scaler).pop(id(self._optimizer), None)

    def _state(self) -> dict[str, Any]:
        assert self.scaler is not None, "asked only where there is one"
        return torch_internals.scaler_states(self.scaler)[id(self._optimizer)]

    def _stage(self) -> OptState:
        stage: OptState = self._state()["stage"]
        return stage


def _unscale_alike(
    scaler: torch.amp.GradScaler, anywhere: Callable[[bool], bool], optimizer: torch.optim.Optimizer
) -> None:
    type(scaler).unscale_(scaler, optimizer)
    _agree(torch_internals.scaler_states(scaler)[id(optimizer)]["found_inf_per_device"], anywhere)


def _agree(found: Mapping[torch.device, torch.Tensor], anywhere: Callable[[bool], bool]) -> None:
    overflow = anywhere(any(bool(each) for each in found.values()))
    for each in found.values():
        each.fill_(float(overflow))
