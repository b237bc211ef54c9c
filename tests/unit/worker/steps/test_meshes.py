"""Which nodes a mesh over the whole job covers, and where there can be none."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.steps.meshes import nodes_of_job


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
