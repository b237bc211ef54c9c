"""The network of GPT-2: its size, what it may look at, how it begins, and which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from elastic_trainer.tasks.language.transformer import Transformer, TransformerOptions, padded
from elastic_trainer.training.optimization import decay_groups

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


def test_scores_have_a_row_for_each_token() -> None:
    """(n, t) ids to (n, t, vocabulary), for any t up to the context."""
    model = _model()
    for t in (1, 5, 12):
        assert model(torch.zeros(3, t, dtype=torch.int64)).shape == (3, t, 20)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_a_later_token_does_not_change_earlier_scores(attention: str) -> None:
    """Those before the changed token are the same to the bit; its own and later ones are not."""
    model = _model(TransformerOptions(**{**SMALL.model_dump(), "attention": attention}))
    ids = torch.randint(20, (1, 12), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 7] = (ids[0, 7] + 1) % 20
    before, after = model(ids), model(other)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.isclose(before[0, 7:], after[0, 7:]).all(dim=1).any()


def test_both_kinds_of_attention_give_the_same_scores_and_gradients() -> None:
    """They differ by rounding only."""
    fused = _model()
    plain = _model(TransformerOptions(**{**SMALL.model_dump(), "attention": "explicit"}))
    ids = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(fused(ids), plain(ids), atol=1e-6)
    for model in (fused, plain):
        model(ids).square().sum().backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_dropout_acts_in_training_only(attention: str) -> None:
    """Two passes differ while training, and are equal in evaluation."""
    model = _model(TransformerOptions(**{**SMALL.model_dump(), "attention": attention, "dropout": 0.3}))
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


def test_a_fresh_model_knows_nothing() -> None:
    """Its loss is that of guessing among all tokens alike."""
    scores = _model()(torch.arange(12)[None])
    assert float((scores.logsumexp(-1).mean() - scores.mean()).detach()) == pytest.approx(math.log(20), rel=0.02)


def test_matrices_and_embeddings_decay_and_nothing_else() -> None:
    """Each parameter is in one group; those with one dimension have no weight decay."""
    model = _model()
    decaying, plain = decay_groups(model.parameters())
    assert "weight_decay" not in decaying
    assert plain["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in plain["params"]}
    assert kept == {name for name in names.values() if name.endswith("bias") or "norm" in name or ".before_" in name}
    assert {names[id(parameter)] for parameter in decaying["params"]} == set(names.values()) - kept
    assert {"tokens.weight", "positions.weight"} <= set(names.values()) - kept


def test_padding_is_to_the_next_multiple() -> None:
    """A multiple stays as it is."""
    assert [padded(50257, 64), padded(128, 64), padded(129, 64), padded(7, 1)] == [50304, 128, 192, 7]


def test_heads_must_divide_the_width() -> None:
    """And both are named."""
    with pytest.raises(ValidationError, match=r"'model.heads' 5 does not divide 'model.width' 128"):
        TransformerOptions(heads=5)
