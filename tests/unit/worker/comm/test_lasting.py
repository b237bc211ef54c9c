"""The shape of a device mesh, which nodes it covers, where there can be none, and its flattened dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm.control import InterruptibleWaits
from elastic_trainer.worker.comm.lasting import ShardLayout, checked_shape, nodes_of_job

TWO = ("dp_shard", "tp")


def test_one_dimension_may_be_what_the_others_leave() -> None:
    assert checked_shape((2, 2), TWO, 8, launched=True) == ((2, 2), TWO)
    assert checked_shape((-1, 2), TWO, 8, launched=True) == ((4, 2), TWO)
    assert checked_shape((-1,), ("dp_shard",), 1, launched=True) == ((1,), ("dp_shard",))
    assert checked_shape((4, 2), TWO, 1, launched=False) == ((1, 1), TWO)


@pytest.mark.parametrize("shape", [(3,), (16,), (0,), (-2,), (-1, -1), (-1, 3), (-1, 16)])
def test_a_mesh_that_does_not_divide_the_node_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not divide the 8 processes of this node"):
        checked_shape(shape, TWO[: len(shape)], 8, launched=True)
    with pytest.raises(ConfigError, match="does not divide the 8 processes of 2 nodes"):
        checked_shape(shape, TWO[: len(shape)], 4, 2, launched=True)


@pytest.mark.parametrize("shape", [(2,), (8,), (-1, 3), (0,)])
def test_a_mesh_over_the_whole_job_covers_all_of_its_processes(shape: tuple[int, ...]) -> None:
    assert checked_shape((-1,), ("a",), 2, 3, launched=True, whole_job=True) == ((6,), ("a",))
    assert checked_shape((2, 2), TWO, 2, 2, launched=True, whole_job=True) == ((2, 2), TWO)
    assert checked_shape((-1,), ("a",), 1, launched=False, whole_job=True) == ((1,), ("a",))
    with pytest.raises(ConfigError, match="does not cover the 4 processes of the whole job"):
        checked_shape(shape, TWO[: len(shape)], 2, 2, launched=True, whole_job=True)


@pytest.mark.parametrize("names", [None, ("a",), ("a", "a"), ()])
def test_each_dimension_has_a_name(names: tuple[str, ...] | None) -> None:
    with pytest.raises(ConfigError, match="name each dimension"):
        checked_shape((2, 2), names, 4, launched=True)


def launched(**changes: Any) -> WorkerEnvironment:
    return WorkerEnvironment(**{"launched": True, "world_size": 6, "local_world_size": 2, **changes})


def test_it_covers_all_nodes() -> None:
    assert nodes_of_job(launched()) == 3
    assert nodes_of_job(WorkerEnvironment()) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recovery": RecoveryMode.IN_PLACE, "channel": "/agent"}, "a lost node takes shards with it"),
        ({"shard_nodes": 2}, "over the whole job, and shard_nodes=2"),
        ({"world_size": 5}, "whose 5 processes are not 2 on each node"),
    ],
)
def test_it_is_refused_where_it_does_not_fit(changes: dict[str, Any], sentence: str) -> None:
    """In place survivors would hold no whole state; groups of nodes have replicas."""
    with pytest.raises(ConfigError, match=sentence):
        nodes_of_job(launched(**changes))


@pytest.mark.usefixtures("sharded_torch")
def test_a_flattened_dimension_has_a_group_of_its_own() -> None:
    """Over the ranks that differ in any of its dimensions, in their order; the mesh gives it by its name."""
    layout = ShardLayout("cpu", (2, 2, 2), ("a", "b", "c"), 6, 8)
    mesh: Any = layout.mesh
    with layout.parallelizing():
        flat = mesh["a", "b"]._flatten("ab")
        group = flat.get_group()
        assert (group, group.rank(), group.size()) == (layout.groups["ab"], 3, 4)
        assert (layout.members("ab"), layout.axes["ab"]) == ((0, 2, 4, 6), (0, 1))
        assert (flat.mesh.tolist(), flat.get_local_rank()) == ([0, 2, 4, 6], 3)
        assert mesh["a", "b"]._flatten("ab") is flat
        assert mesh["c"]._flatten() == mesh["c"]
        with pytest.warns(UserWarning, match="Slicing a flattened dim"):
            assert mesh["ab"].get_group() is group
        assert (mesh._flatten().get_group(), layout.members("a_b_c")) == (layout.groups["a_b_c"], tuple(range(8)))
    for names, name in ((("b", "c"), "ab"), (("a", "b"), "c")):
        with pytest.raises(ConfigError, match=f"the device mesh has another dimension '{name}'"):
            mesh[names]._flatten(name)


@pytest.mark.usefixtures("sharded_torch")
def test_a_mesh_is_flattened_before_its_groups_are_formed() -> None:
    layout = ShardLayout("cpu", (1, 1), TWO, 0, 1)
    layout.enter(None, [None, None], InterruptibleWaits())
    mesh: Any = layout.mesh
    with pytest.raises(ConfigError, match=r"flattened after session.wrap\(\)"):
        mesh._flatten()
    layout.leave()
