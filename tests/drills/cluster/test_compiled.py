"""A compiled model in restart mode: what was compiled once is compiled nowhere again, and changes no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.workers.compile_cache import Home, home_of, look
from elastic_trainer.local.cluster import ClusterSpec
from tests.support.plainjob import QUICK
from tests.support.requirements import needs
from tests.support.running import Running

SCRIPT = Path(__file__).with_name("compiled.py")
LIMIT_S = 500.0
"""A cold compilation takes half a minute of two free cores."""


class CompiledJob(Running):
    def __init__(self, directory: Path, endpoint: str, run: str) -> None:
        super().__init__(
            ClusterSpec(
                run=run,
                directory=directory,
                endpoint=endpoint,
                entry=[str(SCRIPT), str(directory), f"--checkpoint-dir={directory / 'checkpoints'}"],
                min_nodes=1,
                max_nodes=2,
                max_restarts=100,
                options=QUICK | {"last_call": "0", "stop_grace": "1"},
                environment={"OMP_NUM_THREADS": "1"},
            )
        )

    def lives(self, node: str) -> list[dict[str, Any]]:
        """What the worker of each life wrote once it had made its steps."""
        path = self.spec.directory / f"{node}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_lives(self, node: str, count: int) -> dict[str, Any]:
        self.wait_for(lambda: len(self.lives(node)) >= count, f"{node} has not made its steps {count} times", LIMIT_S)
        return self.lives(node)[count - 1]

    def events(self, node: str, event: str) -> list[dict[str, Any]]:
        path = self.spec.logs / f"{node}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [json.loads(line[line.index("{") :]) for line in lines if f'"{event}"' in line]

    def await_published(self, node: str) -> None:
        """Wait until the newest bundle holds all that the node has, also what its template compiled."""
        root = Path(f"/proc/{self.hosts[node].pid}/root") if node in self.hosts else Path("/")
        place = home_of(str(SCRIPT))
        home = Home(place.key, root / place.cache.relative_to("/"), root / place.headers.relative_to("/"))

        def whole() -> bool:
            published = self.events(node, "compile_cache.published")
            return bool(published) and published[-1]["files"] == len(look(home))

        self.wait_for(whole, "not all was published", LIMIT_S)

    def bundle(self) -> Path:
        (found,) = self.spec.directory.glob("checkpoints/compile-cache-*/bundle")
        return found


@pytest.mark.timeout(1500)
def test_what_one_worker_compiled_no_other_compiles_again(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Not the one that follows when it is killed, nor that of a node which joins on a host of its own, and the losses
    are to the bit those of the worker that compiled. A bundle that was changed in the directory is refused by the next
    start, which compiles for itself, with the same losses."""
    needs("g++", "compiles kernels for the CPU")
    with CompiledJob(tmp_path, etcd_endpoint, run_id) as job:
        job.start(1)
        cold = job.await_lives("n0", 1)
        assert cold["compiled"]
        job.await_published("n0")
        assert job.node("n0").kill_worker() is not None
        warm = job.await_lives("n0", 2)
        assert (warm["compiled"], warm["losses"]) == ([], cold["losses"])

        job.add()
        joined, again = job.await_lives("n1", 1), job.await_lives("n0", 3)
        (fetched,) = job.events("n1", "compile_cache.fetched")
        assert fetched["source"] == "n0"
        assert joined["compiled"] == again["compiled"] == []
        assert joined["losses"] == again["losses"] == cold["losses"]
        assert job.events("n1", "compile_cache.published") == []

    content = bytearray((bundle := job.bundle()).read_bytes())
    content[len(content) // 2] ^= 1
    bundle.write_bytes(content)
    for each in tmp_path.glob("n*.jsonl"):
        each.unlink()
    with CompiledJob(tmp_path, etcd_endpoint, run_id) as job:
        job.start(1)
        alone = job.await_lives("n0", 1)
        assert job.events("n0", "compile_cache.refused")[0]["source"] == str(tmp_path / "checkpoints")
        assert alone["losses"] == cold["losses"]
        if job.hosts:  # else the directory of the first start is still there
            assert alone["compiled"]
