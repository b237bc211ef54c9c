"""A compiled model under torchrun, without a Session: ``compiled.py DIRECTORY``.

Once it has made its steps it appends to ``DIRECTORY/NODE.jsonl`` its losses, and how many libraries and headers were
compiled meanwhile; then it waits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 5


def compiled() -> set[str]:
    """The libraries and precompiled headers that there are."""
    found = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")
    return {str(path) for path in (*found, *Path(tempfile.gettempdir()).glob("torchinductor_*/*/*.gch"))}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    before = compiled()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 1)
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    step = torch.compile(lambda x: model(x).square().mean())
    for number in range(STEPS):
        loss = step(torch.randn(64, 16, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with (directory / f"{os.environ['ELASTIC_TRAINER_NODE']}.jsonl").open("a") as file:
        file.write(json.dumps({"compiled": sorted(compiled() - before), "losses": losses}) + "\n")
    while True:  # a rank that ends would end the run
        threading.Event().wait(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
