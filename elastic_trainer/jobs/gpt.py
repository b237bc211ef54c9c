"""A language model of GPT-2's kind: from a toy on Shakespeare's works to the 124 million parameters of the original.

A decoder-only transformer: pre-LayerNorm, GELU, learned positions, tied embeddings. Shapes in comments: n sequences, t
tokens, h heads, w width. Sources: Radford et al. 2019 (GPT-2: LayerNorm before each part and at the end, residual
projections scaled down at the beginning), Vaswani et al. 2017 (attention), Press & Wolf 2017 (one matrix for tokens in
and out).

Batches and budgets may be given in tokens. All samples have as many targets (see corpus), so the mean loss over a batch
is a mean over tokens, and the gradient is the same however the batch is divided. Texts are written a token at a time,
drawn from a generator of their own, never from the global one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from elastic_trainer import Batch, whole
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.corpus import Corpus, TextOptions, load_corpus
from elastic_trainer.jobs.task import Datasets, Exhibits, Task, build_optimizer, decay_groups
from elastic_trainer.jobs.texts import Tokenizer

_INITIAL_STD = 0.02


class TransformerOptions(Section):
    """``model:`` the size of the network."""

    layers: int = Field(default=4, ge=1, le=1024, description="blocks")
    heads: int = Field(default=4, ge=1, le=1024, description="of the attention")
    width: int = Field(default=128, ge=1, le=65536, description="of the residual stream; a multiple of heads")
    context: int = Field(default=64, ge=1, le=1 << 20, description="tokens that a prediction may look at")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="behind attention and perceptron")
    vocab_multiple: int = Field(default=1, ge=1, description="the vocabulary is padded to a multiple: 50257 to 50304")
    shard: bool = Field(default=False, description="over the processes of each node (FSDP2), for large models")
    tensor_parallel: int = Field(default=1, ge=1, description="with `shard`: processes that divide each hidden layer")

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
        # Sizes that are multiples of 64 suit the matrix units of GPUs.
        padded = -(-vocabulary // options.vocab_multiple) * options.vocab_multiple
        self.tokens = nn.Embedding(padded, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.init_weights()

    def forward(self, ids: Tensor) -> Tensor:
        """(n, t) token ids, t up to the context, to (n, t, vocabulary) scores."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.tokens(ids) + self.positions(positions))
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
    """``ids`` (at least one) and as many more as ``manner`` says, all below ``vocabulary``.

    ``model`` is in evaluation mode.
    """
    generator = torch.Generator().manual_seed(manner.seed)
    device = model.tokens.weight.device
    result = list(ids)
    with torch.no_grad():
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


_HIGHEST_EXPONENT = 700.0


class GptOptions(Section):
    """``options:`` sizes in tokens, and what is shown after an evaluation."""

    batch_tokens: int | None = Field(
        default=None, ge=1, description="tokens for each step over all ranks: gives `global_batch`"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="tokens of the run: gives `max_steps`")
    prompt: str = Field(default="\n", min_length=1, description="what the sample texts begin with")
    sample_tokens: int = Field(default=200, ge=0, description="length of the texts that are shown; 0: none")


class Gpt(Task):
    """The next token."""

    Data = TextOptions
    Model = TransformerOptions
    Options = GptOptions

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus(self.data_options, self.model_options.context)

    def datasets(self) -> Datasets:
        return Datasets(train=self.corpus.train, test=self.corpus.validation)

    def identity(self) -> Mapping[str, Any]:
        return self.corpus.identity(self.data_options.tokenizer)

    def model(self) -> nn.Module:
        return Transformer(self.model_options, self.corpus.vocabulary)

    def miniature(self) -> nn.Module:
        options: TransformerOptions = self.model_options
        return Transformer(options.model_copy(update={"layers": 1, "width": options.heads}), self.corpus.vocabulary)

    def mesh(self) -> Mapping[str, int]:
        options: TransformerOptions = self.model_options
        return {"dp_shard": -1, "tp": options.tensor_parallel} if options.shard else {}

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Each block on its own, so that one block at a time is whole in memory; then what is left."""
        assert isinstance(model, Transformer)
        for block in model.blocks:
            if self.model_options.tensor_parallel > 1:
                plan = {"hidden": ColwiseParallel(), "outward": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
            if self.config.compile:
                block.compile()
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])

    def init_weights(self, model: nn.Module) -> None:
        assert isinstance(model, Transformer)
        model.init_weights()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(self.config.optimizer, decay_groups(model.parameters()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return token_losses(model, batch.data).mean()

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        losses = token_losses(model, batch.data)
        return {"loss": (losses.double().sum(), losses.numel())}

    def implied_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """exp of the mean loss, and its bits where a token is a known unit of text."""
        implied = {"perplexity": math.exp(min(metrics["loss"], _HIGHEST_EXPONENT))}
        tokenizer = self.corpus.tokenizer
        if tokenizer is not None and tokenizer.unit is not None:
            implied[f"bits_per_{tokenizer.unit}"] = metrics["loss"] / math.log(2.0)
        return implied

    def implied_config(self) -> Mapping[str, Any]:
        """``global_batch`` and ``max_steps`` from the numbers of tokens."""
        options: GptOptions = self.options
        context: int = self.model_options.context
        implied, tokens, most = {}, options.batch_tokens, options.max_tokens
        if tokens is not None:
            if tokens % context:
                what = f"options.batch_tokens {tokens} is not a multiple of model.context {context}"
                raise ConfigError(what, hint=f"set it to {max(1, tokens // context) * context}")
            implied["global_batch"] = tokens // context
        batch = implied.get("global_batch", self.config.global_batch)
        if most is not None and batch is not None:
            if most < batch * context:
                what = f"options.max_tokens {most} is less than the {batch * context} tokens of one step"
                raise ConfigError(what, hint="raise it")
            implied["max_steps"] = most // (batch * context)
        return implied

    def exhibits(self, model: nn.Module, batch: Batch) -> Exhibits:
        """A text behind the same prompt each time, from the same random numbers."""
        del batch
        tokenizer, options = self.corpus.tokenizer, self.options
        if tokenizer is None or options.sample_tokens == 0 or not isinstance(model, Transformer):
            return Exhibits()
        manner = Manner(tokens=options.sample_tokens, seed=self.config.seed)
        return Exhibits(texts={"sample": written(model, tokenizer, options.prompt, manner)})


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """(n, t + 1) tokens to the n * t cross entropies, in nats, of all but the first of each sample."""
    scores = model(tokens[:, :-1]).float()
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
