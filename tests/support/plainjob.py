"""A job of real torchrun processes on this machine, running the plain script, and what its workers wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from elastic_trainer.local.ledger import FileTail
from elastic_trainer.membership.documents import NodeState
from tests.support.running import LIMIT_S as LIMIT_S
from tests.support.running import Running

SCRIPT = Path(__file__).parents[1] / "integration" / "agent" / "plain.py"
QUICK = {"ttl": "60", "last_call": "600", "join_interval": "0.2"}
"""The first round waits for all of max, however slow the machine is, and no lease ends while a machine is slow."""
BRIEF = {"ttl": "10"}
"""For tests in which the lease of a dead or frozen node is to end."""


@dataclass(frozen=True, slots=True)
class Step:
    t: float
    round: int
    rank: int
    world: int
    step: int
    pid: int


class SteppingCluster(LocalCluster):
    """Nodes whose workers write the lines of the plain script."""

    def __init__(self, spec: ClusterSpec, *more: Any) -> None:
        super().__init__(spec, *more)
        self._tails: dict[tuple[str, int], FileTail] = {}
        self._steps: dict[tuple[str, int], list[Step]] = {}

    def steps(self, node: str, local_rank: int = 0) -> list[Step]:
        """All lines of the workers with this local rank on this node, in order."""
        key = (node, local_rank)
        tail = self._tails.setdefault(key, FileTail(self.spec.directory / f"{node}-{local_rank}.txt"))
        known = self._steps.setdefault(key, [])
        rows = [line.split() for line in tail.read()]
        known += [Step(float(t), int(n), int(r), int(w), int(s), int(p)) for t, n, r, w, s, p in rows]
        return known

    def last(self, node: str, local_rank: int = 0) -> Step | None:
        steps = self.steps(node, local_rank)
        return steps[-1] if steps else None

    def log(self, node: str) -> str:
        return (self.spec.logs / f"{node}.log").read_text(errors="replace")


class PlainJob(SteppingCluster, Running):
    """The nodes of one run of the plain script."""

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        run: str,
        *,
        least: int = 2,
        most: int = 3,
        flags: Sequence[str] = (),
        options: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        spec = ClusterSpec(
            run=run,
            directory=directory,
            endpoint=endpoint,
            entry=[str(SCRIPT), str(directory), *flags],
            min_nodes=least,
            max_nodes=most,
            max_restarts=100,
            options=QUICK | {"stop_grace": "1"} | (options or {}),
            environment={"OMP_NUM_THREADS": "1"},
        )
        super().__init__(replace(spec, **more))

    # ---- what the workers wrote

    def await_order(self) -> list[str]:
        """The nodes in rank order, once a round is formed."""
        self.wait_for(self.formed, "no round was formed")
        return self.order()

    def await_world(self, *nodes: str, after: int = 0, t: float = 0.0) -> int:
        """Wait until these nodes, in this rank order, step together in one round later than ``after``; its number.

        One worker a node. ``t``: only steps after this moment count.
        """
        found: int = self.wait_for(lambda: self._together(nodes, after, t), f"no round of {nodes} after {after}")
        return found

    def _together(self, nodes: Sequence[str], after: int, t: float) -> int | None:
        seen = [self.last(node) for node in nodes]
        rounds = {step.round for step in seen if step is not None}
        whole = all(
            step is not None and (step.rank, step.world) == (rank, len(nodes)) and step.t > t
            for rank, step in enumerate(seen)
        )
        return rounds.pop() if whole and len(rounds) == 1 and min(rounds) > after else None

    def await_round(self, *nodes: str, after: int) -> None:
        """Wait until the first worker of each of these nodes steps in a round later than ``after``."""
        self.wait_for(
            lambda: all((step := self.last(node)) is not None and step.round > after for node in nodes),
            f"no round of {nodes} after {after}",
        )

    def await_steps(self, node: str, count: int, local_rank: int = 0) -> None:
        """Wait until this worker has made ``count`` more steps."""
        goal = len(self.steps(node, local_rank)) + count
        self.wait_for(lambda: len(self.steps(node, local_rank)) >= goal, f"{node} stands still")

    def await_state(self, node: str, state: NodeState) -> None:
        self.wait_for(lambda: self.shows(node, state), f"{node} is not {state}")
