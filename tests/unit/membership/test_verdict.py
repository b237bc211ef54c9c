"""What is concluded from clues, and from what came before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.membership.documents import (
    ACCEPTS,
    FAILS_ALIKE,
    Batch,
    Clue,
    ClueKind,
    Incident,
    MachineFault,
    NodeHealth,
    NodeLoad,
    Verdict,
)
from elastic_trainer.membership.verdict import (
    MOST_EVIDENCE,
    STORM,
    Case,
    awaits,
    can_spare,
    clues_of,
    judge,
    kernel_culprit,
    sick,
)
from elastic_trainer.model import Advice, Cause, Certainty, Culprit, Place

NODES = ("a", "b", "c")
ABORT = "rank 1 on b was killed by SIGABRT: uncaught {}"
BATCH, NEXT = Batch(0, 96, 127), Batch(0, 128, 159)


def incident(number: int = 5, **more: object) -> Incident:
    told: dict[str, object] = {
        "wall": 100.0 + number,
        "by": "a",
        "cause": Cause.WORKER_LOST,
        "round": number,
        "next_round": number + 1,
        "reason": "node b left the round",
        "step": 7,
    }
    return Incident.model_validate(told | more)


def clue(node: str = "b", **more: object) -> Clue:
    told: dict[str, object] = {
        "kind": ClueKind.EXIT,
        "node": node,
        "text": f"rank 1 on {node} ended with exit code 1: ValueError: bad",
        "rank": 1,
        "round": 5,
        "step": 7,
        "batch": BATCH,
        "code": 1,
    }
    return Clue.model_validate(told | more)


def crash(node: str = "b", **more: object) -> Clue:
    told: dict[str, object] = {"kind": ClueKind.SIGNAL, "code": -11, "text": f"rank 1 on {node} was killed by SIGSEGV"}
    return clue(node, **(told | more))


def judged(*clues: Clue, **more: object) -> Verdict:
    what = more.pop("incident", incident())
    return judge(Case(what, clues, nodes=NODES, members=NODES, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "culprit"),
    [
        ({"types": ("ValueError",)}, Culprit.SCRIPT),
        ({"types": ("OSError[ENOSPC]",)}, Culprit.STORAGE),
        ({"types": ("OSError[EIO]",), "place": Place.DATA}, Culprit.STORAGE),
        ({"types": ("ValueError",), "place": Place.DATA}, Culprit.DATA),
        ({"types": ("ValueError",), "place": Place.STORAGE}, Culprit.STORAGE),
        ({"types": ("torch.OutOfMemoryError", "RuntimeError")}, Culprit.MEMORY),
        ({"types": ("torch._dynamo.exc.BackendCompilerFailed",)}, Culprit.COMPILER),
        (
            {"types": ("InductorError",), "text": "rank 1: OutOfMemoryError: out of resource: triton_mm"},
            Culprit.COMPILER,
        ),
        ({"types": ("InductorError",), "text": "rank 1: OutOfMemoryError: CUDA out of memory"}, Culprit.MEMORY),
        (
            {"types": ("torch.AcceleratorError",), "text": "rank 1: CUDA error: uncorrectable ECC error"},
            Culprit.MACHINE,
        ),
        ({"types": ("torch.distributed.DistNetworkError",)}, Culprit.NETWORK),
        ({"types": ("ModuleNotFoundError",)}, Culprit.MACHINE),
        ({"types": ("RuntimeError",), "text": "rank 1: No CUDA GPUs: no CUDA-capable device"}, Culprit.MACHINE),
        ({"code": EXIT_LEFT, "text": "rank 1 on b ended with exit code 143"}, Culprit.SCHEDULER),
        ({"kind": ClueKind.SIGNAL, "code": -9, "memory": True}, Culprit.MEMORY),
        ({"kind": ClueKind.SIGNAL, "code": -9, "text": "SIGKILL"}, Culprit.OUTSIDE),
        ({"kind": ClueKind.SIGNAL, "code": -15, "text": "SIGTERM"}, Culprit.SCHEDULER),
        ({"kind": ClueKind.SIGNAL, "code": -3, "text": "SIGQUIT"}, Culprit.OUTSIDE),
        ({"kind": ClueKind.SIGNAL, "code": -11, "place": Place.DATA}, Culprit.DATA),
        ({"kind": ClueKind.SIGNAL, "code": -11, "place": Place.COMPILER}, Culprit.COMPILER),
        ({"kind": ClueKind.SIGNAL, "code": -11, "place": Place.STORAGE}, Culprit.SCRIPT),
        ({"kind": ClueKind.SIGNAL, "code": -7, "text": "SIGBUS", "place": Place.STORAGE}, Culprit.STORAGE),
        ({"kind": ClueKind.SIGNAL, "code": -6, "text": ABORT.format("std::bad_alloc: std::bad_alloc")}, Culprit.MEMORY),
        ({"kind": ClueKind.SIGNAL, "code": -6, "text": ABORT.format("c10::Error: uncorrectable ECC")}, Culprit.MACHINE),
        ({"kind": ClueKind.SIGNAL, "code": -6, "text": ABORT.format("std::logic_error: x")}, Culprit.SCRIPT),
        ({"text": "rank 1: DataLoader worker exited, because of RuntimeError: out of shared memory"}, Culprit.MEMORY),
        ({"kind": ClueKind.HANG, "state": "stopped"}, Culprit.OUTSIDE),
        ({"kind": ClueKind.HANG, "state": "tracing stop"}, Culprit.OUTSIDE),
        ({"kind": ClueKind.HANG, "state": "disk sleep"}, Culprit.STORAGE),
        ({"kind": ClueKind.HANG, "place": Place.COMPILER}, Culprit.COMPILER),
        ({"kind": ClueKind.HANG, "place": Place.DATA}, Culprit.DATA),
        ({"kind": ClueKind.HANG, "at": "train.py:3 in main"}, Culprit.SCRIPT),
    ],
)
def test_one_clue_names_the_culprit(said: dict[str, object], culprit: Culprit) -> None:
    found = judged(clue("b", **said))
    assert found.culprit is culprit
    assert found.nodes == ("b",)
    assert found.evidence
    assert found.sentence.endswith(".")


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("RuntimeError: unable to write to file </torch_71_3_0>: No space left on device (28)", Culprit.MEMORY),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", Culprit.OUTSIDE),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Culprit.MEMORY),
        ("OSError: [Errno 117] Structure needs cleaning: '/data/x'", Culprit.STORAGE),
        ("ClientError: An error occurred (SlowDown) when calling the GetObject operation", Culprit.STORAGE),
        ("ConnectionError: HTTPSConnectionPool(host='x', port=443): Max retries exceeded", Culprit.NETWORK),
        (
            "RuntimeError: gloo: op.preamble.length <= op.nbytes. Is there a distributed collective mismatch?",
            Culprit.SCRIPT,
        ),
        ("SIGABRT: uncaught c10::DistBackendError: Watchdog caught collective operation timeout", Culprit.NETWORK),
        ("CalledProcessError: collect2: error: ld returned 1 exit status", Culprit.COMPILER),
        ("zlib.error: Error -3 while decompressing data: invalid block type", Culprit.DATA),
        ("RuntimeError: Found no NVIDIA driver on your system.", Culprit.MACHINE),
        ("RuntimeError: CUDA error: device-side assert triggered", Culprit.SCRIPT),
        ("RuntimeError: the tokenizer is a system not yet initialized", Culprit.SCRIPT),
        ("UnpicklingError: Weights only load failed", Culprit.SCRIPT),
        ("ValueError: the loss of the network is too high", Culprit.SCRIPT),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'", Culprit.SCRIPT),
    ],
)
def test_words_of_libraries_name_the_culprit(words: str, culprit: Culprit) -> None:
    assert judged(clue(text=f"rank 1 on b ended with {words}, at train.py:7 in main")).culprit is culprit


def test_who_lost_its_peers_is_no_culprit() -> None:
    """The one that failed is named, though the others ended too, and earlier."""
    victim = clue("a", victim=True, text="rank 0 on a: Connection closed by peer", wall=1.0)
    found = judged(victim, crash("b", wall=2.0))
    assert found.nodes == ("b",)
    assert judged(victim).culprit is Culprit.NETWORK


def test_the_same_batch_on_another_node_is_the_data() -> None:
    older = [crash("a", round=4)]
    found = judged(crash("b"), older=older)
    assert (found.culprit, found.certainty, found.advice) == (Culprit.DATA, Certainty.LIKELY, Advice.GO_ON)
    assert "samples 96 to 127 of epoch 0" in found.sentence
    other = judged(crash("b", batch=NEXT), older=older)
    assert other.culprit is Culprit.SCRIPT


def test_more_often_at_one_step_than_the_limit_means_stop() -> None:
    """At the limit the rules close the run, unless they have counted a loss of a node instead."""
    older, stuck = [crash("a", round=3), crash("c", round=4)], incident(resumed=False)
    assert judged(crash("b"), older=older, incident=stuck).advice is Advice.GO_ON
    assert judged(crash("b"), older=older, incident=incident(next_round=None)).advice is Advice.STOP
    older += [crash("a", round=2)]
    assert judged(crash("b"), older=older, incident=stuck).advice is Advice.STOP
    assert judged(crash("b"), older=older).advice is Advice.GO_ON  # the next round has made the step
    assert judged(crash("b"), older=older, incident=stuck, limit=4).advice is Advice.GO_ON
    moved = [crash("a", round=2, step=5), *older[:2]]
    assert judged(crash("b"), older=moved, incident=stuck).advice is Advice.GO_ON


def test_the_same_node_at_different_batches_is_the_machine() -> None:
    """Unless chance would strike it as often: of three nodes one is struck twice in a row in a third of all cases."""
    twice = [crash("b", round=4, batch=NEXT, step=6)]
    assert judged(crash("b"), older=twice).culprit is Culprit.SCRIPT
    thrice = [*twice, crash("b", round=3, batch=Batch(0, 0, 31), step=5)]
    found = judged(crash("b"), older=thrice)
    assert (found.culprit, found.advice, found.nodes) == (Culprit.MACHINE, Advice.LEAVE_OUT, ("b",))
    assert "Leave b out" in found.sentence
    others = [*thrice, crash("a", round=2, step=4, batch=Batch(0, 32, 63))]
    assert judged(crash("b"), older=others).culprit is Culprit.SCRIPT


def test_what_one_rank_alone_does_is_not_its_machines() -> None:
    """An exception may come from code of this rank alone, a crash from code of rank 0 alone."""
    own = {"text": "rank 1 on b ended with exit code 1: OSError: No space", "types": ("OSError[ENOSPC]",)}
    older = [clue("b", round=number, batch=Batch(0, number), step=number, **own) for number in (1, 2, 3, 4)]
    assert judged(clue("b", **own), older=older).culprit is Culprit.STORAGE
    first = [crash("b", rank=0, round=number, batch=Batch(0, number), step=number) for number in (1, 2, 3, 4)]
    assert judged(crash("b", rank=0), older=first).culprit is Culprit.SCRIPT
    assert judged(crash("b", rank=1), older=first).culprit is Culprit.MACHINE


def test_kills_from_outside_never_leave_a_node_out() -> None:
    kill = {"kind": ClueKind.SIGNAL, "code": -9, "text": "rank 1 on b was killed by SIGKILL"}
    older = [clue("b", round=number, step=number, batch=Batch(0, number), **kill) for number in (1, 2, 3, 4)]
    found = judged(clue("b", **kill), older=older)
    assert (found.culprit, found.advice) == (Culprit.OUTSIDE, Advice.GO_ON)


def test_all_nodes_at_once_are_the_script() -> None:
    alike = [clue(node, types=("ModuleNotFoundError",)) for node in NODES]
    found = judged(*alike)
    assert (found.culprit, found.certainty, found.nodes) == (Culprit.SCRIPT, Certainty.CERTAIN, NODES)


def test_the_kernel_is_believed_if_its_node_failed() -> None:
    line = "the kernel of b logged: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    logged = clue("b", kind=ClueKind.KERNEL, text=line, rank=-1)
    assert judged(crash("b"), logged).culprit is Culprit.MACHINE
    assert judged(crash("a"), logged).culprit is Culprit.SCRIPT
    memory = clue("b", kind=ClueKind.KERNEL, text="the kernel of b logged: Out of memory: Killed process 7", rank=-1)
    assert judged(crash("b"), memory).culprit is Culprit.SCRIPT
    assert judged(crash("b", code=-9, text="SIGKILL"), memory).culprit is Culprit.MEMORY
    typo = clue("b", types=("NameError",), text="rank 1 on b ended with NameError: name 'x' is not defined")
    assert judged(typo, logged).culprit is Culprit.SCRIPT


def test_what_all_nodes_have_reported_alike_is_no_machine_though_only_one_clue_has_come() -> None:
    reason = f"{FAILS_ALIKE} (exit code 1: ImportError: x), 2 times in a row: see any node's log"
    ended = incident(reason=reason, next_round=None)
    found = judged(clue("b", types=("ImportError",)), incident=ended)
    assert (found.culprit, found.nodes, found.advice) == (Culprit.SCRIPT, tuple(NODES), Advice.STOP)
    alone = judged(clue("b", types=("ImportError",)), incident=incident())
    assert (alone.culprit, alone.nodes) == (Culprit.MACHINE, ("b",))


def test_a_lost_node_whose_memory_was_full_ran_out_of_it() -> None:
    lost = incident(cause=Cause.NODE_LOST, reason="node b was lost", nodes=("b",))

    def last(used: int) -> dict[str, NodeHealth]:
        return {"b": NodeHealth(node="b", wall=1.0, load=NodeLoad(cpu=0.1, used_bytes=used, total_bytes=100))}

    assert judged(incident=lost, health=last(99)).culprit is Culprit.MEMORY
    assert judged(incident=lost, health=last(50)).culprit is Culprit.OUTSIDE


@pytest.mark.parametrize(
    ("found", "culprit"),
    [
        ("node b does not answer its peer a at 10.0.0.2:4000 (0.22 s)", Culprit.MACHINE),
        (f"node b does not answer its peer a at 10.0.0.2:4000 (0.22 s), {ACCEPTS}", Culprit.OUTSIDE),
        ("the agent of node b is dead", Culprit.OUTSIDE),
        ("node c does not answer its peer a at 10.0.0.3:4000 (0.22 s)", Culprit.OUTSIDE),
    ],
)
def test_a_node_of_which_nothing_is_heard_is_a_machine_that_failed(found: str, culprit: Culprit) -> None:
    """One that is frozen still accepts connections."""
    lost = incident(reason=f"node b was lost: {found}", cause=Cause.NODE_LOST, nodes=("b",))
    assert judged(incident=lost).culprit is culprit


def test_a_lost_node_that_was_told_to_leave_is_no_fault() -> None:
    lost = incident(cause=Cause.NODE_LOST, reason="node b was lost", nodes=("b",))
    told = {"b": NodeHealth(node="b", wall=1.0, counters={"left": 1.0})}
    assert judged(incident=lost, health=told).culprit is Culprit.SCHEDULER


def test_a_stall_in_different_calls_is_the_script_and_in_one_call_the_network() -> None:
    stalled = incident(cause=Cause.STALLED, reason="all ranks have waited for each other for 9.0 s")

    def waits(node: str, rank: int, at: str) -> Clue:
        return clue(node, kind=ClueKind.WAIT, rank=rank, at=at, text="waits")

    parted = judged(waits("a", 0, "train.py:9 in main"), waits("b", 1, "train.py:12 in main"), incident=stalled)
    assert parted.culprit is Culprit.SCRIPT
    assert "rank 0 in train.py:9 in main, rank 1 in train.py:12 in main" in parted.sentence
    together = judged(waits("a", 0, "train.py:9 in main"), waits("b", 1, "train.py:9 in main"), incident=stalled)
    assert together.culprit is Culprit.NETWORK


def test_nodes_that_do_not_reach_each_other_are_both_named() -> None:
    reason = "node b is excluded: node a cannot reach node b at 10.0.0.2, which b announces (timed out); to check, run"
    found = judged(incident=incident(cause=Cause.CONTACT_LOST, reason=reason, nodes=("b",)))
    assert (found.culprit, found.nodes) == (Culprit.NETWORK, ("a", "b"))


def test_a_planned_change_is_nobodys_fault() -> None:
    found = judged(incident=incident(cause=Cause.NODE_LEFT, reason="node b leaves", nodes=("b",)))
    assert (found.culprit, found.certainty, found.advice) == (Culprit.SCHEDULER, Certainty.CERTAIN, Advice.GO_ON)


def test_a_run_that_ended_is_stopped_or_begun_again() -> None:
    over = incident(next_round=None)
    assert judged(clue(types=("ValueError",)), incident=over).advice is Advice.STOP
    again = judged(clue(kind=ClueKind.SIGNAL, code=-9, text="SIGKILL"), incident=over)
    assert again.advice is Advice.RESTART
    assert "resumes after step 7" in again.sentence


def test_who_ended_with_the_run_is_not_who_ended_it() -> None:
    """The node that failed for the last time has not said so yet; another one's worker ended as the run was closed."""
    late = clue("a", rank=-1, batch=None, text="a worker of a, before it had a rank, ended with exit code 1")
    older = [crash("b", round=3), crash("c", round=4)]
    found = judged(late, incident=incident(next_round=None), older=older)
    assert (found.culprit, found.nodes, found.advice) == (Culprit.DATA, ("c",), Advice.STOP)


