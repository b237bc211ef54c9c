"""The verdict on an incident: what failed, where, how sure that is, and what to do. Pure and deterministic.

First each clue is read for itself: an exit code, a signal, the words of an exception, the place in the code, a line of
the kernel's log. What a worker says that has only lost its peers counts if nothing else is known. Then the incidents
before it are compared: a fault that meets the same batch on another node is not the machine's, one that meets the same
node on other batches is.

A verdict is a suspicion that becomes surer with each incident. It says "stop" only where the same fault has come back
without a step between, as often as ``failure_limit`` says, or ten lives of unknown progress have ended alike (more, if
``failure_limit`` is more), and not by what comes from outside.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from elastic_trainer.errors import EXIT_LEFT, EXIT_RESTARTED
from elastic_trainer.membership.documents import (
    ACCEPTS,
    FAILS_ALIKE,
    Batch,
    Clue,
    ClueKind,
    Incident,
    MachineFault,
    NodeHealth,
    Verdict,
)
from elastic_trainer.model import Advice, Cause, Certainty, Culprit, Place, signal_name
from elastic_trainer.wording import named

STORM: Final = 10
"""Lives in a row that ended in one way, after about as long, end a run of whose progress nothing is known."""
STORM_LIFE_S: Final = 600.0
STORM_SPREAD: Final = 1.25
"""The longest of these lives as a multiple of the shortest."""
_TIMES: Final = 3
"""As often must a batch strike one node before it is suspected without another node."""
CHANCE: Final = 0.25
"""As likely as this may chance alone strike one node again and again, for that node to be suspected."""
SICK: Final = 2
"""Runs in which a machine has failed, after which others do not start there."""
MOST_EVIDENCE: Final = 12
"""Lines of evidence; the rest are counted."""
FULL: Final = 0.97
"""The part of a machine's memory from which the loss of its node is put down to memory."""
FRESH_S: Final = 60.0
"""A line of the kernel's log that is older explains no incident."""
_SURER = {Certainty.POSSIBLE: Certainty.LIKELY}


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known when an incident is judged.

    ``clues``: those of all nodes, of this incident; ``older``: of earlier rounds. ``before``: earlier incidents of the
    run, newest first. ``nodes``: the members of the round that ended, and of the next; ``members``: those that train
    now. ``health``: what the nodes have published last, those that are gone too. ``least``: the fewest nodes that the
    run may have, in groups of ``group``; ``limit``: its ``failure_limit``.
    """

    incident: Incident
    clues: Sequence[Clue] = ()
    before: Sequence[Incident] = ()
    nodes: Sequence[str] = ()
    older: Sequence[Clue] = ()
    health: Mapping[str, NodeHealth] = field(default_factory=dict)
    members: Sequence[str] = ()
    least: int = 1
    group: int = 1
    limit: int = 3


@dataclass(frozen=True, slots=True)
class _Finding:
    """What the clues of this incident alone say."""

    culprit: Culprit
    what: str
    """What happened, as a sentence without its full stop."""
    certainty: Certainty = Certainty.POSSIBLE
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    batch: Batch | None = None
    step: int = 0
    signature: str = ""
    evidence: tuple[str, ...] = ()
    machine: bool = False
    """Whether more faults of this kind on the node, at other batches, speak against its machine: native code does the
    same on all machines, while an exception may come from what one rank alone does."""
    alike: bool = False
    """Whether the same on all nodes speaks against the script."""


def judge(case: Case) -> Verdict:
    """The verdict on ``case.incident``."""
    found = _first_sight(case)
    found, advice, told = _compared(case, found)
    lines = list(dict.fromkeys((*told, *found.evidence)))
    more = [f"and {len(lines) - MOST_EVIDENCE} more"] if len(lines) > MOST_EVIDENCE else []
    evidence = (*lines[:MOST_EVIDENCE], *more)
    return Verdict(
        culprit=found.culprit,
        advice=advice,
        certainty=found.certainty,
        sentence=f"{found.what[:1].upper()}{found.what[1:]}. {_advised(case, found, advice)}",
        evidence=evidence,
        nodes=found.nodes,
        ranks=found.ranks,
        batch=found.batch,
        signature=found.signature,
    )


def sick(faults: Iterable[MachineFault], run: str) -> list[MachineFault]:
    """The faults for which a machine is kept out of ``run``: of that run, which has left it out, or of two others."""
    known = sorted(faults, key=lambda each: each.wall)
    left = any(each.left and each.run == run for each in known)
    return known if left or len({each.run for each in known}) >= SICK else []


# ---- this incident


def _first_sight(case: Case) -> _Finding:
    incident = case.incident
    if incident.kind != "round":
        return _noted(case)
    if incident.planned:
        return _planned(case)
    own = [each for each in case.clues if not each.victim]
    ended = [each for each in own if each.kind in _ENDED]
    if _closed(incident) and not any(each.rank >= 0 for each in ended):
        ended = _last_failure(case) or ended
    if logged := [each for each in own if each.kind is ClueKind.KERNEL and _explains(case, each, ended)]:
        return _read(case, [*logged, *ended])
    if ended:
        return _read(case, ended)
    if unreached := _unreached(incident):
        return _read(case, unreached)
    if incident.cause is Cause.STALLED:
        return _stalled(case)
    if incident.cause is Cause.NODE_LOST:
        return _node_lost(case)
    if victims := [each for each in case.clues if each.victim]:
        found = _of_clue(victims[0])
        nodes = tuple(sorted({each.node for each in victims}))
        what = f"ranks lost each other, and nobody was found dead: {victims[0].text}"
        return replace(
            found, culprit=Culprit.NETWORK, what=what, nodes=nodes, ranks=(), batch=None, signature="lost peers"
        )
    if incident.cause is Cause.CONTACT_LOST:
        what = f"ranks lost each other, and nobody was found dead: {incident.reason}"
        return _Finding(Culprit.NETWORK, what, nodes=incident.nodes, signature="lost peers")
    by_cause = {Cause.STEP_GIVEN_UP: Culprit.MEMORY}.get(incident.cause or Cause.FINISHED, Culprit.UNKNOWN)
    return _Finding(by_cause, incident.reason or "nothing is known of its cause", nodes=incident.nodes)


_ENDED = (ClueKind.EXIT, ClueKind.SIGNAL, ClueKind.HANG)
_CANNOT_REACH = re.compile(
    r"node (\S+) cannot reach node (\S+) at |workers of node (\S+) publish |"
    r"which others cannot reach.*node (\S+) does not answer its peer (\S+) at"
)


def _closed(incident: Incident) -> bool:
    """Whether the run ended with it."""
    return incident.kind == "round" and incident.next_round is None and not incident.open


def _last_failure(case: Case) -> list[Clue]:
    """Who failed last, where the run ended before that node could say how it failed for the last time."""
    failed = [each for each in case.older if each.kind in _ENDED and each.rank >= 0 and not each.victim]
    step = max((each.step for each in failed), default=0)
    return sorted((each for each in failed if each.step == step), key=lambda each: each.round)[-1:]


def _explains(case: Case, logged: Clue, ended: Sequence[Clue]) -> bool:
    """Whether a line of a kernel's log explains this incident: its node failed, and by no exception of Python alone."""
    own = [each for each in ended if each.node == logged.node]
    if own and all(each.types and not _DEVICE.search(each.text) for each in own):
        return False
    struck = {each.node for each in ended} | {*case.incident.nodes}
    if kernel_culprit(logged.text) is Culprit.MEMORY:
        killed = {each.node for each in ended if each.code == -signal.SIGKILL or "DataLoader worker" in each.text}
        return logged.node in killed or (case.incident.cause is Cause.NODE_LOST and logged.node in struck)
    return logged.node in struck


