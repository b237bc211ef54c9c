"""A job of real torchrun processes on this machine, running the plain script, and what its workers wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.local.tail import FileTail
from elastic_trainer.membership.documents import JournalEntry, NodeRecord, NodeState, RoundDocument
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.keys import RunKeys

SCRIPT = Path(__file__).parents[1] / "integration" / "agent" / "plain.py"
LIMIT_S = 180.0
"""How long anything may take on a slow machine before a test fails."""
QUICK = {"ttl": "60", "last_call": "600", "last_call_limit": "600", "join_batch": "0.2", "join_interval": "0.2"}
"""The first round waits for all of max, however slow the machine is, and no lease ends while a machine is slow."""
BRIEF = {"ttl": "10"}
"""For tests in which the lease of a dead or frozen node is to end."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a worker."""

    t: float
    round: int
    rank: int
    world: int
    step: int
    pid: int


class SteppingCluster(LocalCluster):
    """Nodes whose workers write the lines of the plain script."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
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
        """The newest line."""
        steps = self.steps(node, local_rank)
        return steps[-1] if steps else None

    def log(self, node: str) -> str:
        """What the node printed."""
        return (self.spec.logs / f"{node}.log").read_text(errors="replace")

    def describe(self) -> str:
        """The end of all logs, for a failure's message."""
        parts = [f"--- {n.name} (exit {n.exit_code()}), last {self.last(n.name)}" for n in self.nodes]
        return "\n".join(
            f"{part}\n" + "\n".join(self.log(node.name).splitlines()[-12:])
            for part, node in zip(parts, self.nodes, strict=True)
        )


class PlainJob(SteppingCluster):
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
        directory.mkdir(parents=True, exist_ok=True)
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
        self.keys = RunKeys("/elastic_trainer", run)
        self.store = connect(StoreSettings(endpoints=parse_endpoints(endpoint)))

    def __exit__(self, *error: object) -> None:
        self.store.close()
        super().__exit__(*error)

    def add_with(self, **changes: Any) -> Node:
        """One more node, whose command differs from the others' in these fields of the specification."""
        common, self.spec = self.spec, replace(self.spec, **changes)
        try:
            return self.add()
        finally:
            self.spec = common

    # ---- what the workers wrote

    def await_order(self) -> list[str]:
        """The nodes in rank order, once a round is formed."""
        deadline = Deadline.after(LIMIT_S)
        while self.store.get(self.keys.round, deadline).first is None:
            assert not deadline.expired, f"no round was formed:\n{self.describe()}"
            pause(0.05)
        return [member.node for member in self.document().members]

    def await_world(self, *nodes: str, after: int = 0, t: float = 0.0) -> int:
        """Wait until these nodes, in this rank order, step together in one round later than ``after``; its number.

        One worker a node. ``t``: only steps after this moment count.
        """
        deadline = Deadline.after(LIMIT_S)
        while (found := self._together(nodes, after, t)) is None:
            assert not deadline.expired, f"no round of {nodes} after {after}:\n{self.describe()}"
            pause(0.05)
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
        deadline = Deadline.after(LIMIT_S)
        while not all((step := self.last(node)) is not None and step.round > after for node in nodes):
            assert not deadline.expired, f"no round of {nodes} after {after}:\n{self.describe()}"
            pause(0.05)

    def await_steps(self, node: str, count: int, local_rank: int = 0) -> None:
        """Wait until this worker has made ``count`` more steps."""
        goal, deadline = len(self.steps(node, local_rank)) + count, Deadline.after(LIMIT_S)
        while len(self.steps(node, local_rank)) < goal:
            assert not deadline.expired, f"{node} stands still:\n{self.describe()}"
            pause(0.05)

    # ---- what the test tells it

    def await_state(self, node: str, state: NodeState) -> None:
        """Wait until ``node`` shows this state."""
        deadline = Deadline.after(LIMIT_S)
        while (found := self.store.get(self.keys.node(node), deadline).first) is None or (
            NodeRecord.decode(found.value, found.key).state is not state
        ):
            assert not deadline.expired, f"{node} is not {state}:\n{self.describe()}"
            pause(0.05)

    def tell(self, name: str) -> None:
        """Write one of the files that the script looks for."""
        (self.spec.directory / name).touch()

    def finish(self) -> dict[str, int | None]:
        """Let all workers end together; the exit codes of the nodes."""
        self.tell("stop")
        assert self.wait(Deadline.after(LIMIT_S)), f"the job does not end:\n{self.describe()}"
        return {node.name: node.exit_code() for node in self.nodes}

    def exit_code(self, node: Node) -> int | None:
        """Wait for this node's end."""
        code = node.wait(Deadline.after(LIMIT_S))
        assert code is not None, f"{node.name} does not end:\n{self.describe()}"
        return code

    # ---- what the store holds

    def document(self) -> RoundDocument:
        """The round document."""
        found = self.store.get(self.keys.round, Deadline.after(LIMIT_S)).first
        assert found is not None
        return RoundDocument.decode(found.value, found.key)

    def journal(self) -> list[JournalEntry]:
        """All transitions so far."""
        items = self.store.range(self.keys.events, Deadline.after(LIMIT_S)).items
        return [JournalEntry.decode(item.value, item.key) for item in items]

    def present(self, node: str) -> bool:
        """Whether the node's key is there."""
        return self.store.get(self.keys.node(node), Deadline.after(LIMIT_S)).first is not None
