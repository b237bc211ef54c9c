"""The Job controller's rules, as the stand-in keeps them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubelet.job_rules import Condition, Decision, Phase, PodView, Tally, decide, due
from tests.support.kubelet.objects import JobSpec

POD = {
    "spec": {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [{"name": "trainer", "image": "elastic-trainer:latest"}],
    }
}
RULES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [143]}},
    {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [78]}},
]
DELAY_S = 10.0


def spec(size: int = 3, **more: Any) -> JobSpec:
    """A Job as the manifests have it."""
    values: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": size,
        "completions": size,
        "template": POD,
        "backoffLimitPerIndex": 2,
        "maxFailedIndexes": 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": RULES},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }
    return JobSpec.model_validate(values | more)


def running(*indexes: int, **more: Any) -> list[PodView]:
    """Pods that run."""
    return [PodView(f"job-{index}-a", index, Phase.RUNNING, **more) for index in indexes]


def ended(index: int, code: int, name: str = "x", **more: Any) -> PodView:
    """A pod that has ended."""
    phase = Phase.SUCCEEDED if code == 0 else Phase.FAILED
    return PodView(f"job-{index}-{name}", index, phase, code, **more)


def after(*pods: PodView, job: JobSpec | None = None, tally: Tally | None = None, now: float = 100.0) -> Decision:
    """What is decided when these pods are there."""
    return decide(job or spec(), tally or Tally(), pods, now, DELAY_S)


def test_each_index_gets_a_pod() -> None:
    """As many as the Job asks for, each index once."""
    assert after().create == (0, 1, 2)
    assert after(*running(0, 2)).create == (1,)
    assert after(*running(0, 1, 2)) == Decision(Tally())


def test_a_replacement_comes_after_the_pod_it_replaces() -> None:
    """Not while that one is still being ended (podReplacementPolicy Failed)."""
    assert after(*running(0, 1), *running(2, deleting=True)).create == ()


def test_a_failed_pod_is_replaced_after_a_while_that_doubles() -> None:
    """10 s, 20 s, 40 s: each index has its own clock, and failures that are ignored wait as well."""
    tally = after(*running(0, 1), ended(2, 1)).tally
    assert after(*running(0, 1), ended(2, 1), tally=tally, now=109.9).create == ()
    assert after(*running(0, 1), ended(2, 1), tally=tally, now=110.0).create == (2,)
    again = after(*running(0, 1), ended(2, 143, "y"), tally=tally, now=200.0).tally
    assert again.failures == {2: 1}
    assert due(again, 2, DELAY_S) == 220.0
    assert due(Tally(ends={0: 40}, last_end={0: 0.0}), 0, DELAY_S) == 600.0


@pytest.mark.parametrize(
    ("pod", "failures"),
    [
        (ended(1, 143), {}),
        (ended(1, 1, conditions=frozenset({"DisruptionTarget"})), {}),
        (ended(1, 78, conditions=frozenset({"DisruptionTarget"})), {}),
        (ended(1, 137), {1: 1}),
        (ended(1, 71), {1: 1}),
        (ended(1, 143, container="other"), {1: 1}),
    ],
)
def test_what_counts_as_a_failure(pod: PodView, failures: dict[int, int]) -> None:
    """Evicted and left on request do not; the first rule that matches decides. A pod is counted once."""
    decision = after(*running(0, 2), pod)
    assert decision.tally.failures == failures
    assert decision.condition is None
    assert after(*running(0, 2), pod, tally=decision.tally).tally == decision.tally


def test_a_wrong_configuration_fails_the_job_at_once() -> None:
    """All pods are told to go, none is made; the Job is Failed when they are gone."""
    first = after(*running(0, 2), ended(1, 78))
    assert (first.create, set(first.delete)) == ((), {"job-0-a", "job-2-a"})
    assert (first.condition, first.reason) == (Condition.FAILURE_TARGET, "PodFailurePolicy: pod job-1-x exit code 78")
    second = after(*running(0, deleting=True), ended(1, 78), ended(2, 143), tally=first.tally)
    assert (second.delete, second.condition) == ((), Condition.FAILURE_TARGET)
    third = after(ended(0, 143), ended(1, 78), ended(2, 143), tally=second.tally)
    assert third.condition is Condition.FAILED
    assert after(tally=third.tally).create == ()


def test_an_index_fails_for_good_after_its_limit() -> None:
    """The others go on; when more indexes have failed than may, the Job fails."""
    tally = Tally()
    for number, name in enumerate("abc"):
        tally = after(*running(0, 2), ended(1, 1, name), tally=tally, now=1000.0 * number).tally
        assert (tally.failed == {1}) is (number == 2)
    late = after(*running(0, 2), tally=tally, now=9999.0)
    assert (late.create, late.condition) == ((), None)
    for number, name in enumerate("def"):
        tally = after(*running(0), ended(2, 1, name), tally=tally, now=9999.0 + 1000.0 * number).tally
    assert (tally.verdict, tally.reason) == (Condition.FAILURE_TARGET, "MaxFailedIndexesExceeded")


def test_one_success_completes_the_job() -> None:
    """By its success policy: the others are told to go, and the Job is Complete when they are gone, however they
    ended."""
    first = after(*running(1, 2), ended(0, 0))
    assert (set(first.delete), first.condition) == ({"job-1-a", "job-2-a"}, Condition.SUCCESS_CRITERIA_MET)
    last = after(ended(1, 1), ended(2, 143), ended(0, 0), tally=first.tally)
    assert (last.condition, last.reason, last.create) == (Condition.COMPLETE, "SuccessPolicy", ())


def test_without_a_success_policy_all_indexes_must_succeed() -> None:
    """One that has failed for good fails the Job then."""
    job = spec(2, successPolicy=None, backoffLimitPerIndex=0)
    first = after(*running(1), ended(0, 0), job=job)
    assert (first.condition, first.delete) == (None, ())
    done = after(ended(0, 0), ended(1, 0), job=job)
    assert (done.condition, done.reason) == (Condition.COMPLETE, "CompletionsReached")
    failed = after(ended(0, 0), ended(1, 1), job=job)
    assert (failed.condition, failed.reason) == (Condition.FAILED, "FailedIndexes")


def test_without_a_limit_per_index_failures_are_added_up() -> None:
    """Six retries by default."""
    job = spec(1, backoffLimitPerIndex=None, maxFailedIndexes=None)
    tally = Tally(failures={0: 6})
    assert after(*running(0), job=job, tally=tally).condition is None
    assert after(ended(0, 1), job=job, tally=tally).reason == "BackoffLimitExceeded"


def test_scaling_down_ends_the_highest_indexes() -> None:
    """Their ends count neither as failures nor as successes, and what they had failed before is forgotten."""
    down = after(*running(0, 1, 2), job=spec(2), tally=Tally(failures={2: 2}, ends={2: 2}, last_end={2: 0.0}))
    assert (down.delete, down.create) == (("job-2-a",), ())
    assert down.tally.failures == {}
    for code in (0, 1, 78, 143):
        gone = after(*running(0, 1), ended(2, code, deleting=True), job=spec(2), tally=down.tally)
        assert (gone.condition, gone.tally.failures, gone.tally.completed) == (None, {}, frozenset())
    assert after(*running(0, 1), job=spec(4), tally=down.tally).create == (2, 3)


def test_a_suspended_job_has_no_pods() -> None:
    """They are told to go; resumed, it makes them anew."""
    asleep = after(*running(0, 1, 2), job=spec(suspend=True))
    assert (len(asleep.delete), asleep.create, asleep.condition) == (3, (), Condition.SUSPENDED)
    ends = [ended(index, 143, deleting=True) for index in range(3)]
    still = after(*ends, job=spec(suspend=True), tally=asleep.tally)
    assert still.tally.failures == {}
    assert after(*ends, tally=still.tally, now=110.0).create == (0, 1, 2)


def test_an_index_can_fail_at_once_by_a_rule() -> None:
    """FailIndex: no retry of that index."""
    rule = {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [143]}}
    decision = after(*running(0, 1), ended(2, 5), job=spec(podFailurePolicy={"rules": [rule]}))
    assert decision.tally.failed == {2}