def _unreached(incident: Incident) -> list[Clue]:
    """What the reason of the next round says of nodes that do not reach each other (``membership.rules``)."""
    found = []
    for first, second, misled, silent, peer in _CANNOT_REACH.findall(incident.reason):
        node, others = (misled, ()) if misled else (first or silent, (second or peer,))
        found.append(Clue(kind=ClueKind.UNREACHED, node=node, text=incident.reason, others=others))
    return found


def _planned(case: Case) -> _Finding:
    incident = case.incident
    notices = [each for each in case.clues if each.kind is ClueKind.NOTICE]
    what = notices[0].text if notices else incident.reason or "the nodes of the run have changed"
    evidence = tuple(each.text for each in notices)
    return _Finding(Culprit.SCHEDULER, what, Certainty.CERTAIN, incident.nodes, evidence=evidence)


def _noted(case: Case) -> _Finding:
    """An incident that ended no round."""
    incident = case.incident
    nodes, ranks = incident.nodes, incident.ranks
    likely, certain = Certainty.LIKELY, Certainty.CERTAIN
    match incident.kind:
        case "audit_mismatch":
            sure = certain if len(nodes) == 1 else Certainty.POSSIBLE  # of two it may be either
            return _Finding(Culprit.MACHINE, incident.reason, sure, nodes, ranks, signature="wrong result")
        case "straggler" | "node_unfit":
            return _Finding(Culprit.MACHINE, incident.reason, likely, nodes, ranks, signature=incident.kind)
        case "ranks_differ":
            return _Finding(Culprit.SCRIPT, incident.reason, nodes=nodes, signature=incident.kind)
        case "checkpoint_failed":
            culprit = next((each for words, each in _UNSAVED if words.search(incident.reason)), Culprit.STORAGE)
            return _Finding(culprit, incident.reason, likely, nodes, signature=incident.kind)
        case "nonfinite_loss":
            return _Finding(Culprit.DATA, incident.reason, nodes=nodes, signature=incident.kind)
        case "run_stopped":
            return _Finding(Culprit.SCHEDULER, incident.reason, certain, nodes)
        case "worker_died" | "node_gave_up" if own := [each for each in case.clues if _tells(each)]:
            return _read(case, own)
        case "worker_died" if case.clues:
            what = f"a worker ended since it had lost its peers: {case.clues[0].text}"
            return _Finding(Culprit.UNKNOWN, what, nodes=nodes, ranks=ranks, signature="lost peers")
    return _Finding(Culprit.UNKNOWN, incident.reason, nodes=nodes, ranks=ranks, signature=incident.kind)


def _tells(clue: Clue) -> bool:
    """Whether it says how a worker, or a node, ended by itself."""
    return not clue.victim and clue.kind in (*_ENDED, ClueKind.KERNEL, ClueKind.NOTICE)


def _read(case: Case, clues: Sequence[Clue]) -> _Finding:
    """The clue that explains most, and where else it was seen."""
    findings = [(each, _of_clue(each)) for each in clues]
    # A worker without a rank has not trained: it ended with the run, or because of it.
    first, found = min(
        findings,
        key=lambda pair: (pair[0].rank < 0 and pair[0].kind in _ENDED, _WEIGHT[pair[1].certainty], pair[0].wall),
    )
    alike = [each for each, other in findings if other.signature == found.signature]
    nodes = tuple(sorted({each.node for each in alike} | {*found.nodes}))
    ranks = tuple(sorted({each.rank for each in alike if each.rank >= 0}))
    evidence = tuple(each.text for each in clues) + tuple(
        f"rank {each.rank} on {each.node} waited meanwhile: {each.at}"
        for each in case.clues
        if each.kind is ClueKind.WAIT and each.at
    )
    found = replace(found, nodes=nodes, ranks=ranks, evidence=evidence)
    if found.culprit is Culprit.SCHEDULER and case.incident.nodes:
        return replace(found, nodes=case.incident.nodes, ranks=case.incident.ranks)  # the others end because of it
    told_so = case.incident.reason.startswith(FAILS_ALIKE)  # the nodes have, though a clue may still be on its way
    if told_so:
        nodes = tuple(sorted({*case.nodes, *nodes}))
        found = replace(found, nodes=nodes)
    everywhere = len(case.nodes) > 1 and set(nodes) >= set(case.nodes)
    if everywhere and (found.alike or told_so):  # not all machines fail at once, in one way
        culprit = found.culprit if found.culprit is not Culprit.MACHINE else Culprit.SCRIPT
        told = f"all {len(case.nodes)} nodes of the round report it alike"
        return replace(found, culprit=culprit, certainty=Certainty.CERTAIN, machine=False, evidence=(told, *evidence))
    if first.kind is ClueKind.SIGNAL and first.code == -signal.SIGKILL and not first.memory:
        return _killed_of_memory(case, found, first)
    return found


_WEIGHT = {Certainty.CERTAIN: 0, Certainty.LIKELY: 1, Certainty.POSSIBLE: 2}


def _killed_of_memory(case: Case, found: _Finding, clue: Clue) -> _Finding:
    """A SIGKILL without a sender, on a machine whose memory was full."""
    health = case.health.get(clue.node)
    load = health.load if health is not None else None
    if load is None or not load.total_bytes or load.used_bytes < FULL * load.total_bytes:
        return found
    told = f"{load.used_bytes / load.total_bytes:.0%} of the memory of {clue.node} were in use"
    what = f"{found.what}, most likely by the kernel: {told}"
    return replace(found, culprit=Culprit.MEMORY, what=what, certainty=Certainty.LIKELY, evidence=(clue.text, told))


# ---- what one clue says

