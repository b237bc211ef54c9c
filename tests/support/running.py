"""A run of real torchrun nodes on this machine: what a test tells it, what its nodes said, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.membership.documents import JournalEntry, NodeRecord, NodeState, RoundDocument
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import RunKeys

LIMIT_S = 180.0
"""How long anything may take on a slow machine before a test fails."""


class Running(LocalCluster):
    """The nodes of one run, and a connection to its store."""

    def __init__(self, spec: ClusterSpec, store: dict[str, Any] | None = None) -> None:
        spec.directory.mkdir(parents=True, exist_ok=True)
        # Many tests share an etcd, and their hosts have the same names: what one breaks is no fault of the next one's.
        if spec.backend == "etcd3":
            spec = replace(spec, options={"sick_machines": "off", **spec.options})
        super().__init__(spec)
        self.keys = RunKeys("/elastic_trainer", spec.run)
        self.store = connect(StoreSettings(endpoints=parse_endpoints(spec.endpoint), **(store or {})))

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

    # ---- waiting, and what the test tells

    def wait_for(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until ``condition()`` is true, and return it; fail with ``what`` and the ends of all logs."""
        deadline = Deadline.after(limit_s)
        while not (found := condition()):
            assert not deadline.expired, f"{what}:\n{self.describe()}"
            pause(0.05)
        return found

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
        code = node.wait(Deadline.after(limit_s))
        assert code is not None, f"{node.name} does not end:\n{self.describe()}"
        return code

    # ---- what the store holds

    def formed(self) -> bool:
        return self.store.get(self.keys.round, Deadline.after(LIMIT_S)).first is not None

    def document(self) -> RoundDocument:
        found = self.store.get(self.keys.round, Deadline.after(LIMIT_S)).first
        assert found is not None
        return RoundDocument.decode(found.value, found.key)

    def order(self) -> list[str]:
        """The nodes of the present round in rank order."""
        return [member.node for member in self.document().members]

    def journal(self) -> list[JournalEntry]:
        items = self.store.range(self.keys.events, Deadline.after(LIMIT_S)).items
        return [JournalEntry.decode(item.value, item.key) for item in items]

    def record(self, node: str) -> NodeRecord | None:
        """What the node shows of itself; None where its key is gone."""
        found = self.store.get(self.keys.node(node), Deadline.after(LIMIT_S)).first
        return NodeRecord.decode(found.value, found.key) if found is not None else None

    def present(self, node: str) -> bool:
        return self.record(node) is not None

    def absent(self, node: str) -> bool:
        return not self.present(node)

    def shows(self, node: str, state: NodeState) -> bool:
        """Whether the node says that it is in ``state``."""
        record = self.record(node)
        return record is not None and record.state is state

    # ---- what the nodes said

    def log(self, node: str) -> str:
        return (self.spec.logs / f"{node}.log").read_text(errors="replace")

    def sentences(self, node: str) -> list[str]:
        """The lines in which the node says why it ends."""
        return [line for line in self.log(node).splitlines() if line.startswith("elastic-trainer: ")]

    def describe(self) -> str:
        """The end of all logs, for a failure's message."""
        ends = ((node, "\n".join(self.log(node.name).splitlines()[-15:])) for node in self.nodes)
        return "\n".join(f"--- {node.name} (exit {node.exit_code()}):\n{end}" for node, end in ends)
