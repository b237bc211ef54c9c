"""The job of the slow_links benchmark: ``slow_links_job.py RESULT RUNS``, JSON lists of the KEY=VALUE of ``gpt`` jobs.

The runs come one after another. Rank 0 writes of each its last loss, and how many bytes it has sent to the other ranks
as the kernel counts them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.task import find_task
from elastic_trainer.jobs.trainer import Run, Trainer

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
    measure(sys.argv[1], json.loads(sys.argv[2]))