_DEVICE = re.compile(r"CUDA|NCCL|HIP |cudnn|cublas|AcceleratorError|Input/output error|Bus error|DataLoader worker")
"""An exception that may come from a device, or from another process."""
_HARDWARE = re.compile(r"uncorrectable|\bECC error|GPU is lost|fallen off the bus|[Mm]achine check|\[Hardware Error\]")
_BROKEN = re.compile(
    r"NVLink\b.*?(?:error|fail|fault|down)|no CUDA-capable device|CUDA error: unknown error|"
    r"(?:CUDA|HIP).*hardware error|device kernel image is invalid|CUDA driver initialization failed|"
    r"CUDA driver version is insufficient|Driver/library version mismatch|CUDA error: system not yet initialized"
)
"""As likely the driver or what is installed."""
_MEMORY = re.compile(
    r"[Oo]ut of (?:shared )?memory|bad_alloc|OutOfMemory|MemoryError|[Cc]annot allocate memory|"
    r"can't allocate memory|ENOMEM|STATUS_ALLOC_FAILED|shared memory\(shm\)|"
    r"unable to (?:write|mmap|resize)\b.*</torch_"
)
_TOO_LARGE = re.compile(r"[Oo]ut of resource|No valid triton configs")
"""A kernel asks for more than a processor of the GPU has: the compiler's, not the job's memory."""
_STORAGE = re.compile(
    r"No space left|Input/output error|Stale file handle|Read-only file system|Disk quota|Remote I/O error|"
    r"\[E(?:NOSPC|IO|ROFS|STALE|DQUOT|REMOTEIO|NODEV|NXIO|UCLEAN|SHUTDOWN)\]|StorageError|"
    r"elastic_trainer\.errors\.CheckpointError|[Tt]ransport endpoint|Structure needs cleaning|SlowDown"
)
_UNSAVED = (
    (_STORAGE, Culprit.STORAGE),
    (re.compile(r"[Pp]ickl|not serializable"), Culprit.SCRIPT),
    (_MEMORY, Culprit.MEMORY),
    (re.compile("NonFiniteError"), Culprit.DATA),
)
"""Why a checkpoint could not be saved."""
_NETWORK = re.compile(
    r"[Cc]onnection (?:reset|closed|refused|timed out)|Broken pipe|No route to host|[Nn]etwork is unreachable|"
    r"Name or service not known|Temporary failure in name resolution|NCCL error|[Ss]ocket [Tt]imeout|gloo|"
    r"Dist(?:Network|Store|Backend)Error|ncclSystemError|ncclRemoteError|Timed out waiting|"
    r"collective operation timeout|Connection(?:Reset|Refused|Aborted)?Error|Connection aborted|Max retries exceeded|"
    r"(?:Read|Connect)Timeout|RemoteDisconnected|IncompleteRead|SSLError|getaddrinfo|(?:Network|Host) is down|"
    r"StatusCode\.(?:UNAVAILABLE|DEADLINE_EXCEEDED)"
)
_COMPILER = re.compile(
    r"torch\._dynamo|torch\._inductor|torch\._functorch|triton|InductorError|BackendCompilerFailed|CppCompileError|"
    r"CompilationError|ptxas|nvcc|CalledProcessError.*g\+\+|internal compiler error|collect2: error"
)
_DATA = re.compile(
    r"DataError|DataLoader worker|UnidentifiedImage|UnicodeDecodeError|JSONDecodeError|ArrowInvalid|"
    r"BadZipFile|tarfile|[Tt]runcated|corrupt|index out of range in self|Target \S+ is out of bounds|NonFiniteError|"
    r"zlib\.error|LZMAError|BadGzipFile|[Mm]agic bytes|InvalidDataError|"
    r"cannot identify image|before the end-of-stream"
)
_INSTALLED = re.compile(
    r"ModuleNotFoundError|ImportError|cannot open shared object|GLIBC|undefined symbol|[Nn]o NVIDIA driver|"
    r"devices are busy or unavailable"
)
_MISMATCH = re.compile(r"collective mismatch|preamble\.length")
"""gloo's words where ranks do different things; elsewhere its errors are the network's."""
_LOADER_KILLED = re.compile(r"DataLoader worker .*is killed by signal: Killed")
_SHARED_MEMORY = re.compile(r"shared memory|shm|bus error", re.IGNORECASE)
_BY_WORDS = (Culprit.MACHINE, Culprit.MEMORY, Culprit.STORAGE, Culprit.NETWORK, Culprit.COMPILER)
_NATIVE = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"}
_ASKED = {"SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"}


def _of_clue(clue: Clue) -> _Finding:
    """What this clue says by itself."""
    found = _Finding(
        Culprit.UNKNOWN,
        clue.text,
        nodes=(clue.node,),
        ranks=(clue.rank,) if clue.rank >= 0 else (),
        batch=clue.batch,
        step=clue.step,
        evidence=(clue.text,),
        alike=True,
    )
    match clue.kind:
        case ClueKind.KERNEL:
            return _of_kernel(found, clue.text)
        case ClueKind.UNREACHED:
            return _of_unreached(found, clue)
        case ClueKind.HANG:
            return _of_hang(found, clue)
        case ClueKind.SIGNAL:
            return _of_signal(found, clue)
        case ClueKind.EXIT:
            return _of_exit(found, clue)
    return replace(found, culprit=Culprit.SCHEDULER, certainty=Certainty.CERTAIN, signature=str(clue.kind))


def _of_kernel(found: _Finding, text: str) -> _Finding:
    culprit = kernel_culprit(text) or Culprit.MACHINE
    return replace(found, culprit=culprit, certainty=Certainty.CERTAIN, signature=f"kernel {culprit}")


def _of_unreached(found: _Finding, clue: Clue) -> _Finding:
    nodes = tuple(sorted({clue.node, *clue.others}))
    return replace(
        found, culprit=Culprit.NETWORK, certainty=Certainty.LIKELY, nodes=nodes, signature="unreached", alike=False
    )


