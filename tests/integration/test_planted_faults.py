"""How strong the simulator is: a fault is planted in a copy of the sources, and its schedules find it.

Each fault names a schedule that has found it, which is played first; if it no longer does, one of the others must.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forked import Forked

ROOT = Path(__file__).parents[2]
LIMIT_S = 550.0
PLAY = """
import sys
for name in [each for each in sys.modules if each.partition(".")[0] in ("elastic_trainer", "tests")]:
    del sys.modules[name]  # of the clean process
sys.path[:0] = [{copy!r}, {root!r}]
from tests.simulation.world import play
for seed in [{seed}, *range(2000)]:
    play(seed)
"""


class Fault(NamedTuple):
    """``text`` of ``source`` and what is planted in its place.

    ``seed``: that of a schedule that has found it.
    """

    source: str
    text: str
    replacement: str
    seed: int


CONDUCTOR_PY = "agent/workers/conductor.py"
RECOVERY_PY = "worker/recovery.py"
RULES_PY, CLUSTER_VIEW_PY = "membership/rules.py", "membership/cluster_view.py"
MINE = "(mine.life, mine.create_revision) != (self._life.number, self._facts.create_revision())"
CONDUCTOR = {
    "another incarnation's ranks": Fault(
        CONDUCTOR_PY, MINE, "mine.create_revision != self._facts.create_revision()", 123
    ),
    "another life's ranks": Fault(CONDUCTOR_PY, MINE, "mine.life != self._life.number", 1017),
    "one rank for all workers": Fault(CONDUCTOR_PY, "rank=mine.first_rank + local_rank", "rank=mine.first_rank", 1),
    "a ready worker learns of no round": Fault(CONDUCTOR_PY, "self.see(self._document)", "pass", 1524),
    "messages wait for ever": Fault(
        CONDUCTOR_PY, "        if worker.unread:\n            self._read(worker)", "        pass", 30
    ),
    "a back-off never ends": Fault(CONDUCTOR_PY, ", partial(self._offer, self._life.number))", ", lambda: None)", 36),
    "no end of the training": Fault(CONDUCTOR_PY, 'self.passed |= message.status == "done"', "pass", 3),
    "a closed run ends no worker": Fault(
        CONDUCTOR_PY, "self._send(worker, Exit(code=code, reason=document.reason))", "pass", 3
    ),
    "two lives with one number": Fault(CONDUCTOR_PY, "Life(life.number + 1,", "Life(life.number,", 10),
    "blocked workers stay": Fault(CONDUCTOR_PY, "self._release.expect(self._life, worker, number)", "pass", 133),
    "busy workers are killed": Fault(CONDUCTOR_PY, "if busy or stood_still", "if stood_still", 18),
    "a thawed agent kills": Fault(CONDUCTOR_PY, "or stood_still or", "or", 425),
    "workers of one node wait for each other": Fault(
        CONDUCTOR_PY, "        if self._checks:\n            self._check_next()", "        pass", 30
    ),
    "an older record is written last": Fault(
        "agent/workers/conductor_shell.py",
        "                if not written and self._record is None:",
        "                if not written and record is not None:",
        420,
    ),
    "hung workers live": Fault(
        "agent/workers/watchdog.py", "elif now - worker.heard_at > self._limit_s:", "elif False:", 31
    ),
    "a round without this node counts as over": Fault(
        CONDUCTOR_PY, "self._over(document, document.number - 1, f", "self._over(document, document.number, f", 1
    ),
    "a quarantine never tries again": Fault(
        CONDUCTOR_PY, "        self._after(seconds, self._try_again, away=True)\n", "", 101
    ),
}
MEMBERSHIP = {
    "a round is written without its author's key": Fault(
        "membership/writes.py", ", created_at(keys.node(author.node_id), author.create_revision))", ",)", 37
    ),
    "a store that went back is believed": Fault(
        "membership/core.py",
        "if position(seen) >= position(self.known) and not self._is_another(seen):",
        "if True:",
        53,
    ),
    "a lost key is not written again": Fault(
        "membership/core.py", "            return self._do(Return())\n", "            return 1.0\n", 6
    ),
    "newcomers join in a call": Fault(
        RULES_PY, "    if together := in_call(view, ready):", "    if together := list[NodeView]():", 391
    ),
    "a planned round begins before its members are free": Fault(RULES_PY, "    if behind:\n", "    if False:\n", 12),
    "a fault forgets the planned change that it meets": Fault(
        RULES_PY,
        "    base = current.next if current.next is not None else current\n",
        "    base = current\n",
        8,
    ),
    "a number that was planned is used again": Fault(
        CLUSTER_VIEW_PY, "else view.round.last_number) + 1", "else view.round.number) + 1", 206
    ),
    "a round is written over any other": Fault(
        "store/api.py", "Relation.EQUAL, mod_revision)", "Relation.LESS, 1 << 60)", 0
    ),
    "the next round has the number of this one": Fault(
        CLUSTER_VIEW_PY,
        "return (0 if view.round is None else view.round.last_number) + 1",
        "return max(1, number_of(view))",
        0,
    ),
    "a broken round is active still": Fault(
        RULES_PY, '"state": RoundState.BROKEN,\n        "reason": reason,', '"reason": reason,', 0
    ),
    "each node begins at rank 0": Fault(RULES_PY, "        first_rank += size\n", "", 0),
    "newcomers come first": Fault(CLUSTER_VIEW_PY, "order.get(node.id, len(order)))", "-order.get(node.id, 99))", 0),
    "a planned change ends in another round": Fault(
        RULES_PY,
        "planned.reason, planned)",
        'planned.reason, planned.model_copy(update={"members": planned.members[:-1]}))',
        4,
    ),
    "a closed run goes on": Fault(
        RULES_PY,
        "    if current is not None and current.state is RoundState.CLOSED:\n",
        "    if current is not None and current.state is RoundState.CLOSED:\n        return _first_round(view, now)\n",
        3,
    ),
    "a round has one node more than max": Fault(
        CLUSTER_VIEW_PY, "min(count, self.max_nodes) + 1)", "min(count, self.max_nodes + 1) + 1)", 6
    ),
    "groups are of whoever comes": Fault(CLUSTER_VIEW_PY, "    if not has_slots(view.limits):\n", "    if True:\n", 9),
    "spares of one slot never move": Fault(
        "agent/rendezvous/in_place.py", "found = move(self._view(nodes, current))", "found = None", 10
    ),
    "a member joins before it has left its last round": Fault(
        CLUSTER_VIEW_PY,
        "return node.record.reported > number_of(view)",
        "return True",
        1916,
    ),
}
RECOVERY = {
    "a rank that is alone looks for no end": Fault(RECOVERY_PY, "or self._alone:", "or False:", 279),
    "half of an update is offered": Fault(RECOVERY_PY, "self._valid = self._valid and state.whole", "pass", 98),
    "a newcomer meets those behind a step": Fault(
        RECOVERY_PY, "self._regroup(joinable=not was_committed)", "self._regroup(joinable=True)", 218
    ),
    "a rank that was left behind goes on": Fault(
        RECOVERY_PY, "if step.committed and self._script_position != after_step:", "if False:", 304
    ),
    "prepared ranks undo what a peer has committed": Fault(
        RECOVERY_PY,
        "settle(committed=[position.generation, self._state.prepared] in rows)",
        "settle(committed=False)",
        303,
    ),
    "any rank behind takes the answer of a call": Fault(RECOVERY_PY, "= data if self.inside else None", "= data", 1668),
    "what a peer has counted is not counted": Fault(
        RECOVERY_PY, "step.committed = not attempted_since", "step.committed = False", 210
    ),
    "a phase of the script ends with its round": Fault(
        RECOVERY_PY, "before if before in _LASTING else Phase.TRAINING", "Phase.TRAINING", 4
    ),
    "a change that was agreed on outlives its round": Fault(
        RECOVERY_PY,
        "        self._change_due = False\n        self._state.release()\n        self._groups.abandon()\n",
        "        self._state.release()\n        self._groups.abandon()\n",
        59,
    ),
}
HISTORY = {
    "a planned change for a node whose workers are ending": Fault(
        "membership/member.py",
        "state = NodeState.WARMING if self.at_work else self.record.state",
        "state = self.record.state",
        24,
    ),
    "a node that was cut off in the middle of an evaluation, for its worker": Fault(
        RECOVERY_PY, "in_call=self._calls.inside", "in_call=False", 1189
    ),
    "a second death during healing": Fault(
        RECOVERY_PY,
        "            if not is_collective_failure(error):\n                raise\n            logger()",
        "            if formed is not None:\n                raise\n            logger()",
        9,
    ),
    "a member that dies while all save before too few are left": Fault(
        RECOVERY_PY, "            return False\n        return True\n", "            raise\n        return True\n", 249
    ),
    "a newcomer meets a rank behind a step, whose node came back": Fault(
        RECOVERY_PY, "(row[1] or row[2:5] == rows[first][2:5])]", "row[1]]", 1175
    ),
    "a node that came back is in a call that the others have completed": Fault(
        CONDUCTOR_PY, "if message.left_behind and not closed:", "if False:", 1264
    ),
}
"""Faults that this project has had."""
FAULTS = CONDUCTOR | MEMBERSHIP | RECOVERY | HISTORY


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in FAULTS.items()])
def test_the_simulator_finds_a_planted_fault(fault: Fault, tmp_path: Path) -> None:
    """Within the schedules of the ordinary run, as a broken invariant."""
    shutil.copytree(ROOT / "elastic_trainer", tmp_path / "elastic_trainer")  # with what is compiled
    path = tmp_path / "elastic_trainer" / fault.source
    whole = path.read_text(encoding="utf-8")
    assert whole.count(fault.text) == 1
    path.write_text(whole.replace(fault.text, fault.replacement), encoding="utf-8")
    program, errors = tmp_path / "program.py", tmp_path / "errors"
    program.write_text(PLAY.format(copy=str(tmp_path), root=str(ROOT), seed=fault.seed), encoding="utf-8")
    played = Forked([str(program)], os.environ, tmp_path / "output", errors)
    assert played.wait(LIMIT_S) != 0
    found = errors.read_text(encoding="utf-8")
    assert "invariants.Violation" in found, found[-2000:]
