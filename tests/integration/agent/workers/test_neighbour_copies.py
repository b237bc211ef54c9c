"""Copies of shards in the memory of another node's agent: whole or nothing, and only for those with the key."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from elastic_trainer.agent.suspicion import AgentPort
from elastic_trainer.agent.workers import rescue
from elastic_trainer.agent.workers.rescue import NeighbourCopies
from elastic_trainer.checkpoint import Arena, BackgroundSaves, CheckpointManager, DamagedError, Owner, SaveInfo
from elastic_trainer.checkpoint import neighbours as protocol
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.manifest import PIECE
from elastic_trainer.checkpoint.memory import DATA, SLOTS, LocalMemory, StateSnapshot, read, seal_as
from elastic_trainer.checkpoint.neighbours import MemoryAddress, Neighbour, RefusedError, RemoteMemory
from elastic_trainer.checkpoint.reading import read_state
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.restore import joined_copies
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import records
from tests.unit.worker.ranks import run_ranks

OWNER = Owner("run", "job")
WIDTH = 300_000
"""Numbers in a shard: more than one message."""


class GroupRank:
    """Shard rank ``index`` of ``count``, which writes the tensor of its number."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def writes(self, tensor: torch.Tensor) -> bool:
        return int(tensor[0]) % 10 == self.index


class Node:
    """An agent, and the memory of its one worker, which is shard rank ``index`` of ``count``."""

    def __init__(self, index: int, count: int, directory: Path) -> None:
        self.index, self.count = index, count
        self.agent = NeighbourCopies(1)
        self.port = AgentPort("127.0.0.1", "run", "node", self.agent.serve)
        self.own = [os.memfd_create(f"elastic-trainer-test-{slot}") for slot in range(SLOTS)]
        self.manager = CheckpointManager(directory, owner=OWNER)

    @property
    def address(self) -> MemoryAddress:
        return MemoryAddress.parse(self.here)

    @property
    def here(self) -> str:
        return f"127.0.0.1 {self.port.port} {self.agent.key}"

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return {f"w{rank}": torch.full((WIDTH,), step * 10.0 + rank) for rank in range(self.count)}

    def copies(self, step: int) -> int:
        """The worker seals a copy of its shard; the memory file."""
        arena, info = Arena(self.paths(self.own)), SaveInfo(step, 1)
        held = arena.hold(self.manager.encode(self.state(step), info, shard_group=GroupRank(self.index, self.count)))
        manifest = self.manager.draft(info).with_files(records(held.image))
        seal_as(arena.descriptor(held), manifest, self.manager.location, OWNER.job)
        descriptor = arena.descriptor(held)
        return next(each for each in self.own if os.path.sameopenfile(each, descriptor))

    def leaves(self, step: int, neighbour: Node, keep: tuple[int, int] | None = None) -> None:
        client = Neighbour(neighbour.address, 0)
        client.keep(self.copies(step), keep, lambda: False)
        client.close()

    def paths(self, descriptors: list[int]) -> list[Path]:
        return [Path(f"/proc/{os.getpid()}/fd/{each}") for each in descriptors]

    def parts(self) -> list[tuple[str, StateSnapshot]]:
        """What a worker that starts now finds."""
        return Arena(self.paths(self.own), beside=self.paths(self.agent.files)).parts()

    def kept(self) -> list[int]:
        """The steps of the copies here, the older first."""
        found = [read(each) for each in self.agent.files]
        return sorted(each.manifest.step for each in found if each is not None)

    def close(self) -> None:
        self.agent.close()
        self.port.close()
        for each in self.own:
            os.close(each)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with ExitStack() as ends:
        made = [Node(index, 3, tmp_path) for index in range(3)]
        for each in made:
            ends.callback(each.close)
        yield made


def test_those_who_are_left_read_all_parts_of_the_newest_state_that_all_had_copied(nodes: list[Node]) -> None:
    """Node 1 is gone, with what it kept for node 0. It had left two copies with node 2, which node 0 reads from there,
    as node 2 reads the part of node 0. At step 3 it had not copied yet."""
    for step in (1, 2):
        for index, node in enumerate(nodes):
            node.leaves(step, nodes[(index + 1) % 3])
    nodes[0].leaves(3, nodes[1])
    nodes[2].leaves(3, nodes[0])
    left = [nodes[0], nodes[2]]

    def resumed(control: Control) -> tuple[tuple[int, int], dict[str, torch.Tensor], int]:
        node = left[control.rank]
        with joined_copies(control, node.parts(), node.here) as joined:
            assert joined is not None
            local = sum(isinstance(each, LocalMemory) for each in joined.memories)
            return joined.order, read_state(joined, joined.manifest), local

    for order, state, local in run_ranks(2, resumed):
        assert order == (1, 2)
        assert all(torch.equal(state[name], each) for name, each in nodes[0].state(2).items())
        assert local in (1, 2)


def test_the_older_copy_is_overwritten_and_never_the_one_that_the_job_has_resumed(nodes: list[Node]) -> None:
    for step in (1, 2, 3):
        nodes[0].leaves(step, nodes[1])
        assert nodes[1].kept() == [*range(max(1, step - 1), step + 1)]
    nodes[0].leaves(4, nodes[1], keep=(1, 2))
    assert nodes[1].kept() == [2, 4]
    nodes[0].leaves(5, nodes[1])
    assert nodes[1].kept() == [4, 5]


def test_a_copy_that_is_cut_off_is_none_and_the_one_before_stays(nodes: list[Node]) -> None:
    for step in (1, 2):
        nodes[0].leaves(step, nodes[1])
    asked = iter([False, True])
    Neighbour(nodes[1].address, 0).keep(nodes[0].copies(3), None, lambda: next(asked))
    eventually(lambda: nodes[1].kept() == [2], "the broken copy is still there")
    nodes[0].leaves(4, nodes[1])
    assert nodes[1].kept() == [2, 4]


def test_without_the_part_of_a_node_there_is_no_state_and_a_bit_that_changed_in_one_is_found(nodes: list[Node]) -> None:
    for index, node in enumerate(nodes):
        node.leaves(1, nodes[(index + 1) % 3])
    for here in (nodes[0].here, None):
        with joined_copies(Control(), nodes[0].parts(), here) as joined:
            assert joined is None
    (kept,) = (each for each in nodes[1].agent.files if read(each) is not None)
    (byte,) = os.pread(kept, 1, DATA + 500_000)
    os.pwrite(kept, bytes([byte ^ 1]), DATA + 500_000)
    parts = [*nodes[1].parts(), *nodes[2].parts()]
    with joined_copies(Control(), parts, nodes[1].here) as joined:
        assert joined is not None
        with pytest.raises(DamagedError):
            read_state(joined, joined.manifest)


def test_who_does_not_know_the_key_reads_and_leaves_nothing(nodes: list[Node]) -> None:
    nodes[0].leaves(1, nodes[1])
    wrong = nodes[1].address._replace(key="00" * 16)
    with pytest.raises(OSError, match="does not answer"):
        Neighbour(wrong, 0).keep(nodes[0].copies(2), None, lambda: False)
    with pytest.raises(OSError, match="does not answer"):
        RemoteMemory(wrong, f"/proc/1/fd/{nodes[1].agent.files[0]}").read_into(memoryview(bytearray(10)), 0)
    assert nodes[1].kept() == [1]


