"""What this node sees of faults, and the verdicts on the incidents that it reports.

Clues are gathered where they arise: how workers died, which hung and where, what the kernel has logged. Each node
publishes its own with its health. The node that reports an incident reads those of all, judges it
(``membership.verdict``), and does what the verdict says: it asks a faulty node to leave, or ends a run that cannot go
on. A fault of a machine is kept below the prefix of all runs, so that a later run does not start there.

*Runs in* the agent: clues come from any thread, judging is done by the thread ``health-writer``.
*Owns* a descriptor of the kernel's log.
*Fails by* nothing: an incident that cannot be judged for want of the store waits for it; where the kernel's log or the
records of machines may not be read, nothing is known of them.
*Invariant*: nothing is done before the verdict is written, and it is done once.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.agent.workers.machine import LINE
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import EXIT_FAILURE, ElasticTrainerError, UnfitError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import (
    Batch,
    Clue,
    ClueKind,
    DocumentError,
    Incident,
    MachineFault,
    NodeHealth,
    RoundDocument,
    Verdict,
)
from elastic_trainer.membership.forgetting import faults_of
from elastic_trainer.membership.verdict import (
    Case,
    awaits,
    can_spare,
    clues_of,
    is_mismatch,
    judge,
    kernel_culprit,
    sick,
)
from elastic_trainer.model import Advice, Culprit, Phase, Place, PreflightMode, line_of_script, place_of
from elastic_trainer.store.api import Put, Read, RunKeys, Store, machine_faults
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_MACHINE
from elastic_trainer.wording import counted

if TYPE_CHECKING:  # it imports torch, which commands that read verdicts do without
    from elastic_trainer.agent.workers.deaths import Death

KEPT: Final = 12
"""Clues that a node publishes; the newest."""
_LOGGED: Final = 4
HISTORY: Final = 40
"""Earlier incidents that are compared."""
KMSG: Final = Path("/dev/kmsg")
RECORD_S: Final = 14 * 24 * 3600.0
"""How long a fault of a machine counts; etcd's lease forgets it, whatever clocks say."""
PATIENCE_S: Final = 1.0
"""How long an incident waits for what its nodes have seen of it, before a provisional verdict is published."""
LATE_S: Final = 120.0
"""And how long such a verdict may still be replaced."""
AGAIN_S: Final = 5.0
"""Seconds between two looks for its clues."""
_EARLY_KEPT: Final = 8
_LIMIT_S: Final = 3.0
_LONGEST: Final = 400


