"""A real job of this machine with its etcd and its monitor, and a Prometheus and an Alertmanager that watch it.

*Runs in* a test. *Owns* all of those, from entry to exit. *Fails by* what :class:`Stage` and :class:`Watch` raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_trainer.drills.measure import Standing
from elastic_trainer.drills.stage import Setting, Stage, staged
from tests.support.following import monitor
from tests.support.watch import Sample, Watch

SCALE = 1 / 20
"""Three seconds are a minute of the rules: still more than the two from one word of a node to the next."""
OUTAGE = {"ElasticTrainerStoreUnreachable": 1 / 4}
"""A busy machine can let nobody ask etcd for six seconds, but not for 15 more as well."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The job, and who watches it."""

    stage: Stage
    watch: Watch

    @property
    def run(self) -> str:
        return self.stage.run

    def query(self, expression: str) -> list[Sample]:
        """``expression``, in which RUN is the matcher of this run."""
        return self.watch.query(self._of_run(expression))

    def value(self, expression: str) -> float | None:
        return self.watch.value(self._of_run(expression))

    def wait_value(self, expression: str) -> list[Sample]:
        """Wait until it has a value: comparisons have one when they are true."""
        return self.watch.wait_value(self._of_run(expression))

    def settled(self) -> Standing:
        """Wait until all nodes that should train do, and Prometheus sees just their ranks."""
        standing = self.stage.await_steps()
        self.wait_value(f"count(elastic_trainer_step{{RUN}}) == {standing.world}")
        self.wait_value(f"elastic_trainer_world_size{{RUN}} == {standing.world}")
        return standing

    def critical(self) -> set[str]:
        return {each.name for each in self.watch.alerts() if each.labels["severity"] == "critical"}

    def _of_run(self, expression: str) -> str:
        return expression.replace("RUN", f'run="{self.run}"')


@contextmanager
def watched(setting: Setting, directory: Path, scales: Mapping[str, float] | None = None) -> Iterator[Watched]:
    """Start everything, and wait until the job trains and is seen; ``scales``: see :class:`Watch`."""
    setting = replace(setting, options={**setting.options, "metrics_address": "0.0.0.0"})  # Prometheus is elsewhere
    with staged(setting, directory / "job") as stage, monitor(stage.server.endpoint) as (_, port):
        stage.await_steps()  # or the start of this machine would count as a slow rendezvous
        address = f"127.0.0.1:{port}"
        nodes_from = f"http://{address}/sd/nodes"
        scales = OUTAGE | dict(scales or {})
        with Watch(directory / "watch", monitors=[address], nodes_from=nodes_from, scale=SCALE, scales=scales) as watch:
            job = Watched(stage, watch)
            job.settled()
            yield job
