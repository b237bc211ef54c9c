"""Keys below a run that no node of it has written: they are passed over, and the run goes on."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.documents import RoundState
from elastic_trainer.store.api import Put
from tests.support.crew import KEYS, Crew, eventually, soon
from tests.support.monitored import record

JUNK = {
    "junk": b"no JSON",
    "older-version": b'{"version": 1}',
    "huge": record().encode().replace(b'"local_world_size":2', b'"local_world_size":99999999'),
    "a b": record().encode(),
    "../n9": record().encode(),
    "\x1b[31m": record().encode(),
}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nodes_form_rounds_among_keys_that_are_none(when: str) -> None:
    """Older than all nodes, in the places of those who decide, or written while they train: nobody waits for them, and
    none of them becomes a member."""
    puts = [Put(f"{KEYS.nodes}{name}", value) for name, value in JUNK.items()]
    with Crew() as crew:
        if when == "before":
            crew.observer.transact([], puts, deadline=soon())
        crew.join("n0", "n1")
        eventually(lambda: _members(crew) == {"n0", "n1"}, "n0 and n1 form no round")
        if when == "meanwhile":
            crew.observer.transact([], puts, deadline=soon())
        crew.join("n2")
        crew.await_round(["n0", "n1", "n2"])  # all three work in it: who is told to crash before is forgotten
        before = _number(crew)
        crew.agents["n0"].fail_worker()
        eventually(lambda: _number(crew) > before, "no round follows")
        eventually(lambda: _members(crew) == {"n0", "n1", "n2"}, "not all are back")


def _number(crew: Crew) -> int:
    found = crew.document
    return found.number if found else 0


def _members(crew: Crew) -> set[str]:
    found = crew.document
    return {member.node for member in found.members} if found and found.state is RoundState.ACTIVE else set()
