"""Starts programs by a template, and says why where they must start cold.

*Runs in* the owner of the template (an agent, a local cluster), any thread that lives as long as the owner.
*Owns* the template's process. *Fails by* :class:`Cold`: the caller then starts the program itself.
*Invariant*: a program that :meth:`Starter.start` did not return never runs: a fork waits for its owner's word.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_trainer.warm import identity
from elastic_trainer.warm.fitness import Facts, PythonCommand, decide
from elastic_trainer.warm.template import HEIRS, receive, send

PATIENCE_S = 120.0
"""How long a template may take to answer: it may be importing what the program would import."""
MOST_TEMPLATES = 6
"""Once this many templates were spoiled or have died, all starts are cold."""
_BOOT = "from elastic_trainer.warm.template import main; main()"


class Cold(Exception):
    """The program must be started cold; the message says why."""


class Adopted(subprocess.Popen[bytes]):
    """A child of this process that its template has forked: waited for and signalled as any other."""

    _child_created = False

    def __init__(self, words: Sequence[str], pid: int) -> None:
        self._adopted = pid
        super().__init__(words)

    def _execute_child(self, *_: Any) -> None:
        self.pid, self._child_created = self._adopted, True


@dataclass(frozen=True, slots=True)
class Wish:
    """How a program is to be started. ``death_signal``: what it gets when its parent dies; ``heir``: whether it starts
    programs itself, by a template of its own; ``network``: the file of the network namespace that it enters."""

    words: Sequence[str]
    environment: Mapping[str, str]
    stdin: int
    stdout: int
    stderr: int
    death_signal: int = 0
    heir: bool = False
    network: str = ""


class Starter:
    """Keeps a template and starts programs by it; replaces one that is spoiled or gone."""

    def __init__(
        self,
        preload: Sequence[str],
        options: Sequence[str],
        environment: Mapping[str, str],
        *,
        learn: bool,
        free: Collection[str] = (),
    ) -> None:
        self._preload, self._learn = tuple(preload), learn
        self._lock = threading.Lock()
        self._without: list[str] = []
        self._made = 0
        self._facts = Facts(sys.executable, tuple(options), os.getcwd(), dict(environment), tuple(free))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        if HEIRS:
            heir = HEIRS.pop()
            self._facts, self._link, self._process = heir.facts, heir.link, Adopted(["template"], heir.pid)
        else:
            self._make()

    def _make(self) -> None:
        """Start a template; it imports while this process goes on."""
        self._made += 1
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [self._facts.executable, *self._facts.options, "-c", _BOOT, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=self._facts.environment,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        start = {"preload": self._preload, "without": self._without, "learn": self._learn, "owner": os.getpid()}
        self._link = mine
        with contextlib.suppress(OSError):
            send(mine, {**start, "facts": asdict(self._facts)})

    def start(self, wish: Wish) -> Adopted:
        """Start what is wished for. Raises Cold."""
        decision = decide(wish.words, wish.environment, os.getcwd(), self._facts)
        if decision.command is None:
            raise Cold(decision.reason)
        with self._lock:
            if self._link is None and self._made >= MOST_TEMPLATES:
                raise Cold(f"{self._made} templates were spoiled or died")
            if self._link is None:
                self._make()
                raise Cold("the template is being made")
            answer = self._ask(self._link, decision.command, wish)
            if "pid" in answer:
                return Adopted(wish.words, answer["pid"])
            if answer["without"]:
                self._without.append(answer["without"])
                self._renew()
            raise Cold(answer["cold"])

    def _ask(self, link: socket.socket, command: PythonCommand, wish: Wish) -> dict[str, Any]:
        hear, say = os.pipe()
        order = {
            "command": asdict(command),
            "words": list(wish.words),
            "environment": dict(wish.environment),
            "death_signal": wish.death_signal,
            "heir": wish.heir,
            "network": wish.network,
            "owner": os.getpid(),
        }
        try:
            link.settimeout(PATIENCE_S)
            with identity.adopting():
                send(link, order, [wish.stdin, wish.stdout, wish.stderr, hear])
                answer, _ = receive(link)
            if "pid" in answer:
                os.waitid(
                    os.P_PID, answer["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT
                )  # it is a child of this process
                os.write(say, b"g")
        except BaseException as error:  # also of a signal in torchrun: the fork must not run
            code = self._drop()
            if isinstance(error, TimeoutError):
                raise Cold(f"the template did not answer within {PATIENCE_S:g} s") from error
            if isinstance(error, (OSError, EOFError)):
                self._make_again()
                raise Cold(f"the template is gone (exit code {code})") from error
            raise
        finally:
            os.close(hear)
            os.close(say)
        return answer

    def _renew(self) -> None:
        self._drop()
        self._make_again()

    def _make_again(self) -> None:
        if self._made < MOST_TEMPLATES:
            self._make()

    def _drop(self) -> int | None:
        """End the template; its exit code where it had ended by itself."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is not None:
            link.close()
        if process is None:
            return None
        code = process.poll()
        process.kill()
        process.wait()
        return code

    def close(self) -> None:
        """End the template; the programs go on."""
        with self._lock:
            self._made = MOST_TEMPLATES
            self._drop()