class Clues:
    """What this node has seen, oldest first. ``round_now()`` is the newest round; ``wake()`` has them published."""

    def __init__(
        self, node: str, round_now: Callable[[], int], wake: Callable[[], None] = lambda: None, clock: Clock = SYSTEM
    ) -> None:
        self._node, self._round_now, self._wake, self._clock = node, round_now, wake, clock
        self._lock = threading.Lock()
        self._kept: deque[Clue] = deque(maxlen=KEPT)
        self._logged: deque[Clue] = deque(maxlen=_LOGGED)
        """Of the kernel, which may say much at once: they push out no others."""

    def add(self, kind: ClueKind, text: str, **more: Any) -> None:
        """Keep a clue, unless it is the last one again."""
        more.setdefault("round", self._round_now())
        clue = Clue(kind=kind, node=self._node, text=text[:_LONGEST], wall=self._clock.wall(), **more)
        kept = self._logged if kind is ClueKind.KERNEL else self._kept
        with self._lock:
            if any(_words(each.text) == _words(clue.text) and each.round == clue.round for each in kept):
                return
            kept.append(clue)
        if kind is not ClueKind.KERNEL:
            self._wake()

    def all(self) -> tuple[Clue, ...]:
        with self._lock:
            return *self._logged, *self._kept

    # ---- where they come from

    def failed(self, reading: Reading) -> None:
        """A worker's Session has ended by an exception; its process may need seconds to exit."""
        notes, rank = reading.notes, reading.pulse.rank
        fault = notes["fault"]
        self.add(
            ClueKind.EXIT,
            _with_details(f"{self._who(rank)} ended with {notes.get('error', 'an exception')}", fault),
            rank=rank,
            round=reading.pulse.round,
            code=EXIT_FAILURE,
            **_fault(fault, reading),
            **_position(reading),
        )

    def died(self, deaths: Iterable[Death], readings: Mapping[int, Reading], number: int) -> None:
        """Workers of this node have ended in round ``number``; ``readings``: their last pages, by process id."""
        for each in deaths:
            reading = readings.get(each.pid)
            notes = reading.notes if reading is not None else {}
            fault = notes.get("fault") or each.fault or _crashed(reading)
            # A script without a Session cannot say whether it has lost a peer.
            lost = "fault" not in notes and each.fault.get("lost_peer", False) and not is_mismatch(each.how)
            if notes.get("fault") and self._knows(each.rank, number):
                continue
            self.add(
                ClueKind.SIGNAL if each.code < 0 else ClueKind.EXIT,
                _with_details(f"{self._who(each.rank)} {each.how}", fault),
                rank=each.rank,
                code=each.code,
                memory=each.memory,
                victim=bool(notes.get("lost_peer")) or lost,
                round=number,
                **_fault(fault, reading),
                **(_position(reading) if reading is not None else {}),
            )

    def _knows(self, rank: int, number: int) -> bool:
        """Whether the end of this rank in round ``number`` is known."""
        return any(each.kind is ClueKind.EXIT and (each.rank, each.round) == (rank, number) for each in self.all())

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._node}" if rank >= 0 else f"a worker of {self._node}, before it had a rank,"

    def hung(self, reading: Reading | None, rank: int, reason: str, state: str, stacks: str) -> None:
        """A worker makes no progress, and its agent ends it or leaves it behind."""
        files, at = stack_of(stacks)
        place = place_of(files) if files else _place_by_phase(reading)
        where = f", in {at}" if at else ""
        self.add(
            ClueKind.HANG,
            f"{self._who(rank)} hung: {reason}{where}",
            rank=rank,
            state=state,
            place=place,
            at=at,
            **(_position(reading) if reading is not None else {}),
        )

    def waits(self, reading: Reading, stacks: str) -> None:
        """A worker has waited for others for longer than it may."""
        _, at = stack_of(stacks)
        recorded = collective_of(reading.pulse.rank)
        at = f"{recorded} ({at})" if recorded and at else recorded or at
        text = f"rank {reading.pulse.rank} on {self._node} waited for others in {at or 'an unknown call'}"
        self.add(ClueKind.WAIT, text, rank=reading.pulse.rank, at=at, place=Place.COLLECTIVE)

    def told_to_leave(self, reason: str, workers: bool = False) -> None:
        """The node, or its workers alone."""
        who = f"the workers of {self._node} were" if workers else f"node {self._node} was"
        self.add(ClueKind.NOTICE, f"{who} told to leave: {reason}")

    def logged(self, lines: Iterable[str]) -> None:
        """Lines of the kernel's log; those that say nothing of a fault are left out."""
        for line in lines:
            if kernel_culprit(line) is not None:
                self.add(ClueKind.KERNEL, f"the kernel of {self._node} logged: {line.strip()[:LINE]}")


