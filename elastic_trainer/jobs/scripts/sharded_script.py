"""A GPT on Shakespeare's works, sharded: FSDP2 over the processes of each node, tensor parallel below it if asked for.

elastic-trainer local --nodes 1:2 --nproc-per-node 2 --recovery in_place --kill-node-at 60 -- \
    elastic_trainer/jobs/scripts/sharded_script.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Subset

from elastic_trainer import Session
from elastic_trainer.jobs.corpus import TextOptions, load_corpus
from elastic_trainer.jobs.gpt import Transformer, TransformerOptions, token_losses


def parallelize(model: Transformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Each block on its own, so that one block at a time is whole in memory; then what is left."""
    for block in model.blocks:
        plan = {"hidden": ColwiseParallel(), "outward": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
        fully_shard(block, mesh=mesh["dp_shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)


def loss_sums(model: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
    """A sum and a count, not a mean: exact, however the texts are divided over the ranks."""
    losses = token_losses(model, batch.data)
    return {"loss": (losses.double().sum(), losses.numel())}


parser = argparse.ArgumentParser()
parser.add_argument("--directory", default="runs/sharded", help="checkpoints; started again, the job resumes there")
parser.add_argument("--files", help="texts; without them the shakespeare package")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--tensor-parallel", type=int, default=1, help="how many processes share each block's hidden layer")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, sum gradients in float32")
arguments = parser.parse_args()

corpus = load_corpus(TextOptions(files=arguments.files), context=64)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
validation: Any = corpus.validation
with Session(checkpoint_dir=arguments.directory, seed=0, checkpoint_every_s=10) as session:
    mesh = session.init_device_mesh((-1, arguments.tensor_parallel), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):  # no process ever holds the whole model
        model = Transformer(TransformerOptions(width=arguments.width), corpus.vocabulary)
    with session.parallelizing():
        parallelize(model, mesh, half if arguments.bf16 else MixedPrecisionPolicy())
    model.to_empty(device=session.device)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    wrapped = session.wrap(model, optimizer=optimizer)  # resumed, each process its shards, or healed
    for batch in session.batches(corpus.train, global_batch_size=8, epochs=1000):
        if session.step_number >= arguments.steps:
            break
        with session.step() as step:  # if a node dies in here, the others do this batch again
            step.backward(token_losses(wrapped, batch.data).mean())
            step.clip(1.0)  # over all shards
            optimizer.step()
    result = session.evaluate(wrapped, Subset(validation, range(256)), 64, loss_sums)
    if session.is_rank0:
        print(f"step {session.step_number}: loss {result['loss']:.3f} on {session.world_size} ranks", flush=True)
