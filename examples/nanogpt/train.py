"""A GPT in one file, as nanoGPT has it, that trains on when nodes die: characters of Python's own manual.

elastic-trainer local --nodes 2:3 --recovery in_place --kill-node-at 50 -- examples/nanogpt/train.py --steps 100
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from elastic_trainer import Session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--directory", default="runs/nanogpt", help="checkpoints; started again, the job resumes there")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--block", type=int, default=64, help="tokens that a prediction sees")
parser.add_argument("--batch", type=int, default=24, help="sequences for each step, on all ranks together")
parser.add_argument("--accumulate", type=int, default=2, help="forward passes for each step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

text = "\n".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
numbers = {character: number for number, character in enumerate(characters)}
tokens = torch.tensor([numbers[character] for character in text])


class Blocks(torch.utils.data.Dataset):
    """Each sequence with the same one, a token later: two tensors of (block,)."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // options.block

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * options.block
        piece = self.tokens[start : start + options.block + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        width = options.width
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, tokens, width) to the same."""
        q, k, v = self.attend(self.before(x)).unflatten(-1, (3, options.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """(n, tokens) numbers to (n, tokens, characters) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = (
            nn.Embedding(len(characters), options.width),
            nn.Embedding(options.block, options.width),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(options.layers)))
        self.end = nn.Sequential(nn.LayerNorm(options.width), nn.Linear(options.width, len(characters)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.blocks(self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))))


def lr_factor(step: int) -> float:
    """Linear warmup, then a cosine down to a tenth."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = min(1.0, (step - options.warmup) / max(1, options.steps - options.warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def loss_sums(model: nn.Module, batch) -> dict:
    """A sum and a count: exact, however the test data is divided over the ranks."""
    return {"loss": (cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten(), reduction="sum"), batch.y.numel())}


cut = int(0.9 * len(tokens))
train, validation = Blocks(tokens[:cut]), Blocks(tokens[cut : cut + 64 * options.block + 1])
with Session(checkpoint_dir=options.directory, seed=0, checkpoint_every_s=10) as session:
    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    model = session.wrap(torch.compile(model) if options.compile else model, optimizer=optimizer, scheduler=scheduler)
    for batch in session.batches(
        train, global_batch_size=options.batch, passes=options.accumulate, steps=options.steps
    ):
        with session.step() as step:  # if a rank dies in here, the others do this batch again
            for part in step.micro_batches(batch):
                with torch.autocast(session.device.type, torch.bfloat16, enabled=session.device.type == "cuda"):
                    loss = cross_entropy(model(part.x).flatten(0, 1), part.y.flatten())
                step.backward(loss)
            step.clip(1.0)
            optimizer.step()
        if step.committed and step.number % 50 == 0:
            loss = step.loss  # all ranks ask together
            if session.is_rank0:
                print(f"step {step.number}: loss {loss:.3f} on {session.world_size} ranks", flush=True)
    result = session.evaluate(model, validation, 16, loss_sums)
    if session.is_rank0:
        print(f"validation loss {result['loss']:.3f}", flush=True)