def storm(count: int, every_s: float, **more: object) -> list[Incident]:
    """Lives of whose steps nothing is known, newest first."""
    told = Verdict(
        culprit=Culprit.SCRIPT,
        advice=Advice.GO_ON,
        certainty=Certainty.POSSIBLE,
        sentence="",
        signature=judged(clue(batch=None, step=0)).signature,
        nodes=("b",),
    )
    return [incident(4, wall=1000.0 - every_s * number, step=0, verdict=told, **more) for number in range(1, count + 1)]


def test_a_storm_of_equal_lives_ends() -> None:
    """Ten lives in a row that end alike after as long: a script without a Session never says that it makes a step."""
    now, last = incident(wall=1000.0, step=0), clue(batch=None, step=0)
    assert judged(last, incident=now, before=storm(STORM, 70.0)).advice is Advice.STOP
    assert judged(last, incident=now, before=storm(STORM - 1, 70.0)).advice is Advice.GO_ON
    assert judged(last, incident=now, before=storm(STORM, 3000.0)).advice is Advice.GO_ON
    uneven = storm(STORM, 70.0)[:-1] + storm(30, 70.0)[-1:]
    assert judged(last, incident=now, before=uneven).advice is Advice.GO_ON


def test_who_wants_more_lives_says_so_by_the_limit_of_failures() -> None:
    now, last = incident(wall=1000.0, step=0), clue(batch=None, step=0)
    for lives, advice in ((STORM, Advice.GO_ON), (STORM + 5, Advice.STOP)):
        assert judged(last, incident=now, before=storm(lives, 70.0), limit=STORM + 5).advice is advice


