"""A GPT under DDP that knows nothing of this project: ``compile_job.py WIDTH [compiled | unsplit] DIRECTORY``.

``unsplit`` is compiled too, as one graph instead of one for each of DDP's buckets. With WIDTH 128 it has nanoGPT's CPU
settings: 4 layers, 4 heads, 64 tokens, 12 samples. It resumes from its newest checkpoint, and writes ``time round rank
world step pid`` to ``DIRECTORY/NODE-0.txt`` for each step. To ``DIRECTORY/NODE.first`` it writes what the first step
took: seconds, seconds of CPU with its child processes, and those since the process began.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LAYERS, HEADS, TOKENS, SAMPLES, VOCABULARY = 4, 4, 64, 12, 256
SAVE_EVERY = 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.attention(self.first(x)).view(samples, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, tokens, width))
        return x + torch.as_tensor(self.mlp(self.second(x)))


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS if width >= 128 else 1))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(self.last(h)).flatten(0, 1), y.flatten())


def cpu_s() -> float:
    return sum(os.times()[:4])


def train(directory: Path, kind: str, width: int) -> None:
    torch.set_num_threads(1)
    if kind == "unsplit":
        torch._dynamo.config.optimize_ddp = False
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = GPT(width)
    model = DistributedDataParallel(torch.compile(plain) if kind != "plain" else plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    checkpoint, step, first = directory / "checkpoint.pt", 0, True
    if checkpoint.exists():
        state = torch.load(checkpoint)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    node, number = os.environ["ELASTIC_TRAINER_NODE"], os.environ.get("ELASTIC_TRAINER_ROUND", "0")
    number = number if number != "0" else os.environ["TORCHELASTIC_RESTART_COUNT"]
    with (directory / f"{node}-0.txt").open("a", buffering=1) as lines:
        while not (directory / "stop").exists():
            begun, before, step = time.monotonic(), cpu_s(), step + 1
            choice = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=choice)
            loss = model(x[:, :-1].contiguous(), x[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.monotonic()
            if first:
                first = False
                with (directory / f"{node}.first").open("a") as file:
                    file.write(f"{now - begun} {cpu_s() - before} {cpu_s()}\n")
            lines.write(f"{now} {number} {rank} {world} {step} {os.getpid()}\n")
            if step % SAVE_EVERY == 0 and rank == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)


if __name__ == "__main__":
    train(Path(sys.argv[-1]), sys.argv[2] if len(sys.argv) > 3 else "plain", int(sys.argv[1]))
