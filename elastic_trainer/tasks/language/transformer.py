"""A decoder-only transformer as GPT-2 is one: pre-LayerNorm, GELU, learned positions, tied embeddings.

Shapes in comments: n sequences, t tokens, h heads, w width. Sources: Radford et al. 2019 (GPT-2: LayerNorm before each
part and at the end, residual projections scaled down at the beginning), Vaswani et al. 2017 (attention), Press & Wolf
2017 (one matrix for tokens in and out).
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer.training.config import Section
from elastic_trainer.training.sharding import whole

_INITIAL_STD = 0.02


class TransformerOptions(Section):
    """``model:`` the size of the network."""

    layers: int = Field(default=4, ge=1, le=1024)
    heads: int = Field(default=4, ge=1, le=1024)
    width: int = Field(default=128, ge=1, le=65536, description="of the residual stream; a multiple of heads")
    context: int = Field(default=64, ge=1, le=1 << 20, description="tokens that a prediction may look at")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    vocab_multiple: int = Field(default=1, ge=1, description="the vocabulary is padded to a multiple: 50257 to 50304")
    shard: bool = Field(default=False, description="over the processes of each node (FSDP2), for large models")
    tensor_parallel: int = Field(default=1, ge=1, description="with shard: processes that divide each hidden layer")

    @model_validator(mode="after")
    def _divides(self) -> TransformerOptions:
        if self.width % self.heads:
            raise ValueError(f"'model.heads' {self.heads} does not divide 'model.width' {self.width}")
        if self.tensor_parallel > 1 and not self.shard:
            raise ValueError("'model.tensor_parallel' needs 'model.shard'")
        if 4 * self.width % self.tensor_parallel:
            raise ValueError(
                f"'model.tensor_parallel' {self.tensor_parallel} does not divide the hidden layers of {4 * self.width}"
            )
        return self


class Attention(nn.Module):
    """Each token looks at itself and those before it, with ``heads`` different looks."""

    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        self.heads, self.rate = options.heads, options.dropout
        self.inward = nn.Linear(options.width, 3 * options.width)
        self.outward = nn.Linear(options.width, options.width)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        query, key, value = self.inward(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.drop(self.outward(mixed.transpose(1, 2).reshape(n, t, width)))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention, then a network of one hidden layer; both add to what passes through."""

    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        width = options.width
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(options)
        self.before_hidden = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.outward = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        wide = functional.gelu(self.hidden(self.before_hidden(x)), approximate="tanh")
        return x + self.drop(self.outward(wide))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Scores for the token that follows each token."""

    def __init__(self, options: TransformerOptions, vocabulary: int) -> None:
        super().__init__()
        self.context, self.layers = options.context, options.layers
        self.tokens = nn.Embedding(padded(vocabulary, options.vocab_multiple), options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.init_weights()

    def forward(self, ids: Tensor) -> Tensor:
        """(n, t) token ids, t up to the context, to (n, t, vocabulary) scores."""
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.tokens(ids) + self.positions(place))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)

    def init_weights(self) -> None:
        """Normal with 0.02; what adds to the residual stream is scaled by the root of how many do (GPT-2, 2.3).

        Again after a model was built on the meta device, and given memory.
        """
        for name, parameter in self.named_parameters():
            with whole(parameter) as filled:
                if name.endswith("bias"):
                    nn.init.zeros_(filled)
                elif filled.dim() > 1:
                    residual = name.endswith("outward.weight")
                    nn.init.normal_(filled, std=_INITIAL_STD / (math.sqrt(2 * self.layers) if residual else 1.0))
                else:
                    nn.init.ones_(filled)


def padded(vocabulary: int, multiple: int) -> int:
    """The next multiple: sizes that are multiples of 64 suit the matrix units of GPUs."""
    return -(-vocabulary // multiple) * multiple
