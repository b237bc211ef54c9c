"""What training apart saves and costs: bytes sent and final loss of LocalSGD and DiLoCo beside DDP's, on ``gpt``.

All train on the same tokens in the same order, on two ranks, a model of two layers. The loss is that of the validation
text. The outer optimizer has less momentum than in the paper, since there are only 40 outer steps.

``job RESULT RUNS`` is the job: RUNS are JSON lists of the KEY=VALUE of ``gpt`` jobs, which come one after another.
Rank 0 writes of each its last loss, and how many bytes it has sent to the other ranks as the kernel counts them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.task import find_task
from elastic_trainer.jobs.trainer import Run, Trainer
from tests.bench.report import Report, at_least, at_most, emit, median, note, parse, taken

LIMIT_S = 1800.0
OUTER = ("outer_lr=1.0", "outer_momentum=0.5")


@dataclass(frozen=True, slots=True)
class Size:
    """What is compared, steps of the run and between two synchronisations, and the shape of job and model."""

    reductions: tuple[str, ...]
    steps: int
    every: int
    tokens: int
    shape: tuple[str, ...]

    def run(self, reduction: str, seed: int, directory: str) -> list[str]:
        apart = [] if reduction == "ddp" else [f"sync_every={self.every}", *(OUTER if reduction == "diloco" else ())]
        length = [f"options.batch_tokens={self.tokens}", f"options.max_tokens={self.steps * self.tokens}"]
        looks = ["evaluation.every_steps=null", "evaluation.every_epochs=null", "options.sample_tokens=0"]
        where = [f"seed={seed}", f"checkpoint.directory={directory}/{reduction}"]
        return [f"reduction={reduction}", *apart, *length, *looks, *where, *self.shape]


FULL = Size(("ddp", "local_sgd", "diloco"), 1200, 30, 2048, ("model.layers=2", "model.width=64"))
QUICK = Size(("ddp", "diloco"), 20, 10, 512, ("model.layers=1", "model.width=32", "data.validation_fraction=0.001"))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("slow_links", __doc__, argv, repeats=2)
    size = QUICK if options.quick else FULL
    repeats = []
    for repeat in range(options.repeats):
        note(f"{repeat + 1} of {options.repeats}")
        with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place:
            runs = json.dumps([size.run(each, repeat, place) for each in size.reductions])
            found: Any = taken(Path(__file__), 2, runs, limit_s=LIMIT_S)
        repeats.append(dict(zip(size.reductions, found, strict=True)))
    less = median([each["ddp"]["bytes"] / each["diloco"]["bytes"] for each in repeats])
    losses = {name: median([each[name]["loss"] for each in repeats]) for name in size.reductions}
    musts = [at_least("DDP's bytes over DiLoCo's, for each step of an outer step", less / size.every, 0.9)]
    if not options.quick:
        musts.append(at_most("DiLoCo's final loss over DDP's", losses["diloco"] / losses["ddp"], 1.02))
    figures = {"sync_every": size.every, "times_less_bytes": less, "loss": losses, "repeats": repeats}
    return emit(Report(options, figures, musts))


# ---- the job

SENT_AT = 200
"""Where ``tcp_info`` of linux/tcp.h holds tcpi_bytes_sent."""


def bytes_sent() -> int:
    """Over the TCP connections that this process has now."""
    total = 0
    for each in psutil.Process().net_connections("tcp"):
        with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:  # one may be closing
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT_AT + 8)
            total += struct.unpack_from("Q", info, SENT_AT)[0]
    return total


def measure(result: str, runs: Sequence[Sequence[str]]) -> None:
    """Count from the first step, when all ranks have one state, until the last one, while no rank has left."""
    train, sent = Run.train, []

    def counted(self: Run) -> None:
        before = bytes_sent()
        train(self)
        sent.append(bytes_sent() - before)

    Run.train = counted  # type: ignore[method-assign]
    found: list[dict[str, Any]] = []
    for overrides in runs:
        config = load_job("gpt", overrides)
        report = Trainer(find_task(config.task), config).run()
        found.append({"steps": report["step"], "loss": report["metrics"]["loss"], "bytes": sent[-1]})
    if report["rank"] == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        measure(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
