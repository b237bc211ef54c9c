"""What the Job controller does about an Indexed Job: which pods to make and to delete, and when the Job is over. Pure.

The rules are those of Kubernetes 1.31 and later, as far as ``objects.JobSpec`` lets a Job use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tests.support.kubelet.objects import JobSpec

LONGEST_DELAY_S = 600.0


class Phase(StrEnum):
    """How far a pod is."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class Condition(StrEnum):
    """What a Job says about itself."""

    SUCCESS_CRITERIA_MET = "SuccessCriteriaMet"
    FAILURE_TARGET = "FailureTarget"
    COMPLETE = "Complete"
    FAILED = "Failed"


OVER = frozenset({Condition.COMPLETE, Condition.FAILED})


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the Job. ``deleting``: its end was requested."""

    name: str
    index: int
    phase: Phase
    exit_code: int | None = None
    conditions: frozenset[str] = frozenset()
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Tally:
    """What a Job remembers: which pods were counted, and what their ends came to."""

    counted: frozenset[str] = frozenset()
    completed: frozenset[int] = frozenset()
    failures: Mapping[int, int] = field(default_factory=dict)
    """Failures that count, by index."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """All failures by index, those that are ignored too: they delay the next pod."""
    last_end: Mapping[int, float] = field(default_factory=dict)
    verdict: Condition | None = None
    reason: str = ""

    def failed(self, spec: JobSpec) -> frozenset[int]:
        """Indexes that have failed for good."""
        return frozenset(i for i, count in self.failures.items() if count > spec.backoff_limit_per_index)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    tally: Tally
    create: tuple[int, ...] = ()
    delete: tuple[str, ...] = ()


def decide(spec: JobSpec, tally: Tally, pods: Sequence[PodView], now: float, delay_s: float) -> Decision:
    """The next step for the Job. ``delay_s``: how long the first replacement of an index waits (10 s in a cluster)."""
    if tally.verdict in OVER:
        return Decision(tally)
    tally = _judged(spec, _within(spec, _counted(spec, tally, pods, now)))
    living = [pod for pod in pods if pod.phase not in ENDED]
    over = tally.verdict is not None
    unwanted = tuple(pod.name for pod in living if not pod.deleting and (over or pod.index >= spec.completions))
    if over:
        if not living:
            failed = tally.verdict is Condition.FAILURE_TARGET
            tally = replace(tally, verdict=Condition.FAILED if failed else Condition.COMPLETE)
        return Decision(tally, delete=unwanted)
    taken = {pod.index for pod in living} | tally.completed | tally.failed(spec)
    create = tuple(i for i in range(spec.completions) if i not in taken and now >= due(tally, i, delay_s))
    return Decision(tally, create, unwanted)


def due(tally: Tally, index: int, delay_s: float) -> float:
    """When the next pod of ``index`` may be made."""
    ends = tally.ends.get(index, 0)
    return tally.last_end[index] + min(delay_s * 2 ** (ends - 1), LONGEST_DELAY_S) if ends else 0.0


def _within(spec: JobSpec, tally: Tally) -> Tally:
    """What is still remembered once the Job has ``spec.completions`` indexes."""

    def inside(numbers: Mapping[int, int]) -> dict[int, int]:
        return {index: number for index, number in numbers.items() if index < spec.completions}

    completed = frozenset(index for index in tally.completed if index < spec.completions)
    return replace(tally, completed=completed, failures=inside(tally.failures), ends=inside(tally.ends))


def _counted(spec: JobSpec, tally: Tally, pods: Sequence[PodView], now: float) -> Tally:
    """``tally`` with the pods that have ended since; each is counted once."""
    for pod in pods:
        if pod.phase in ENDED and pod.name not in tally.counted:
            tally = replace(_count(spec, tally, pod, now), counted=tally.counted | {pod.name})
    return tally


def _count(spec: JobSpec, tally: Tally, pod: PodView, now: float) -> Tally:
    index = pod.index
    if index >= spec.completions:  # scaled down: its end is not a failure, and no success
        return tally
    if pod.phase is Phase.SUCCEEDED:
        return replace(tally, completed=tally.completed | {index})
    ends = {**tally.ends, index: tally.ends.get(index, 0) + 1}
    tally = replace(tally, ends=ends, last_end={**tally.last_end, index: now})
    rules = (rule for rule in spec.pod_failure_policy.rules if rule.matches(pod.exit_code or 0, pod.conditions))
    rule = next(rules, None)
    if rule is None:
        return replace(tally, failures={**tally.failures, index: tally.failures.get(index, 0) + 1})
    if rule.action == "FailJob" and tally.verdict is None:
        reason = f"PodFailurePolicy: pod {pod.name} exit code {pod.exit_code}"
        return replace(tally, verdict=Condition.FAILURE_TARGET, reason=reason)
    return tally


def _judged(spec: JobSpec, tally: Tally) -> Tally:
    """``tally`` with the verdict about the Job, if there is one now."""
    if tally.verdict is not None:
        return tally
    if len(tally.completed) >= spec.success_policy.rules[0].succeeded_count:
        return replace(tally, verdict=Condition.SUCCESS_CRITERIA_MET, reason="SuccessPolicy")
    if len(tally.failed(spec)) > spec.max_failed_indexes:
        return replace(tally, verdict=Condition.FAILURE_TARGET, reason="MaxFailedIndexesExceeded")
    return tally
