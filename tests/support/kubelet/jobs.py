"""What the Job controller does about an Indexed Job: which pods to make and to delete, and when the Job is over.

The rules are those of Kubernetes 1.31 and later for what our Jobs use: a success policy, a failure policy, retries for
each index, replacements for failed pods alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.support.kubelet.pods import ENDED, Phase, PodStatus


class Condition(StrEnum):
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass
class JobState:
    """What a Job remembers. ``condition`` comes when the last pod has gone after the ``verdict``."""

    condition: Condition | None = None
    verdict: Condition | None = None
    reason: str = ""
    succeeded: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    """Failures that count, by index."""
    failed: set[int] = field(default_factory=set)
    """Indexes that have failed for good."""
    counted: set[str] = field(default_factory=set)
    ended_at: dict[int, float] = field(default_factory=dict)

    def look(
        self, spec: dict[str, Any], pods: Sequence[PodStatus], now: float, delay_s: float
    ) -> tuple[list[int], list[str]]:
        """The indexes that need a pod now, ``delay_s`` after the last one's failure, and the pods that are to go."""
        if self.condition is not None:
            return [], []
        for pod in pods:
            if pod.phase in ENDED and pod.name not in self.counted:
                self.counted.add(pod.name)
                if pod.index < spec["completions"]:  # else it was scaled down: neither a failure nor a success
                    self._count(spec, pod, now)
        self.failed = {index for index, count in self.failures.items() if count > spec["backoffLimitPerIndex"]}
        if len(self.succeeded) >= spec["successPolicy"]["rules"][0]["succeededCount"]:
            self._decide(Condition.COMPLETE, "SuccessPolicy")
        if len(self.failed) > spec["maxFailedIndexes"]:
            self._decide(Condition.FAILED, "MaxFailedIndexesExceeded")
        living = [pod for pod in pods if pod.living]
        unwanted = [pod.name for pod in living if self.verdict or pod.index >= spec["completions"]]
        if self.verdict is not None:
            self.condition = None if living else self.verdict
            return [], unwanted
        taken = {pod.index for pod in living} | self.succeeded | self.failed
        free = [index for index in range(spec["completions"]) if index not in taken]
        return [index for index in free if now >= self.ended_at.get(index, -delay_s) + delay_s], unwanted

    def _decide(self, verdict: Condition, reason: str) -> None:
        if self.verdict is None:
            self.verdict, self.reason = verdict, reason

    def _count(self, spec: dict[str, Any], pod: PodStatus, now: float) -> None:
        if pod.phase is Phase.SUCCEEDED:
            self.succeeded.add(pod.index)
            return
        self.ended_at[pod.index] = now
        actions = (rule["action"] for rule in spec["podFailurePolicy"]["rules"] if _matches(rule, pod))
        action = next(actions, "Count")
        if action == "Count":
            self.failures[pod.index] = self.failures.get(pod.index, 0) + 1
        elif action == "FailJob":
            self._decide(Condition.FAILED, f"PodFailurePolicy: pod {pod.name} exit code {pod.exit_code}")


def _matches(rule: dict[str, Any], pod: PodStatus) -> bool:
    if "onExitCodes" in rule:
        return pod.exit_code in rule["onExitCodes"]["values"]
    return any(each["type"] in pod.conditions for each in rule["onPodConditions"])
