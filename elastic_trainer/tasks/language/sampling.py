"""Texts from a language model, a token at a time, drawn from a generator of its own, never from the global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_trainer.tasks.language.tokenizer import Tokenizer
from elastic_trainer.tasks.language.transformer import Transformer
from elastic_trainer.worker.collectives import evaluating


@dataclass(frozen=True, slots=True)
class Manner:
    """How to draw. ``temperature`` 0 takes the likeliest token; ``top_k`` limits the choice to the k likeliest."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0


def written(model: Transformer, tokenizer: Tokenizer, prompt: str, manner: Manner) -> str:
    """``prompt`` and what ``model`` writes behind it."""
    ids = [int(number) for number in tokenizer.encode(prompt)]
    return tokenizer.decode(continued(model, ids, tokenizer.size, manner))


def continued(model: Transformer, ids: Sequence[int], vocabulary: int, manner: Manner) -> list[int]:
    """``ids`` (at least one) and as many more as ``manner`` says, all below ``vocabulary``."""
    generator = torch.Generator().manual_seed(manner.seed)
    device = model.tokens.weight.device
    result = list(ids)
    with evaluating(model), torch.no_grad():
        for _ in range(manner.tokens):
            seen = torch.tensor([result[-model.context :]], device=device)
            scores = model.forward(seen)[0, -1, :vocabulary]  # not model(): its lengths differ, it would be recompiled
            result.append(drawn(scores.float().cpu(), manner, generator))
    return result


def drawn(scores: Tensor, manner: Manner, generator: torch.Generator) -> int:
    """One token by its (vocabulary,) scores."""
    if manner.temperature == 0.0:
        return int(scores.argmax())
    if manner.top_k is not None and manner.top_k < len(scores):
        least = scores.topk(manner.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    chances = (scores / manner.temperature).softmax(dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))
