"""What must hold of a job after all its faults: exact samples, equal states, rounds that only grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_trainer.local.ledger import Line, audit
from elastic_trainer.membership.documents import RoundDocument


class JournalMoment(StrEnum):
    """When a digest was taken: every few steps, and at the end of a process."""

    STEP = "step"
    END = "end"


class Digest(BaseModel):
    """A digest of everything that one rank had trained, as it wrote it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: JournalMoment
    node: str
    pid: int
    round: int
    step: int
    digest: str
    place: int = 0
    """Of the rank in the mesh of a sharded model: ranks of one place hold the same."""


def read_digest(text: str) -> Digest | None:
    """The digest that a line of text holds, or None if it is torn."""
    try:
        return Digest.model_validate_json(text)
    except ValidationError:
        return None


def sample_problems(lines: Sequence[Line], size: int) -> list[str]:
    """Whether any sample was repeated or lost in what survives of the job's work."""
    found = audit(lines, size)
    return [] if found.exact else [f"the samples are not exact: {found.reason}"]


def state_problems(digests: Sequence[Digest], members: Iterable[str]) -> list[str]:
    """Whether ranks differed, on the way or at the end; every one of ``members`` must have come to the end."""
    problems = []
    common: dict[tuple[int, int, int], set[str]] = {}
    for each in digests:
        common.setdefault((each.round, each.step, each.place), set()).add(each.digest)
    apart = sorted(place for place, values in common.items() if len(values) > 1)
    if apart:
        round_, step, _ = apart[0]
        problems.append(f"the parameters of ranks differ at step {step} of round {round_} ({len(apart)} such steps)")
    ends = {(each.node, each.place): each for each in digests if each.event is JournalMoment.END}
    absent = sorted(set(members) - {node for node, _ in ends})
    if absent:
        problems.append(f"no parameters were left by {', '.join(absent)}")
    finals = {(each.step, each.place, each.digest) for each in ends.values()}
    if len(finals) > len({place for _, place in ends}):
        told = ", ".join(f"{node} at step {each.step}: {each.digest[:8]}" for (node, _), each in sorted(ends.items()))
        problems.append(f"members ended with different parameters ({told})")
    return problems


def compared(digests: Sequence[Digest]) -> int:
    """At how many points the states of at least two ranks were compared."""
    writers: dict[tuple[int, int, int], set[int]] = {}
    for each in digests:
        writers.setdefault((each.round, each.step, each.place), set()).add(each.pid)
    return sum(len(pids) > 1 for pids in writers.values())


def round_problems(history: Sequence[RoundDocument]) -> list[str]:
    """Whether the round document, in the order of its versions, ever went back or named one round twice."""
    problems = []
    numbers = [each.number for each in history]
    if numbers != sorted(numbers):
        problems.append(f"round numbers went back: {numbers}")
    nonces: dict[int, set[str]] = {}
    for each in history:
        nonces.setdefault(each.number, set()).add(each.nonce)
    twice = sorted(number for number, names in nonces.items() if len(names) > 1)
    if twice:
        problems.append(f"there were two rounds of one number: {twice}")
    return problems
