"""A language model of GPT-2's kind: from a toy on Shakespeare's works to the 124 million parameters of the original.

Batches and budgets may be given in tokens. All samples have as many targets (see token_stream), so the mean loss over a
batch is a mean over tokens, and the gradient is the same however the batch is divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.tasks.language.corpus import Corpus, TextOptions, load_corpus
from elastic_trainer.tasks.language.sampling import Manner, written
from elastic_trainer.tasks.language.transformer import Transformer, TransformerOptions
from elastic_trainer.training.config import Section
from elastic_trainer.training.optimization import build_optimizer, decay_groups
from elastic_trainer.training.task import Datasets, Exhibits, Task

_HIGHEST_EXPONENT = 700.0


class GptOptions(Section):
    """``options:`` sizes in tokens, and what is shown after an evaluation."""

    batch_tokens: int | None = Field(default=None, ge=1, description="tokens per step: global_batch times context")
    max_tokens: int | None = Field(default=None, ge=1, description="tokens of the run: says max_steps")
    prompt: str = Field(default="\n", min_length=1, description="what the sample texts begin with")
    sample_tokens: int = Field(default=200, ge=0, description="how long they are; 0: none are written")


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
        implied = {}
        if options.batch_tokens is not None:
            implied["global_batch"] = samples_of(options.batch_tokens, context)
        batch = implied.get("global_batch", self.config.global_batch)
        if options.max_tokens is not None and batch is not None:
            implied["max_steps"] = steps_of(options.max_tokens, batch * context)
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


def samples_of(batch_tokens: int, context: int) -> int:
    """How many samples make ``batch_tokens`` targets; ConfigError if they cannot."""
    samples, rest = divmod(batch_tokens, context)
    if rest:
        near = max(1, samples) * context
        raise ConfigError(
            f"options.batch_tokens {batch_tokens} is not a multiple of model.context {context}",
            hint=f"set it to {near}",
        )
    return samples


def steps_of(max_tokens: int, step_tokens: int) -> int:
    """How many whole steps ``max_tokens`` suffice for; ConfigError if for none."""
    if max_tokens < step_tokens:
        raise ConfigError(
            f"options.max_tokens {max_tokens} is less than the {step_tokens} tokens of one step", hint="raise it"
        )
    return max_tokens // step_tokens
