"""A small training that fails in whatever way a test asks for.

A file ``fault-NODE`` in its directory is a piece of Python that the workers of that node run, once; ``fault-all`` is
for all. Its first line says where: ``# start`` (before the Session), ``# data`` (inside the data set), ``# step`` or
``# loss`` (inside a step), ``# between`` (between two steps), ``# save`` (while a checkpoint is written). With ``# step
again`` it stays, and is run each time. It knows ``ids``, the samples of the step, ``session``, ``loss`` and ``torch``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint import Event
from elastic_trainer.clock import pause
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.steps.options import GroupOptions, SavingOptions

SAMPLES, BATCH = 320, 32


class Faults:
    """What the test asks of this worker."""

    def __init__(self, directory: Path, node: str) -> None:
        self._files = (directory / f"fault-{node}", directory / "fault-all")

    def here(self, place: str, **names: Any) -> dict[str, Any]:
        """Run what is asked for at ``place``; its names afterwards."""
        for file in self._files:
            if not file.exists():
                continue
            text = file.read_text()
            head = text.partition("\n")[0].removeprefix("# ").split()
            if head[:1] != [place]:
                continue
            if "again" not in head:
                file.unlink()
            exec(compile(text, file.name, "exec"), names)
        return names


class Rows(torch.utils.data.TensorDataset):
    """Rows of numbers; one of them may be what the test asks for."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(torch.randn(SAMPLES, 16), torch.arange(SAMPLES) % 4)
        self._faults = faults
        self.deterministic = True

    def __getitem__(self, index: int) -> Any:
        self._faults.here("data", index=index, torch=torch)
        return tuple(tensor[index] for tensor in self.tensors)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--save-every", type=float)
    parser.add_argument("--audit", type=int)
    options = parser.parse_args()
    faults = Faults(options.directory, worker_environment().node)
    faults.here("start", torch=torch)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def saving(event: Event) -> None:
        faults.here("save", event=event)

    with Session(
        checkpoint_dir=options.directory / "checkpoints",
        checkpoint_every_s=options.save_every,
        saving=SavingOptions(on_event=saving),
        group=GroupOptions(stop_timeout_s=60.0),
    ) as session:
        network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        model = session.wrap(network, optimizer=optimizer)
        for batch in session.batches(Rows(faults), global_batch_size=BATCH, epochs=10_000):
            with session.step() as step:
                faults.here("step", ids=batch.ids, session=session, torch=torch, model=model, batch=batch)
                loss = nn.functional.cross_entropy(model(batch.x), batch.y)
                step.backward(faults.here("loss", loss=loss, ids=batch.ids)["loss"])
                end = session.all_reduce(torch.tensor(float((options.directory / "stop").exists())))
                optimizer.step()
            if step.committed and end.item():
                break
            faults.here("between", session=session, torch=torch)
            pause(0.03)


if __name__ == "__main__":
    main()
