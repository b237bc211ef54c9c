"""A job without torch: its ranks commit steps in turn and write the ledger, each round going on where the last was.

Arguments: directory of its state, steps, seconds per step. Rank 0 records a step and then commits it (a file); the
others record what is committed. Step s uses samples 4 (s - 1) to 4 s - 1, divided over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

BATCH = 4


class Recorder:
    """This rank's file in the ledger."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.rank, self.world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        self.ids = {
            "run": environ["TORCHELASTIC_RUN_ID"],
            "node": environ["ELASTIC_TRAINER_NODE"],
            "rank": self.rank,
            "local_rank": int(environ["LOCAL_RANK"]),
            "world": self.world,
            "round": int(environ.get("ELASTIC_TRAINER_ROUND", "1")),
            "pid": os.getpid(),
        }
        name = f"{self.ids['node']}-{self.ids['local_rank']}-{os.getpid()}.jsonl"
        self.file = (Path(environ["ELASTIC_TRAINER_LEDGER_DIR"]) / name).open("a", buffering=1)

    def write(self, event: str, step: int, **fields: object) -> None:
        """One line."""
        line = {"event": event, "t": time.monotonic(), "wall": time.time(), **self.ids, "step": step, "epoch": 0}
        self.file.write(json.dumps({**line, **fields}) + "\n")

    def step(self, step: int) -> None:
        """This rank's share of one step."""
        batch = list(range(BATCH * (step - 1), BATCH * step))
        each = -(-BATCH // self.world)
        share = batch[self.rank * each : (self.rank + 1) * each]
        self.write("step", step, samples=share, global_samples=BATCH, loss=1.0 / step)


def committed(state: Path) -> int:
    """The step that the job has reached."""
    return int(state.read_text()) if state.exists() else 0


def commit(state: Path, step: int) -> None:
    """Make ``step`` the one reached."""
    temporary = state.with_suffix(".new")
    temporary.write_text(str(step))
    os.replace(temporary, state)


def main() -> None:
    """Run this rank to the last step."""
    state, last, pace_s = Path(sys.argv[1]) / "state", int(sys.argv[2]), float(sys.argv[3])
    recorder = Recorder(dict(os.environ))
    step = committed(state)
    recorder.write("opened", step, resumed_from=None)
    print(f"rank {recorder.rank} of {recorder.world} begins at {step}", flush=True)
    clock = threading.Event()
    while step < last:
        clock.wait(pace_s)
        if recorder.rank == 0:
            step += 1
            recorder.step(step)
            commit(state, step)
            continue
        for new in range(step + 1, committed(state) + 1):
            recorder.step(new)
            step = new
    recorder.write("closed", step, status="done")


if __name__ == "__main__":
    main()
