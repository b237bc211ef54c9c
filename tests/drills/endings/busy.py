"""A small in-place training that is busy for as long as files want it to; the test decides its end as in ``train``.

``evaluate``: behind the next step all ranks do something of their own until ``marked`` is there, then evaluate until
``free`` is. ``slow``: they save and wait for it, which takes until ``free`` is there. ``stick-NODE``: that node's
worker never comes back from an evaluation. Whoever is busy has written ``busy-NODE``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint.manager import Event, Transition
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.worker.steps.options import SavingOptions
from tests.drills.endings.train import BATCH, begun, built

FOREVER_S = 600.0
"""More than a test."""


class Work:
    """What the script does beside its steps."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.session: Session | None = None
        self._slow = False

    def asked(self, name: str) -> bool:
        return (self._directory / name).exists()

    def save_slowly(self, session: Session) -> None:
        """On all ranks; rank 0 waits for storage."""
        self._slow = True
        session.save(wait=True)

    def hold_save(self, event: Event) -> None:
        """On rank 0, in the middle of a save."""
        if event.kind is Transition.COMMITTED and self._slow:
            self._slow = False
            self._begin()
            self._until("free")

    def evaluate(self, session: Session) -> None:
        stick = self.asked(f"stick-{session.environment.node}")
        self._begin()
        self._until("marked")
        with session.phase("evaluation"):
            self._until("never" if stick else "free")

    def _until(self, name: str) -> None:
        deadline = Deadline.after(FOREVER_S)
        while not self.asked(name) and not deadline.expired:
            pause(0.02)

    def _begin(self) -> None:
        if self.session is not None:
            (self._directory / f"busy-{self.session.environment.node}").touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    data = begun()
    work = Work(directory)
    with Session(
        checkpoint_dir=directory / "checkpoints",
        checkpoint_every_s=None,
        checkpoint_every_steps=50,
        saving=SavingOptions(on_event=work.hold_save),
    ) as session:
        work.session = session
        model, optimizer = built()
        model = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=BATCH, epochs=10_000):
            with session.step() as step:
                step.backward(nn.functional.cross_entropy(model(batch.x), batch.y))
                wishes = torch.tensor([float(work.asked(name)) for name in ("stop", "evaluate", "slow")])
                end, evaluate, slow = session.all_reduce(wishes).tolist()
                optimizer.step()
            if not step.committed:
                continue
            step.loss  # noqa: B018 - a collective of its own
            if end:
                break
            if evaluate:
                work.evaluate(session)
            if slow:
                work.save_slowly(session)
            pause(0.02)


if __name__ == "__main__":
    main()