def _of_hang(found: _Finding, clue: Clue) -> _Finding:
    """By what the process did, or could not do."""
    if clue.state in ("stopped", "tracing stop"):
        return replace(found, culprit=Culprit.OUTSIDE, certainty=Certainty.LIKELY, signature="stopped", alike=False)
    if clue.state == "disk sleep":
        return replace(found, culprit=Culprit.STORAGE, certainty=Certainty.LIKELY, signature="hang in disk sleep")
    by_place = {
        Place.DATA: Culprit.DATA,
        Place.STORAGE: Culprit.STORAGE,
        Place.COMPILER: Culprit.COMPILER,
        Place.COLLECTIVE: Culprit.NETWORK,
        Place.SCRIPT: Culprit.SCRIPT,
    }
    certainty = Certainty.POSSIBLE if clue.place is Place.SCRIPT and not clue.at else Certainty.LIKELY
    signature = f"hang in {clue.place} {clue.at}"
    return replace(found, culprit=by_place[clue.place], certainty=certainty, signature=signature)


def is_mismatch(text: str) -> bool:
    """Whether an error of a collective says that ranks do different things."""
    return _MISMATCH.search(text) is not None


def _of_signal(found: _Finding, clue: Clue) -> _Finding:
    name = signal_name(-clue.code)
    found = replace(found, signature=name)
    if clue.memory:
        return replace(found, culprit=Culprit.MEMORY, certainty=Certainty.CERTAIN, signature="out of memory")
    if "SIGABRT: uncaught " in clue.text:
        by_words = _of_exit(found, clue.model_copy(update={"place": Place.SCRIPT}))
        if by_words.culprit in _BY_WORDS or is_mismatch(clue.text):
            return by_words
    if name in _NATIVE:
        by_place = {Place.DATA: Culprit.DATA, Place.COMPILER: Culprit.COMPILER}
        if name == "SIGBUS":  # what was mapped into memory is not there
            by_place[Place.STORAGE] = Culprit.STORAGE
        culprit = by_place.get(clue.place, Culprit.SCRIPT)
        if name == "SIGBUS" and _SHARED_MEMORY.search(clue.text):
            culprit = Culprit.MEMORY
        return replace(found, culprit=culprit, machine=clue.place is not Place.DATA)
    if name in _ASKED:
        return replace(found, culprit=Culprit.SCHEDULER, certainty=Certainty.LIKELY, alike=False)
    return replace(found, culprit=Culprit.OUTSIDE, alike=False)


def _of_exit(found: _Finding, clue: Clue) -> _Finding:
    """By the exception, its words and the place in the code."""
    said = " ".join((*clue.types, clue.text))
    found = replace(found, signature=_signature(clue))
    likely, certain = Certainty.LIKELY, Certainty.CERTAIN
    if is_mismatch(said):
        return replace(found, culprit=Culprit.SCRIPT, certainty=likely, alike=False)
    if _HARDWARE.search(said):
        return replace(found, culprit=Culprit.MACHINE, certainty=certain, signature="hardware")
    if _BROKEN.search(said):
        return replace(found, culprit=Culprit.MACHINE, certainty=likely, signature="device", alike=True)
    if _TOO_LARGE.search(said):
        return replace(found, culprit=Culprit.COMPILER, certainty=likely)
    if _MEMORY.search(said):
        return replace(found, culprit=Culprit.MEMORY, certainty=certain, signature="out of memory", alike=False)
    if clue.place is Place.COMPILER or _COMPILER.search(said):
        return replace(found, culprit=Culprit.COMPILER, certainty=likely)
    if _STORAGE.search(said):
        return replace(found, culprit=Culprit.STORAGE, certainty=certain)
    if clue.place is Place.STORAGE:
        return replace(found, culprit=Culprit.STORAGE, certainty=likely)
    if _NETWORK.search(said):
        return replace(found, culprit=Culprit.NETWORK, alike=False)
    if _LOADER_KILLED.search(said):
        return replace(found, culprit=Culprit.OUTSIDE, alike=False)
    if clue.place is Place.DATA or _DATA.search(said):
        return replace(found, culprit=Culprit.DATA, certainty=likely)
    if _INSTALLED.search(said):
        return replace(found, culprit=Culprit.MACHINE, machine=True)
    if clue.code in (EXIT_LEFT, EXIT_RESTARTED):
        return replace(found, culprit=Culprit.SCHEDULER, certainty=likely, signature="left", alike=False)
    known = bool(clue.types or clue.at)
    return replace(found, culprit=Culprit.SCRIPT, certainty=likely if known else Certainty.POSSIBLE)


def _signature(clue: Clue) -> str:
    """Equal for failures of one kind: the words without ranks, nodes, numbers and addresses."""
    said = clue.text.partition(" ended with ")[2].removeprefix(f"exit code {clue.code}: ")
    said = said or clue.text.partition(" was killed by ")[2]
    said = said.partition(", because of ")[0]
    said = said.rpartition(", at ")[0] or said or f"exit code {clue.code}"
    words = re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)*", "#", said)[:120]
    return f"{clue.types[0] if clue.types else ''} {words}".strip()


