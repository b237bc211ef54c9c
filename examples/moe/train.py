"""A mixture of experts that trains on when nodes die: experts along one dimension of a mesh, the rest sharded by FSDP2.

elastic-trainer local --nodes 1:2 --nproc-per-node 2 --recovery in_place --kill-node-at 30 -- \
    examples/moe/train.py --steps 100

Layers are as torchtitan lays them out, without its optimizations: each rank draws tokens of its own, an all-to-all
brings them to the ranks of the experts that they chose, and another one brings the results back.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from elastic_trainer import Session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--directory", default="runs/moe", help="checkpoints; started again, the job resumes there")
parser.add_argument("--expert-parallel", type=int, default=2, help="processes that share out the experts of a layer")
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--chosen", type=int, default=2, help="experts for each token")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seen", type=int, default=8, help="characters that a prediction sees")
options = parser.parse_args()

text = "\n".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
numbers = {character: number for number, character in enumerate(characters)}
tokens = torch.tensor([numbers[character] for character in text])
windows = tokens.unfold(0, options.seen + 1, 5)
data = torch.utils.data.TensorDataset(windows[:, :-1], windows[:, -1])


class Experts(nn.Module):
    """The experts of this rank; FSDP2 puts them together before each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(options.experts, options.width, 2 * options.width) * options.width**-0.5)
        self.down = nn.Parameter(torch.randn(options.experts, 2 * options.width, options.width) * options.width**-0.5)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Tokens of (n, width), by expert, ``counts`` for each."""
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        return torch.cat([(part @ a).relu() @ b for part, a, b in zip(x.split(counts), up, down, strict=True)])


class Mixture(nn.Module):
    """Each token goes to the experts that the gate chooses for it; ``mesh`` is that of their dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(options.width, options.experts, bias=False), Experts()
        self.mesh = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of (n, width) to the same."""
        group, ranks = self.mesh.get_group(), self.mesh.size()
        weights, chosen = self.gate(x).softmax(1).topk(options.chosen)
        order = chosen.flatten().argsort(stable=True)  # tokens by expert, so by rank too
        sent = chosen.flatten().bincount(minlength=options.experts)
        come = all_to_all_single(sent, None, None, group).view(ranks, -1)  # from each rank, for each expert here
        leaving, coming = sent.view(ranks, -1).sum(1).tolist(), come.sum(1).tolist()
        here = all_to_all_single_autograd(x[order // options.chosen], coming, leaving, group)
        experts = torch.arange(come.shape[1], device=x.device).repeat(ranks)
        by_expert = experts.repeat_interleave(come.flatten()).argsort(stable=True)  # they came by rank
        done = self.experts(here[by_expert], come.sum(0).tolist())
        mine = all_to_all_single_autograd(done[by_expert.argsort()], leaving, coming, group)
        return torch.zeros_like(x).index_add(0, order // options.chosen, mine * weights.flatten()[order, None])


class Block(nn.Module):
    """A perceptron for all tokens, then a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.think = nn.LayerNorm(options.width), nn.Linear(options.width, options.width)
        self.between, self.mixture = nn.LayerNorm(options.width), Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.think(self.before(x)).relu()
        return x + self.mixture(self.between(x))


class Model(nn.Module):
    """(n, seen) numbers of characters to (n, characters) scores of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(characters), options.width)
        self.join = nn.Linear(options.seen * options.width, options.width)
        self.blocks = nn.ModuleList(Block() for _ in range(options.layers))
        self.end = nn.Linear(options.width, len(characters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.join(self.token(x).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def loss_sums(model: nn.Module, batch) -> dict:
    """A sum and a count: exact, however the data is divided over the ranks."""
    return {"loss": (cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch))}


with Session(checkpoint_dir=options.directory, seed=0, checkpoint_every_s=10) as session:
    mesh = session.init_device_mesh((-1, options.expert_parallel), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    everyone = mesh._flatten("dp_shard")  # both dimensions as one
    torch.manual_seed(0)
    model = Model()
    with session.parallelizing():
        for block in model.blocks:
            experts, block.mixture.mesh = block.mixture.experts, mesh["ep"]
            for name, each in list(experts.named_parameters()):
                spread = distribute_tensor(each, mesh["ep"], [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, nn.Parameter(spread))
            fully_shard(experts, mesh=mesh["dp_shard_mod_ep"])
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model = session.wrap(model, optimizer=optimizer)
    for batch in session.batches(data, global_batch_size=64, steps=options.steps):
        with session.step() as step:  # if a node dies in here, the others do this batch again
            step.backward(cross_entropy(model(batch.x), batch.y))
            step.clip(1.0)  # over all experts, and over what lies on the other mesh
            optimizer.step()
    held_out = torch.utils.data.Subset(data, range(0, len(data), 100))
    result = session.evaluate(model, held_out, 64, loss_sums)
    if session.is_rank0:
        print(f"loss {result['loss']:.3f} after {session.step_number} steps", flush=True)
