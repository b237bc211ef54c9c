"""A small training that writes what one of its behaviours crosses: ``walk.py BEHAVIOUR RESULT [DIRECTORY]``.

BEHAVIOUR is ``step`` (one committed step), ``save`` (``session.save(wait=True)``), ``resume`` (``session.wrap()`` of a
state in DIRECTORY), or ``recovery`` (from the step behind which rank 1 kills itself to the next one, in the survivor).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import elastic_trainer
from elastic_trainer import Session
from tests.unit.worker.toys import data, loss_of, model

PACKAGE = f"{Path(elastic_trainer.__file__).parent}{os.sep}"
STEPS, AT = 40, 12


class Walk:
    """The package's files in the order in which all threads of this process call their functions."""

    def __init__(self) -> None:
        self.crossed: list[tuple[int, str]] = []
        self.on = False
        threading.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self.on and event == "call" and name.startswith(PACKAGE):
            self.crossed.append((threading.get_ident(), name.removeprefix(PACKAGE)))

    def begin(self) -> None:
        self.on = True
        sys.setprofile(self._see)

    def end(self) -> None:
        """Write the files, and the returns: how often a thread comes back to a file that it has left."""
        self.on = False
        sys.setprofile(None)
        returns = 0
        for thread in {each for each, _ in self.crossed}:
            seen: set[str] = set()
            last = ""
            for name in (name for each, name in self.crossed if each == thread):
                returns += name != last and name in seen
                seen.add(name)
                last = name
        found = {"files": sorted({name for _, name in self.crossed}), "returns": returns}
        Path(sys.argv[2]).write_text(json.dumps(found))


def main() -> None:
    behaviour, walk = sys.argv[1], Walk()
    directory = sys.argv[3] if len(sys.argv) > 3 else None
    with Session(device="cpu", checkpoint_dir=directory, checkpoint_every_s=None) as session:
        torch.manual_seed(1)
        module = model()
        optimizer = torch.optim.AdamW(module.parameters())
        if behaviour == "resume":
            walk.begin()
        wrapped = session.wrap(module, optimizer=optimizer)
        if behaviour == "resume":
            walk.end()
        batches = iter(session.batches(data(400), global_batch_size=10, steps=STEPS))
        while (batch := next(batches, None)) is not None:
            with session.step() as step:
                step.backward(loss_of(wrapped, batch))
                optimizer.step()
            if walk.on and step.committed:
                walk.end()
            elif behaviour in ("step", "recovery") and step.number == AT:
                if session.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                walk.begin()
        if behaviour == "save":
            walk.begin()
            session.save(wait=True)
            walk.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