_KERNEL: Final = (
    (Culprit.MEMORY, re.compile(r"Out of memory: Killed process|oom-kill|Memory cgroup out of memory")),
    (
        Culprit.MACHINE,
        re.compile(
            r"NVRM: Xid \(.*?\): (?:48|6[34]|74|79|92|94|95|119|120|140)\b|Machine check|mce: |"
            r"Memory failure: 0x|hardware memory (?:corruption|error)|uncorrectable hardware error|"
            r"\[Hardware Error\]: event severity: (?:recoverable|fatal)|"
            r"Uncorrected|EDAC .*\bUE\b|AER: .*[Ff]atal|amdgpu.*GPU reset|thermal .*critical|hard LOCKUP"
        ),
    ),
    (
        Culprit.STORAGE,
        re.compile(
            r"I/O error, dev|Buffer I/O error|EXT4-fs error|XFS .*(?:error|shut)|BTRFS.*error|nvme.*(?:timeout|reset)|"
            r"nfs: server \S+ not responding|Remounting filesystem read-only|LustreError|ata\d.*failed|"
            r"critical medium error|md/raid.*[Ff]ailure"
        ),
    ),
    (
        Culprit.NETWORK,
        re.compile(
            r"NIC Link is Down|[Ll]ink (?:is |status definitely )?[Dd]own|NETDEV WATCHDOG|"
            r"mlx5.*(?:error|down|compromised)"
        ),
    ),
)
"""The words of the kernel's drivers. Of NVIDIA's Xids those of hardware alone (docs.nvidia.com/deploy/xid-errors): 13,
31 and 43 are the script's, 45 follows any kill."""
_CORRECTED = re.compile(r"(?<![Uu]n)[Cc]orrect(?:ed|able)|\bCE\b")


def kernel_culprit(line: str) -> Culprit | None:
    """What a line of the kernel's log says has failed; None for one of no fault, or of one that was corrected."""
    if _CORRECTED.search(line):
        return None
    return next((culprit for culprit, words in _KERNEL if words.search(line)), None)


# ---- without a clue of whoever failed


def _stalled(case: Case) -> _Finding:
    """All ranks waited for each other: in different calls the script is wrong, in one call the network may be."""
    waits = [each for each in case.clues if each.kind is ClueKind.WAIT]
    evidence = tuple(f"rank {each.rank} on {each.node} waited in {each.at or 'an unknown call'}" for each in waits)
    found = _Finding(Culprit.SCRIPT, case.incident.reason, nodes=(), signature="stalled", evidence=evidence)
    places = {each.at for each in waits}
    if len(places) > 1:
        first = min(waits, key=lambda each: each.rank)
        second = next(each for each in waits if each.at != first.at)
        what = (
            f"ranks waited for each other in different calls: rank {first.rank} in {first.at}, "
            f"rank {second.rank} in {second.at}"
        )
        return replace(found, what=what, certainty=Certainty.LIKELY)
    if places and len(waits) > 1:
        what = f"all ranks waited in {next(iter(places)) or 'one call'}, and it did not end"
        return replace(found, culprit=Culprit.NETWORK, what=what)
    return found


def _node_lost(case: Case) -> _Finding:
    """By how the nodes were when they were last heard."""
    incident = case.incident
    names = incident.nodes
    found = _Finding(Culprit.OUTSIDE, incident.reason, nodes=names, ranks=incident.ranks, signature="node lost")
    if names and all(name in case.health and case.health[name].counters.get("left") for name in names):
        what = f"{incident.reason}, after it was told to leave"
        return replace(found, culprit=Culprit.SCHEDULER, what=what, certainty=Certainty.CERTAIN)
    full = [
        (name, load.used_bytes / load.total_bytes)
        for name in names
        if (health := case.health.get(name)) is not None and (load := health.load) is not None and load.total_bytes
    ]
    told = tuple(f"{part:.0%} of the memory of {name} were in use when it was last heard" for name, part in full)
    if any(part >= FULL for _, part in full):
        what = f"{incident.reason}: {told[0]}"
        return replace(found, culprit=Culprit.MEMORY, what=what, certainty=Certainty.LIKELY, evidence=told)
    silent = "did not answer" in incident.reason or "answered nothing" in incident.reason
    unheard = set(re.findall(rf"node (\S+) does not answer (?![^;]*{ACCEPTS})", incident.reason))
    silent |= bool(names) and unheard.issuperset(names)
    culprit = Culprit.MACHINE if silent else Culprit.OUTSIDE
    if len(names) > 1 and len(names) == len(case.nodes):
        culprit = Culprit.SCHEDULER  # whatever they share: a rack's power, a job that was cancelled
    return replace(found, culprit=culprit, evidence=told)


# ---- the incidents before


@dataclass(frozen=True, slots=True)
class _Past:
    """An earlier fault of one kind: what a node saw of it, or its verdict."""

    round: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    batch: Batch | None
    step: int


