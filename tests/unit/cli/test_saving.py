"""Commands that wait for a run's checkpoint, while others ask it for the next one."""

from __future__ import annotations

from elastic_trainer.cli import checkpoints as saving
from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import SaveRequest
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("/p", "run")


def test_an_answer_is_heard_though_the_next_request_has_replaced_it() -> None:
    """Which may have its own answer by then; the request before both is forgotten."""
    store = MemoryStore()

    def answer(request: SaveRequest, name: str) -> None:
        text = request.model_copy(update={"name": name}).encode()
        store.transact([], [Put(KEYS.save, text)], deadline=Deadline.after(1.0))

    def heard(asked: SaveRequest) -> str:
        answered = saving._wait(store, KEYS, asked, Deadline.after(1.0))
        return "" if answered is None else answered.name

    first = saving._ask(store, KEYS)
    answer(first, "step-1")
    second = saving._ask(store, KEYS)
    assert heard(first) == "step-1"
    answer(second, "step-2")
    assert [heard(first), heard(second)] == ["step-1", "step-2"]
    third = saving._ask(store, KEYS)
    assert heard(second) == "step-2"
    assert third.before is not None
    assert third.before.before is None
