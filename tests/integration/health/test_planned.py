"""A real job that does what it is asked to: all of it is seen, and nobody is woken. One job for all, in this order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from elastic_trainer.clock import pause
from elastic_trainer.drills.job import Wedge, ask, pace
from elastic_trainer.drills.measure import Standing
from elastic_trainer.drills.stage import Setting
from elastic_trainer.drills.strikes import kill_nodes
from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import FAMILIES, MetricKind
from tests.integration.health.watched import SCALE, Watched, watched

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("etcd_binary")]

LIMITS = {"hang_timeout": "5", "step_timeout": "8.5", "first_step_timeout": "60"}
"""Of the watchdog: not much above the longest step below, so that it would be mistaken easily."""
PATIENT = {"last_call": "120", "regroup_grace": "10", "ttl": "15"}
"""The first round waits for all three: whoever comes later would be counted as a join. So would who is slow to
regroup, or is taken for dead. Killed nodes are found at once nevertheless."""
PACE_S = 0.05
PACES = ((0.0, 40), (5.0, 2), (0.2, 2), (1.0, 2), (0.0, 40))
"""What steps take beside 5 ms, and for how many of them; the first may have begun at the old pace."""
SETTING = Setting(
    nodes=3,
    min_nodes=1,
    max_nodes=3,
    pause_s=0.005,
    wedges=True,
    save_every_s=3.0,
    options=LIMITS | PATIENT,
    limit_s=180.0,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("planned")
    (directory / "job").mkdir()
    pace(directory / "job", PACE_S)
    with watched(SETTING, directory) as started:
        yield started


@pytest.fixture(autouse=True)
def silence(job: Watched) -> Iterator[None]:
    """No alert fires in a test, nor has fired before."""
    yield
    assert job.watch.fired() == set(), job.watch.alerts()


def test_all_ranks_appear_with_all_that_is_promised(job: Watched) -> None:
    """Each rank is shown by its own node; each family that a CPU can have and that is of no end reaches Prometheus."""
    standing = job.settled()
    ranks = {str(rank): node for rank, node in enumerate(standing.nodes)}
    job.watch.wait("all ranks by their nodes", lambda: _shown(job) == ranks)
    for family in FAMILIES:
        suffix = "_count" if family.kind is MetricKind.HISTOGRAM else ""
        matcher = "{RUN}" if "run" in family.labels else ""
        if family not in (families.GPU_MEMORY, families.RUN_ENDED):
            job.wait_value(f"{family.full_name}{suffix}{matcher}")
    job.wait_value("elastic_trainer_checkpoints_total{RUN,op='save',result='ok'} > 0")
    job.wait_value("sum(elastic_trainer_phase{RUN}) == 3")


def _shown(job: Watched) -> dict[str, str]:
    return {each.labels["rank"]: each.labels["node"] for each in job.query("elastic_trainer_rank_info{RUN}")}


def test_steps_of_5_ms_to_5_s_are_no_hang(job: Watched) -> None:
    """The watchdog ends nobody while the pace changes a thousandfold from one step to the next."""
    before = job.settled()
    for seconds, count in PACES:
        pace(job.stage.directory, seconds)
        _await_steps(job, before, count)
    pace(job.stage.directory, PACE_S)
    after = job.settled()
    assert (after.pids, after.round) == (before.pids, before.round)
    steps = [each.t for each in job.stage.book.steps_after(before.pids[before.nodes[0]], 0.0)]
    spans = [later - earlier for earlier, later in pairwise(steps)]
    assert max(spans) > 5.0
    assert min(spans) < PACE_S
    assert job.value("sum(elastic_trainer_workers_killed_total{RUN})") == 0.0
    assert job.value("sum(elastic_trainer_restarts_total{RUN,reason=~'worker_hung|stalled'})") == 0.0


def test_counters_survive_a_worker_that_the_watchdog_ends(job: Watched) -> None:
    """With those same limits a worker that hangs is ended; what it has counted stays, and no counter goes back."""
    before = job.settled()
    name = before.nodes[-1]
    # its limit is to be well below that of the alert, and grows with ten of the late steps
    job.wait_value("max(elastic_trainer_step_duration_seconds{RUN}) < 0.2")
    samples = job.value("elastic_trainer_samples_total{RUN}")
    assert samples is not None
    file = ask(job.stage.directory, name, Wedge.LOOP)
    job.stage.until(lambda: not file.exists(), "a worker that hangs")
    job.wait_value(f"elastic_trainer_workers_killed_total{{RUN,node='{name}'}} == 1")
    job.wait_value("elastic_trainer_restarts_total{RUN,reason='worker_hung'} == 1")
    after = job.settled()
    assert after.pids[name] != before.pids[name]
    job.wait_value(f"elastic_trainer_samples_total{{RUN}} > {samples + 100}")
    job.wait_value("elastic_trainer_restarts_total{RUN,reason='node_joined'} == 1")
    assert _gone_back(job) == {}


def test_a_planned_scale_down(job: Watched) -> None:
    before = job.settled()
    _drain(job, before.nodes[-1])
    after = job.settled()
    assert after.nodes == before.nodes[:-1]
    job.wait_value("elastic_trainer_restarts_total{RUN,reason='node_left'} == 1")
    job.wait_value("count(up{job='elastic-trainer-nodes'}) == 2")
    assert job.query("elastic_trainer_step{RUN,rank='2'}") == []


def test_a_join(job: Watched) -> None:
    node = job.stage.cluster.add().name
    assert node in job.settled().nodes
    job.wait_value(f"up{{job='elastic-trainer-nodes',node='{node}'}} == 1")


def test_a_handover_of_rank_0(job: Watched) -> None:
    """The node of rank 0 leaves: another one shows rank 0, and tells of checkpoints and progress from there on."""
    before = job.settled()
    saved = job.value("elastic_trainer_checkpoints_total{RUN,op='save',result='ok'}")
    _drain(job, before.nodes[0])
    after = job.settled()
    (info,) = job.wait_value("elastic_trainer_rank_info{RUN,rank='0'}")
    assert info.labels["node"] == after.nodes[0] != before.nodes[0]
    job.wait_value(f"elastic_trainer_checkpoints_total{{RUN,op='save',result='ok'}} > {saved}")
    job.wait_value("elastic_trainer_checkpoint_interval_seconds{RUN} == 3")


def test_ranks_of_a_lost_node_vanish_at_the_next_scrape(job: Watched) -> None:
    """A killed node's rank is shown until a scrape of it fails, and not once more."""
    before = job.settled()
    name = before.nodes[-1]
    kill_nodes(job.stage, [name])
    # while the run has not noticed yet, the list still has the node: this scrape fails
    job.wait_value(f"max_over_time((up{{job='elastic-trainer-nodes',node='{name}'}} == bool 0)[1h:250ms]) == 1")
    job.settled()
    shown = "count by (instance) (elastic_trainer_step{RUN}) and on (instance) up{job='elastic-trainer-nodes'} == 0"
    assert job.query(f"count_over_time(({shown})[1h:250ms])") == []
    job.wait_value("elastic_trainer_restarts_total{RUN,reason=~'node_lost|contact_lost|worker_lost'} == 1")
    job.wait_value("elastic_trainer_nodes{RUN,state='ready'} == 1")


