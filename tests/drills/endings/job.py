"""A job in place: real torchrun nodes with the training script, what their workers wrote, and what the store holds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.drills.measure import Book
from elastic_trainer.local.cluster import ClusterSpec, Node
from elastic_trainer.local.ledger import LedgerTail, Line, LineKind, audit
from elastic_trainer.membership.documents import RoundDocument, RoundState
from tests.support.networks import within
from tests.support.running import LIMIT_S as LIMIT_S
from tests.support.running import Running
from tests.unit.checkpoint.states import load_newest

SCRIPT = Path(__file__).with_name("train.py")
QUICK = {
    "recovery": "in_place",
    "ttl": "4",
    "last_call": "0.5",
    "join_interval": "1",
    "connect_timeout": "60",
}
PATIENT = {"last_call": "600"}
LASTING = {"ttl": "20"}
"""For tests in which no lease is to end, however slow the machine is."""


class Job(Running):
    def __init__(
        self,
        directory: Path,
        endpoint: str,
        run: str,
        *flags: str,
        least: int = 2,
        most: int = 3,
        options: dict[str, str] | None = None,
        store: dict[str, Any] | None = None,
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
            options=QUICK | (options or {}),
            environment={"OMP_NUM_THREADS": "1"},
        )
        super().__init__(replace(spec, **more), store)
        self._ledger = LedgerTail(self.spec.ledger)
        self._lines: list[Line] = []

    def start(self, count: int) -> list[Node]:
        """Where these are all that the run may have, the first round waits for each, however slow the machine is."""
        if not self.nodes and count == self.spec.max_nodes:
            self.spec = replace(self.spec, options={**self.spec.options, **PATIENT})
        return super().start(count)

    # ---- what the workers wrote

    def lines(self) -> list[Line]:
        self._lines += self._ledger.read()
        return self._lines

    def steps(self, node: str) -> list[Line]:
        """The steps that this node's workers recorded."""
        mine = [line for line in self.lines() if line.event is LineKind.STEP and line.node == node]
        return sorted(mine, key=lambda line: line.t)

    def newest(self) -> int:
        return max((line.step for line in self.lines() if line.event is LineKind.STEP), default=0)

    def await_world(self, *nodes: str, after: int = 0, count: int = 3) -> int:
        """Wait until exactly these nodes (one worker each) have made ``count`` steps together; their round.

        ``after``: in a round later than that.
        """

        def together() -> int:
            for number in sorted({line.round for line in self.lines()}, reverse=True):
                if number <= after:
                    break
                here = [line for line in self._lines if line.event is LineKind.STEP and line.round == number]
                made = {name: sum(line.node == name and line.world == len(nodes) for line in here) for name in nodes}
                if min(made.values()) >= count:
                    return number
            return 0

        found: int = self.wait_for(together, f"{nodes} do not train together after round {after}")
        return found

    def await_steps(self, count: int) -> int:
        """Wait until ``count`` more steps have been made; the newest."""
        goal = self.newest() + count
        self.wait_for(lambda: self.newest() >= goal, "the job stands still")
        return self.newest()

    def check_lossless(self, again: int = 0) -> None:
        """Every sample was used once, and no process did again what it had committed.

        But for ``again`` steps that a node committed as it was excluded: the others had given them up by then.
        """
        found = audit(self.lines(), size=None)
        assert found.exact, found.reason
        assert Book(self.lines()).committed_again() <= again, found

    def near(self, node: str) -> AbstractContextManager[None]:
        """In the body this thread connects from the node's own host: what listens on its loopback hears it."""
        return within(f"/proc/{self.hosts[node].pid}/ns/net") if self.hosts else nullcontext()

    # ---- what the store and the disk hold

    def closed(self) -> RoundDocument:
        document = self.document()
        assert document.state is RoundState.CLOSED, document
        return document

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that can be read and verified; None where there is none."""
        directory = self.spec.directory / "checkpoints"
        if not directory.exists():
            return None
        loaded = load_newest(CheckpointManager(directory))
        return loaded.manifest.step if loaded is not None else None

    def describe(self) -> str:
        return f"newest step {self.newest()}\n{super().describe()}"
