"""Each precision has its autocast and scaler, or a clear refusal."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.training.config import Precision
from elastic_trainer.training.precision import arithmetic

CPU = torch.device("cpu")


def test_fp32_changes_nothing() -> None:
    """No autocast, no scaler."""
    how = arithmetic(Precision.FP32, CPU)
    with how.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert how.scaler() is None


def test_bf16_computes_in_bf16_on_the_cpu_and_needs_no_scaler() -> None:
    """Matrix products come out in bf16; the range of bf16 needs no scaling."""
    how = arithmetic(Precision.BF16, CPU)
    with how.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert how.scaler() is None


def test_fp16_on_the_cpu_is_refused_with_the_alternatives() -> None:
    """The sentence says what to use instead."""
    with pytest.raises(ConfigError, match=r"fp16 needs a CUDA device.*bf16"):
        arithmetic(Precision.FP16, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fp16_on_cuda_scales_its_gradients() -> None:
    """fp16 comes with an enabled scaler."""
    scaler = arithmetic(Precision.FP16, torch.device("cuda")).scaler()
    assert scaler is not None
    assert scaler.is_enabled()
