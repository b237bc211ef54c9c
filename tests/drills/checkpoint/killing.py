"""Kill a process that saves checkpoints, at a random moment, again and again; then look at what it left."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.checkpoint import BackgroundSaves, CheckpointManager, Retention, SaveInfo
from elastic_trainer.checkpoint.manifest import Kind, kind_of
from elastic_trainer.checkpoint.storage import open_storage
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry import logs
from tests.unit.checkpoint.states import load_newest, records, same

Saver = Callable[[Any, Connection], None]
COUNT = "ELASTIC_TRAINER_SAVE_KILLS"
"""The variable for how many kills the long forms of these drills make."""
START_LIMIT_S = 300.0
ELEMENTS = 500_000
SAVES = 3
"""A life lasts for up to so many saves, however long the disk takes for one, and for a part of one more."""


def content(step: int) -> dict[str, Any]:
    """What the state of ``step`` holds: every element depends on the step."""
    base = torch.arange(ELEMENTS, dtype=torch.float32)
    return {
        "model": {"w": base + step, "b": torch.full((1000,), step, dtype=torch.int64)},
        "optimizer": {0: (base * 0.5 - step).to(torch.bfloat16)},
        "step": step,
    }


def holds(state: dict[str, Any], step: int) -> bool:
    return same(state, content(step))


def resumed(directory: str | Path, say: Connection) -> tuple[CheckpointManager, int]:
    """A manager, and the step of the newest checkpoint, which it says."""
    torch.set_num_threads(1)
    checkpoints = CheckpointManager(directory, Retention(keep_last=2))
    checkpoints.sweep()
    found = load_newest(checkpoints)
    step = 0 if found is None else int(found.state["step"])
    say.send(step)
    return checkpoints, step


def save_for_ever(directory: str | Path, say: Connection) -> None:
    """Save one step after the other; say each that save() has returned from."""
    checkpoints, step = resumed(directory, say)
    while True:
        step += 1
        checkpoints.save(content(step), SaveInfo(step=step))
        say.send(step)


def save_beside_for_ever(directory: str | Path, say: Connection) -> None:
    """The same beside training: the state changes as soon as its copy is taken. Say each step that was committed."""
    checkpoints, step = resumed(directory, say)
    saves, state = BackgroundSaves(checkpoints), content(step)
    while True:
        step += 1
        following = content(step)
        for name, tensor in state["model"].items():
            tensor.copy_(following["model"][name])
        state["optimizer"][0].copy_(following["optimizer"][0])
        info = SaveInfo(step=step)
        saves.submit(checkpoints.encode(state | {"step": step}, info), checkpoints.draft(info))
        for tensor in (*state["model"].values(), state["optimizer"][0]):
            tensor.fill_(-1)
        for save in saves.take_ended():
            say.send(save.manifest.step)


def save_together_for_ever(directory: str | Path, say: Connection) -> None:
    """The same with files that a co-writer in another thread writes too, which the kill takes as well."""
    checkpoints, step = resumed(directory, say)
    while True:
        step += 1
        image = checkpoints.encode(content(step), SaveInfo(step=step), parts=3)
        manifest, stop = checkpoints.draft(SaveInfo(step=step)).with_files(records(image)), threading.Event()
        other = CheckpointManager(directory)
        co_writer = threading.Thread(target=other.write_share, args=(image, manifest, 1, stop), daemon=True)
        co_writer.start()
        checkpoints.commit(image, manifest)
        say.send(step)
        stop.set()
        co_writer.join()


@dataclass(slots=True)
class Casualties:
    """What the kills did. ``interrupted`` counts those that hit a save half-way."""

    saves: int = 0
    interrupted: int = 0
    broken: list[str] = field(default_factory=list)

    def check(self) -> None:
        """All that were committed are whole, and the drill has proved it."""
        assert self.broken == []
        assert self.saves > 0
        assert self.interrupted > 0, "no kill hit a save: the drill proved nothing"


def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "elastic_trainer.checkpoint", __name__, "tests.support.frozen"])
    return context


def one_life(saver: Saver, directory: str | Path, saves: int, part: float, longest_s: float) -> tuple[int, int]:
    """Run ``saver``, SIGKILL it a random time behind its first ``saves`` saves; first and last step that it said.

    That time is ``part`` of ``longest_s``, or of what a save took if that is longer.
    """
    context = forks()
    hear, say = context.Pipe(duplex=False)
    child = context.Process(target=_live, args=(saver, directory, say, dict(os.environ)), daemon=True)
    child.start()
    say.close()
    try:
        first = last = _next_step(hear)
        took_s = 0.0
        for _ in range(saves):
            began = SYSTEM.monotonic()
            last = _next_step(hear)
            took_s = SYSTEM.monotonic() - began
        pause(part * max(longest_s, took_s))
    finally:
        child.kill()
        child.join(START_LIMIT_S)
    if child.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the saving process ended by itself with {child.exitcode}")
    try:
        while hear.poll(0):
            last = int(hear.recv())
    except EOFError:
        pass
    hear.close()
    return first, last


def _live(saver: Saver, directory: str | Path, say: Connection, environment: Mapping[str, str]) -> None:
    """The process that forks has the environment of its own start."""
    os.environ.update(environment)
    logs.configure(level="error")
    saver(directory, say)


def _next_step(hear: Connection) -> int:
    if not hear.poll(START_LIMIT_S):
        raise TimeoutError(f"the saving process said nothing within {START_LIMIT_S} s")
    return int(hear.recv())


def kill_savers(
    directory: str | Path, kills: int, seed: int, longest_s: float = 0.15, saver: Saver = save_for_ever
) -> Casualties:
    """Kill a process that runs ``saver`` ``kills`` times; after each the newest checkpoint must hold what it should.

    One that goes on while it saves may have committed one more copy before it said so.
    """
    draw = random.Random(seed)
    result = Casualties()
    for _ in range(kills):
        first, said = one_life(saver, directory, draw.randrange(SAVES), draw.random(), longest_s)
        result.saves += said - first
        kinds = set(map(kind_of, open_storage(directory).names()))
        result.interrupted += bool(kinds & {Kind.TEMPORARY, Kind.TRASH})
        problem = problem_with(directory, said, 2 if saver is save_beside_for_ever else 1)
        if problem:
            result.broken.append(problem)
    return result


def problem_with(directory: str | Path, said: int, ahead: int) -> str:
    """What is wrong with the newest checkpoint after a writer died that had said ``said``; empty if nothing is.

    It may be up to ``ahead`` steps newer.
    """
    try:
        found = load_newest(CheckpointManager(directory))
    except CheckpointError as error:
        return str(error)
    if found is None:
        return f"step {said} was committed and nothing is there" if said else ""
    step = found.manifest.step
    if not said <= step <= said + ahead:
        return f"step {said} was committed, the newest is {step}"
    names = sorted(open_storage(directory).names())
    if any(kind_of(name) is Kind.QUARANTINED for name in names):
        return f"something was quarantined: {names}"
    return "" if holds(found.state, step) else f"step {step} holds something else"
