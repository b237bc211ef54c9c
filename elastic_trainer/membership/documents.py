"""The documents that nodes share through the store: versioned JSON, validated when read.

First those of the membership protocol, then what nodes publish about their workers, last a requested save. The round
document of a large round is compressed by zlib: etcd sends each version of it to every node, so that it costs bytes by
the square of the nodes.

*Fails by* DocumentError for content that this version cannot read; everything in the store is untrusted.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from elastic_trainer.errors import PermanentError
from elastic_trainer.ipc.channel import Identity
from elastic_trainer.model import NAME_PATTERN, Advice, Cause, Certainty, Culprit, Incarnation, Place, RecoveryMode
from elastic_trainer.settings import as_json
from elastic_trainer.store.untrusted import MOST_BYTES, cleaned
from elastic_trainer.telemetry.families import GAUGES, RankGauges
from elastic_trainer.wording import counted, duration

PROTOCOL_VERSION = 5
"""Of what nodes write and of what their ranks tell each other: nodes of different versions refuse each other."""


COMPRESS_FROM = 8 << 10
"""Bytes of JSON from which the document of a round is compressed."""
_ZLIB = b"\x78"
"""The first byte of a zlib stream; no JSON begins with it."""
MOST_WORKERS = 4096
"""Upper bound on workers per node; sizes allocations."""
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]


class DocumentError(PermanentError):
    """A key of the run holds something that this version cannot read."""


class VersionError(DocumentError):
    """The document has another protocol version, ``found``."""

    def __init__(self, message: str, found: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.found = found


class Document(BaseModel):
    """Base class: frozen, JSON; ignores unknown fields when read, so that a later version can add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[5] = 5

    def encode(self) -> bytes:
        return as_json(self)

    @classmethod
    def decode(cls, value: bytes, key: str) -> Self:
        """Parse the JSON found under ``key``; raises DocumentError, which names the key, if it does not validate."""
        try:
            return cls.model_validate_json(cleaned(value))
        except ValueError as error:  # pydantic's ValidationError is one
            try:
                found = _Versioned.model_validate_json(value).version
            except ValueError:
                found = PROTOCOL_VERSION
            if found != PROTOCOL_VERSION:
                wanted = f"no {cls.__name__} of protocol version {PROTOCOL_VERSION}"
                raise VersionError(
                    f"key {key!r} holds {wanted}, but one of version {found}",
                    found,
                    hint="run the same version of elastic_trainer everywhere",
                ) from error
            raise DocumentError(
                f"key {key!r} holds no {cls.__name__} of protocol version {PROTOCOL_VERSION}",
                hint="another program or another version of elastic_trainer writes under this run id",
            ) from error


class _Versioned(BaseModel):
    """The one field that documents of all versions share."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: int = Field(ge=0, le=1_000_000)


class Spec(Document):
    """What all nodes of a run must agree on: its limits, and which job it is.

    A field of the job is empty where it is not known, as in a spec of an earlier version: then nothing is compared.
    """

    epoch: int = 1
    min_nodes: int = Field(ge=1)
    max_nodes: int = Field(ge=1)
    recovery: RecoveryMode = RecoveryMode.RESTART
    sizes: tuple[int, ...] = ()
    shard_nodes: int = Field(default=1, ge=1)
    user: str = ""
    """The system's user that the nodes run as."""
    checkpoint_dir: str = ""
    """As the command names it, if it does."""
    script: str = ""
    """The script or module, as the command names it."""
    command: str = ""
    """A digest of the script's arguments, without what differs by node."""

    def disagreement(self, other: Spec) -> str | None:
        """The first difference of ``other``, in words, or None."""
        for name, mine, theirs in (
            ("min nodes", self.min_nodes, other.min_nodes),
            ("max nodes", self.max_nodes, other.max_nodes),
            ("recovery", str(self.recovery), str(other.recovery)),
            ("shard_nodes", self.shard_nodes, other.shard_nodes),
            ("sizes", _listed(self.sizes), _listed(other.sizes)),
        ):
            if mine != theirs:
                return f"{name} {theirs} here, {mine} in the run"
        return None

    def changed(self, other: Spec, allowed: Collection[str] = ()) -> dict[str, str]:
        """In which fields of the job ``other`` differs, in words, but for those that are ``allowed`` to."""
        found = {}
        for name in JOB_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs and name not in allowed:
                shown = f" {theirs!r} here, {mine!r} in the run"
                found[name] = "other arguments of the script" if name == "command" else f"{name}{shown}"
        return found

    def knows_less(self, other: Spec) -> bool:
        """Whether a field of the job is known to ``other`` alone."""
        return any(getattr(other, name) and not getattr(self, name) for name in JOB_FIELDS)


