"""Which lives count as ended at their start, and who listens."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.agent.workers import deaths
from elastic_trainer.agent.workers.conductor import FalseStart
from elastic_trainer.agent.workers.deaths import AT_START_S, StartupWatch, described, listened_at
from tests.support.memory_store import ManualClock

PORT = 0x1234


def failed(*codes: int) -> dict[int, ProcessFailure]:
    return {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}


def test_lives_that_end_alike_at_their_start_are_counted() -> None:
    """One that was ended from outside changes nothing, another way to fail begins the count anew."""
    starts, outcomes = StartupWatch(ManualClock(), lambda port: False), []
    for codes in ((1,), (), (1,), (2,)):
        starts.begin(None)
        starts.turn(PORT)
        outcomes.append(starts.end(failed(*codes), stepped=False))
    assert outcomes == [FalseStart("exit code 1", 1), None, FalseStart("exit code 1", 2), FalseStart("exit code 2", 1)]


def test_lives_that_fail_alike_may_differ_in_numbers_and_paths(tmp_path: Path) -> None:
    """And a worker whose words nobody kept may have failed like the others."""
    starts, counts = StartupWatch(ManualClock(), lambda port: False), []
    for number, said in enumerate(
        ("KeyError: 'run-1'", "KeyError: 'run-2'", "", "KeyError: 'run-3'", "KeyError: 'lr'")
    ):
        path = tmp_path / f"{number}.json"
        if said:
            path.write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": "1"}}}))
        starts.begin(None)
        found = starts.end({0: ProcessFailure(0, 1, 1, str(path))}, stepped=False)
        counts.append(found.count if found is not None else 0)
    assert counts == [1, 2, 3, 4, 1]


def nobody_knows(port: int) -> bool:
    raise OSError("this kernel does not say who listens")


@pytest.mark.parametrize("how", ["a step", "a minute", "a meeting", "nobody knows"])
def test_a_node_that_got_past_the_start_once_never_says_so_again(how: str) -> None:
    clock = ManualClock()
    starts = StartupWatch(clock, nobody_knows if how == "nobody knows" else lambda port: how == "a meeting")
    starts.begin(None)
    starts.turn(PORT)
    clock.advance(AT_START_S if how == "a minute" else 1.0)
    assert starts.end(failed(1), stepped=how == "a step") is None
    starts.begin(None)
    assert starts.end(failed(1), stepped=False) is None


def test_a_signal_is_no_failure_of_the_script() -> None:
    """The kernel's memory killer, say, may end a worker on one machine and not on another."""
    assert described({}) == described(failed(-9)) == described(failed(1, -15)) == ""
    assert described(failed(2, 1)) == "exit code 2"


def test_what_a_recorded_script_says_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ImportError: no x\nmore", "extraInfo": {"timestamp": "1"}}}))
    assert described({0: ProcessFailure(0, 1, 1, str(path))}) == "exit code 1: ImportError: no x"


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
@pytest.mark.parametrize("netlink", [True, False], ids=["netlink", "tables"])
def test_a_port_is_listened_at_from_listen_to_close(
    netlink: bool, family: socket.AddressFamily, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound socket does not listen yet; nor does the one that connects to it."""
    if not netlink:
        monkeypatch.setattr(deaths, "_SOCK_DIAG", 31)  # there is no such protocol
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind((address, 0))
        port = server.getsockname()[1]
        assert not listened_at(port)
        server.listen()
        assert listened_at(port)
        client.connect((address, port))
        assert not listened_at(client.getsockname()[1])
    assert not listened_at(port)
