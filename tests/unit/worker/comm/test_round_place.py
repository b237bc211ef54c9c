"""A session's place in the world, from the environment."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.comm.round_place import RoundPlace, StoreAddress, place_in

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "ELASTIC_TRAINER_ROUND": "5",
}


def place(environ: dict[str, str]) -> RoundPlace:
    return place_in(worker_environment(environ))


def test_a_plain_process_is_alone_and_needs_no_store() -> None:
    """Without a launcher there is nothing to form."""
    assert place({}) == RoundPlace(0, 0, 1, 0, 1, None)


def test_torchrun_names_the_place_and_who_hosts_the_store() -> None:
    """The agent's store is used where torchrun has one; otherwise rank 0 serves."""
    formation = place(TORCHRUN)
    assert formation == RoundPlace(5, 3, 4, 1, 2, StoreAddress("node7", 29500, serve=False))
    assert not formation.one_host
    own = place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert own.store is not None
    assert own.store.serve


def test_ranks_of_one_machine_are_known_as_such() -> None:
    """Then gloo may use the loopback interface."""
    assert place({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).one_host
    assert place({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}).one_host


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "4"}, "RANK 4 of WORLD_SIZE 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(changed: dict[str, str], says: str) -> None:
    """The sentence names the variables."""
    with pytest.raises(ConfigError, match=says):
        place({**TORCHRUN, **changed})
