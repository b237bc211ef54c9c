"""Two ways to the next round's groups on gloo: a session's, and torch's ``_reconfigure`` (2.14 and newer).

Real processes sum gradients in both. In turn one is killed (SIGKILL) and replaced; then two are frozen for good, one
after the other; then one of those that are to form a round never comes. As an agent does, the benchmark says that a
round is over. ``reconfigure`` frees ranks by the session's short waits alone, ``reconfigure+sever`` shuts their sockets
down too. See deploy/decisions/reconfigure.md.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from elastic_trainer.clock import SYSTEM, Deadline, pause
from tests.bench.reconfigure_job import FORMING_S, HOST, WORKING_S, serve
from tests.bench.report import Report, alternate, at_most_time, emit, median, note, parse

WAYS = ("groups", "reconfigure", "reconfigure+sever")
WORLD, MEGABYTES = 4, 4.0
KILLS, ROUNDS, QUICK_ROUNDS = 3, 50, 4
START_S, LIMIT_S = 180.0, 2.0 * WORKING_S + FORMING_S
BLOCKED_AFTER_S = 0.05


class Rank:
    """One process, and what it has said. ``handles`` and ``held`` are as of when it last left a round."""

    def __init__(self, way: str, port: int, index: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._connection, its = context.Pipe()
        self.process = context.Process(target=serve, args=(way, port, index, MEGABYTES, its), daemon=True)
        self.process.start()
        self.handles: list[str] = []
        self.held: dict[str, float] = {}

    def tell(self, what: str, **more: Any) -> None:
        self._connection.send({"what": what, **more})

    def when(self, what: str, number: int, limit_s: float = LIMIT_S) -> float:
        """The time at which it said ``what`` of round ``number``."""
        deadline, why = Deadline.after(limit_s), ""
        while self._connection.poll(deadline.remaining_s()):
            said = self._connection.recv()
            why = said.get("why", why)
            if said["what"] == "free":
                self.handles, self.held = said["handles"], said["held"]
            if (said["what"], said["number"]) == (what, number):
                return float(said["at"])
        raise RuntimeError(f"no {what!r} of round {number} after {limit_s:g} s: {why}")


class Job:
    """The agents: they start ``count`` processes, and lead them through rounds."""

    def __init__(self, way: str, count: int) -> None:
        limit = timedelta(seconds=START_S)
        self._store = TCPStore(HOST, 0, None, True, wait_for_workers=False, timeout=limit)
        self.all = [Rank(way, self._store.port, index) for index in range(count)]
        self.number = 0
        for rank in self.all:
            rank.when("free", 0, START_S)

    def announce(self, members: Sequence[Rank]) -> None:
        """Give them their places in the next round."""
        self.number += 1
        handles = [rank.handles for rank in members]
        for place, rank in enumerate(members):
            rank.tell("round", number=self.number, rank=place, size=len(members), handles=handles)

    def step(self, members: Sequence[Rank]) -> float:
        """When the last of them had made the first step of the next round."""
        self.announce(members)
        return max(rank.when("step", self.number) for rank in members)

    def over(self, members: Sequence[Rank]) -> float:
        """The round is over; when the last of ``members`` was free."""
        for rank in members:
            rank.tell("over", number=self.number)
        return self.free(members)

    def free(self, members: Sequence[Rank]) -> float:
        return max(rank.when("free", self.number) for rank in members)

    def drain(self, members: Sequence[Rank]) -> None:
        """End the round by plan."""
        for rank in members:
            rank.tell("drain")
        self.free(members)


@contextmanager
def job(way: str, count: int) -> Iterator[Job]:
    """Ends all of its processes."""
    made = Job(way, count)
    try:
        yield made
    finally:
        for rank in made.all:
            rank.process.kill()
            rank.process.join()


def measure(way: str, kills: int, rounds: int) -> dict[str, Any]:
    """All faults once, kills ``kills`` times, on one job."""
    with job(way, WORLD + kills) as led:
        members, spares = led.all[:WORLD], led.all[WORLD:]
        led.step(members)
        killed, joined = [], []
        for turn in range(kills):
            pause(0.3)
            victim = members.pop(turn % WORLD)
            struck = SYSTEM.monotonic()
            victim.process.kill()
            victim.process.join()
            led.over(members)
            killed.append(led.step(members) - struck)
            pause(0.3)
            asked = SYSTEM.monotonic()
            led.drain(members)
            members.append(spares.pop())
            joined.append(led.step(members) - asked)
        held = []
        for _ in range(rounds):
            led.drain(members)
            held.append(members[0].held)
            led.step(members)
        absent = members[-1]
        first, second = freeze(led, members), freeze(led, members)
        led.drain(members)
        led.announce([*members, absent])
        pause(0.2)
        word = SYSTEM.monotonic()
        late = led.over(members) - word
        back = led.step(members) - word
    return {
        "kill_to_next_step_s": killed,
        "join_s": joined,
        "first_freeze_to_next_step_s": first,
        "second_freeze_to_next_step_s": second,
        "free_while_forming_s": late,
        "next_step_after_forming_failed_s": back,
        "held_early_and_late": {name: (held[min(2, rounds - 1)][name], held[-1][name]) for name in held[-1]},
    }


def freeze(led: Job, members: list[Rank]) -> float:
    """Freeze the last of ``members`` for good; seconds from the word to the others' next step."""
    pause(0.3)
    os.kill(members.pop().process.pid or 0, signal.SIGSTOP)
    pause(BLOCKED_AFTER_S)
    word = SYSTEM.monotonic()
    led.over(members)
    return led.step(members) - word


def summed_up(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs of one way: what each measured, and medians."""
    found = {name: [run[name] for run in runs] for name in runs[0]}
    medians = {name: median(chain.from_iterable(found[name])) for name in ("kill_to_next_step_s", "join_s")}
    return {"median": medians, **found}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse("reconfigure", __doc__, argv, repeats=3)
    kills, rounds = (1, QUICK_ROUNDS) if options.quick else (KILLS, ROUNDS)
    able = hasattr(dist, "_reconfigure")
    ways = [way for way in WAYS if way == "groups" or (able and not (options.quick and way == "reconfigure"))]
    calls = {way: partial(measure, way, kills, rounds) for way in ways}
    figures: dict[str, Any] = {way: summed_up(runs) for way, runs in alternate(calls, options.repeats).items()}
    if not able:
        figures["skipped"] = f"reconfigure: torch {torch.__version__} cannot, 2.14 and newer can"
        note(figures["skipped"])
    mine = figures["groups"]
    musts = [
        at_most_time("killed to next step, s", mine["median"]["kill_to_next_step_s"], 0.2),
        at_most_time("second frozen peer to next step, s", median(mine["second_freeze_to_next_step_s"]), 0.2),
        at_most_time("free of a round that does not form, s", median(mine["free_while_forming_s"]), 0.1),
    ]
    return emit(Report(options, figures, musts))


if __name__ == "__main__":
    sys.exit(main())
