"""A store that does writes late, as a frozen etcd does after its thaw."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError
from elastic_trainer.store.api import Compare, Operation, TransactionResult
from tests.support.memory_store import MemoryBackend, MemoryStore


class LateStore(MemoryStore):
    """What is written while ``holds_back`` stays unknown to its writer, and is done when the test says so."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.holds_back = False
        self._held: list[tuple[Sequence[Compare], Sequence[Operation], Sequence[Operation]]] = []

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        if self.holds_back:
            self._held.append((guards, success, failure))
            raise OutcomeUnknownError("the store is frozen")
        return super().transact(guards, success, failure, deadline=deadline)

    def thaw(self) -> list[bool]:
        """Do what was held back; whether the guards of each held."""
        self.holds_back, held, self._held = False, self._held, []
        deadline = Deadline.after(60.0)
        return [super(LateStore, self).transact(*each, deadline=deadline).succeeded for each in held]
