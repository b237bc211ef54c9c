"""The network of GPT-2: its size, what it may look at, how it begins."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from elastic_trainer.jobs.gpt import Transformer, TransformerOptions

GPT2 = TransformerOptions(layers=12, heads=12, width=768, context=1024)
SMALL = TransformerOptions(layers=2, heads=2, width=16, context=12)


def _model(options: TransformerOptions = SMALL, vocabulary: int = 20) -> Transformer:
    torch.manual_seed(0)
    return Transformer(options, vocabulary)


def test_gpt2_has_as_many_parameters_as_the_original() -> None:
    """124,439,808 with one matrix for tokens in and out; the padded vocabulary adds 47 rows of it."""
    with torch.device("meta"):
        exact = Transformer(GPT2, 50257)
        wide = Transformer(GPT2.model_copy(update={"vocab_multiple": 64}), 50257)
    assert sum(parameter.numel() for parameter in exact.parameters()) == 124_439_808
    assert len(wide.tokens.weight) == 50304
    assert sum(parameter.numel() for parameter in wide.parameters()) == 124_439_808 + 47 * 768


def test_a_later_token_does_not_change_earlier_scores() -> None:
    model = _model()
    ids = torch.randint(20, (1, 12), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 7] = (ids[0, 7] + 1) % 20
    before, after = model(ids), model(other)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.isclose(before[0, 7:], after[0, 7:]).all(dim=1).any()


def test_dropout_acts_in_training_only() -> None:
    model = _model(SMALL.model_copy(update={"dropout": 0.3}))
    ids = torch.arange(12)[None]
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_parameters_begin_as_in_gpt2() -> None:
    """0.02 for matrices, less by the root of 2 x layers where they add to the residual stream; biases 0, gains 1."""
    model = _model(TransformerOptions(layers=8, heads=4, width=64, context=64), vocabulary=200)
    seen = set()
    for name, weights in model.named_parameters():
        parameter = weights.detach()
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            residual = "outward" in name
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.1), name
            assert abs(float(parameter.mean())) < 0.1 * expected
            seen.add(residual)
    assert seen == {True, False}


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValidationError, match=r"'model.heads' 5 does not divide 'model.width' 128"):
        TransformerOptions(heads=5)
