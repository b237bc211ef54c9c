"""Labelled faults: what is done to a job, and what its verdict must say.

Each row is played on real nodes by ``test_verdicts``. Kinds are the causes that people know; the culprit is what a
person who did it would answer to "what failed, and where?".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.model import Advice, Culprit

POISON: Final = 137
"""The sample that poisoned batches contain."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One fault. ``code``: Python for the workers of ``on`` (see train.py); ``act``: what the test does instead, a
    function of ``acts``. ``times``: how many incidents there are before the one that is judged; the ``code`` is given
    anew for each. ``nodes``: where the culprit is, or None where that means nothing."""

    name: str
    kind: str
    culprit: Culprit
    code: str = ""
    act: str = ""
    on: str = "n1"
    nodes: tuple[str, ...] | None = ("n1",)
    advice: Advice = Advice.GO_ON
    restart: bool = False
    times: int = 1
    ends: bool = False
    """Whether the run ends with it."""
    incident: str = "round"
    start: int = 2
    """Nodes of the job."""
    planned: bool = False
    """Whether the round ends by agreement."""
    options: str = ""
    flags: str = ""
    says: str = ""
    """What its sentence has to contain."""
    in_turn: bool = False
    """Whether its nodes join in turn, so that n1 does not have rank 0."""


GO_ON, STOP, LEAVE_OUT = Advice.GO_ON, Advice.STOP, Advice.LEAVE_OUT
BOTH: Final = ("n0", "n1")
RAISE = "# step\nraise {}"
SEGV = "# step\nimport os\nos.kill(os.getpid(), 11)"
NATIVE = "# step\nimport os\nos.kill(os.getpid(), {})"
STRIKES = f"# step again\nimport os\nif {POISON} in ids: {{}}"
EIO = "raise OSError(5, 'Input/output error')"
ENDS: Final[dict[str, Any]] = {"on": "all", "advice": STOP, "ends": True}


def unstartable(name: str, kind: str, code: str, *, restart: bool = False) -> Labelled:
    """A script that cannot start on any node."""
    code = f"# start again\n{code}"
    return Labelled(name, kind, Culprit.SCRIPT, code, nodes=BOTH, act="begin", restart=restart, **ENDS)


def poison(name: str, kind: str, code: str, options: str = "") -> Labelled:
    """One batch does this to whoever computes it."""
    return Labelled(name, kind, Culprit.DATA, code, nodes=None, start=3, times=3, options=options, **ENDS)


def unsaved(name: str, kind: str, code: str, culprit: Culprit = Culprit.STORAGE) -> Labelled:
    """Checkpoints cannot be written."""
    more: dict[str, Any] = {"incident": "checkpoint_failed", "flags": "--save-every 0.5"}
    return Labelled(name, kind, culprit, f"# save again\n{code}", on="all", nodes=None, **more)


FAULTS: Final = (
    # 1. the script raises
    Labelled("a shape", "exception", Culprit.SCRIPT, RAISE.format("ValueError('expected 3 channels, got 4')")),
    Labelled("a key", "exception", Culprit.SCRIPT, RAISE.format("KeyError('lr')"), on="n0", nodes=("n0",)),
    Labelled("a matrix", "exception", Culprit.SCRIPT, "# step\ntorch.ones(2, 3) @ torch.ones(2, 3)"),
    Labelled("a type, all begin anew", "exception", Culprit.SCRIPT, RAISE.format("TypeError('None')"), restart=True),
    Labelled("an attribute", "exception", Culprit.SCRIPT, "# between\nNone.shape"),
    # 2. the script exits
    Labelled("exit 3", "exit", Culprit.SCRIPT, "# step\nimport sys\nsys.exit(3)"),
    Labelled("exit at once", "exit", Culprit.SCRIPT, "# step\nimport os\nos._exit(5)"),
    Labelled("exit, all begin anew", "exit", Culprit.SCRIPT, "# step\nimport os\nos._exit(5)", restart=True),
    # 3. the script hangs
    Labelled("a loop", "hang", Culprit.SCRIPT, "# step\nwhile True: pass", options="step_timeout=4"),
    Labelled(
        "a lock", "hang", Culprit.SCRIPT, "# step\nimport threading\nthreading.Event().wait()", options="step_timeout=4"
    ),
    Labelled(
        "a loop on rank 0",
        "hang",
        Culprit.SCRIPT,
        "# step\nwhile True: pass",
        on="n0",
        nodes=("n0",),
        options="step_timeout=4",
    ),
    # 4. ranks do different things
    Labelled("one rank calls more", "ranks part", Culprit.SCRIPT, "# between\nsession.barrier()", nodes=None),
    Labelled(
        "one rank evaluates alone",
        "ranks part",
        Culprit.SCRIPT,
        nodes=None,
        code="# between\nsession.all_reduce(torch.ones(1))",
    ),
    # 5. the script cannot start
    unstartable("a module is missing", "start", "import no_such_module"),
    unstartable("a module is missing, restart", "start", "import no_such_module", restart=True),
    # 6. the data set raises
    Labelled("a bad row", "data raises", Culprit.DATA, "# data\nraise ValueError('row is empty')"),
    Labelled("a bad text", "data raises", Culprit.DATA, "# data\nb'\\xff'.decode()"),
    Labelled(
        "a bad row of rank 0", "data raises", Culprit.DATA, "# data\nraise KeyError('jpg')", on="n0", nodes=("n0",)
    ),
    Labelled(
        "a bad row, all begin anew", "data raises", Culprit.DATA, "# data\nraise ValueError('empty')", restart=True
    ),
    # 7. a batch kills whoever computes it
    poison("a batch raises", "poison", STRIKES.format("raise ValueError('label 12')")),
    poison("a batch crashes", "poison", STRIKES.format("os.kill(os.getpid(), 11)")),
    poison("a batch kills", "poison", STRIKES.format("os.kill(os.getpid(), 9)")),
    # 8. the data set gives nothing
    Labelled(
        "a row never comes",
        "data hangs",
        Culprit.DATA,
        "# data\nimport threading\nthreading.Event().wait()",
        options="step_timeout=4",
    ),
    Labelled(
        "a row never comes to rank 0",
        "data hangs",
        Culprit.DATA,
        on="n0",
        nodes=("n0",),
        code="# data\nimport time\ntime.sleep(600)",
        options="step_timeout=4",
    ),
    # 9. the loss is no number
    Labelled(
        "a NaN", "no number", Culprit.DATA, "# loss\nloss = loss * float('nan')", nodes=None, incident="nonfinite_loss"
    ),
    # 10. memory, by the kernel
    Labelled("the kernel kills", "killed for memory", Culprit.MEMORY, act="oom"),
    Labelled("the kernel kills, restart", "killed for memory", Culprit.MEMORY, act="oom", restart=True),
    # 11. memory, by an exception
    Labelled("MemoryError", "out of memory", Culprit.MEMORY, RAISE.format("MemoryError()")),
    Labelled(
        "the device's", "out of memory", Culprit.MEMORY, RAISE.format("torch.OutOfMemoryError('CUDA out of memory')")
    ),
    Labelled("the allocator's", "out of memory", Culprit.MEMORY, "# step\ntorch.empty(1 << 50)"),
    Labelled("MemoryError, restart", "out of memory", Culprit.MEMORY, RAISE.format("MemoryError()"), restart=True),
    # 12. the compiler
    Labelled(
        "a backend fails",
        "compiler",
        Culprit.COMPILER,
        "# step\ndef bad(graph, inputs): raise RuntimeError('codegen')\n"
        "torch.compile(lambda x: x + 1, backend=bad)(torch.ones(1))",
    ),
    Labelled(
        "a graph breaks",
        "compiler",
        Culprit.COMPILER,
        "# step\nimport torch._dynamo\ntorch.compile(lambda x: torch._dynamo.graph_break() or x + 1, fullgraph=True,"
        " backend='eager')(torch.ones(1))",
    ),
    # 13. checkpoints cannot be written
    unsaved("a full disk", "save fails", "raise OSError(28, 'No space left on device')"),
    unsaved("a broken disk", "save fails", EIO),
    # 14. data cannot be read
    Labelled("an I/O error", "read fails", Culprit.STORAGE, f"# data\n{EIO}"),
    Labelled("a stale handle", "read fails", Culprit.STORAGE, "# data\nraise OSError(116, 'Stale file handle')"),
    Labelled("an I/O error of rank 0", "read fails", Culprit.STORAGE, f"# data\n{EIO}", on="n0", nodes=("n0",)),
    Labelled("an I/O error, restart", "read fails", Culprit.STORAGE, f"# data\n{EIO}", restart=True),
    # 15. the network between two
    Labelled("a newcomer is not reached", "parted", Culprit.NETWORK, act="part_newcomer", nodes=("n1", "n2")),
    # 16. one machine's hardware, by its words
    Labelled(
        "an ECC error",
        "hardware says so",
        Culprit.MACHINE,
        advice=LEAVE_OUT,
        code=RAISE.format("RuntimeError('CUDA error: uncorrectable ECC error encountered')"),
    ),
    Labelled(
        "a GPU is lost",
        "hardware says so",
        Culprit.MACHINE,
        advice=LEAVE_OUT,
        restart=True,
        code=RAISE.format("RuntimeError('CUDA error: GPU is lost')"),
    ),
    # 17. one machine's hardware, by the kernel
    Labelled("an Xid", "kernel says so", Culprit.MACHINE, act="xid", advice=LEAVE_OUT),
    Labelled("a machine check", "kernel says so", Culprit.MACHINE, act="machine_check", advice=LEAVE_OUT),
    Labelled("a dying disk", "kernel says so", Culprit.STORAGE, act="disk"),
    # 18. one machine again and again
    Labelled("crashes", "same node", Culprit.MACHINE, SEGV, times=3, advice=LEAVE_OUT),
    Labelled("aborts", "same node", Culprit.MACHINE, NATIVE.format(6), times=3, advice=LEAVE_OUT),
    Labelled(
        "crashes, restart",
        "same node",
        Culprit.MACHINE,
        SEGV,
        times=3,
        advice=LEAVE_OUT,
        restart=True,
        in_turn=True,
        options="last_call=5",
    ),
    Labelled("bus errors", "same node", Culprit.MACHINE, NATIVE.format(7), times=3, advice=LEAVE_OUT),
    # 19. native code, once
    Labelled("a crash", "crash", Culprit.SCRIPT, SEGV),
    Labelled("an abort", "crash", Culprit.SCRIPT, NATIVE.format(6), on="n0", nodes=("n0",), says="at fault-n0:3"),
    Labelled("a crash, all begin anew", "crash", Culprit.SCRIPT, SEGV, restart=True),
    # 20. killed from outside
    Labelled("a worker", "killed", Culprit.OUTSIDE, act="kill_worker"),
    Labelled("a worker, all begin anew", "killed", Culprit.OUTSIDE, act="kill_worker", restart=True),
    Labelled("a node", "killed", Culprit.OUTSIDE, act="kill_node"),
    Labelled("a node, all begin anew", "killed", Culprit.OUTSIDE, act="kill_node", restart=True),
    # 21. stopped from outside
    Labelled("a worker", "frozen", Culprit.OUTSIDE, act="freeze_worker"),
    # 22. somebody's decision
    Labelled("a SIGTERM to the node", "told to leave", Culprit.SCHEDULER, act="terminate_node", planned=True),
    Labelled(
        "a SIGTERM, restart", "told to leave", Culprit.SCHEDULER, act="terminate_node", planned=False, restart=True
    ),
    Labelled("a worker's SIGTERM", "told to leave", Culprit.SCHEDULER, NATIVE.format(15), planned=True),
    Labelled("a node joins", "told to join", Culprit.SCHEDULER, act="join", planned=True, nodes=("n2",)),
)
