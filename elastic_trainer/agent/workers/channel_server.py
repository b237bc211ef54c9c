"""The agent's end of the channel: a thread for each worker that connects, which passes on what it says.

*Runs in* the agent: the listener's thread, one for each connection, one that waits for each worker's death.
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


class Hearer(Protocol):
    """Who leads the workers: admits one or refuses it (None), hears what it says, and learns when it is gone."""

    def admit(self, connection: Connection, local_rank: int) -> Worker | None: ...

    def hear(self, worker: Worker, message: Message) -> None: ...

    def gone(self, worker: Worker) -> None: ...


class ChannelServer:
    """See the module."""

    def __init__(self, hearer: Hearer) -> None:
        self._hearer = hearer
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
                    self._hearer.hear(worker, message)
                if isinstance(message, Leaving):
                    return  # hanging up confirms that its word has been taken, so it may end now
        except MessageError as error:
            logger().error("worker.not_understood", pid=connection.peer()[0], error=str(error))
        finally:
            if worker is not None:
                self._hearer.gone(worker)

    def _welcome(self, connection: Connection, hello: Hello) -> Worker | None:
        if hello.version != CHANNEL_VERSION:
            reason = f"the worker speaks channel version {hello.version}, its agent {CHANNEL_VERSION}"
            connection.send(Exit(code=78, reason=reason))
            return None
        worker = self._hearer.admit(connection, hello.local_rank)
        if worker is not None and hello.mutex is not None:
            arguments = (worker, Path(hello.mutex))
            threading.Thread(target=self._await_death, args=arguments, name=f"life-{worker.pid}", daemon=True).start()
        return worker

    def _await_death(self, worker: Worker, mutex: Path) -> None:
        try:
            if await_death(mutex):
                self._hearer.gone(worker)
        except OSError as error:
            logger().warning("worker.mutex_unusable", pid=worker.pid, error=str(error))
