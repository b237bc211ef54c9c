"""A job in place: real torchrun nodes with the training script, what their workers wrote, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.measure import Book
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.local.ledger import Line, LineKind, audit, parse
from elastic_trainer.local.tail import FileTail
from elastic_trainer.membership.documents import JournalEntry, NodeRecord, NodeState, RoundDocument, RoundState
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.keys import RunKeys

SCRIPT = Path(__file__).with_name("train.py")
LIMIT_S = 120.0
"""How long anything may take on a slow machine before a test fails."""
QUICK = {
    "recovery": "in_place",
    "ttl": "4",
    "last_call": "0.5",
    "join_interval": "1",
    "join_batch": "0.2",
    "connect_timeout": "60",
}
LASTING = {"ttl": "20"}
"""For tests in which no lease is to end, however slow the machine is."""


class Job(LocalCluster):
    """The nodes of one run."""

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
        directory.mkdir(parents=True, exist_ok=True)
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
        super().__init__(replace(spec, **more))
        self.keys = RunKeys("/elastic_trainer", run)
        self.store = connect(StoreSettings(endpoints=parse_endpoints(endpoint), **(store or {})))
        self._tails: dict[Path, FileTail] = {}
        self._lines: list[Line] = []

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

    def lines(self) -> list[Line]:
        """All lines of all workers so far."""
        for path in self.spec.ledger.glob("*.jsonl"):
            tail = self._tails.setdefault(path, FileTail(path))
            self._lines += [line for line in map(parse, tail.read()) if line is not None]
        return self._lines

    def steps(self, node: str) -> list[Line]:
        """The steps that this node's workers recorded."""
        mine = [line for line in self.lines() if line.event is LineKind.STEP and line.node == node]
        return sorted(mine, key=lambda line: line.t)

    def newest(self) -> int:
        """The highest step recorded."""
        return max((line.step for line in self.lines() if line.event is LineKind.STEP), default=0)

    def await_world(self, *nodes: str, after: int = 0, count: int = 3) -> int:
        """Wait until exactly these nodes (one worker each) have made ``count`` steps together; their round.

        ``after``: in a round later than that.
        """

        def together() -> bool:
            for number in sorted({line.round for line in self.lines()}, reverse=True):
                if number <= after:
                    break
                here = [line for line in self._lines if line.event is LineKind.STEP and line.round == number]
                made = {name: sum(line.node == name and line.world == len(nodes) for line in here) for name in nodes}
                if min(made.values()) >= count:
                    found.append(number)
                    return True
            return False

        found: list[int] = []
        self.wait_for(together, f"{nodes} do not train together after round {after}")
        return found[0]

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

    # ---- waiting

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until ``condition()``; fail with ``what`` and the ends of all logs."""
        deadline = Deadline.after(limit_s)
        while not condition():
            assert not deadline.expired, f"{what}:\n{self.describe()}"
            pause(0.05)

    def tell(self, name: str) -> None:
        """Write one of the files that the script looks for."""
        (self.spec.directory / name).touch()

    def finish(self) -> dict[str, int | None]:
        """Let the training end; the exit codes of all nodes."""
        self.tell("stop")
        return self.exit_codes()

    def exit_codes(self, limit_s: float = LIMIT_S) -> dict[str, int | None]:
        """Wait for the end of all nodes; their exit codes."""
        assert self.wait(Deadline.after(limit_s)), f"the job does not end:\n{self.describe()}"
        return {node.name: node.exit_code() for node in self.nodes}

    def exit_code(self, node: Node, limit_s: float = LIMIT_S) -> int | None:
        """Wait for this node's end."""
        code = node.wait(Deadline.after(limit_s))
        assert code is not None, f"{node.name} does not end:\n{self.describe()}"
        return code

    # ---- what the store and the disk hold

    def document(self) -> RoundDocument | None:
        """The round document."""
        found = self.store.get(self.keys.round, Deadline.after(LIMIT_S)).first
        return RoundDocument.decode(found.value, found.key) if found is not None else None

    def closed(self) -> RoundDocument:
        """The document of the closed run."""
        document = self.document()
        assert document is not None
        assert document.state is RoundState.CLOSED, document
        return document

    def journal(self) -> list[JournalEntry]:
        """All transitions so far."""
        items = self.store.range(self.keys.events, Deadline.after(LIMIT_S)).items
        return [JournalEntry.decode(item.value, item.key) for item in items]

    def order(self) -> list[str]:
        """The nodes of the present round in rank order."""
        document = self.document()
        return [member.node for member in document.members] if document is not None else []

    def record(self, node: str) -> NodeRecord | None:
        """What the node shows of itself; None where its key is gone."""
        found = self.store.get(self.keys.node(node), Deadline.after(LIMIT_S)).first
        return NodeRecord.decode(found.value, found.key) if found is not None else None

    def present(self, node: str) -> bool:
        """Whether the node's key is there."""
        return self.record(node) is not None

    def absent(self, node: str) -> bool:
        """Whether it is gone."""
        return not self.present(node)

    def shows(self, node: str, state: NodeState) -> bool:
        """Whether the node says that it is in ``state``."""
        record = self.record(node)
        return record is not None and record.state is state

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that can be read and verified; None where there is none."""
        directory = self.spec.directory / "checkpoints"
        if not directory.exists():
            return None
        loaded = CheckpointManager(directory).load_newest()
        return loaded.manifest.step if loaded is not None else None

    # ---- what the nodes said

    def log(self, node: str) -> str:
        """What the node printed."""
        return (self.spec.logs / f"{node}.log").read_text(errors="replace")

    def sentences(self, node: str) -> list[str]:
        """The lines in which the node says why it ends."""
        return [line for line in self.log(node).splitlines() if line.startswith("elastic-trainer: ")]

    def describe(self) -> str:
        """The end of all logs, for a failure's message."""
        parts: Sequence[str] = [f"--- {node.name} (exit {node.exit_code()})" for node in self.nodes]
        return f"newest step {self.newest()}\n" + "\n".join(
            f"{part}\n" + "\n".join(self.log(node.name).splitlines()[-15:])
            for part, node in zip(parts, self.nodes, strict=True)
        )
