"""Reads what the processes of a run leave behind: ledgers, logs and exit codes.

The audit says whether the job used its data exactly once. A job commits some steps more than once (the work of a failed
round is rolled back and repeated); its *lineage* is what survives: for each step number the commit of the highest
round, without steps that a later round has rolled back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_trainer.wording import counted


class LineKind(StrEnum):
    """The kind of event of a ledger line."""

    OPENED = "opened"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    METRIC = "metric"
    CLOSED = "closed"


class Line(BaseModel):
    """One line. ``t`` is seconds on the monotonic clock of this host; ``step`` counts committed steps from 1."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: LineKind
    t: float
    wall: float = 0.0
    run: str = ""
    node: str = ""
    rank: int = 0
    local_rank: int = 0
    world: int = 1
    round: int = 0
    pid: int = 0
    step: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()
    global_samples: int = 0
    loss: float | None = None
    name: str | None = None
    value: float | None = None
    duration_s: float | None = None
    status: str | None = None
    resumed_from: str | None = None


def parse(text: str) -> Line | None:
    """Parse ``text``; None if it is incomplete or of an unknown kind."""
    try:
        return Line.model_validate_json(text)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of one step in one round, merged over the ranks that recorded it."""

    step: int
    round: int
    epoch: int
    t: float
    """When the first rank recorded it."""
    world: int
    recorded: int
    """How many ranks recorded it; fewer than ``world`` if one died between its commit and its line."""
    samples: tuple[int, ...]
    global_samples: int
    loss: float | None

    @property
    def unrecorded(self) -> int:
        """The number of samples of ranks that left no line."""
        return max(0, self.global_samples - len(self.samples)) if self.recorded < self.world else 0

    @property
    def key(self) -> tuple[int, int]:
        return self.round, self.step


def commits(lines: Iterable[Line]) -> dict[tuple[int, int], Commit]:
    """All commits, including those rolled back later, by (round, step)."""
    groups: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        if line.event is LineKind.STEP:
            groups.setdefault((line.round, line.step), []).append(line)
    return {key: _gather(group) for key, group in groups.items()}


def _gather(group: Sequence[Line]) -> Commit:
    first = min(group, key=lambda line: line.t)
    return Commit(
        step=first.step,
        round=first.round,
        epoch=first.epoch,
        t=first.t,
        world=max(line.world for line in group),
        recorded=len({line.rank for line in group}),
        samples=tuple(sample for line in group for sample in line.samples),
        global_samples=max(line.global_samples for line in group),
        loss=next((line.loss for line in group if line.loss is not None), None),
    )


def lineage(lines: Iterable[Line]) -> tuple[Commit, ...]:
    """The commits that survive, in step order.

    A round begins at its first step: commits of that and later steps from earlier rounds are rolled back.
    """
    rounds: dict[int, dict[int, Commit]] = {}
    for (round_, step), commit in commits(lines).items():
        rounds.setdefault(round_, {})[step] = commit
    surviving: dict[int, Commit] = {}
    for round_ in sorted(rounds):
        begin = min(rounds[round_])
        surviving = {step: commit for step, commit in surviving.items() if step < begin} | rounds[round_]
    return tuple(surviving[step] for step in sorted(surviving))


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """How one epoch's samples were used. ``ended`` is False for the epoch in which the job stopped."""

    epoch: int
    used: int
    repeated: int
    missing: int
    unrecorded: int
    ended: bool
    resumed: bool = False
    """Whether an earlier life began it, whose samples these lines cannot tell."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Whether the surviving lineage used each sample of each epoch exactly once; ``reason`` says it in words."""

    exact: bool
    reason: str
    steps: int
    steps_rolled_back: int
    steps_skipped: int
    epochs: tuple[EpochAudit, ...]

    @property
    def repeated(self) -> int:
        """Uses beyond the first, over all epochs."""
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def missing(self) -> int:
        """Samples never used in an epoch that ended, over all epochs."""
        return sum(epoch.missing for epoch in self.epochs)

    @property
    def unrecorded(self) -> int:
        """Samples whose rank died between its commit and its line."""
        return sum(epoch.unrecorded for epoch in self.epochs)


