"""Containers that train together, started with the words of deploy/image.md, and what their ledgers say of them.

*Runs in* the main thread of a test. *Owns* its containers, until the block ends.
*Fails by* AssertionError with the last words of all containers.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from elastic_trainer.clock import SYSTEM
from elastic_trainer.drills.measure import Book, Effect, Standing
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.ledger import LedgerTail, Line
from elastic_trainer.variables import ENV_LEDGER_DIR
from tests.drills.containers.engine import Composed, Engine, say
from tests.support.deployment import DEPLOY
from tests.support.waiting import eventually

LIMIT_S = 240.0
STEPS = 12
"""After which a round counts as quiet, as in drills."""
FOLDER = "/drill"
"""The test's directory, as containers see it."""
SAMPLES = 4000
"""Digits that the job ``mnist`` trains on."""
ALL = ("n0", "n1", "n2")


def digits(run: str, epochs: int, *more: str) -> tuple[str, ...]:
    """The job ``mnist``, which evaluates at its end alone."""
    where = f"checkpoint.directory=/checkpoints/{run}"
    rare = f"evaluation.every_epochs={epochs}"
    return ("-m", "elastic_trainer.training", "mnist", where, f"epochs={epochs}", rare, *more)


@cache
def documented() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of ``docker run`` that deploy/image.md names, and the command in the container."""
    found = re.search(r"^docker run (.*?)^```", (DEPLOY / "image.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    image = words.index("elastic-trainer")
    return tuple(words[:image]), tuple(words[image:])


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """``words`` with other values behind some options, each of which must be among them."""
    assert set(values) <= set(words)
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a command was given and when the engine had sent the signal, in monotonic seconds of this machine."""

    asked: float
    sent: float


class Fleet:
    """See the module. ``conf``, where it is given, takes the place of the documented options of the rendezvous."""

    def __init__(
        self,
        composed: Composed,
        run: str,
        folder: Path,
        job: Sequence[str],
        nnodes: str = "1:3",
        conf: str | None = None,
    ) -> None:
        self.composed, self.run, self.folder = composed, run, folder
        self.book = Book()
        self.job, self._nnodes, self._conf = tuple(job), nnodes, conf
        folder.chmod(0o777)  # for the image's user
        (folder / "ledger").mkdir()
        (folder / "ledger").chmod(0o777)
        self._tail = LedgerTail(folder / "ledger")
        self._lives: dict[tuple[str, int], int] = {}
        self._started: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self.engine.docker("rm", "--force", "--volumes", *self._started)

    @property
    def engine(self) -> Engine:
        return self.composed.engine

    # ---- acting

    def start(self, *names: str, options: Iterable[str] = (), job: Sequence[str] | None = None) -> None:
        given, command = documented()
        entry = command.index("-m")
        for name in names:
            mine = {"--name": name, "--hostname": name, "--network": self.composed.network}
            ours = {"--rdzv-id": self.run, "--nnodes": self._nnodes}
            ours |= {"--rdzv-conf": self._conf} if self._conf is not None else {}
            marks = ["--volume", f"{self.folder}:{FOLDER}", "--env", f"{ENV_LEDGER_DIR}={FOLDER}/ledger"]
            threads = ["--env", "OMP_NUM_THREADS=1"]  # as on a machine with many nodes
            words = [*replaced(given, mine), *marks, *threads, *options, *replaced(command[:entry], ours)]
            self.engine.docker("run", *words, *(self.job if job is None else job))
            self._started.append(name)

    def remove(self, *names: str) -> None:
        self.engine.docker("rm", "--force", "--volumes", *names)
        self._started = [name for name in self._started if name not in names]

    def stop(self, *names: str) -> None:
        """``docker stop``: each leaves by plan, and its container says so."""
        self.engine.docker("stop", *names)
        assert [self.code(name) for name in names] == [EXIT_LEFT] * len(names)

    def kill(self, name: str) -> Moment:
        """``docker kill``: SIGKILL to all processes of a container; when."""
        asked, began = SYSTEM.monotonic(), SYSTEM.wall()
        self.engine.docker("kill", name)
        assert self.code(name) == 128 + signal.SIGKILL
        span = ("--since", f"{began:.9f}", "--until", f"{SYSTEM.wall():.9f}")
        told = self.engine.docker("events", *span, "--filter=event=kill", "--format={{json .}}")
        sent = int(json.loads(told)["timeNano"]) / 1e9
        return Moment(asked, sent - (SYSTEM.wall() - SYSTEM.monotonic()))

    # ---- looking

    def state(self, name: str) -> dict[str, Any]:
        return dict(self.engine.inspect(name)["State"])

    def code(self, name: str) -> int:
        eventually(lambda: not self.state(name)["Running"], lambda: f"{name} runs on: {self.describe()}", LIMIT_S)
        return int(self.state(name)["ExitCode"])

    def look(self) -> Standing | None:
        self.book.add(map(self._told, self._tail.read()))
        return self.book.standing()

    def _told(self, line: Line) -> Line:
        """A node is called like its container, and each process has a number that no other container has."""
        number = self._lives.setdefault((line.node, line.pid), len(self._lives) + 1)
        return line.model_copy(update={"pid": number, "node": line.node.partition("-")[0]})

    def events(self) -> str:
        return self.composed.told("events", self.run)

    def describe(self) -> str:
        """The last words of all, for the message of a failure."""
        told = [f"{self.look()}", self.events()]
        told += [f"{name}: {line[:500]}" for name in self._started for line in self.engine.log(name).splitlines()[-6:]]
        return "\n".join(told)

    # ---- waiting

    def until(self, holds: Callable[[], object], what: str) -> None:
        eventually(holds, lambda: f"{what} did not come about: {self.describe()}", LIMIT_S)

    def settled(self, *names: str, steps: int = STEPS) -> Standing:
        """Wait until exactly these train together, and have committed ``steps`` steps in that."""
        self.until(lambda: self._together(set(names), steps), f"a round of {' '.join(names)}")
        standing = self.look()
        assert standing is not None
        return standing

    def _together(self, names: set[str], steps: int) -> bool:
        standing = self.look()
        if standing is None or set(standing.nodes) != names or standing.world != len(standing.pids):
            return False
        return standing.least_steps() >= steps

    def aftermath(self, before: Standing, what: str, t: float, *struck: str) -> Effect:
        """Wait until the survivors step in a later round; what ``t`` cost them. Their processes are still the same."""
        survivors = {name: life for name, life in before.pids.items() if name not in struck}
        ask = (survivors.values(), t, before.round + 1)
        self.until(lambda: self.look() and self.book.resumed_at(*ask, 5), f"a step after: {what}")
        resumed, standing = self.book.resumed_at(*ask), self.look()
        assert resumed is not None
        assert standing is not None
        assert {name: standing.pids[name] for name in survivors} == survivors, f"{what}: a survivor was restarted"
        gap_s, lost = (self.book.gap(survivors.values(), t, resumed), self.book.committed_again(survivors.values()))
        assert lost == 0, f"{what}: survivors made {lost} committed steps again"
        say(f"{what}: the others stepped again after {resumed - t:.2f} s, no committed step lost")
        return Effect(what, resumed - t, gap_s, lost)