def test_kills_from_outside_are_no_storm() -> None:
    """A drill that kills a worker each minute, of a script whose steps nobody knows."""
    now = incident(wall=1000.0, step=0)
    killed = clue(kind=ClueKind.SIGNAL, code=-9, text="rank 1 on b was killed by SIGKILL", batch=None, step=0)
    said = judged(killed)
    assert said.culprit is Culprit.OUTSIDE
    before = [each.model_copy(update={"verdict": said}) for each in storm(3 * STORM, 60.0)]
    assert judged(killed, incident=now, before=before).advice is Advice.GO_ON


def test_nobody_is_left_out_that_cannot_be_spared() -> None:
    broken = clue(text="rank 1 on b ended with exit code 1: CUDA error: uncorrectable ECC error")
    case = Case(incident(), [broken], nodes=("a", "b", "lost"), members=("a", "b"), least=2)
    found = judge(case)
    assert found.advice is Advice.LEAVE_OUT
    assert "Replace b" in found.sentence
    assert not can_spare(case, ["b"])
    assert can_spare(replace(case, least=1), ["b"])
    assert not can_spare(replace(case, least=2, group=2, members=("a", "b", "c")[:2]), ["b"])
    assert can_spare(replace(case, members=("a", "b", "c", "d"), group=2), ["b"])


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("audit_mismatch", Culprit.MACHINE),
        ("straggler", Culprit.MACHINE),
        ("checkpoint_failed", Culprit.STORAGE),
        ("nonfinite_loss", Culprit.DATA),
        ("ranks_differ", Culprit.SCRIPT),
        ("run_stopped", Culprit.SCHEDULER),
    ],
)
def test_what_ends_no_round_has_a_verdict_too(kind: str, culprit: Culprit) -> None:
    assert judged(incident=incident(kind=kind, nodes=("b",))).culprit is culprit