OWNER_FIELDS: Final = ("user", "checkpoint_dir")
"""Of the job: what stays the same as long as the run's keys are there."""
JOB_FIELDS: Final = (*OWNER_FIELDS, "script", "command")


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "all"


class NodeState(StrEnum):
    """The progress of a node."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"
    """In place: its workers have finished the training but have not exited yet."""
    DONE = "done"


class NodeRecord(Document):
    """One node's key.

    ``acknowledged``: the agent knows that all rounds below this number are over. ``reported``: its workers are free to
    join the round of this number (in restart mode both are equal).
    """

    host: str
    address: str
    local_world_size: Workers
    role: str = "default"
    store_port: int = Field(ge=0, le=65535)
    """Port of rank 0's store if this node becomes the first: reserved anew for each life."""
    probe_port: int = Field(ge=0, le=65535)
    """Port on which the agent listens: a refused connection proves that the agent is dead, unless ``address`` is a
    loopback one and this node is on another machine."""
    shard_slot: int | None = Field(default=None, ge=0)
    """In place, with shard groups of several nodes: the slot in a group whose shards its workers hold."""
    state: NodeState = NodeState.WARMING
    life: int = Field(default=0, ge=0)
    acknowledged: int = Field(default=0, ge=0)
    reported: int = Field(default=0, ge=0)
    step_time_s: float = Field(default=0.0, ge=0.0)
    planned: bool = False
    """Whether it left its last round by agreement rather than by a failure."""
    identity: Identity | None = None
    reached: Identity | None = None
    """The progress of its last life, from its workers' heartbeat pages, or their last report if there are none."""
    joinable: bool = True
    """In place: whether a newcomer could join its workers now (they are not in the middle of an evaluation)."""
    newcomer: bool = False
    """In place: whether one of its workers never joined a round, although a round document may have named it."""
    met: tuple[str, ...] = ()
    """In place: the nonces of the rounds whose ranks all its workers have met where they are in the script."""
    busy: str = ""
    """In place: why its workers are still in a round that is over, for people. Its agent makes sure that they leave."""
    committed: int = Field(default=0, ge=0)
    """In place: the newest step whose state a worker of this life is known to hold."""
    unreachable: tuple[str, ...] = ()
    """In place: members of the last round that it could not reach, if it did not form or broke for that reason; itself
    if it knows that others cannot reach its workers."""
    stuck: bool = False
    """In place: a worker of its last round hangs, so other nodes do not wait for its report."""
    cause: str = ""
    """Why it left its last round, for people."""
    ended_by: Cause | None = None
    """What ended its last life, unless by agreement: other nodes may break the round before its agent does."""
    false_start: str = ""
    """How its present life failed at startup, kept while other nodes have time to report the same."""
    false_starts: int = Field(default=0, ge=0)
    """Its consecutive lives that failed at startup in this way."""
    passed: bool = False
    """Whether a worker of it has passed the end of the training, which all ranks pass together: the run has succeeded,
    whatever their scripts do afterwards."""


class RoundState(StrEnum):
    """The state of a round. Only CLOSED is final."""

    ACTIVE = "active"
    BROKEN = "broken"
    DRAINING = "draining"
    CLOSED = "closed"


class RoundMember(NamedTuple):
    """One node of a round; ``first_rank`` is the global rank of its local rank 0.

    Stored as a list without names, since every node receives all nodes' entries with each round document. Entries are
    therefore read strictly: an added value needs another protocol version.
    """

    node: Name
    create_revision: int
    life: int
    first_rank: Annotated[int, Field(ge=0)]
    local_world_size: Workers
    role: str = "default"

    @property
    def incarnation(self) -> Incarnation:
        """The life of the node that is the member."""
        return Incarnation(self.create_revision, self.life)


FAILS_ALIKE: Final = "the script fails at startup in the same way on all nodes"
"""How a run ends whose script no node can start; verdicts read it."""
ACCEPTS: Final = "though its machine accepts connections"
"""Of a node that does not answer: its processes are stopped, its machine lives."""


