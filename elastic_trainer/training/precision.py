"""Mixed precision: which autocast and which gradient scaler a device needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.training.config import Precision

_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the forward pass computes. ``dtype`` None is plain fp32."""

    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass and its loss; never of the backward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """A fresh gradient scaler where small gradients would vanish (fp16), else None: bf16 has fp32's range."""
        return torch.amp.GradScaler(self.device_type) if self.dtype is torch.float16 else None


def arithmetic(precision: Precision, device: torch.device) -> Arithmetic:
    """What ``precision`` means on ``device``; ConfigError where the device cannot compute that way."""
    if precision is Precision.FP16 and device.type != "cuda":
        raise ConfigError("precision fp16 needs a CUDA device", hint="set precision=bf16 or precision=fp32 on the CPU")
    if precision is Precision.BF16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("this CUDA device cannot compute in bf16", hint="set precision=fp16 or precision=fp32")
    return Arithmetic(device.type, _DTYPES.get(precision))
