"""Leads real worker processes through rounds in place, in the agents' stead: no torchrun, no etcd, faults where wanted.

One :class:`Lead` stands for all agents of a run. Each :class:`Worker` is a process with a channel of its own, as on a
node with one device. What workers say is kept, and can be waited for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import TCPStore

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_LEFT
from elastic_trainer.ipc.channel import (
    ChannelClosedError,
    Connection,
    Drain,
    Failed,
    Formation,
    Hello,
    Leaving,
    Listener,
    Message,
    Over,
    Ready,
    Welcome,
    read_from_worker,
)
from elastic_trainer.local.ledger import LedgerTail, Line, audit
from elastic_trainer.variables import ENV_CHANNEL, ENV_LEDGER_DIR, ENV_NODE, ENV_RECOVERY
from tests.integration.worker.launch import environment, tail
from tests.support.forked import Forked

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]
LIMIT_S = 180.0
FOLLOW_S = 5.0
SAMPLES = 60
"""Of the jobs that most scripts run: two epochs of eight steps in all."""
Fault = tuple[str, int, str, str]
"""Node, step, where in it, and what happens there; see job.py."""
Said = TypeVar("Said", bound=Message)


class Worker:
    """One worker process, and what it has said."""

    def __init__(self, lead: Lead, name: str, words: Sequence[str]) -> None:
        self.name, self._lead = name, lead
        self.said: list[Message] = []
        self.placed = False
        """Whether it has been given a place in a round."""
        self.may_exit = {0, -signal.SIGKILL, EXIT_LEFT}
        self.log = lead.directory / f"{name}.log"
        self._connection: Connection | None = None
        self._listener = Listener(self._serve)
        extra = {
            ENV_CHANNEL: str(self._listener.path),
            ENV_RECOVERY: "in_place",
            ENV_NODE: name,
            ENV_LEDGER_DIR: str(lead.ledger),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.process = Forked(words, environment(**extra), self.log, self.log, lead.directory)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _serve(self, connection: Connection) -> None:
        for line in connection.lines():
            message = read_from_worker(line)
            with self._lead.changed:
                if isinstance(message, Hello):
                    self._connection = connection
                    connection.send(Welcome(run="test", node=self.name))
                self.said.append(message)
                self._lead.changed.notify_all()
            if isinstance(message, Leaving):
                return  # hanging up tells the worker that its word was taken

    def tell(self, message: Message) -> None:
        """Send ``message``; a worker that is gone does not hear it."""
        self.placed |= isinstance(message, Formation)
        if self._connection is not None:
            try:
                self._connection.send(message)
            except ChannelClosedError:
                return

    def last(self, kind: type[Said]) -> Said | None:
        """The last message of this kind."""
        return next((message for message in reversed(self.said) if isinstance(message, kind)), None)

    def readiness(self, number: int) -> Ready | None:
        """What it said when it became free for round ``number``; who was in none yet is free for any."""
        found = self.last(Ready)
        return found if found is not None and (found.number >= number or not self.placed) else None

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._listener.close()


class Lead:
    """The agents of a run. Use it as a context; it ends all that it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = directory / "ledger"
        self.changed = threading.Condition()
        self.number = 0
        self.members: list[Worker] = []
        self.workers: list[Worker] = []
        timeout = timedelta(seconds=LIMIT_S)
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def start(self, name: str, script: str, *arguments: object) -> Worker:
        worker = Worker(self, name, [str(SCRIPTS / script), *map(str, arguments)])
        self.workers.append(worker)
        return worker

    def begin(self, script: str, names: Sequence[str], faults: Sequence[Fault] = (), **values: Any) -> list[Worker]:
        """Workers that run a script with a scenario, and are in no round yet."""
        listed = [dict(zip(("node", "step", "where", "what"), each, strict=True)) for each in faults]
        return [self.start(name, script, json.dumps({"faults": listed, **values})) for name in names]

    # ---- leading

    def place(self, members: Sequence[Worker], number: int, worker: Worker, store: str | None = None) -> Formation:
        """The place of ``worker`` in round ``number`` of ``members``, in rank order."""
        return Formation(
            number=number,
            nonce=f"round-{number}",
            store=store if store is not None else f"127.0.0.1:{self._store.port}",
            rank=list(members).index(worker),
            world_size=len(members),
        )

    def form(self, members: Sequence[Worker], *, store: str | None = None) -> int:
        """Form the next round of ``members`` once they are free; its number."""
        number = self.number + 1
        self.wait(lambda: all(each.readiness(number) for each in members), f"all free for round {number}")
        self.number, self.members = number, list(members)
        for worker in members:
            worker.tell(self.place(members, number, worker, store))
        return number

    def regroup(
        self, workers: Sequence[Worker], failing: Sequence[Worker], following: Sequence[Worker] = ()
    ) -> list[int | None]:
        """A collective has failed on ``failing``: end the round, and form the next of ``workers``; the steps of the
        states that they held then."""
        self.await_failed(failing)
        self.let_follow(following)
        self.end()
        states = self.await_ready(workers)
        self.form(workers)
        return [state[1] if state is not None else None for state in states]

    def end(self, reason: str = "the test says so") -> None:
        """The present round is broken."""
        for worker in self.members:
            worker.tell(Over(number=self.number, reason=reason))

    def change(self, members: Sequence[Worker], *, waits: bool = False) -> None:
        """A planned change: the present round is to be left for one of ``members``."""
        before, number = list(self.members), self.number
        self.number, self.members = number + 1, list(members)
        for worker in before:
            then = self.place(members, number + 1, worker) if worker in members else None
            worker.tell(Drain(number=number, reason="the test says so", waits=waits, next=then))
        for worker in members:
            if worker not in before:  # it may still be starting
                self.wait(lambda worker=worker: worker.last(Ready), f"{worker.name} ready to join")  # type: ignore[misc]
                worker.tell(self.place(members, number + 1, worker))

    def tolerate(self, workers: Sequence[Worker]) -> None:
        """These may fail; the others go on."""
        for worker in workers:
            worker.may_exit |= {EXIT_FAILURE, EXIT_CONFIG}

    # ---- waiting

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for ``condition``; fails with ``what`` and the workers' logs if it never comes, or a worker fails."""
        deadline = Deadline.after(LIMIT_S)
        with self.changed:
            while not condition():
                failed = [w for w in self.workers if w.process.poll() not in (None, *w.may_exit)]
                assert not failed, f"{failed[0].name} failed while waiting for {what}:\n{tail(failed[0].log)}"
                assert not deadline.expired, f"{what}: not within {LIMIT_S} s\n" + "\n".join(
                    f"--- {w.name}: {w.said[-3:]}\n{tail(w.log)[-2500:]}" for w in self.workers
                )
                self.changed.wait(0.05)

    def await_failed(self, workers: Sequence[Worker]) -> None:
        """Wait until a collective of the present round has failed on each of ``workers``."""
        self.wait(lambda: all(map(self.failed, workers)), f"all to fail in round {self.number}")

    def failed(self, worker: Worker) -> bool:
        """Whether ``worker`` has said so of the present round."""
        said = worker.last(Failed)
        return said is not None and said.number == self.number

    def gave_up(self, workers: Sequence[Worker]) -> list[str]:
        """Those of ``workers`` that last gave a step up, and did not lose a peer."""
        return [each.name for each in workers if (said := each.last(Failed)) is not None and said.given_up]

    def let_follow(self, workers: Sequence[Worker]) -> None:
        """Give ``workers`` time to get as far as they can without a peer that has failed.

        As a rule they fail too; one whose connection was cut in the middle of a message waits until the round is ended.
        """
        deadline = Deadline.after(FOLLOW_S)
        with self.changed:
            while not all(map(self.failed, workers)) and not deadline.expired:
                self.changed.wait(deadline.remaining_s())

    def await_ready(self, workers: Sequence[Worker]) -> list[tuple[int, int] | None]:
        """Wait until ``workers`` are free for the next round; the states that they hold, as (round, step)."""
        self.wait(lambda: all(each.readiness(self.number + 1) for each in workers), "all to be free")
        reports = [each.readiness(self.number + 1) for each in workers]
        states = [report.state if report is not None else None for report in reports]
        return [(state.round, state.step) if state is not None else None for state in states]

    def await_file(self, name: str) -> None:
        self.wait(lambda: (self.directory / name).exists(), name)

    def open(self, gate: str) -> None:
        (self.directory / f"{gate}.open").touch()

    def await_done(self, workers: Sequence[Worker]) -> None:
        self.wait(lambda: all(each.process.poll() is not None for each in workers), "all to end")
        for worker in workers:
            left = worker.last(Leaving)
            assert (worker.process.returncode, left and left.status) == (0, "done"), tail(worker.log)

    # ---- what came of it

    def lines(self) -> list[Line]:
        return LedgerTail(self.ledger).read()

    def results(
        self, workers: Sequence[Worker], samples: int = SAMPLES, *, unrecorded: int = 0, exact: bool = True
    ) -> list[dict[str, Any]]:
        """What the workers wrote at their end: in the processes that they began in, with one state, and each sample was
        used exactly once (unless not ``exact``). ``unrecorded`` samples were used in a step that the others committed,
        by a rank that died before it could say so."""
        self.await_done(workers)
        ended = [json.loads((self.directory / f"{worker.name}.result").read_text()) for worker in workers]
        assert [result["pid"] for result in ended] == [worker.pid for worker in workers]
        assert all(result["state"] == ended[0]["state"] for result in ended)
        found = audit(self.lines(), samples)
        assert found.exact == exact, found.reason
        assert found.unrecorded == unrecorded
        return ended


@contextmanager
def leading(directory: Path) -> Iterator[Lead]:
    """A lead for one test."""
    with Lead(directory) as lead:
        yield lead


def played(story: Callable[[Path], None], directory: Path, limit_s: float) -> None:
    """``story(directory)`` in a process of its own: threads that were started before would stay in the old network."""
    code = f"from {story.__module__} import {story.__name__} as story; from pathlib import Path; import sys"
    code += "; from elastic_trainer.local import agents; agents.preload(); story(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