@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        ("PicklingError: Can't pickle <function <lambda>>", Culprit.SCRIPT),
        ("MemoryError: ", Culprit.MEMORY),
        ("CheckpointError: out of memory, which had to hold the copy", Culprit.MEMORY),
        ("ClientError: An error occurred (SlowDown)", Culprit.STORAGE),
        ("OSError: [Errno 28] No space left on device: '/data/pickles/x'", Culprit.STORAGE),
        ("NonFiniteError: the state is not finite", Culprit.DATA),
    ],
)
def test_a_save_that_fails_is_judged_by_its_error(error: str, culprit: Culprit) -> None:
    reason = f"a checkpoint could not be saved: {error}"
    found = judged(incident=incident(kind="checkpoint_failed", nodes=("b",), reason=reason))
    assert found.culprit is culprit
    assert error.split(":")[0] in found.sentence


def test_an_audit_that_names_two_accuses_neither() -> None:
    both = judged(incident=incident(kind="audit_mismatch", nodes=("a", "b")))
    assert (both.certainty, both.advice) == (Certainty.POSSIBLE, Advice.GO_ON)
    one = judged(incident=incident(kind="audit_mismatch", nodes=("b",)))
    assert (one.certainty, one.advice) == (Certainty.CERTAIN, Advice.LEAVE_OUT)


