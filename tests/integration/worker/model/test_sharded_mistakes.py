"""Mistakes with sharded models: one sentence each, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("sharded_torch")


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(device="cpu") as session:
        yield session


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sharded(session: Session, *, half: bool = False, device: str = "cpu") -> nn.Module:
    mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
    with torch.device(device):
        module = model()
    with session.parallelizing():
        fully_shard(module[0] if half else module, mesh=mesh)
    return module


def wrapped(session: Session, module: nn.Module, **options: Any) -> nn.Module:
    return session.wrap(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), **options)


def drawn(session: Session, **options: Any) -> Any:
    return next(iter(session.batches(TensorDataset(torch.randn(4, 4)), global_batch_size=4, epochs=1, **options)))


@pytest.mark.parametrize(
    ("how", "options", "sentence"),
    [
        ({}, {"reduction": "tree"}, "reduction='tree' does not go with a sharded model"),
        ({}, {"ddp_options": {"bucket_cap_mb": 1}}, "ddp_options does not go with a sharded model"),
        ({}, {"sync_batchnorm": True}, "sync_batchnorm does not go with a sharded model"),
        ({}, {"average": AveragedModel(nn.Linear(1, 1))}, "an AveragedModel of a sharded model"),
        ({}, {"average": 2.0}, "average is 2"),
        ({"half": True}, {}, r"parameter '1.weight' is not sharded, and others are"),
        ({"device": "meta"}, {}, r"parameter '0.weight' is on the meta device"),
    ],
)
def test_what_does_not_go_with_a_sharded_model_is_refused(
    session: Session, how: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    """Where FSDP sums gradients, nobody else can; nor is anything summed over replicas alone."""
    with pytest.raises(ConfigError, match=sentence):
        wrapped(session, sharded(session, **how), **options)


def test_sharding_outside_of_parallelizing_is_refused(session: Session) -> None:
    """So is a mesh of the script's own, whose groups would not outlive a round."""
    mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
    with pytest.raises(ConfigError, match=r"outside of session.parallelizing\(\)"):
        fully_shard(model(), mesh=mesh)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(foreign := model(), mesh=DeviceMesh("cpu", [0]))
        with pytest.raises(ConfigError, match=r"'0.weight' is sharded over another mesh than the session's"):
            wrapped(session, foreign)
    finally:
        dist.destroy_process_group()


def in_stages(session: Session, stage: str, *, shards: bool = True, memory: str = "cpu") -> nn.Module:
    """A model of two layers, of which the layers ``stage`` are this rank's."""
    mesh, module = session.init_device_mesh((1, 1), mesh_dim_names=("pp", "dp_shard")), model()
    mine = nn.Sequential(*(module[int(number)] for number in stage))
    for number in {"0", "1"} - set(stage):
        module[int(number)].to(memory)
    with session.parallelizing():
        if shards:
            fully_shard(mine, mesh=mesh["dp_shard"])
        return wrapped(session, module, stage=PipelineStage(mine, 0, 1, session.device, group=mesh.get_group("pp")))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stage": "01", "shards": False}, "the module of a pipeline stage is not sharded"),
        ({"stage": "0"}, "parameter '1.weight' has memory on this rank and is in no stage of it"),
        ({"stage": "0", "memory": "meta"}, "parameter '1.weight' is in the stages of 0 ranks"),
    ],
)
def test_a_model_that_is_not_divided_into_stages_is_refused(
    session: Session, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        in_stages(session, **options)


def test_a_stage_of_another_group_or_model_is_refused(session: Session) -> None:
    """Its transfers would end with the round, and its parameters be in no checkpoint."""
    mesh = session.init_device_mesh((1, 1), mesh_dim_names=("pp", "dp_shard"))
    with session.parallelizing():
        fully_shard(module := model(), mesh=mesh["dp_shard"])
        fully_shard(other := model(), mesh=mesh["dp_shard"])
        longer = PipelineStage(module, 0, 2, session.device, group=mesh.get_group("pp"))
        foreign = PipelineStage(nn.Sequential(module, other), 0, 1, session.device, group=mesh.get_group("pp"))
        fully_shard(foreign.submod, mesh=mesh["dp_shard"])
        elsewhere = PipelineStage(module, 0, 1, session.device, group=mesh.get_group("dp_shard"))
    for options, sentence in (
        ({"stage": longer}, r"rank 0 of 1 has the pipeline stages \[0\] of 2 \(give it 0, 1 and so on"),
        ({"stage": [foreign, elsewhere]}, "not over a dimension of the session's mesh"),
        ({"stage": foreign}, "a pipeline stage has parameters that the model does not have"),
        ({"stage": foreign, "average": 0.9}, "average does not go with stages"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            wrapped(session, module, **options)


def test_stages_are_trained_by_schedules(session: Session) -> None:
    """A call with gradients would be of one stage."""
    module = in_stages(session, "01")
    batch = drawn(session, micro_batch_size=2)

    def trained(**options: Any) -> None:
        with session.step() as step:
            step.pipeline(lambda output, part: output.mean(), **options)
            step.pipeline(lambda output, part: output.mean(), **options)

    with pytest.raises(ConfigError, match="a call of a model that is computed in stages"):
        module(batch.x)
    with pytest.raises(ConfigError, match=r"schedule='V'\), and each rank has one stage \(known are 1F1B, GPipe"):
        trained(schedule="V")
    with pytest.raises(ConfigError, match=r"step.pipeline\(\) without a batch, or a second time"):
        trained()
    with torch.no_grad():
        assert module(batch.x).shape == (4, 2)


def test_one_mesh_is_made_and_used(session: Session) -> None:
    with pytest.raises(ConfigError, match="there is no device mesh yet"), session.parallelizing():
        pass
    session.init_device_mesh((-1, 1), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(ConfigError, match="a second device mesh"):
        session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))


def test_steps_that_would_train_wrongly_are_refused(session: Session) -> None:
    """A closure communicates during the update, which could not be undone."""
    module = sharded(session)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module = session.wrap(module, optimizer=optimizer)
    batch = drawn(session)
    with pytest.raises(ConfigError, match=r"step.pipeline\(\) of a model without stages"), session.step() as step:
        step.pipeline(lambda output, part: output.mean())
    with pytest.raises(ConfigError, match="does not go with a closure"), session.step() as step:  # noqa: PT012
        step.backward(module(batch.x).mean())
        optimizer.step(lambda: 0.0)
    next(iter(session.module.parameters())).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameter '0.weight' was frozen after session.wrap\(\)"), session.step():
        pass
