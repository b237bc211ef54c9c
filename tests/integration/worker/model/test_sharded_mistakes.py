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


def sharded(session: Session) -> nn.Module:
    mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
    module = model()
    with session.parallelizing():
        fully_shard(module, mesh=mesh)
    return module


def wrapped(session: Session, module: nn.Module, **options: Any) -> nn.Module:
    return session.wrap(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reduction": "tree"}, "reduction='tree' does not go with a sharded model"),
        ({"ddp_options": {"bucket_cap_mb": 1}}, "ddp_options does not go with a sharded model"),
        ({"sync_batchnorm": True}, "sync_batchnorm does not go with a sharded model"),
        ({"average": AveragedModel(nn.Linear(1, 1))}, "an AveragedModel of a sharded model"),
        ({"average": 2.0}, "average is 2"),
    ],
)
def test_what_does_not_go_with_a_sharded_model_is_refused(
    session: Session, options: dict[str, Any], sentence: str
) -> None:
    """Where FSDP sums gradients, nobody else can."""
    with pytest.raises(ConfigError, match=sentence):
        wrapped(session, sharded(session), **options)


def test_a_model_that_is_sharded_half_is_refused(session: Session) -> None:
    """The rest would be summed over replicas, and not over the shard group."""
    mesh, module = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",)), model()
    with session.parallelizing():
        fully_shard(module[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"parameter '1.weight' is not sharded, and others are"):
        wrapped(session, module)


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


def test_a_model_on_the_meta_device_is_refused(session: Session) -> None:
    """Its parameters have no values yet."""
    mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        module = model()
    with session.parallelizing():
        fully_shard(module, mesh=mesh)
    with pytest.raises(ConfigError, match=r"parameter '0.weight' is on the meta device"):
        wrapped(session, module)


def in_stages(session: Session, stage: str, sharding: str = "", group: str = "pp", memory: str = "cpu") -> nn.Module:
    """A model of two layers, of which the layers ``stage`` are this rank's; ``sharding``: they stay unsharded."""
    mesh, module = session.init_device_mesh((1, 1), mesh_dim_names=("pp", "dp_shard")), model()
    mine = nn.Sequential(*(module[int(number)] for number in stage))
    for number in {"0", "1"} - set(stage):
        module[int(number)].to(memory)
    with session.parallelizing():
        if not sharding:
            fully_shard(mine, mesh=mesh["dp_shard"])
        return wrapped(session, module, stage=PipelineStage(mine, 0, 1, session.device, group=mesh.get_group(group)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stage": "01", "sharding": "none"}, "the module of a pipeline stage is not sharded"),
        ({"stage": "0"}, "parameter '1.weight' has memory on this rank and is in no stage of it"),
        ({"stage": "0", "memory": "meta"}, "parameter '1.weight' is in the stages of 0 ranks"),
    ],
)
def test_a_model_that_is_not_divided_into_stages_is_refused(
    session: Session, options: dict[str, Any], sentence: str
) -> None:
    """Each parameter is held by one of them."""
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
    with pytest.raises(ConfigError, match=r"rank 0 of 1 has the pipeline stages \[0\] of 2 \(give it 0, 1 and so on"):
        wrapped(session, module, stage=longer)
    with pytest.raises(ConfigError, match="not over a dimension of the session's mesh"):
        wrapped(session, module, stage=[foreign, elsewhere])
    with pytest.raises(ConfigError, match="a pipeline stage has parameters that the model does not have"):
        wrapped(session, module, stage=foreign)
    with pytest.raises(ConfigError, match="average does not go with stages"):
        wrapped(session, module, stage=foreign, average=0.9)


def test_stages_are_trained_by_schedules(session: Session) -> None:
    """A call with gradients would be of one stage; a model that has none has no schedule."""
    module = in_stages(session, "01")
    batches = session.batches(TensorDataset(torch.randn(4, 4)), global_batch_size=4, micro_batch_size=2, epochs=1)
    batch = next(iter(batches))

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


def test_a_schedule_of_a_model_without_stages_is_refused(session: Session) -> None:
    """Nor is a step without a batch divided."""
    wrapped(session, sharded(session))
    next(iter(session.batches(TensorDataset(torch.randn(4, 4)), global_batch_size=4, epochs=1)))
    with pytest.raises(ConfigError, match=r"step.pipeline\(\) of a model without stages"), session.step() as step:
        step.pipeline(lambda output, part: output.mean())


def test_one_mesh_is_made_and_used(session: Session) -> None:
    """Parts of it are for tensor parallel."""
    with pytest.raises(ConfigError, match="there is no device mesh yet"), session.parallelizing():
        pass
    session.init_device_mesh((-1, 1), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(ConfigError, match="a second device mesh"):
        session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))


def test_a_closure_and_a_change_of_what_is_trained_are_refused(session: Session) -> None:
    """A closure communicates during the update, which could not be undone."""
    module = sharded(session)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module = session.wrap(module, optimizer=optimizer)
    batch = next(iter(session.batches(TensorDataset(torch.randn(4, 4)), global_batch_size=4, epochs=1)))

    def with_closure() -> None:
        with session.step() as step:
            step.backward(module(batch.x).mean())
            optimizer.step(lambda: 0.0)

    with pytest.raises(ConfigError, match="does not go with a closure"):
        with_closure()
    next(iter(session.module.parameters())).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameter '0.weight' was frozen after session.wrap\(\)"), session.step():
        pass
