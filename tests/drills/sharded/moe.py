"""A mixture of experts as torchtitan lays it out: experts along "ep" of the session's mesh, tokens sent to them.

Each rank along "ep" holds as many experts as the others, sharded by FSDP over "dp_shard_mod_ep"; all else is sharded
over both dimensions together. Each rank draws samples of its own. An all-to-all brings its tokens to the ranks of the
experts that its router chose, as many as that may be, another one brings the results back, and the backward pass goes
the same ways.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, HIDDEN, BLOCKS, EXPERTS, CHOSEN = 48, 32, 1, 8, 2
COUNTS, DISPATCH, RETURN = 1, 2, 5
"""Which all-to-all of a step is which: counts of tokens and then tokens go to the experts; the gradients of tokens come
back, behind those of what the experts made of them."""


def held(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it while FSDP has put it together: its own experts."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """``tokens`` stand by expert, ``counts`` of them for each expert of this rank; there may be none."""
        parts = zip(torch.split(tokens, counts), held(self.up), held(self.down), strict=True)
        return torch.cat([torch.tanh(part @ up) @ down for part, up, down in parts])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.mesh: Any = None
        """That of "ep"; None: all is here, and nothing is sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(1).topk(CHOSEN)
        if self.mesh is None:
            made = torch.tanh(x[:, None, None] @ self.experts.up[chosen]) @ self.experts.down[chosen]
            return torch.sum(made.squeeze(2) * weights[..., None], 1)
        group, ranks = self.mesh.get_group(), self.mesh.size()
        order = chosen.flatten().argsort(stable=True)
        sent = chosen.flatten().bincount(minlength=EXPERTS)
        dist.all_to_all_single(counts := torch.empty_like(sent), sent, group=group)
        come = counts.view(ranks, -1)  # from each rank, for each expert here
        out, back = sent.view(ranks, -1).sum(1).tolist(), come.sum(1).tolist()
        tokens = all_to_all_single_autograd(x[order // CHOSEN], back, out, group)
        here = come.shape[1]
        by_expert = torch.arange(here).repeat(ranks).repeat_interleave(come.flatten()).argsort(stable=True)
        done = self.experts(tokens[by_expert], come.sum(0).tolist())
        mine = all_to_all_single_autograd(done[by_expert.argsort()], out, back, group)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, mine * weights.flatten()[order, None])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mixture = nn.Linear(WIDTH, WIDTH), Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.mixture(x)  # type: ignore[no-any-return]


class MoeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def shard(model: MoeNet, mesh: Any, **how: Any) -> None:
    """Over a mesh of "dp_shard_mod_ep" and "ep"; ``how`` is for ``fully_shard``."""
    dense = mesh["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    blocks: Any = model.blocks
    for block in blocks:
        mixture, experts = block.mixture, block.mixture.experts
        mixture.mesh = mesh["ep"]
        for name, each in list(experts.named_parameters()):
            spread = distribute_tensor(each, mesh["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(spread))
        fully_shard(experts, mesh=mesh["dp_shard_mod_ep"], **how)
        fully_shard(block, mesh=dense, **how)
    fully_shard(model, mesh=dense, **how)
