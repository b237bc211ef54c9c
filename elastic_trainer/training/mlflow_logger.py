"""MLflow: one run through rounds, restarts and lives, on a server or in a local store.

Server, experiment and name are those of MLflow's own variables (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``).

*Runs in* rank 0, in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from elastic_trainer.clock import SYSTEM
from elastic_trainer.training.loggers import Logger, Opening, TrackedRun
from elastic_trainer.training.task import Exhibits

NAME = "mlflow"
_PARAMS = 100
"""What MLflow takes at once."""


class MlflowLogger(Logger):
    """Through the client alone: the script's own active run of MLflow stays its own."""

    def __init__(self, opening: Opening) -> None:
        self._tracked = TrackedRun(opening.directory, NAME)
        self._client = MlflowClient()
        if self._tracked.id is None:
            self._tracked.begin(os.environ.get("MLFLOW_RUN_ID") or self._created(opening))
        assert self._tracked.id is not None
        self._id = self._tracked.id
        self._client.update_run(self._id, status="RUNNING")

    def _created(self, opening: Opening) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run: str = self._client.create_run(where, run_name=opening.directory.name).info.run_id
        params = [Param(name, str(value)) for name, value in _flat(opening.config).items()]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(run, params=params[begin : begin + _PARAMS])
        return run

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self._tracked.advance(group, step):
            now = int(SYSTEM.wall() * 1000)
            metrics = [Metric(f"{group}/{name}", value, now, step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        if not self._tracked.advance("exhibits", step):
            return
        for name, image in exhibits.images.items():
            self._client.log_image(self._id, image.permute(1, 2, 0).numpy(), f"{step}/{name}.png")
        for name, text in exhibits.texts.items():
            self._client.log_text(self._id, text, f"{step}/{name}.txt")

    def close(self, finished: bool) -> None:
        if finished:
            self._client.set_terminated(self._id, "FINISHED")


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``, as MLflow shows parameters."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat
