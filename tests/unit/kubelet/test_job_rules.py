"""The stand-in's rules for Jobs and probes: where they were wrong, a drill would prove what no cluster does."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.job_rules import Condition, Decision, Phase, PodView, Tally, decide, due
from tests.support.kubelet.objects import Job, JobSpec, parsed
from tests.support.kubelet.probing import Health, Kind, probes
from tests.support.manifests import Manifest, named, rendered

DELAY_S = 10.0


def document(**more: Any) -> Manifest:
    """The Job of the dev overlay, with other values in its specification."""
    job = named(rendered("overlays/dev"), "Job", "mnist")
    job["spec"] |= more
    return job


def spec(size: int = 3) -> JobSpec:
    """The same, understood, with ``size`` pods."""
    job = parsed(document(parallelism=size, completions=size, backoffLimitPerIndex=2))
    assert isinstance(job, Job)
    return job.spec


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
    ],
)
def test_what_counts_as_a_failure(pod: PodView, failures: dict[int, int]) -> None:
    """Evicted and left on request do not; the first rule that matches decides. A pod is counted once."""
    decision = after(*running(0, 2), pod)
    assert decision.tally.failures == failures
    assert decision.tally.verdict is None
    assert after(*running(0, 2), pod, tally=decision.tally).tally == decision.tally


def test_a_wrong_configuration_fails_the_job_at_once() -> None:
    """All pods are deleted, none is made; the Job is Failed when they are gone."""
    first = after(*running(0, 2), ended(1, 78))
    assert (first.create, set(first.delete)) == ((), {"job-0-a", "job-2-a"})
    assert first.tally.verdict is Condition.FAILURE_TARGET
    assert first.tally.reason == "PodFailurePolicy: pod job-1-x exit code 78"
    second = after(*running(0, deleting=True), ended(1, 78), ended(2, 143), tally=first.tally)
    assert (second.delete, second.tally.verdict) == ((), Condition.FAILURE_TARGET)
    third = after(ended(0, 143), ended(1, 78), ended(2, 143), tally=second.tally)
    assert third.tally.verdict is Condition.FAILED
    assert after(tally=third.tally).create == ()


def test_an_index_fails_for_good_after_its_limit() -> None:
    """The others go on; when more indexes have failed than may, the Job fails."""
    tally = Tally()
    for number, name in enumerate("abc"):
        tally = after(*running(0, 2), ended(1, 1, name), tally=tally, now=1000.0 * number).tally
        assert (tally.failed(spec()) == {1}) is (number == 2)
    late = after(*running(0, 2), tally=tally, now=9999.0)
    assert (late.create, late.tally.verdict) == ((), None)
    for number, name in enumerate("def"):
        tally = after(*running(0), ended(2, 1, name), tally=tally, now=9999.0 + 1000.0 * number).tally
    assert (tally.verdict, tally.reason) == (Condition.FAILURE_TARGET, "MaxFailedIndexesExceeded")


def test_one_success_completes_the_job() -> None:
    """By its success policy: the other pods are deleted, and the Job is Complete when they are gone, however they
    ended."""
    first = after(*running(1, 2), ended(0, 0))
    assert (set(first.delete), first.tally.verdict) == ({"job-1-a", "job-2-a"}, Condition.SUCCESS_CRITERIA_MET)
    last = after(ended(1, 1), ended(2, 143), ended(0, 0), tally=first.tally)
    assert (last.tally.verdict, last.tally.reason, last.create) == (Condition.COMPLETE, "SuccessPolicy", ())


def test_scaling_down_ends_the_highest_indexes() -> None:
    """Their ends count neither as failures nor as successes, and what they had failed before is forgotten."""
    down = after(*running(0, 1, 2), job=spec(2), tally=Tally(failures={2: 2}, ends={2: 2}, last_end={2: 0.0}))
    assert (down.delete, down.create) == (("job-2-a",), ())
    assert down.tally.failures == {}
    for code in (0, 1, 78, 143):
        gone = after(*running(0, 1), ended(2, code, deleting=True), job=spec(2), tally=down.tally)
        assert (gone.tally.verdict, gone.tally.failures, gone.tally.completed) == (None, {}, frozenset())
    assert after(*running(0, 1), job=spec(4), tally=down.tally).create == (2, 3)


@pytest.mark.parametrize(
    "more",
    [
        {"suspend": True},
        {"activeDeadlineSeconds": 5},
        {"completions": 3},
        {"podReplacementPolicy": "TerminatingOrFailed"},
        {"podFailurePolicy": {"rules": [{"action": "FailIndex", "onPodConditions": []}]}},
        {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_field_that_is_not_played_is_an_error(more: dict[str, Any]) -> None:
    """Never ignored."""
    assert parsed(document()) is not None
    with pytest.raises(ConfigError):
        parsed(document(**more))


def test_probes_start_a_container_make_it_ready_and_end_it() -> None:
    """Only the startup probe is asked until it passes; a good answer begins the count of bad ones anew."""
    asked = probes(spec().template.spec.container)

    def heard(health: Health, kind: Kind, *answers: bool) -> Health:
        for good in answers:
            health = health.answered(kind, asked[kind], good)
        return health

    assert Health().wanted == (Kind.STARTUP,)
    started = heard(Health(), Kind.STARTUP, False, True)
    assert (started.ready, started.wanted) == (False, (Kind.READINESS, Kind.LIVENESS))
    assert heard(started, Kind.READINESS, True, False).ready
    gone = heard(started, Kind.READINESS, True, *[False] * 9)
    assert (gone.ready, gone.unfit) == (False, "")
    bad = [False] * asked[Kind.LIVENESS].failure_threshold
    assert not heard(started, Kind.LIVENESS, *bad[1:], True, *bad[1:]).unfit
    assert heard(started, Kind.LIVENESS, *bad).unfit == "liveness probe failed 6 times in a row"