def _words(text: str) -> str:
    """A line of the kernel without what differs each time."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text) if "logged: " in text else text


def _with_details(text: str, fault: Mapping[str, Any]) -> str:
    """``text``, shortened if need be, with its cause and where in the script it was."""
    details = f", because of {fault['because']}" if fault.get("because") else ""
    details += f", at {fault['at']}" if fault.get("at") else ""
    return text[: max(_LONGEST // 3, _LONGEST - len(details))] + details


def _crashed(reading: Reading | None) -> dict[str, Any]:
    """Where a fatal signal ended a worker, as that would note it of an exception."""
    if reading is None:
        return {}
    files, at = _in_current(reading.crash)
    if files:
        place = place_of(files)
        return {"at": at, **({"place": place} if place is not Place.SCRIPT else {})}
    _, at = stack_of(reading.crash)
    return {"at": f"{at} (main thread)"} if at else {}  # a thread crashed that runs no Python


def _fault(fault: Mapping[str, Any], reading: Reading | None) -> dict[str, Any]:
    """What the worker has noted of its exception; without that the place by its phase."""
    return {
        "types": tuple(map(str, fault.get("types") or ())),
        "place": Place(fault["place"]) if fault.get("place") in set(Place) else _place_by_phase(reading),
        "at": str(fault.get("at") or ""),
    }


def _place_by_phase(reading: Reading | None) -> Place:
    if reading is None:
        return Place.SCRIPT
    by_phase = {Phase.DATA: Place.DATA, Phase.CHECKPOINT: Place.STORAGE, Phase.HEALING: Place.STORAGE}
    return by_phase.get(reading.phase, Place.COLLECTIVE if reading.waits else Place.SCRIPT)


def _position(reading: Reading) -> dict[str, Any]:
    """The step that the worker had committed, and the samples of the one that it was in."""
    pulse, length, size = reading.pulse, int(reading.notes.get("length") or 0), int(reading.notes.get("batch") or 0)
    if not size:
        return {"step": pulse.step}
    last = min(pulse.used + size, length or math.inf) - 1
    batch = Batch(pulse.epoch, pulse.used, int(last)) if last >= pulse.used else None
    return {"step": pulse.step, "batch": batch}


_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)|^\s+(\S+) \(([^()]+):(\d+)\)', re.MULTILINE)


def stack_of(stacks: str) -> tuple[list[str], str]:
    """The files of the main thread's stack, innermost first, and the innermost line of the script.

    ``stacks`` is what faulthandler or py-spy has written.
    """
    found = _in_current(stacks)
    if found[0]:
        return found
    threads = stacks.split("Thread ")[1:]  # without the current one's frames; faulthandler names the main thread last
    return _frames(next((part for part in threads if "MainThread" in part), threads[-1] if threads else ""))


def _in_current(stacks: str) -> tuple[list[str], str]:
    """The same of the thread that wrote them, or crashed; nothing if it runs no Python."""
    _, current, rest = stacks.rpartition("Current thread ")
    return _frames(rest) if current else ([], "")


def _frames(stack: str) -> tuple[list[str], str]:
    stack = re.split(r"\n\s*\nThread |\nThread ", stack)[0]
    frames = [(m[1] or m[5], m[2] or m[6], m[3] or m[4]) for m in _FRAME.finditer(stack)]
    return [file for file, _, _ in frames], line_of_script(frames)


# ---- NCCL's flight recorder (pytorch.org/tutorials/prototype/flight_recorder_tutorial): a pickle for each rank


class _Plain(pickle.Unpickler):
    """Reads plain values only: what names a class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def collective_of(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """The newest collective that ``rank`` had not completed, by NCCL's dump, with its number and sizes; else empty."""
    prefix = environ.get("TORCH_FR_DUMP_TEMP_FILE") or environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not prefix:
        return ""
    try:
        found = _Plain(io.BytesIO(Path(f"{prefix}{rank}").read_bytes())).load()
        entries = [each for each in found["entries"] if each.get("state") != "completed"]
        last = entries[0] if entries else None
        if last is None:
            return ""
        sizes = "x".join(str(part) for part in (last.get("input_sizes") or [[]])[0])
        return f"{last['profiling_name']} number {last['collective_seq_id']} of {sizes or 'no'} elements"
    except (OSError, KeyError, IndexError, TypeError, ValueError, EOFError, pickle.UnpicklingError):
        return ""


# ---- the kernel's log

_RECORD = re.compile(r"\d+,\d+,-?\d+,[^;]*;(.*)")


class KernelLog:
    """What the kernel logs from now on (Documentation/ABI/testing/dev-kmsg); nothing where it may not be read."""

    def __init__(self, path: Path = KMSG) -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            logger().debug("kernel_log.unread", reason=error.strerror)

    def read(self) -> list[str]:
        """The lines since the last call."""
        lines: list[str] = []
        while self._descriptor is not None and len(lines) < 1000:
            try:
                block = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                self.close()
                break
            if not block:
                break
            for line in block.decode("utf-8", "replace").splitlines():
                found = _RECORD.match(line)
                lines += [found[1] if found else line] if not line.startswith(" ") else []
        return lines

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# ---- verdicts


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """``least``: the fewest nodes of the run, in groups of ``group``; ``failures``: its ``failure_limit``; ``evicts``:
    whether a faulty node is asked to leave."""

    least: int = 1
    group: int = 1
    failures: int = 3
    evicts: bool = True


@dataclass(frozen=True, slots=True)
class VerdictPorts:
    """``told()``: what all nodes have published, or the store's error; ``ask(node, reason)`` asks a node to leave,
    ``stop(number, reason)`` ends the run in that round."""

    told: Callable[[], Mapping[str, NodeHealth]]
    ask: Callable[[str, str], bool]
    stop: Callable[[int, str], None]


@dataclass(slots=True)
class _Early:
    """An incident that was judged before its clues had come, and when that was, and when it was looked at last."""

    key: str
    incident: Incident
    since: float
    looked_at: float


class Verdicts:
    """Judges incidents, and does what verdicts say. Raises ElasticTrainerError where the store does not answer."""

    def __init__(
        self,
        clues: Clues,
        store: Store,
        keys: RunKeys,
        limits: VerdictLimits,
        ports: VerdictPorts,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clues, self._store, self._keys, self._limits = clues, store, keys, limits
        self._ports, self._clock = ports, clock
        self._awaited: tuple[Incident | None, float] = (None, 0.0)
        """The incident that waits for clues, and since when."""
        self._early: list[_Early] = []
        self._case: Case | None = None
        """Of the last verdict."""

    def judged(self, incident: Incident, current: RoundDocument | None, *, last: bool = False) -> Incident | None:
        """``incident`` with its verdict; None while its clues are on their way. ``last``: there is no later."""
        now = self._clock.monotonic()
        if self._awaited[0] is not incident:
            self._awaited = (incident, now)
        case = self._case_of(incident, current)
        if awaits(incident, case.clues) and not last and now - self._awaited[1] < PATIENCE_S:
            return None
        self._case = self._with_past(case)
        verdict = judge(self._case)
        _log(incident, verdict)
        return incident.model_copy(update={"verdict": verdict})

    def act(self, key: str, incident: Incident, current: RoundDocument | None) -> Incident | None:
        """Do what the verdict on ``incident`` says, which is in the store at ``key``; what it says then, if it changed.

        An early verdict is only kept for later: what it says may be wrong.
        """
        case, verdict, now = self._case, incident.verdict, self._clock.monotonic()
        if case is None or verdict is None:
            return None
        if awaits(incident, case.clues):
            self._early = [*self._early, _Early(key, incident, now, now)][-_EARLY_KEPT:]
            return None
        ends_round = incident.kind == "round" and incident.next_round is not None and current is not None
        if ends_round and verdict.advice is Advice.STOP and current is not None:
            self._ports.stop(current.last_number, verdict.sentence)
        if verdict.culprit is not Culprit.MACHINE or verdict.advice is not Advice.LEAVE_OUT:
            return None
        gone = []
        if ends_round and self._limits.evicts and can_spare(case, verdict.nodes):
            gone = [node for node in verdict.nodes if self._ports.ask(node, verdict.sentence)]
        if incident.kind in ("round", "audit_mismatch"):
            for node in verdict.nodes:
                told = case.health.get(node)
                self._record(told.machine if told is not None else "", incident, verdict, left=node in gone)
        if not gone:
            return None
        said = verdict.model_copy(update={"sentence": f"{verdict.sentence} It was asked to leave."})
        return incident.model_copy(update={"verdict": said})

    def better(self, current: RoundDocument | None) -> tuple[str, Incident, Incident] | None:
        """The key of an incident that was judged too early, as it is in the store, and with its new verdict. Nothing
        else follows from that: the run has gone on."""
        now = self._clock.monotonic()
        self._early = [each for each in self._early if now - each.since < LATE_S]
        for each in self._early:
            if now - each.looked_at < AGAIN_S:
                continue
            each.looked_at = now
            case = self._case_of(each.incident, current)
            if not awaits(each.incident, case.clues):
                verdict = judge(self._with_past(case))
                _log(each.incident, verdict)
                return each.key, each.incident, each.incident.model_copy(update={"verdict": verdict})
        return None

    def drop_early(self, key: str) -> None:
        """The better verdict on the incident at ``key`` is written."""
        self._early = [each for each in self._early if each.key != key]

    def _case_of(self, incident: Incident, current: RoundDocument | None) -> Case:
        """All but the incidents before, which one that only waits for its clues does not need."""
        health, limits = self._ports.told(), self._limits
        clues, older = clues_of(incident, health, self._clues.all())
        members = [member.node for member in current.members] if current is not None else []
        return Case(
            incident,
            clues,
            nodes=sorted({*incident.nodes, *members, *(each.node for each in clues)}),
            older=older,
            health=health,
            members=members,
            least=limits.least,
            group=limits.group,
            limit=limits.failures,
        )

    def _with_past(self, case: Case) -> Case:
        return replace(case, before=earlier(self._store, self._keys, case.incident))

    def _record(self, machine: str, incident: Incident, verdict: Verdict, *, left: bool) -> None:
        """Keep a fault of ``machine`` for later runs."""
        if not machine:
            return
        run = self._keys.run_id
        fault = MachineFault(
            wall=incident.wall, run=run, sentence=verdict.sentence, certainty=verdict.certainty, left=left
        )
        key = f"{machine_faults(self._keys.prefix, machine)}{run}.{int(incident.wall * 1000.0)}"
        lease = 0
        try:
            lease = self._store.grant(RECORD_S, Deadline.after(_LIMIT_S)).id
            self._store.transact([], [Put(key, fault.encode(), lease)], deadline=Deadline.after(_LIMIT_S))
            logger().warning("machine.recorded", machine=machine, sentence=verdict.sentence)
        except ElasticTrainerError as error:  # an account of this run alone may not write there
            logger().info("machine.not_recorded", machine=machine, error=str(error))
            with suppress(ElasticTrainerError):
                self._store.revoke(lease, Deadline.after(_LIMIT_S))


def _log(incident: Incident, verdict: Verdict) -> None:
    log = logger().info if verdict.advice is Advice.GO_ON else logger().warning
    log(
        "incident.judged",
        round=incident.round,
        culprit=verdict.culprit,
        advice=verdict.advice,
        certainty=verdict.certainty,
        nodes=verdict.nodes,
        sentence=verdict.sentence,
    )


def earlier(store: Store, keys: RunKeys, incident: Incident) -> list[Incident]:
    """The incidents before this one, newest first. Raises ElasticTrainerError."""
    known = store.range(keys.incidents, Deadline.after(_LIMIT_S), keys_only=True).items
    last = keys.incident(int(incident.wall * 1000.0))
    names = [item.key for item in known if item.key < last][-HISTORY:]
    if not names:
        return []
    reads = [Read(names[0], range_end=last)]
    items = store.transact([], reads, deadline=Deadline.after(_LIMIT_S)).reads[0].items
    found = []
    for item in items:
        try:
            found.append(Incident.decode(item.value, item.key))
        except DocumentError as error:
            logger().debug("document.refused", key=plain(item.key), error=str(error))
    return found[::-1]


# ---- machines


def machine_name(environ: Mapping[str, str]) -> str:
    """The machine's name, as the environment, Slurm or the system says; what no key may hold becomes a dash.

    Empty in a pod that is not told: its host name is that of whatever pod takes its place.
    """
    name = environ.get(ENV_MACHINE) or environ.get("SLURMD_NODENAME")
    if not name and "KUBERNETES_SERVICE_HOST" in environ:
        return ""
    name = name or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:128] or "unnamed"


def ensure_healthy(store: Store, keys: RunKeys, machine: str, mode: PreflightMode, clock: Clock = SYSTEM) -> None:
    """Keep a machine out that has failed again and again (UnfitError), or warn. A silent store is no fault."""
    if mode is PreflightMode.OFF or not machine:
        return
    try:
        known = sick(faults_of(store, keys.prefix, machine, Deadline.after(_LIMIT_S, clock)), keys.run_id)
    except ElasticTrainerError as error:
        logger().info("machine.unknown", machine=machine, error=str(error))
        return
    if not known:
        return
    runs = sorted({each.run for each in known})
    last = known[-1].sentence.partition(". ")[0]
    text = f"machine {machine} has failed {counted(len(known), 'time')} (runs: {', '.join(runs)})"
    logger().warning("machine.sick", machine=machine, faults=len(known), runs=runs, last=last)
    if mode is PreflightMode.REFUSE:
        hint = (
            f"last: {last}; once it is repaired, run 'elastic-trainer forget --machine {machine}', "
            "or join all the same with --rdzv-conf sick_machines=warn"
        )
        raise UnfitError(f"{text}: it stays out", hint=hint)