def test_no_headline_is_better_than_the_truth() -> None:
    """A run whose last node has gone does not go on."""
    stopped = judged(incident=incident(kind="run_stopped", nodes=("b",)))
    assert stopped.advice is Advice.RESTART
    gone = judged(incident=incident(kind="node_gave_up", nodes=("b",)))
    assert not [each for each in (stopped, gone) if "continues" in each.sentence]


def test_no_driver_on_one_node_is_no_proof_against_its_machine() -> None:
    """Rank 0 alone may call what needs one."""
    found = judged(clue("a", rank=0, text="rank 0 on a ended with RuntimeError: Found no NVIDIA driver on your system"))
    assert (found.culprit, found.certainty, found.advice) == (Culprit.MACHINE, Certainty.POSSIBLE, Advice.GO_ON)


def test_the_kernel_says_why_a_process_of_a_data_loader_was_killed() -> None:
    text = "rank 1 on b ended with RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    killed = clue(types=("RuntimeError",), text=text)
    logged = clue(
        kind=ClueKind.KERNEL, rank=-1, text="the kernel of b logged: Out of memory: Killed process 7 (python)"
    )
    assert judged(killed, logged).culprit is Culprit.MEMORY
    assert judged(clue(types=("ValueError",)), logged).culprit is Culprit.SCRIPT


