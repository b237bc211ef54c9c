"""torchrun's own agent with its real loop, in this process, with flags in the place of worker processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler

Result = TypeVar("Result")


class AgentOfFlags(SimpleElasticAgent):
    """Runs torchrun's rendezvous, rank assignment, monitoring, restarts and exit barrier.

    ``starts`` has the ranks of the workers at each start. ``fail`` and ``finish`` say what they do next.
    """

    def __init__(
        self, handler: RendezvousHandler, size: int = 1, max_restarts: int = 100, role: str = "default"
    ) -> None:
        spec = WorkerSpec(
            role=role,
            local_world_size=size,
            rdzv_handler=handler,
            entrypoint="flags",
            max_restarts=max_restarts,
            monitor_interval=0.01,
        )
        super().__init__(spec)
        self.starts: list[tuple[int, ...]] = []
        self.worlds: list[int] = []
        self.result: RunResult | None = None
        self.exit: BaseException | None = None
        self.ended = threading.Event()
        self._state = WorkerState.HEALTHY
        self._finished = False
        self._thread = threading.Thread(target=self._main, name="torchrun", daemon=True)

    def begin(self) -> None:
        """Run torchrun's loop in a thread."""
        self._thread.start()

    def fail(self) -> None:
        """The workers crash."""
        self._state = WorkerState.FAILED

    def finish(self) -> None:
        """The workers succeed."""
        self._finished = True
        self._state = WorkerState.SUCCEEDED

    def called(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returns when this agent calls it."""
        return function()

    def _main(self) -> None:
        try:
            self.result = self.run()
        except BaseException as error:  # noqa: BLE001 - SystemExit is what the handler ends torchrun with
            self.exit = error
        finally:
            self.ended.set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Workers that are asked to finish while they are just being started do so.
        self._state = WorkerState.SUCCEEDED if self._finished else WorkerState.HEALTHY
        self.starts.append(tuple(worker.global_rank for worker in worker_group.workers))
        self.worlds.append(worker_group.workers[0].world_size)
        return dict.fromkeys(range(len(worker_group.workers)), 0)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """There is nothing to stop."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        results: dict[int, Any] = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=self._state, return_values=results)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """There is nothing to stop."""
