"""A job without torch: its ranks commit steps together and write the ledger, each round going on where the last was.

Arguments: directory of its state, steps, seconds per step and, where one rank is to wait for others at some time, the
last step that it makes alone. Each rank says for which step it is ready; when all ranks of the round are, rank 0
commits it; so it stands still while a rank is missing, as a collective does. Step s uses samples 4 (s - 1) to 4 s - 1,
divided over the ranks.
"""

from __future__ import annotations

import json
import os
import signal
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


def read(path: Path) -> int:
    """The number in a file, 0 without one."""
    return int(path.read_text()) if path.exists() else 0


def write(path: Path, number: int) -> None:
    """Replace the number in a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(str(number))
    os.replace(temporary, path)


def await_number(path: Path, number: int) -> None:
    """Wait until the file holds at least ``number``."""
    never = threading.Event()
    while read(path) < number:
        never.wait(0.005)


def main() -> None:
    """Run this rank to the last step."""
    directory, last, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    alone = int(sys.argv[4]) if len(sys.argv) > 4 else last
    recorder = Recorder(dict(os.environ))
    committed = directory / "committed"
    ready = [directory / f"ready-{recorder.ids['round']}-{rank}" for rank in range(recorder.world)]
    # All ranks begin at the same step: rank 0 says which.
    begin = directory / f"begin-{recorder.ids['round']}"
    if recorder.rank == 0:
        write(begin, read(committed) + 1)
    await_number(begin, 1)
    first = read(begin)
    recorder.write("opened", first - 1, resumed_from=None)
    print(f"rank {recorder.rank} of {recorder.world} begins after step {first - 1}", flush=True)
    for step in range(first, last + 1):
        if step > alone and recorder.world == 1:
            threading.Event().wait()  # torchrun ends this worker for the round with a newcomer
        threading.Event().wait(pace_s)
        write(ready[recorder.rank], step)
        if recorder.rank == 0:
            for other in ready:
                await_number(other, step)
            # torchrun's SIGTERM waits, lest the step is committed and its line is missing.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            write(committed, step)
        await_number(committed, step)
        recorder.step(step)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    recorder.write("closed", last, status="done")


if __name__ == "__main__":
    main()