class Ghost(BaseModel):
    """The version of a node's key with which the node was excluded or suspected: it is ignored until it writes its key.

    Every live member writes its key when the round is broken. A restored store reuses revisions, so a mod-revision
    alone may be that of another key of the node.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    create_revision: int = 0
    mod_revision: int
    life: int = 0


class RunResult(StrEnum):
    """How a closed run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class RoundDocument(Document):
    """The one round document of a run."""

    epoch: int = 1
    """How often the run was opened: 1, and one more each time that it was closed and opened again."""
    number: int = Field(ge=0)
    nonce: str
    state: RoundState
    members: tuple[RoundMember, ...]
    store: str = ""
    """``host:port`` of the TCPStore at which the workers of this round rendezvous."""
    last_step: int | None = None
    failures: int = 0
    """Consecutive worker failures after ``last_step`` steps: a poison batch would kill one node after another."""
    culprits: tuple[Name, ...] = ()
    """In restart mode: the nodes whose own workers failed."""
    stalled: int = 0
    """Consecutive rounds that ended without a committed step."""
    fewest: int = 0
    """The size in nodes of the smallest round since ``last_step``, this one included; 0 if not known."""
    final: bool = False
    """Whether a verdict ends the run with this round, since trying again cannot help; ``reason`` says why."""
    unformed: int = 0
    """In place: consecutive rounds whose groups could not be formed, since ranks did not reach each other."""
    ghosts: tuple[Ghost, ...] = ()
    left_out: str | None = None
    """The node excluded from this round, as others cannot reach it or its workers fail; ``reason`` says which."""
    reason: str = ""
    worker_failed: bool = False
    """Whether a worker failure broke it, rather than the loss of a node."""
    cause: Cause | None = None
    """What broke it, if known."""
    lost: tuple[Name, ...] = ()
    """The nodes whose loss broke it, if known."""
    result: RunResult | None = None
    next: RoundDocument | None = None

    def encode(self) -> bytes:
        text = super().encode()
        return text if len(text) < COMPRESS_FROM else zlib.compress(text)

    @classmethod
    def decode(cls, value: bytes, key: str) -> Self:
        return super().decode(uncompressed(value), key)

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return sum(member.local_world_size for member in self.members)

    @property
    def last_number(self) -> int:
        """The number of the newest round that may be in effect: a planned change may have taken effect already."""
        return self.next.number if self.next is not None else self.number

    def is_first(self, node: str) -> bool:
        """Whether ``node`` has rank 0."""
        return bool(self.members) and self.members[0].node == node

    def member(self, node: str) -> RoundMember | None:
        return next((member for member in self.members if member.node == node), None)

    def accuses(self, node: str) -> bool:
        """Whether it was broken because ``node``, a member, did not answer."""
        suspected = any(ghost.node == node for ghost in self.ghosts)
        return suspected and self.state is RoundState.BROKEN and self.member(node) is not None


def uncompressed(value: bytes) -> bytes:
    """The JSON; ``value`` itself where it is not a zlib stream, or one of more bytes than are read."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(value, MOST_BYTES) if value.startswith(_ZLIB) else value
    except zlib.error:
        return value
    return text if stream.eof or text is value else value


class ClueKind(StrEnum):
    """What a node has seen."""

    EXIT = "exit"
    """A worker ended with an exit code."""
    SIGNAL = "signal"
    """A signal ended a worker that its agent had not sent."""
    HANG = "hang"
    """A worker made no progress, and its agent ended it."""
    WAIT = "wait"
    """A worker had waited for others for too long."""
    KERNEL = "kernel"
    """The kernel of the node's machine has logged a fault."""
    UNREACHED = "unreached"
    """Its workers could not reach those of another node, or others could not reach its own."""
    NOTICE = "notice"
    """The node was told to leave."""


class Batch(NamedTuple):
    """The samples of one step: ``first`` to ``last`` in the order of ``epoch``; -1 if ``last`` is not known."""

    epoch: int
    first: int
    last: int = -1


