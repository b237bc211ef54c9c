"""The job of the sharded benchmark: a session's loop over FSDP and two loops by hand over torch's HSDP, in turn.

``sharded_job.py RESULT WIDTH BATCH ALTERNATIONS STEPS``: rank 0 writes what each block of steps took, and each wait in
the commit barrier: in all, and after the last rank of its node had come.

In restart mode the model is sharded over the whole job, and the session's loop alone takes turns: with copies of its
shards in its agent's memory and the neighbour's, and without.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import worker_environment
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.worker.model.sharded import ShardedReplica
from elastic_trainer.worker.state.saver import Saver
from tests.bench.step_overhead_job import (
    CLASSES,
    FEATURES,
    SAMPLES,
    WARM_UP,
    bare_steps,
    block,
    build,
    in_turn,
    session_steps,
)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def timed(waits: list[tuple[float, float]]) -> None:
    """Let each commit barrier add when this rank came and when it went on to ``waits``."""
    meet: Callable[..., None] = ShardedReplica.commit_together

    def commit_together(self: ShardedReplica, number: int) -> None:
        began = time.perf_counter()
        meet(self, number)
        waits.append((began, time.perf_counter()))

    ShardedReplica.commit_together = commit_together  # type: ignore[method-assign]


def run(result: Path, width: int, batch: int, alternations: int, count: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop(ENV_LEDGER_DIR, None)
    waits: list[tuple[float, float]] = []
    timed(waits)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    )
    with Session(device="cpu") as session:
        mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
        with session.parallelizing():
            model = sharded(build(width)[0], mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer)
        loops: dict[str, Iterator[None]] = {"session": session_steps(session, wrapped, optimizer, data, batch)}
        places = int(os.environ["LOCAL_WORLD_SIZE"])
        by_hand = init_device_mesh("cpu", (session.world_size // places, places), mesh_dim_names=("copy", "shard"))
        for name in ("bare", "bare again"):
            twin = sharded(build(width)[0], by_hand)
            loops[name] = bare_steps(
                session, twin, torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9), data, batch
            )
        for steps in loops.values():
            block(steps, WARM_UP)
        waits.clear()
        taken = in_turn(loops, alternations, count)
        others = [result.with_name(f"{result.name}.{rank}") for rank in range(places)]
        if 0 < session.rank < places:
            others[session.rank].write_text(json.dumps(waits))
        session.barrier()
        if session.is_rank0:
            came = [[began for began, _ in json.loads(each.read_text())] for each in others[1:]]
            barrier = [
                [went - mine, max(0.0, went - max(mine, *theirs))]
                for (mine, went), *theirs in zip(waits, *came, strict=True)
            ]
            result.write_text(json.dumps(taken | {"barrier": barrier}))


def run_copies(result: Path, width: int, batch: int, alternations: int, count: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop(ENV_LEDGER_DIR, None)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,)))
    due, copies = Saver.wants_copy, {"allowed": True, "made": 0}

    def wants_copy(self: Saver) -> bool:
        wanted = bool(copies["allowed"]) and due(self)
        copies["made"] += wanted
        return wanted

    Saver.wants_copy = wants_copy  # type: ignore[method-assign]
    with Session(result.with_name("checkpoints"), device="cpu", checkpoint_every_s=None) as session:
        mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",), whole_job=True)
        with session.parallelizing():
            model = sharded(build(width)[0], mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        steps = session_steps(session, session.wrap(model, optimizer=optimizer), optimizer, data, batch)

        def told(*, allowed: bool) -> Iterator[None]:
            while True:
                copies["allowed"] = allowed
                yield next(steps)

        block(steps, WARM_UP)
        copies["made"] = 0
        taken = in_turn({"copied": told(allowed=True), "not copied": told(allowed=False)}, alternations, count)
        if session.is_rank0:
            size = sum(each.nbytes for each in model.parameters()) * 2
            result.write_text(json.dumps(taken | {"copies": copies["made"], "state_mb": size / 1e6}))


if __name__ == "__main__":
    whole_job = worker_environment().recovery is RecoveryMode.RESTART
    (run_copies if whole_job else run)(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
