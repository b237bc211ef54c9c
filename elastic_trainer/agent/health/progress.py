"""Says on Kubernetes how far the run is: in annotations of its Job, and in the status of a Kubeflow TrainJob.

The node of rank 0 says it every few seconds, where the pod has a token that allows it. Whoever answers slowly or not
at all holds up nothing but this thread.

*Runs in* a thread named ``progress``. *Owns* nothing.
*Fails by* nothing: a refusal is logged once (``progress.refused``), and tried again after a minute.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.membership.documents import RunProgress
from elastic_trainer.settings import ProgressTarget
from elastic_trainer.telemetry.logs import logger

EVERY_S: Final = 10.0
"""Kubeflow asks for five seconds or more; a Job is an object of the API server."""
REFUSED_S: Final = 60.0
LIMIT_S: Final = 5.0
PREFIX: Final = "elastic-trainer.github.io/"

Known = Callable[[], tuple[RunProgress, float | None, str] | None]
"""How far the run is, its loss and its last incident; None on another node than rank 0's."""


class ProgressReports(PeriodicThread):
    """See the module."""

    def __init__(self, target: ProgressTarget, known: Known, clock: Clock = SYSTEM) -> None:
        super().__init__("progress", self.turn, clock)
        self._target, self._known, self._wall = target, known, clock.wall
        self._said: dict[str, str] = {}
        self._refused = False

    def turn(self) -> float:
        """Say it, if it has changed; seconds until the next time."""
        known = self._known()
        if known is None or (new := job_annotations(*known)) == self._said:
            return EVERY_S
        progress, loss, _ = known
        try:
            if self._target.kubeflow:
                status = trainer_status(progress, loss, datetime.fromtimestamp(self._wall(), UTC))
                self._send("POST", "application/json", {"trainerStatus": status})
            else:
                self._send("PATCH", "application/merge-patch+json", {"metadata": {"annotations": new}})
        except (OSError, ValueError, HTTPException) as error:
            if not self._refused:
                self._refused = True
                why = f"{error.code} {error.reason}" if isinstance(error, HTTPError) else str(error)
                logger().warning("progress.refused", url=self._target.url, reason=why)
            return REFUSED_S
        self._said, self._refused = new, False
        return EVERY_S

    def _send(self, method: str, kind: str, body: Mapping[str, Any]) -> None:
        target = self._target
        headers = {"Content-Type": kind, "Authorization": f"Bearer {target.token.read_text(encoding='utf-8').strip()}"}
        request = Request(target.url, json.dumps(body).encode(), headers, method=method)
        with urlopen(request, timeout=LIMIT_S, context=ssl.create_default_context(cafile=str(target.ca))) as answer:
            answer.read()


def job_annotations(progress: RunProgress, loss: float | None, incident: str) -> dict[str, str]:
    """What the Job is annotated with; values that are not known are missing."""
    values = {
        "step": f"{progress.step}" + (f"/{progress.last_step}" if progress.last_step else ""),
        "epoch": f"{progress.epoch + 1}/{progress.epochs}" if progress.epochs else "",
        "percent": f"{100 * progress.part:.1f}" if progress.part is not None else "",
        "eta-seconds": f"{progress.left_s:.0f}" if progress.left_s is not None else "",
        "loss": f"{loss:.6g}" if loss is not None else "",
        "learning-rate": f"{progress.lr:.6g}" if progress.lr is not None else "",
        "last-incident": incident,
    }
    return {PREFIX + name: value for name, value in values.items() if value}


def trainer_status(progress: RunProgress, loss: float | None, now: datetime) -> dict[str, Any]:
    """The ``trainerStatus`` of KEP-2779 of Kubeflow Trainer."""
    values = {"step": progress.step, "epoch": progress.epoch, "loss": loss, "learning_rate": progress.lr}
    status: dict[str, Any] = {
        "metrics": [{"name": name, "value": str(value)} for name, value in values.items() if value is not None],
        "lastUpdatedTime": now.isoformat(),
    }
    if progress.part is not None:
        status["progressPercentage"] = min(100, int(100 * progress.part))
    if progress.left_s is not None:
        status["estimatedRemainingSeconds"] = int(progress.left_s)
    return status