def _past(case: Case, signature: str) -> list[_Past]:
    """The earlier faults with this signature, one for each round and node."""
    found: dict[tuple[int, tuple[str, ...]], _Past] = {}
    for clue in case.older:
        if clue.kind in _ENDED and not clue.victim and _of_clue(clue).signature == signature:
            found[clue.round, (clue.node,)] = _Past(clue.round, (clue.node,), (clue.rank,), clue.batch, clue.step)
    for each in case.before:
        verdict = each.verdict
        if each.kind == "round" and not each.planned and verdict is not None and verdict.signature == signature:
            known = _Past(each.round, verdict.nodes, verdict.ranks, verdict.batch, each.step)
            if each.round < case.incident.round:
                found.setdefault((each.round, verdict.nodes), known)
    return list(found.values())


def _compared(case: Case, found: _Finding) -> tuple[_Finding, Advice, tuple[str, ...]]:
    """The finding in the light of earlier incidents, what to do, and the evidence for both."""
    if case.incident.kind == "run_stopped":
        return found, Advice.RESTART, ()
    if case.incident.kind != "round" or case.incident.planned:
        return found, _advice(found), ()
    past, told = _past(case, found.signature) if found.signature else [], list[str]()
    found, told = _same_batch(found, past)
    if not told:
        found, told = _same_node(case, found, past)
    advice = _advice(found)
    ended = _closed(case.incident)
    # The rules close a run at its limit: a verdict ends it one time later, where they did not count (a node was lost).
    if (again := _without_progress(found, past)) >= case.limit:
        told.append(f"it has come {again} times in a row without a step between")
        loops = again > case.limit and found.culprit in _HELPLESS and not case.incident.resumed
        advice = Advice.STOP if ended or loops else advice
    elif not (case.incident.resumed and case.incident.step) and (lives := _storm(case, found)):
        told.append(f"{lives} lives in a row ended in this way, each after about as long")
        advice = Advice.STOP
    if ended and advice is not Advice.STOP:
        advice = Advice.STOP if found.culprit in _HELPLESS else Advice.RESTART
    return found, advice, tuple(told)


_HELPLESS: Final = (Culprit.SCRIPT, Culprit.DATA, Culprit.COMPILER, Culprit.MEMORY)
"""Where the same step fails in the same way again."""


def _same_batch(found: _Finding, past: Sequence[_Past]) -> tuple[_Finding, list[str]]:
    """A fault that has met the same batch on another node is the batch's, or the script's with it."""
    if found.batch is None or found.culprit in (Culprit.NETWORK, Culprit.STORAGE, Culprit.SCHEDULER):
        return found, []
    there = [each for each in past if each.batch == found.batch]
    elsewhere = sorted({name for each in there for name in each.nodes} - {*found.nodes})
    if not elsewhere and len(there) < _TIMES - 1:
        return found, []
    where = f"on {named(elsewhere)} before" if elsewhere else f"{len(there)} times before"
    told = f"the same batch ({batch_words(found.batch)}) did so {where}"
    culprit = found.culprit
    if culprit in (Culprit.SCRIPT, Culprit.MACHINE, Culprit.OUTSIDE, Culprit.UNKNOWN):
        culprit = Culprit.DATA
    certainty = Certainty.CERTAIN if len(there) > 1 else _SURER.get(found.certainty, found.certainty)
    return replace(found, culprit=culprit, certainty=certainty, what=f"{found.what}; {told}"), [told]


def _same_node(case: Case, found: _Finding, past: Sequence[_Past]) -> tuple[_Finding, list[str]]:
    """A crash that comes back on one node alone, at other batches, is that node's: unless chance would do that too, or
    rank 0 alone runs that code."""
    if not found.machine or len(found.nodes) != 1 or len(case.nodes) < 2:
        return found, []
    node = found.nodes[0]
    mine = [each for each in past if each.nodes == (node,)]
    places = {(each.batch, each.step) for each in mine} | {(found.batch, found.step)}
    ranks = {*found.ranks, *(rank for each in mine for rank in each.ranks)}
    times = len(mine) + 1
    if not mine or len(mine) < len(past) or len(places) == 1:
        return found, []  # at one place, or nobody knows where: it may be what this rank does there
    told = f"of {len(case.nodes)} nodes {node} alone has done so {times} times, at different batches"
    if len(case.nodes) ** (1 - times) > CHANCE or ranks <= {0}:
        return found, [told]
    what = f"{found.what}; {told}"
    return replace(found, culprit=Culprit.MACHINE, certainty=Certainty.LIKELY, what=what), [told]


def _without_progress(found: _Finding, past: Sequence[_Past]) -> int:
    """How often the same fault came behind one step; 1 for the first time, or where no step is known."""
    return 1 + len({each.round for each in past if each.step == found.step}) if found.step else 1


def _storm(case: Case, found: _Finding) -> int:
    """How many lives in a row, of unknown steps, ended like this one after about as long; 0 if they are too few."""
    if found.culprit in (Culprit.OUTSIDE, Culprit.SCHEDULER, Culprit.NETWORK, Culprit.STORAGE):
        return 0  # somebody who kills a worker each minute would stop the run; networks and disks come back
    walls = [case.incident.wall]
    for each in (past for past in case.before if past.kind == "round"):
        alike = each.verdict is not None and each.verdict.signature == found.signature
        if not alike or each.step or case.incident.step or each.planned:
            break
        walls.append(each.wall)
    lives = [late - early for late, early in pairwise(walls)]
    for count in range(len(lives), max(STORM, case.limit) - 1, -1):
        shortest, longest = min(lives[:count]), max(lives[:count])
        if longest <= min(STORM_LIFE_S, STORM_SPREAD * max(shortest, 1.0)):
            return count
    return 0


def _advice(found: _Finding) -> Advice:
    if found.culprit is Culprit.MACHINE and found.certainty is not Certainty.POSSIBLE:
        return Advice.LEAVE_OUT
    if found.signature == "ranks_differ":
        return Advice.RESTART
    return Advice.GO_ON


_ADVISED = {
    Culprit.MEMORY: "If it comes again, use a smaller batch or more memory",
    Culprit.STORAGE: "Look at the storage: a retry helps once it answers",
    Culprit.DATA: "If it comes again, look at these samples with 'elastic-trainer data'",
    Culprit.SCRIPT: "If it comes again, mend the script",
    Culprit.COMPILER: "If it comes again, run the script without torch.compile, or empty the compiler's cache",
    Culprit.NETWORK: "If it comes again, run 'elastic-trainer doctor' on both",
}


def _advised(case: Case, found: _Finding, advice: Advice) -> str:
    """What to do, in a sentence."""
    match advice:
        case Advice.STOP:
            return "Stop: trying again cannot help before that is mended."
        case Advice.RESTART if found.signature == "ranks_differ":
            return "Restart the workers from the last checkpoint, and watch whether it comes back."
        case Advice.RESTART:
            return f"Start the nodes again: the run resumes after step {case.incident.step}."
        case Advice.LEAVE_OUT if can_spare(case, found.nodes):
            return f"Leave {named(found.nodes)} out until it is repaired."
        case Advice.LEAVE_OUT:
            return f"Replace {named(found.nodes)}: without it too few nodes are left, so it stays."
    also = _ADVISED.get(found.culprit, "")
    if case.incident.kind == "node_gave_up":
        return f"If no node is left, start nodes again: the run resumes after step {case.incident.step}."
    if case.incident.kind not in ("round", "worker_died"):
        return also + "." if also else "Nothing has to be done at once."
    if case.incident.open:
        return also + "." if also else "The run waits for enough nodes."
    return f"Go on: training continues without help. {also}." if also else "Go on: training continues without help."


def clues_of(
    incident: Incident, health: Mapping[str, NodeHealth], own: Iterable[Clue] = ()
) -> tuple[list[Clue], list[Clue]]:
    """The clues of ``incident``, and those of earlier rounds.

    ``own`` are those of the node that judges, which it may not have published yet. A line of a kernel's log counts if
    it is not much older than the end of a worker on its node, or than what the node has said last.
    """
    known = {(each.node, each.round, each.wall, each.text): each for each in own}
    said = {each.node: each.wall for each in known.values()}
    for document in health.values():
        said[document.node] = max(document.wall, said.get(document.node, 0.0))
        known |= {(each.node, each.round, each.wall, each.text): each for each in document.clues}
    ends = {each.node: each.wall for each in known.values() if each.kind in _ENDED and each.round == incident.round}
    found = [
        each
        for each in known.values()
        if each.kind is not ClueKind.KERNEL or abs(ends.get(each.node, said[each.node]) - each.wall) <= FRESH_S
    ]
    # The kernel's lines may be read when the next round has begun.
    mine = [each for each in found if each.round in (incident.round, 0) or each.kind is ClueKind.KERNEL]
    return mine, [each for each in found if 0 < each.round < incident.round and each.kind is not ClueKind.KERNEL]


def can_spare(case: Case, nodes: Iterable[str]) -> bool:
    """Whether enough of those that train now are left without ``nodes``."""
    left = len({*case.members} - {*nodes})
    return left - left % case.group >= case.least


def batch_words(batch: Batch) -> str:
    """``samples 96 to 127 of epoch 0``, as its order has them."""
    last = f" to {batch.last}" if batch.last >= 0 else ""
    return f"samples {batch.first}{last} of epoch {batch.epoch}"


def awaits(incident: Incident, clues: Iterable[Clue]) -> bool:
    """Whether a worker's end has ended the round, and nobody has said yet how it ended: its process may need long to
    exit, and a verdict before that is only provisional."""
    wanted = incident.cause in (Cause.WORKER_LOST, Cause.WORKER_HUNG) and incident.kind == "round"
    return wanted and not any(each.kind in _ENDED and each.rank >= 0 for each in clues)