def test_an_abort_during_a_save_is_judged_by_its_words() -> None:
    words = ABORT.format("c10::DistBackendError: NCCL error: remote process exited")
    assert judged(clue(kind=ClueKind.SIGNAL, code=-6, text=words, place=Place.STORAGE)).culprit is Culprit.NETWORK


def test_who_waited_for_others_does_not_explain_a_death() -> None:
    waits = clue("a", kind=ClueKind.WAIT, at="train.py:7 in main", text="rank 0 on a waited")
    hung = clue(kind=ClueKind.HANG, place=Place.DATA, text="rank 1 on b hung")
    found = judged(waits, hung, incident=incident(kind="worker_died", nodes=("b",)))
    assert (found.culprit, found.nodes) == (Culprit.DATA, ("b",))


def test_evidence_is_bounded() -> None:
    many = [clue(f"n{number}", text=f"rank {number} on n{number} ended with exit code 1") for number in range(100)]
    found = judged(*many)
    assert len(found.evidence) == MOST_EVIDENCE + 1
    assert found.evidence[-1].startswith("and ")


def test_clues_of_other_rounds_are_older_and_old_kernel_lines_are_none() -> None:
    logged = clue("b", kind=ClueKind.KERNEL, text="mce: oops", wall=10.0)
    fresh = clue("b", kind=ClueKind.KERNEL, text="mce: again", wall=400.0)
    told = (crash(round=4), crash(wall=450.0), logged, fresh, crash(round=6))
    health = {"b": NodeHealth(node="b", wall=5000.0, clues=told)}
    mine, older = clues_of(incident(), health, [crash("a")])
    assert mine == [crash("a"), crash(wall=450.0), fresh]
    assert older == [crash(round=4)]
    own = clue("a", kind=ClueKind.KERNEL, text="mce: own, old", wall=10.0)
    mine, _ = clues_of(incident(), {}, [own, crash("a", wall=900.0)])
    assert own not in mine