def audit(lines: Sequence[Line], size: int | None = None) -> Audit:
    """Check the lineage of ``lines`` against a data set of ``size`` samples numbered from 0.

    Without ``size``, the highest number that any rank used counts as the last sample.
    """
    surviving = lineage(lines)
    everything = commits(lines)
    known = size if size is not None else 1 + max((max(line.samples) for line in lines if line.samples), default=-1)
    # A rank may die between its commit and its line. The others can finish that step, but no later one without it:
    # so a missing line may mean used samples only at the end of a round.
    ends = set(dict(sorted(everything)).items())  # the last step of each round
    by_epoch: dict[int, list[Commit]] = {}
    for commit in surviving:
        by_epoch.setdefault(commit.epoch, []).append(commit)
    last = max(by_epoch, default=0)
    epochs = tuple(_epoch(epoch, by_epoch[epoch], known, ends, followed=epoch < last) for epoch in sorted(by_epoch))
    if surviving and surviving[0].step > 1 and epochs[0].used < known:
        epochs = (replace(epochs[0], missing=0, ended=False, resumed=True), *epochs[1:])
    skipped = surviving[-1].step - len(surviving) - (surviving[0].step - 1) if surviving else 0
    return Audit(
        exact=bool(surviving) and known > 0 and not skipped and not any(e.repeated or e.missing for e in epochs),
        reason=_reason(epochs, skipped, known),
        steps=len(surviving),
        steps_rolled_back=len(everything) - len(surviving),
        steps_skipped=skipped,
        epochs=epochs,
    )


def _epoch(epoch: int, parts: Sequence[Commit], size: int, ends: set[tuple[int, int]], *, followed: bool) -> EpochAudit:
    uses = Counter(sample for commit in parts for sample in commit.samples)
    unrecorded = sum(commit.unrecorded for commit in parts if commit.key in ends)
    missing = max(0, size - len(uses) - unrecorded)
    # The job may have stopped in its last epoch (a limit of steps). The epoch was finished if nothing is missing, or
    # if it reached the smaller batch at its end: then the missing samples were skipped.
    ended = followed or not missing or parts[-1].global_samples < parts[0].global_samples
    return EpochAudit(
        epoch=epoch,
        used=len(uses) + unrecorded,
        repeated=uses.total() - len(uses),
        missing=missing if ended else 0,
        unrecorded=unrecorded,
        ended=ended,
    )


def _reason(epochs: Sequence[EpochAudit], skipped: int, size: int) -> str:
    if not epochs:
        return "no step was recorded"
    if not size:
        return "the steps list no samples"
    faults = [f"{counted(skipped, 'step was', 'steps were')} never committed"] if skipped else []
    for epoch in epochs:
        if epoch.repeated:
            faults.append(f"epoch {epoch.epoch}: {epoch.repeated} repeated")
        if epoch.missing:
            faults.append(f"epoch {epoch.epoch}: {epoch.missing} of {size} missing")
    if faults:
        return "; ".join(faults)
    whole = sum(epoch.ended for epoch in epochs)
    parts = [f"each of {size} samples exactly once in {counted(whole, 'epoch')}"] if whole else []
    for each in epochs:
        if not each.ended:
            why = "an earlier life began it" if each.resumed else "then the job stopped in it"
            parts.append(f"{counted(each.used, 'sample')} of epoch {each.epoch} once, {why}")
    return "; ".join(parts)


# ---- files that grow


class FileTail:
    """Reads the new complete lines of one file; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[str]:
        """Lines completed since the last call, without their newlines."""
        if not self._path.exists() or self._path.stat().st_size <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def end_of(path: Path) -> list[str]:
    """The last lines of a file, at most 64 KiB; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (64 << 10)))
        return file.read().decode(errors="replace").splitlines()


class LedgerTail:
    """Reads the new ledger lines of all processes of a run, and skips those that cannot be parsed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, FileTail] = {}

    def read(self) -> list[Line]:
        """Lines that appeared since the last call, in the order of their times."""
        for path in self._directory.glob("*.jsonl"):
            self._files.setdefault(path, FileTail(path))
        texts = [text for tail in self._files.values() for text in tail.read()]
        lines = [line for line in map(parse, texts) if line is not None]
        return sorted(lines, key=lambda line: line.t)


_LONGEST = 300
_RANK = re.compile(r"\[rank\d+\]: ")
"""What torch writes before each line of a traceback once a process group is there."""
_OURS = re.compile(r"(?:error|elastic-trainer): ")
_TORCHRUNS = ("ChildFailedError", "SignalException")


def exit_text(exit_code: int) -> str:
    """How a process ended (its code as in :class:`subprocess.Popen`: negative for a signal)."""
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited with {exit_code}"


def last_error(lines: Iterable[str]) -> str:
    """The message of the last traceback or of our own in a process's output, except torchrun's; "" if none."""
    found, inside = "", False
    for raw in lines:
        line = _RANK.sub("", raw, count=1) if raw.startswith("[rank") else raw
        if line.startswith(("Traceback (most recent call last)", '  File "')):  # a SyntaxError has no first line
            inside = True
        elif ours := _OURS.match(line):
            found = line[ours.end() :]
        elif inside and line.strip() and not line[0].isspace():
            found, inside = found if any(name in line for name in _TORCHRUNS) else line, False
    return found[:_LONGEST]
