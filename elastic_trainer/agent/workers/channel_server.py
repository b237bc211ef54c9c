"""The agent's end of the channel: one thread for each connected worker, which passes its messages on.

*Runs in* the agent: the listener's thread, one for each connection, and one that waits for each worker's death.
*Owns* the listener. *Fails by* nothing: a worker that breaks the protocol is treated as lost.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from elastic_trainer.agent.workers.roster import Worker
from elastic_trainer.ipc.channel import Connection, Listener
from elastic_trainer.ipc.messages import (
    CHANNEL_VERSION,
    Exit,
    Hello,
    Leaving,
    Message,
    MessageError,
    read_from_worker,
)
from elastic_trainer.ipc.mutex import await_death
from elastic_trainer.telemetry.logs import logger


class WorkerHandler(Protocol):
    """The owner of the workers: admits or refuses (None) each, and receives its messages and its end."""

    def admit(self, connection: Connection, local_rank: int) -> Worker | None: ...

    def receive(self, worker: Worker, message: Message) -> None: ...

    def gone(self, worker: Worker) -> None: ...


class ChannelServer:
    """See the module."""

    def __init__(self, handler: WorkerHandler) -> None:
        self._handler = handler
        self._listener = Listener(self._serve)

    @property
    def path(self) -> Path:
        return self._listener.path

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        worker: Worker | None = None
        try:
            for line in connection.lines():
                message = read_from_worker(line)
                if isinstance(message, Hello):
                    worker = self._welcome(connection, message)
                elif worker is not None:
                    self._handler.receive(worker, message)
                if isinstance(message, Leaving):
                    return  # closing the connection confirms that the message was processed, so the worker may exit now
        except MessageError as error:
            logger().error("worker.message_rejected", pid=connection.peer()[0], error=str(error))
        finally:
            if worker is not None:
                self._handler.gone(worker)

    def _welcome(self, connection: Connection, hello: Hello) -> Worker | None:
        if hello.version != CHANNEL_VERSION:
            reason = f"the worker speaks channel version {hello.version}, its agent {CHANNEL_VERSION}"
            connection.send(Exit(code=78, reason=reason))
            return None
        worker = self._handler.admit(connection, hello.local_rank)
        if worker is not None and hello.mutex is not None:
            arguments = (worker, Path(hello.mutex))
            threading.Thread(target=self._await_death, args=arguments, name=f"life-{worker.pid}", daemon=True).start()
        return worker

    def _await_death(self, worker: Worker, mutex: Path) -> None:
        try:
            if await_death(mutex):
                self._handler.gone(worker)
        except OSError as error:
            logger().warning("worker.mutex_unusable", pid=worker.pid, error=str(error))
