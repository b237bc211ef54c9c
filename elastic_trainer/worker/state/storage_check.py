"""Whether checkpoints can be written at all, found before a training begins.

*Runs in* the worker's main thread of all ranks at once. *Fails by* StorageError on all ranks.
"""

from __future__ import annotations

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.errors import CheckpointError
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.shares import in_round


def check_storage(manager: CheckpointManager | None, control: Control, environment: WorkerEnvironment) -> None:
    """Raise on all ranks if rank 0 cannot write checkpoints.

    Not where a process continues a training: the directory could be written when that began.
    """
    with control.agreed():
        if manager is None or control.rank != 0:
            return
        try:
            in_round(None, manager.check_writable)
        except CheckpointError as error:
            if not _goes_on(manager, environment):
                raise
            logger().error("storage.refused", step=environment.reached, error=str(error))


def _goes_on(manager: CheckpointManager, environment: WorkerEnvironment) -> bool:
    """Whether the training was under way before: steps are known, or there is a checkpoint."""
    try:
        return environment.reached > 0 or (environment.midway and manager.newest() is not None)
    except CheckpointError:
        return False