def test_an_agent_that_is_silent_for_once_in_the_middle_is_asked_again(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had sent by then is read anew; and one that is silent twice does not answer."""
    monkeypatch.setattr(protocol, "SILENCE_S", 1)
    send, silences, over = NeighbourCopies._send, [1, 2, 3], threading.Event()

    def sends(agent: NeighbourCopies, link: Any, request: dict[str, Any]) -> None:
        if silences:
            silences.pop()
            link.send_bytes(b"some")
            over.wait(60.0)
        else:
            send(agent, link, request)

    monkeypatch.setattr(NeighbourCopies, "_send", sends)
    path = nodes[0].paths([descriptor := nodes[0].copies(1)])[0]
    memory, content = RemoteMemory(nodes[0].address, str(path)), bytearray(WIDTH)
    with pytest.raises(OSError, match="does not answer"):
        memory.read_into(memoryview(content), DATA)
    assert len(silences) == 1
    assert memory.read_into(memoryview(content), DATA)
    assert not silences
    assert content == os.pread(descriptor, WIDTH, DATA)
    over.set()
    memory.close()


def test_only_memory_files_of_snapshots_are_served(nodes: list[Node], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    with (tmp_path / "secret").open("rb") as secret:
        for path in (f"/proc/1/fd/{secret.fileno()}", "/proc/1/fd/0", "secret", "/proc/1/fd/-1"):
            with pytest.raises(OSError, match="does not answer"):
                RemoteMemory(nodes[0].address, path).read_into(memoryview(bytearray(10)), 0)
    beyond = RemoteMemory(nodes[0].address, f"/proc/1/fd/{nodes[0].own[0]}")
    assert not beyond.read_into(memoryview(bytearray(10)), 0)
    beyond.close()


def test_a_node_without_memory_for_a_copy_says_so(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescue, "available", lambda: 1000)
    with pytest.raises(RefusedError, match="MB of memory on the next node, which has 0 MB left"):
        nodes[0].leaves(1, nodes[1])
    assert nodes[1].kept() == []


def test_a_neighbour_hangs_up_on_who_asks_nothing_for_long_and_takes_the_next_copy(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are as rare as they cost little; a process that is gone must not keep a connection."""
    monkeypatch.setattr(protocol, "SILENCE_S", 1)
    monkeypatch.setattr(rescue, "IDLE_S", 1.0)
    client = Neighbour(nodes[1].address, 0)
    client.keep(nodes[0].copies(1), None, lambda: False)
    eventually(lambda: "neighbour" not in {each.name for each in threading.enumerate()}, "it does not hang up")
    client.keep(nodes[0].copies(2), None, lambda: False)
    assert nodes[1].kept() == [1, 2]
    client.close()


class Impossible(Neighbour):
    """No host has such a name, which is no OSError: UnicodeError."""

    def __init__(self) -> None:
        super().__init__(MemoryAddress("n" * 64, 1, "00"), 0)
        self.asked = False

    def keep(self, *arguments: Any) -> None:
        self.asked = True
        super().keep(*arguments)


def keeps(node: Node, step: int) -> bool:
    return node.kept() == [step]


def test_saves_go_on_beside_a_neighbour_that_is_silent_or_gone(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel accepts, and nobody answers: the copy is given up after a while, and its slot is used again. One
    warning says it. In the next rounds others are the neighbours, and get the next copies; then nobody is.
    """
    monkeypatch.setattr(protocol, "SILENCE_S", 1)
    node, manager = nodes[0], nodes[0].manager
    with capture_logs() as logged, socket.create_server(("127.0.0.1", 0)) as silent:
        saves = BackgroundSaves(manager, Arena(node.paths(node.own)))
        saves.copy_to(Neighbour(MemoryAddress("127.0.0.1", silent.getsockname()[1], "00"), 0))

        def keep(step: int) -> None:
            info = SaveInfo(step, 1)
            image = manager.encode(node.state(step), info, shard_group=GroupRank(0, 3))
            saves.submit(image, manager.draft(info), SnapshotPurpose.MEMORY_ONLY)

        keep(1)
        eventually(lambda: saves.sending, "nothing is sent")
        assert not saves.full
        assert not saves.copied
        keep(2)
        eventually(lambda: not saves.sending, "the silent neighbour is not given up")
        impossible = Impossible()
        saves.copy_to(impossible)
        keep(3)
        eventually(lambda: impossible.asked and not saves.sending, "the impossible neighbour is not given up")
        for step, each in enumerate(nodes[1:], 4):
            saves.copy_to(Neighbour(each.address, 0))
            keep(step)
            eventually(partial(keeps, each, step), "no copy came")
            eventually(lambda: saves.copied, "nobody learns that it came")
        saves.copy_to(None)
        assert not saves.copied
        keep(6)
        saves.await_slot()
        assert not saves.sending
        saves.close()
    assert [each["step"] for each in logged if each["event"] == "snapshot.not_copied"] == [1]


def test_who_knows_only_the_digest_of_the_compile_cache_can_read_that_alone(nodes: list[Node]) -> None:
    """Not the state of a run, nor leave a copy; a bundle that is replaced while it is read is read to its end."""
    content, digest = os.urandom(3 * PIECE), "ab" * 32
    bundle = os.memfd_create("elastic-trainer-bundle")
    os.write(bundle, content)
    nodes[0].agent.lend_bundle(digest, bundle)
    address = nodes[0].address._replace(key=digest)
    state = nodes[0].paths([nodes[0].copies(1)])[0]
    for path in ("bundle", str(state)):
        memory, got = RemoteMemory(address, path), bytearray(len(content))
        assert memory.read_into(memoryview(got)[:PIECE], 0)
        nodes[0].agent.lend_bundle("cd" * 32, os.memfd_create("elastic-trainer-bundle"))
        assert memory.read_into(memoryview(got)[PIECE:], PIECE)
        assert got == content
        memory.close()
        nodes[0].agent.lend_bundle(digest, again := os.memfd_create("elastic-trainer-bundle"))
        os.write(again, content)
    client = Neighbour(address, 0)
    with pytest.raises(OSError, match="does not answer"):
        client.keep(nodes[0].copies(2), None, lambda: False)
    client.close()
    assert nodes[0].kept() == []
    nodes[0].agent.lend_bundle("", -1)
    with pytest.raises(OSError, match="does not answer"):
        RemoteMemory(address, "bundle").read_into(memoryview(bytearray(1)), 0)
