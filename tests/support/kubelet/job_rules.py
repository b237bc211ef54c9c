"""What the Job controller does about an Indexed Job: which pods to make and to delete, and when the Job is over. Pure.

The rules are those of Kubernetes 1.31 and later, as far as ``objects.JobSpec`` lets a Job use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tests.support.kubelet.objects import FailureRule, JobSpec

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

    SUSPENDED = "Suspended"
    SUCCESS_CRITERIA_MET = "SuccessCriteriaMet"
    FAILURE_TARGET = "FailureTarget"
    COMPLETE = "Complete"
    FAILED = "Failed"


OVER = frozenset({Condition.COMPLETE, Condition.FAILED})


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the Job. ``deleting``: somebody has asked for its end."""

    name: str
    index: int
    phase: Phase
    exit_code: int | None = None
    conditions: frozenset[str] = frozenset()
    deleting: bool = False
    container: str = "trainer"


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
    failed: frozenset[int] = frozenset()
    """Indexes that have failed for good."""
    verdict: Condition | None = None
    reason: str = ""

    @property
    def failures_total(self) -> int:
        """All failures that count."""
        return sum(self.failures.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. ``condition`` is what the Job's status says."""

    tally: Tally
    create: tuple[int, ...] = ()
    delete: tuple[str, ...] = ()
    condition: Condition | None = None
    reason: str = ""


def decide(spec: JobSpec, tally: Tally, pods: Sequence[PodView], now: float, delay_s: float) -> Decision:
    """The next step for the Job. ``delay_s``: how long the first replacement of an index waits (10 s in a cluster)."""
    if tally.verdict in OVER:
        return Decision(tally, condition=tally.verdict, reason=tally.reason)
    tally = judged(spec, within(spec, counted(spec, tally, pods, now)))
    living = [pod for pod in pods if pod.phase not in ENDED]
    unwanted = tuple(pod.name for pod in living if not pod.deleting and _unwanted(spec, tally, pod))
    if tally.verdict is not None:
        if not living:
            over = Condition.FAILED if tally.verdict is Condition.FAILURE_TARGET else Condition.COMPLETE
            tally = replace(tally, verdict=over)
        return Decision(tally, delete=unwanted, condition=tally.verdict, reason=tally.reason)
    if spec.suspend:
        return Decision(tally, delete=unwanted, condition=Condition.SUSPENDED, reason="JobSuspended")
    taken = {pod.index for pod in living} | tally.completed | tally.failed
    create = tuple(i for i in range(spec.completions) if i not in taken and now >= due(tally, i, delay_s))
    return Decision(tally, create, unwanted)


def _unwanted(spec: JobSpec, tally: Tally, pod: PodView) -> bool:
    return tally.verdict is not None or spec.suspend or pod.index >= spec.completions


def due(tally: Tally, index: int, delay_s: float) -> float:
    """When the next pod of ``index`` may be made."""
    ends = tally.ends.get(index, 0)
    return tally.last_end[index] + min(delay_s * 2 ** (ends - 1), LONGEST_DELAY_S) if ends else 0.0


def within(spec: JobSpec, tally: Tally) -> Tally:
    """What is still remembered once the Job has ``spec.completions`` indexes."""

    def inside(numbers: Mapping[int, int]) -> dict[int, int]:
        return {index: number for index, number in numbers.items() if index < spec.completions}

    return replace(
        tally,
        completed=frozenset(index for index in tally.completed if index < spec.completions),
        failed=frozenset(index for index in tally.failed if index < spec.completions),
        failures=inside(tally.failures),
        ends=inside(tally.ends),
    )


# ---- counting


def counted(spec: JobSpec, tally: Tally, pods: Sequence[PodView], now: float) -> Tally:
    """``tally`` with the pods that have ended since; each is counted once."""
    for pod in pods:
        if pod.phase in ENDED and pod.name not in tally.counted:
            tally = replace(_count(spec, tally, pod, now), counted=tally.counted | {pod.name})
    return tally


def _count(spec: JobSpec, tally: Tally, pod: PodView, now: float) -> Tally:
    index = pod.index
    if index >= spec.completions:  # scaled down: its end is no failure, and no success
        return tally
    if pod.phase is Phase.SUCCEEDED:
        return replace(tally, completed=tally.completed | {index})
    ends = {**tally.ends, index: tally.ends.get(index, 0) + 1}
    tally = replace(tally, ends=ends, last_end={**tally.last_end, index: now})
    rule = first_match(spec.pod_failure_policy.rules, pod)
    match rule.action if rule is not None else "Count":
        case "Ignore":
            return tally
        case "FailJob":
            if tally.verdict is not None:
                return tally
            reason = f"PodFailurePolicy: pod {pod.name} exit code {pod.exit_code}"
            return replace(tally, verdict=Condition.FAILURE_TARGET, reason=reason)
        case "FailIndex":
            return replace(tally, failed=tally.failed | {index})
    failures = {**tally.failures, index: tally.failures.get(index, 0) + 1}
    limit = spec.backoff_limit_per_index
    lost = {index} if limit is not None and failures[index] > limit else set()
    return replace(tally, failures=failures, failed=tally.failed | lost)


def first_match(rules: Sequence[FailureRule], pod: PodView) -> FailureRule | None:
    """The rule that counts for a pod that has failed."""
    return next((rule for rule in rules if _matches(rule, pod)), None)


def _matches(rule: FailureRule, pod: PodView) -> bool:
    if rule.on_pod_conditions is not None:
        return any(condition.type in pod.conditions for condition in rule.on_pod_conditions)
    codes = rule.on_exit_codes
    if codes is None or not pod.exit_code or codes.container_name not in (None, pod.container):
        return False
    return codes.matches(pod.exit_code)


# ---- judging


def judged(spec: JobSpec, tally: Tally) -> Tally:
    """``tally`` with the verdict about the Job, if there is one now."""
    if tally.verdict is not None:
        return tally
    for verdict, reason in _verdicts(spec, tally):
        return replace(tally, verdict=verdict, reason=reason)
    return tally


def _verdicts(spec: JobSpec, tally: Tally) -> list[tuple[Condition, str]]:
    """All that may be said, the most urgent first."""
    found: list[tuple[Condition, str]] = []
    rules = spec.success_policy.rules if spec.success_policy is not None else []
    if any(len(tally.completed) >= rule.succeeded_count for rule in rules):
        found.append((Condition.SUCCESS_CRITERIA_MET, "SuccessPolicy"))
    if spec.max_failed_indexes is not None and len(tally.failed) > spec.max_failed_indexes:
        found.append((Condition.FAILURE_TARGET, "MaxFailedIndexesExceeded"))
    limit = spec.backoff_limit if spec.backoff_limit is not None else 6
    if spec.backoff_limit_per_index is not None and spec.backoff_limit is None:
        limit = 2**31 - 1
    if tally.failures_total > limit:
        found.append((Condition.FAILURE_TARGET, "BackoffLimitExceeded"))
    if len(tally.completed | tally.failed) >= spec.completions:
        if tally.failed:
            found.append((Condition.FAILURE_TARGET, "FailedIndexes"))
        else:
            found.append((Condition.SUCCESS_CRITERIA_MET, "CompletionsReached"))
    return found