class Clue(BaseModel):
    """One thing that a node has seen of a fault, at first hand. What is not known is empty."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: ClueKind
    node: str
    text: str
    """In a sentence, without a full stop."""
    wall: float = 0.0
    """When (Unix time of that node)."""
    rank: int = -1
    round: int = 0
    step: int = 0
    """The newest step that the worker had committed."""
    batch: Batch | None = None
    """The samples of the step that it was in."""
    code: int = 0
    """Exit code; a signal's number is negative."""
    memory: bool = False
    """Whether the kernel killed for memory."""
    victim: bool = False
    """Whether it ended, or stood, since it had lost its peers."""
    types: tuple[str, ...] = ()
    """The exception and those that it was raised from, outermost first, as ``module.Class``; OSErrors with their code,
    as ``OSError[ENOSPC]``."""
    place: Place = Place.SCRIPT
    """What the process did."""
    at: str = ""
    """Where in the script: ``train.py:31 in forward``; or which collective it waited in."""
    state: str = ""
    """The kernel's state of a process that hung."""
    others: tuple[str, ...] = ()
    """The nodes that it did not reach."""


class Verdict(BaseModel):
    """What failed in an incident, where, how sure that is, and what to do (see ``membership.verdict``)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    culprit: Culprit
    advice: Advice
    certainty: Certainty
    sentence: str
    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    batch: Batch | None = None
    signature: str = ""
    """Equal for faults of one kind, whatever node, rank or batch they strike."""


class Departure(Document):
    """How the last node of a run left. Nodes that crash leave none, and the next node that joins removes it."""

    wall: float
    node: str
    planned: bool
    """Whether it was asked to leave; otherwise it gave up."""
    reason: str
    exit_code: int
    step: int = Field(default=0, ge=0)
    """The newest step that its workers are known to have committed."""
    clues: tuple[Clue, ...] = ()
    """What it had seen of faults."""


class JournalEntry(Document):
    """One transition, kept for people; the journal's length is bounded."""

    wall: float
    by: str
    round: int
    state: RoundState
    reason: str
    nodes: tuple[str, ...]
    world_size: int


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` (IPv6 host in brackets) as host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Host and port as ``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


GONE: Final = "_gone"
"""The name under which the summed counters of long-gone nodes are kept (no node can have it)."""


@dataclass(slots=True, kw_only=True)
class RankHealth(RankGauges):
    """One rank as its node's agent sees it. Times are in seconds."""

    local_rank: int
    pid: int
    phase: str
    """A model.Phase."""
    phase_s: float
    """How long it has been in this phase."""
    still_s: float
    """Seconds without progress."""
    device: str = "cpu"
    waits: bool = False
    """Whether it is waiting for other ranks."""
    waits_s: float = 0.0
    """How long it has been observed to only wait."""

    def as_status(self) -> dict[str, Any]:
        """The fields by name; None for unknown values."""
        status = dict(zip(RANK_FIELDS, _VALUES(self), strict=True))
        return status | {gauge.name: gauge.known(status[gauge.name]) for gauge in GAUGES}


RANK_FIELDS: Final = tuple(each.name for each in fields(RankHealth))
_VALUES: Final = attrgetter(*RANK_FIELDS)


def _columns(ranks: Sequence[RankHealth]) -> dict[str, Sequence[Any]]:
    """Columns instead of rows: each name is stored once, as there may be many ranks."""
    return dict(zip(RANK_FIELDS, zip(*map(_VALUES, ranks), strict=True), strict=True)) if ranks else {}


def _rows(stored: Any) -> Any:
    """The inverse of :func:`_columns`; validation drops columns that this version does not know."""
    if not isinstance(stored, dict):
        return stored
    if not all(isinstance(column, list) for column in stored.values()):
        raise ValueError("a column is not a list")
    return [dict(zip(stored, row, strict=True)) for row in zip(*stored.values(), strict=True)]


Ranks = Annotated[tuple[RankHealth, ...], BeforeValidator(_rows), PlainSerializer(_columns)]


class Saved(BaseModel):
    """The last checkpoint that rank 0 saved."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    wall: float
    """When it was saved (Unix time of that node)."""
    bytes: int = 0
    duration_s: float = 0.0
    free_bytes: int | None = None
    """Free space left for checkpoints after the save; None if unknown."""


class RunProgress(BaseModel):
    """How far the run is, as rank 0's node knows it. What the script has not said is None."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    """From 0."""
    epochs: int | None = None
    last_step: int | None = None
    """The step at which the run ends, where that was asked for."""
    part: float | None = Field(default=None, ge=0.0, le=1.0)
    """The part of the run that is done, 0 to 1."""
    left_s: float | None = Field(default=None, ge=0.0)
    """Seconds until its end at the present speed, without evaluations and saves."""
    lr: float | None = None
    paused: bool = False
    """Whether all ranks wait, since an operator wants it."""


class GpuLoad(BaseModel):
    """One GPU of a node."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    index: int
    """Its number on the machine, as ``nvidia-smi`` counts."""
    busy: float | None = Field(default=None, ge=0.0, le=1.0)
    """The part of the time in which a kernel ran on it, in the driver's last sample; None if it does not say."""
    used_bytes: int = 0
    total_bytes: int = 0


class NodeLoad(BaseModel):
    """How busy the machine of a node is, or the container that its agent is in."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    cpu: float = Field(ge=0.0, le=1.0)
    """The part of all CPUs' time that was not idle since the last report."""
    cpus: int = 1
    used_bytes: int = 0
    """Memory that is not available to others."""
    total_bytes: int = 0
    """Memory of the machine, or the container's limit."""
    gpus: tuple[GpuLoad, ...] = ()


class LogTail(BaseModel):
    """The last lines of a file that workers write to."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    ranks: tuple[int, ...]
    """Who writes to it, as far as they have ranks."""
    file: str
    lines: tuple[str, ...]
    """Oldest first."""


class MachineFault(Document):
    """A fault of one machine, kept for later runs; it ends with its lease."""

    wall: float
    run: str
    sentence: str
    certainty: Certainty
    left: bool = False
    """Whether its node was asked to leave that run."""


class NodeHealth(Document):
    """See the module. ``counters``: sums over this node's workers since it joined, including those that have ended.

    Names: ``seconds.<phase>``; ``samples``, ``steps``, ``nonfinite_steps``, ``differences``, ``audit_mismatches``;
    ``verdict.<culprit>.<advice>``; ``left`` (the node left on request); ``ended.<cause>`` (rounds whose end this node
    noticed first); ``save.ok``, ``save.failed``, ``load.ok``, ``load.failed``. The histograms ``save_s``, ``load_s``,
    ``recovery_s.failure``, ``recovery_s.planned`` and ``recovery_s.start`` have ``<name>.le.<bound>`` (not cumulative),
    ``<name>.sum`` and ``<name>.count``.
    """

    node: str
    host: str = ""
    wall: float
    """When this was written (Unix time of that node; for display, and comparable only with values of the same node)."""
    every_s: float = Field(default=5.0, gt=0.0)
    """Seconds between two writes."""
    metrics: str = ""
    """``scheme://host:port`` of the node's endpoint; empty if it has none that other machines can reach."""
    logs: str = ""
    """Where its output goes (see agent/health/service.log_location); empty if unknown."""
    round: int = 0
    ranks: Ranks = ()
    counters: Mapping[str, float] = Field(default_factory=dict)
    loss: float | None = None
    """The newest loss; known on the node of rank 0."""
    saved: Saved | None = None
    """The last checkpoint that a worker of this node saved as rank 0."""
    saves_failing: int = 0
    """Its saves that failed since the last one that succeeded."""
    save_interval_s: float = 0.0
    progress: RunProgress | None = None
    """Known on the node of rank 0."""
    load: NodeLoad | None = None
    tails: tuple[LogTail, ...] = ()
    clues: tuple[Clue, ...] = ()
    """What it has seen of faults, oldest first."""
    machine: str = ""
    """The name of the machine that it runs on, whatever the node is called."""


class Incident(Document):
    """One event for people: what ended a round and how the run continued, or something else worth knowing.

    The node of the next round's rank 0 writes the record of a round's end, when that round has made its first step or
    the run has ended; until then only the journal has the transitions.
    """

    wall: float
    """When it began (Unix time of the reporting node)."""
    by: str
    cause: Cause | None = None
    kind: str = "round"
    """``round`` (a round ended), ``straggler``, ``checkpoint_failed``, ``nonfinite_loss``, ``ranks_differ``,
    ``audit_mismatch``, ``node_unfit``, ``node_gave_up``, ``run_stopped``, ``worker_died``."""
    open: bool = False
    """The round ended, and no round has followed yet."""
    round: int = 0
    """The round that ended, or in which it happened."""
    next_round: int | None = None
    reason: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes that were lost, joined, left or are slow."""
    ranks: tuple[int, ...] = ()
    world_before: int = 0
    world_after: int = 0
    step: int = 0
    """The last known committed step before it."""
    steps_lost: int = 0
    resumed: bool = True
    """Whether a step of the next round is known: the next round may have ended before its first."""
    before_s: float = 0.0
    """From the last committed step to the forming of the round that ended, if that made no step."""
    detect_s: float = 0.0
    """From the last committed step, or the forming of the round behind it, to the end of the round. 0: not known, or a
    planned change, before which training goes on."""
    regroup_s: float = 0.0
    """From the end of the round to the agreement on the next."""
    resume_s: float = 0.0
    """From that agreement to the next committed step."""
    verdict: Verdict | None = None

    @property
    def planned(self) -> bool:
        """Whether it is a planned change of the round, and nobody's fault."""
        return self.cause in (Cause.NODE_JOINED, Cause.NODE_LEFT)

    @property
    def total_s(self) -> float | None:
        """How long training stood still, from the last committed step before it to the first one after it.

        None if the one or the other is not known.
        """
        since_known = self.planned or self.detect_s > 0.0
        if self.kind != "round" or self.next_round is None or not self.resumed or not since_known:
            return None
        return self.before_s + self.detect_s + self.regroup_s + self.resume_s

    @property
    def outcome(self) -> str:
        """What it did to training, in sentences; empty for one that ended no round."""
        if self.kind != "round":
            return ""
        if self.next_round is None:
            return "No round has followed yet." if self.open else "The run did not continue after it."
        regroup, resume = f"{duration(self.regroup_s)} to regroup", f"{duration(self.resume_s)} to resume"
        if not self.resumed:
            return f"No step of round {self.next_round} is known; it took {regroup}."
        lost = counted(self.steps_lost, "step was", "steps were") if self.steps_lost else "No step was"
        if (total_s := self.total_s) is None:
            return f"{lost} lost. Nobody knows since when training stood still; it took {regroup}, {resume}."
        hang = self.cause in (Cause.WORKER_HUNG, Cause.STALLED)
        parts = (
            (self.before_s, f"{duration(self.before_s)} in rounds without a step"),
            (self.detect_s, f"{duration(self.detect_s)} until {'the hang' if hang else 'it'} was noticed"),
            (self.regroup_s, regroup),
            (self.resume_s, resume),
        )
        told = [words for seconds, words in parts if seconds]
        split = f": {', '.join(told)}" if len(told) > 1 else ""
        return f"{lost} lost. Training stood still for {duration(total_s)}{split}."


def added_up(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums, by name."""
    total = dict[str, float]()
    for each in counters:
        total |= {name: total.get(name, 0.0) + value for name, value in each.items()}
    return total


def goodput(counters: Mapping[str, float]) -> float | None:
    """The share of all rank seconds that went into new steps; None before there are any."""
    seconds = {name: value for name, value in counters.items() if name.startswith("seconds.")}
    total = sum(seconds.values())
    return seconds.get("seconds.training", 0.0) / total if total else None


class LeaveRequest(Document):
    """A node is asked to leave by a planned change."""

    reason: str
    ordered: bool = False
    """By an operator: it leaves whatever its options say."""
    workers: bool = False
    """Its workers alone: torchrun starts them anew, and the node comes back."""


class RestartRequest(Document):
    """An operator wants all workers of one round to be started anew; in later rounds it means nothing."""

    round: int


class CompileBundle(Document):
    """What the compilers of node ``node`` have made: a bundle is taken up only if its SHA-256 is this one."""

    node: Name
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=1)
    names: str = Field(pattern="^[0-9a-f]{64}$")
    """A digest of the names of its files: a node that has all of them need not fetch it."""


class SaveRequest(Document):
    """A requested save; another request may replace it only once it is answered."""

    id: str
    wall: float
    """When it was requested (Unix time of the command's machine; for display only)."""
    name: str = ""
    """The checkpoint written for it."""
    problem: str = ""
    """Why no checkpoint was written."""
    code: int = 0
    """The command's exit code for ``problem``."""
    before: SaveRequest | None = None
    """The answered request that it replaced, for a command that still waits for that answer."""

    @property
    def answered(self) -> bool:
        return bool(self.name or self.problem)