def test_the_end_of_the_job(job: Watched) -> None:
    """It succeeds, its ranks are gone, no counter has ever gone back; nothing fires, nor is about to."""
    assert job.stage.finish() == []
    job.wait_value("elastic_trainer_run_state{RUN,state='succeeded'} == 1")
    job.wait_value("absent(elastic_trainer_step{RUN}) and on () absent(up{job='elastic-trainer-nodes'})")
    pause(3 * 60 * SCALE)
    job.watch.wait("nobody is about to be told", lambda: not job.watch.alerts("pending"))
    assert _gone_back(job) == {}


def _await_steps(job: Watched, standing: Standing, count: int) -> None:
    """Wait until all have made so many more steps in the round of ``standing``."""

    def steps() -> int:
        now = job.stage.observe()
        assert now is not None
        assert now.round == standing.round
        return now.least_steps()

    wanted = steps() + count
    job.stage.until(lambda: steps() >= wanted, f"{count} steps")


def _drain(job: Watched, name: str) -> None:
    job.stage.retire(name)
    job.stage.node(name).terminate()
    job.stage.until(lambda: not job.stage.node(name).running, f"the end of {name}")
    assert job.stage.node(name).exit_code() == 143


def _gone_back(job: Watched) -> dict[str, float]:
    """Counters that have ever become smaller."""
    kinds = {MetricKind.COUNTER: ("",), MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    names = [f"{each.full_name}{suffix}" for each in FAMILIES for suffix in kinds.get(each.kind, ())]
    found = {name: job.value(f"max(resets({name}{{RUN}}[1h]))") for name in names}
    assert all(value is not None for value in found.values()), found
    return {name: value for name, value in found.items() if value}
