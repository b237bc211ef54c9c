"""A session's place in the world, how ranks meet there, and how the end of a round frees whoever is in it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, TransientError
from elastic_trainer.ipc import gloo
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.comm.groups import (
    CollectiveAborter,
    RankAssignment,
    StoreAddress,
    assignment_of,
    meet,
    self_started,
)

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


def place(environ: dict[str, str]) -> RankAssignment:
    return assignment_of(worker_environment(environ))


def test_torchrun_names_the_place_and_who_hosts_the_store() -> None:
    """The agent's store is used where torchrun has one; otherwise rank 0 serves."""
    formation = place(TORCHRUN)
    assert formation == RankAssignment(5, 3, 4, 1, 2, StoreAddress("node7", 29500, serve=False))
    own = place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert own.store is not None
    assert own.store.serve


def test_ranks_of_one_machine_are_known_as_such() -> None:
    """Then gloo uses the loopback: they all hold it, or have met at it."""
    assert place({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).gloo_addresses() == gloo.ONE_HOST
    assert place({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}).gloo_addresses() == gloo.ONE_HOST


def test_ranks_of_several_machines_use_the_address_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the node's agent announces, if this machine has it; without an agent, the one that leads to the
    store."""
    monkeypatch.setattr(gloo, "own_address", lambda host, port: f"towards {host}:{port}")
    monkeypatch.setattr(gloo, "bindable", lambda address: address if address == "192.168.7.2" else None)
    announced = {**TORCHRUN, "ELASTIC_TRAINER_ADDRESS": "192.168.7.2"}
    assert place(announced).gloo_addresses() == ("192.168.7.2",)
    assert place({**announced, "ELASTIC_TRAINER_ADDRESS": "100.64.0.1"}).gloo_addresses() == ("towards node7:29500",)
    assert place(TORCHRUN).gloo_addresses() == ("towards node7:29500",)


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("", ""), ("lo", "lo"), ("lo,loop6", "lo,loop6"), ("lo,eth0", ""), ("eth0", ""), ("lo,gone", "lo,gone")],
)
def test_a_user_who_binds_gloo_to_loopbacks_misleads_other_hosts(
    monkeypatch: pytest.MonkeyPatch, chosen: str, found: str
) -> None:
    interfaces = {
        "lo": [_address(socket.AF_PACKET, "00:00"), _address(socket.AF_INET, "127.0.0.1")],
        "loop6": [_address(socket.AF_INET6, "::1")],
        "eth0": [_address(socket.AF_INET, "192.168.7.2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(gloo, "own_address", lambda host, port: "192.168.7.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    assert place(TORCHRUN).misleads() == found
    assert place({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}).misleads() == ""
    assert place({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).misleads() == ""


def _address(family: socket.AddressFamily, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "4"}, "RANK 4 of WORLD_SIZE 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(changed: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place({**TORCHRUN, **changed})


TCP = "tcp://127.0.0.1:29500"


def test_a_script_without_a_launcher_gives_its_place_as_in_torch() -> None:
    """Rank 0 serves the store; behind a loopback address all ranks are on this machine."""
    completed = self_started(worker_environment({}), TCP, 1, 2)
    assert assignment_of(completed) == RankAssignment(0, 1, 2, 1, 2, StoreAddress("127.0.0.1", 29500, serve=True))
    own = worker_environment({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    elsewhere = assignment_of(self_started(own, "tcp://[fe80::1]:29500", 3, 4))
    assert elsewhere == RankAssignment(0, 3, 4, 1, 2, StoreAddress("fe80::1", 29500, serve=True))
    master = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    same = self_started(worker_environment({**master, "RANK": "1", "WORLD_SIZE": "2"}), "env://", None, None)
    assert assignment_of(same) == RankAssignment(0, 1, 2, 0, 1, StoreAddress("node7", 29500, serve=True))
    assert self_started(worker_environment(master), None, 1, 2) == same


def test_a_launcher_is_left_to_decide() -> None:
    launched = worker_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "local"})
    for method in (None, "env://"):
        assert self_started(launched, method, None, None) is launched


@pytest.mark.parametrize(
    ("environ", "method", "rank", "world_size", "says"),
    [
        ({}, TCP, 2, 2, "rank is 2, and world_size is 2"),
        ({}, TCP, -1, 2, "'rank' is -1"),
        ({}, TCP, 0, 0, "'world_size' is 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, TCP, None, None, "rank and world_size are missing"),
        ({}, "env://", 0, None, "world_size is missing.*set RANK and WORLD_SIZE"),
        ({}, "tcp://127.0.0.1", 0, 2, "use 'tcp://HOST:PORT'"),
        ({}, "tcp://127.0.0.1:99999", 0, 2, "use 'tcp://HOST:PORT'"),
        ({}, "file:///tmp/there", 0, 2, "use 'tcp://HOST:PORT'"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, TCP, 0, 2, "torchrun has started this process"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, TCP, None, None, "torchrun has started this process"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "env://", 0, 2, "torchrun has started this process"),
        ({"ELASTIC_TRAINER_CHANNEL": "/run/agent"}, TCP, 0, 2, "torchrun has started this process"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    environ: dict[str, str], method: str, rank: int | None, world_size: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        self_started(worker_environment(environ), method, rank, world_size)


def together(store: HashStore, world: int) -> set[str]:
    with ThreadPoolExecutor(world) as pool:
        meetings = [pool.submit(meet, store, rank, world, Deadline.after(60.0)) for rank in range(world)]
        return {each.result(60.0) for each in meetings}


def test_all_ranks_get_one_prefix_and_each_round_another() -> None:
    """A store that holds the remains of earlier rounds, also larger and smaller ones, misleads no rank."""
    store = HashStore()
    seen: set[str] = set()
    for world in (3, 3, 5, 2, 1, 4, 4):
        prefixes = together(store, world)
        assert len(prefixes) == 1
        assert not prefixes & seen
        seen |= prefixes


def test_the_remains_of_ranks_that_died_while_meeting_are_passed_over() -> None:
    store = HashStore()
    for rank in (1, 2):
        store.set(f"meeting/hello/{rank}", "stale")
    store.set("meeting/offer/dead", '{"world": 3, "tokens": {"1": "stale", "2": "stale"}}')
    store.set("meeting/offer", "dead")
    store.set("meeting/go/dead", "1")
    prefixes = together(store, 3)
    assert len(prefixes) == 1
    assert "dead" not in prefixes


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TransientError, match="rank 0 waits for ranks 1, 2"):
        meet(HashStore(), 0, 3, Deadline.after(0.05))
    with pytest.raises(TransientError, match="rank 1 waits for rank 0"):
        meet(HashStore(), 1, 3, Deadline.after(0.05))


def test_the_end_of_a_round_aborts_all_groups_whose_kernels_wait() -> None:
    """A sharded model has several communicators; one that cannot be aborted keeps none of the others."""
    freed: list[str] = []

    def refuse() -> None:
        raise RuntimeError("no communicator was made yet\nC++ stack")

    escape = CollectiveAborter(cast("Any", None))
    works = escape.enter(3, [])
    works.abort_with(refuse)
    works.abort_with(lambda: freed.append("shards"))
    escape.over(2)
    assert freed == []
    escape.over(3)
    assert freed == ["shards"]
    escape.leave(planned=True)


def test_the_end_of_a_round_does_not_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the thread that severs comes: its round was left meanwhile, and the next has its connections."""
    escape = CollectiveAborter(cast("Any", None))
    escape.enter(1, [])
    aborted: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as store:

        def next_round() -> None:
            escape.leave(planned=True)
            escape.enter(2, [store.getsockname()]).abort_with(lambda: aborted.append("of round 2"))

        monkeypatch.setattr("elastic_trainer.worker.comm.groups.abort_nccl", next_round)
        escape.over(1)
        assert aborted == []
        with socket.create_connection(store.getsockname()):
            escape.release_main_thread(1, "it was not formed in time")
            assert escape.sockets.sever(1) == 0
            assert escape.sockets.sever(2) == 1
    escape.leave(planned=True)
