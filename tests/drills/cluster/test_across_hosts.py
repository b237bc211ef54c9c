"""Jobs that grow and shrink on hosts of their own, on networks of every kind: 1, 2, 3, 1 and 2 nodes.

Each kind of network, name, clock, start, recovery and model is in one cell or more; a cell is one job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from elastic_trainer.drills.job import Sharded
from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.drills.strikes import kill_nodes
from elastic_trainer.local import agents
from elastic_trainer.local.cluster import LocalCluster
from elastic_trainer.local.hosts import free_ports
from elastic_trainer.local.ledger import LineKind
from tests.drills.cluster.clocks import MovedClocks
from tests.drills.cluster.undisturbed import undisturbed
from tests.integration.training.launch import LIMIT_S
from tests.integration.worker.launch import environment
from tests.support.networks import ABOVE, BELOW, IPV6, HostNetwork, OwnName
from tests.support.requirements import here, needs

pytestmark = [pytest.mark.timeout(400), pytest.mark.root, pytest.mark.usefixtures("etcd_binary")]

TRAIN = Path(__file__).parents[2] / "integration" / "worker" / "scripts" / "train.py"
FIREWALL = """
table inet host {
    chain inbound {
        type filter hook input priority 0; policy drop;
        iif "lo" accept
        ct state established,related accept
        meta l4proto ipv6-icmp accept
        tcp dport 32768-60999 accept
    }
}
"""
"""What deploy/operations.md asks a firewall between nodes to let through, and nothing else."""
IN_PLACE = Setting(
    nodes=1, min_nodes=1, samples=500, width=64, pause_s=0.03, reduction="tree", limit_s=180.0, options={"ttl": "10"}
)
RESTART = replace(IN_PLACE, save_every_s=0.5, options={**IN_PLACE.options, "recovery": "restart"})
SHARDED = replace(IN_PLACE, reduction="ddp", workers=2, sharded=Sharded.GROUP)
RESHARDED = replace(RESTART, reduction="ddp", sharded=Sharded.JOB)
COLD = {"preload": "off"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One job. ``ahead_s``: by how much the clock of each further host is ahead of the one before."""

    name: str
    setting: Setting = IN_PLACE
    network: HostNetwork = field(default_factory=HostNetwork)
    ahead_s: float = 0.0
    nodes: int = 1
    """How many start together."""

    @property
    def exact(self) -> bool:
        """Whether it computes the bits of one process."""
        return self.setting.reduction == "tree"


def cold(setting: Setting) -> Setting:
    """``setting`` with workers that import everything themselves."""
    return replace(setting, options={**setting.options, **COLD})


CELLS = (
    Cell("in place"),
    Cell("in place, three at once", nodes=3),
    Cell("in place, below, debian, cold", cold(IN_PLACE), HostNetwork((BELOW,), OwnName.LOOPBACK)),
    Cell("in place, debian, aside", network=HostNetwork((ABOVE,), OwnName.LOOPBACK, aside=True)),
    Cell("in place, ipv6, unnamed", network=HostNetwork((IPV6,), OwnName.NOTHING)),
    Cell("in place, both, firewall", network=HostNetwork((ABOVE, IPV6), rules=FIREWALL)),
    Cell("in place, clocks", ahead_s=3600.0),
    Cell("restart", RESTART),
    Cell("restart, ipv6, debian, cold", cold(RESTART), HostNetwork((IPV6,), OwnName.LOOPBACK)),
    Cell("restart, unnamed, aside, firewall", RESTART, HostNetwork((ABOVE,), OwnName.NOTHING, True, FIREWALL)),
    Cell("restart, below, clocks", RESTART, HostNetwork((BELOW,)), ahead_s=-3600.0),
    Cell("sharded, debian", SHARDED, HostNetwork((ABOVE,), OwnName.LOOPBACK)),
    Cell("sharded over hosts, both", RESHARDED, HostNetwork((IPV6, BELOW))),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name.replace(", ", "-").replace(" ", "_"))
