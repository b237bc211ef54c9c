"""A training of a fixed length whose checkpoint disk fails and comes back while it runs: ``lasting.py SCENARIO``.

SCENARIO is a JSON object: ``checkpoints``, ``out``, ``steps``, and ``faults``: ``{step: what}``;
``required``: whether the last save is. What: ``full`` and
``free`` (of the disks in ``disks``), ``read_only`` and ``writable`` (of the first of them), ``die`` (rank 1 kills
itself). Each happens once, behind that step, wherever rank 0 is; ``die`` in it.

It leaves in ``out`` what each ``session.save()`` returned, and the digest of the parameters at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.worker.steps.options import SavingOptions
from tests.support.small_disk import fill

SAMPLES, BATCH, SAVE_EVERY = 96, 16, 4


class Faults:
    def __init__(self, scenario: dict[str, Any]) -> None:
        self._faults: dict[str, str] = scenario["faults"]
        self._disks = [Path(each) for each in scenario.get("disks", ())]
        self._out = Path(scenario["out"])

    def behind(self, step: int, rank: int) -> None:
        what = self._faults.get(str(step), "")
        if what == "die" and rank == 1 and self._first(step):
            os.kill(os.getpid(), signal.SIGKILL)
        elif what and what != "die" and rank == 0 and self._first(step):
            self._strike(what)

    def _first(self, step: int) -> bool:
        try:
            (self._out / f"fault-{step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, what: str) -> None:
        shielded = str(self._disks[0]) if self._disks else ""
        if what == "read_only":  # for whoever opens anything from now on: to remount it would take that no file is open
            for options in (["--bind", shielded, shielded], ["-o", "remount,bind,ro", shielded]):
                subprocess.run(["mount", *options], check=True, timeout=60)
        elif what == "writable":
            subprocess.run(["umount", "--lazy", shielded], check=True, timeout=60)
        for disk in self._disks:
            if what == "full":
                fill(disk)
            elif what == "free":
                (disk / "ballast").unlink()


def main() -> None:
    scenario = json.loads(sys.argv[1])
    out, faults = Path(scenario["out"]), Faults(scenario)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 64), torch.arange(SAMPLES) % 4)
    model: nn.Module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Session(
        scenario["checkpoints"],
        seed=1,
        device="cpu",
        checkpoint_every_steps=7,
        keep_last=2,
        saving=SavingOptions(require_last_save=scenario.get("required", False)),
    ) as session:
        model = session.wrap(model, optimizer=optimizer, reduction="tree")
        for batch in session.batches(data, global_batch_size=BATCH, micro_batch_size=4, epochs=10_000):
            with session.step() as step:
                for micro in step.micro_batches(batch):
                    step.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
                optimizer.step()
            if not step.committed:
                continue
            at = session.step_number
            if at % SAVE_EVERY == 0:
                name = session.save({"step": at}, wait=True)
                with (out / f"saves-{session.rank}.jsonl").open("a") as file:
                    file.write(json.dumps([at, name]) + "\n")
            faults.behind(at, session.rank)
            if at >= scenario["steps"]:
                break
        (out / f"digest-{session.rank}").write_text(str(fingerprint(session.module.state_dict())))


if __name__ == "__main__":
    main()
