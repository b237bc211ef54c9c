"""Each precision has its autocast and scaler, or a clear refusal."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import Precision
from elastic_trainer.jobs.trainer import arithmetic

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_each_precision_computes_in_its_type_and_needs_no_scaler(precision: str, dtype: torch.dtype) -> None:
    how = arithmetic(Precision(precision), CPU)
    with how.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype
    assert how.scaler() is None


def test_fp16_on_the_cpu_is_refused_with_the_alternatives() -> None:
    with pytest.raises(ConfigError, match=r"fp16 needs a CUDA device.*bf16"):
        arithmetic(Precision.FP16, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fp16_on_cuda_scales_its_gradients() -> None:
    scaler = arithmetic(Precision.FP16, torch.device("cuda")).scaler()
    assert scaler is not None
    assert scaler.is_enabled()