def test_a_job_grows_and_shrinks_across_hosts(cell: Cell, tmp_path: Path) -> None:
    """One node trains; a second and a third join; two die at once, and the one left trains on; another joins. No node
    that lives is lost, each sample counts once, and with the tree all bits are those of one undisturbed process."""
    with placed(cell, tmp_path) as stage:
        trained = [len(stage.await_steps().nodes)]
        assert here().reaches("n0") == (not cell.network.rules), "the firewall lets through what it must not"
        while trained[-1] < 3:
            stage.cluster.add()
            trained.append(len(stage.await_steps().nodes))
        assert {inner_id(node.pid) for node in stage.cluster.running} == {2}, "process ids differ between hosts"
        kill_nodes(stage, stage.await_steps().nodes[1:])
        trained.append(len(stage.await_steps().nodes))
        stage.cluster.add()
        trained.append(len(stage.await_steps().nodes))
        assert conclusions(stage) == []
        assert trained == [*range(cell.nodes, 4), 1, 2]
        assert stage.cluster.hosts.keys() == {node.name for node in stage.cluster.nodes}
        found = {(each.step, each.digest) for each in stage.digests()} if cell.exact else set()
    if cell.exact:
        expected = undisturbed(cell.setting, tmp_path / "alone", max(step for step, _ in found))
        assert len(found) > 2  # every tenth step, of the twelve or more that each round makes
        assert found == {(step, digest) for step, digest in expected.items() if step in dict(found)}


def inner_id(pid: int) -> int:
    """The id of a process on its own host."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])


class AheadClocks(MovedClocks):
    """The clock of the host n2 is ahead of that of n1 by so many seconds, as that one is of n0's."""

    def __init__(self, directory: Path, ahead_s: float) -> None:
        super().__init__(directory)
        self._ahead_s = ahead_s

    def ahead_s(self, node: str) -> float:
        return int(node.removeprefix("n")) * self._ahead_s

    def variables(self, node: str) -> dict[str, str]:
        """See :class:`MovedClocks`; temporary files are each host's own."""
        found = super().variables(node)
        self.move(node, self.ahead_s(node))
        return {name: value for name, value in found.items() if name != "TMPDIR"}


@contextmanager
def placed(cell: Cell, directory: Path) -> Iterator[Stage]:
    """The job of ``cell`` on hosts as it wants them; the first nodes have been started."""
    if cell.network.rules:
        needs("nft", "a firewall between hosts (Debian: nftables)")
    clocks = AheadClocks(directory / "clocks", cell.ahead_s) if cell.ahead_s else None
    clusters = clocks.cluster if clocks is not None else LocalCluster
    setting = replace(cell.setting, nodes=cell.nodes)
    with here().using(cell.network), staged(setting, directory / "job", clusters) as stage:
        yield stage
        if clocks is not None:
            shown = {line.node: line.wall - line.t for line in stage.book.lines if line.event is LineKind.STEP}
            for node, offset in shown.items():
                assert round(offset - shown["n0"], -1) == clocks.ahead_s(node)


def test_processes_that_no_launcher_started_meet_at_an_init_method(tmp_path: Path) -> None:
    """Each on its own host, whose name resolves to its loopback: they train together."""
    segment = here()
    with segment.using(HostNetwork((ABOVE,), OwnName.LOOPBACK)):
        hosts = [segment.attach(f"n{rank}") for rank in range(2)]
        words = [str(TRAIN), str(tmp_path), "1", "--world-size", "2", "--init-method"]
        words += [f"tcp://{hosts[0].address}:{free_ports(1)[0]}"]
        logs = [tmp_path / f"{rank}.log" for rank in range(2)]
        started = [
            agents.spawn([sys.executable, *words, "--rank", str(rank)], logs[rank], environment(), host.pid)
            for rank, host in enumerate(hosts)
        ]
        codes = [each.wait(LIMIT_S) for each in started]
    assert codes == [0, 0], [log.read_text() for log in logs]
    finals = [torch.load(tmp_path / f"final-{rank}.pt") for rank in range(2)]
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