def test_a_verdict_waits_for_whoever_saw_it() -> None:
    assert awaits(incident(), [])
    assert awaits(incident(), [clue(rank=-1)])
    assert not awaits(incident(), [clue()])
    assert not awaits(incident(cause=Cause.NODE_LOST), [])


def test_a_machine_is_sick_after_faults_in_two_runs_or_where_a_run_has_left_it_out() -> None:
    def fault(run: str, *, left: bool = False) -> MachineFault:
        return MachineFault(wall=1.0, run=run, sentence="It failed.", certainty=Certainty.CERTAIN, left=left)

    assert not sick([fault("x"), fault("x")], "x")
    assert sick([fault("x"), fault("y")], "z")
    assert sick([fault("x", left=True)], "x")
    assert not sick([fault("x", left=True)], "y")


def test_lines_of_broken_hardware_count() -> None:
    for line in (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: dc00008001010090",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
        "amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block",
        "{1}[Hardware Error]: event severity: recoverable",
        "Memory failure: 0x1f4a2: Sending SIGBUS to python3:4711 due to hardware memory corruption",
        "pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error received",
    ):
        assert kernel_culprit(line) is Culprit.MACHINE


def test_harmless_lines_of_the_kernel_say_nothing() -> None:
    for line in (
        "usb 1-1: new device",
        "eth0: link up",
        "EXT4-fs (sda1): mounted filesystem",
        "pcieport 0000:00:1c.0: AER: Corrected error message received from 0000:00:1c.0",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0",
        "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0",
        "{1}[Hardware Error]: event severity: corrected",
        "mce: [Hardware Error]: Corrected error, no action required.",
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, Ch 00000008, MMU Fault",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s!",
    ):
        assert kernel_culprit(line) is None
