"""Nodes whose wall clocks can be moved, one by one, while they run (see ``tests/support/clockshift.c``).

*Runs in* the main thread of the test. *Owns* a library, and one file for each node, in the directory that it is given.
*Fails by* a skipped test where there is no C compiler (in CI by a failed one).
*Invariant*: monotonic clocks stay as they are; nothing outside the nodes sees another time.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from tests.support.requirements import needs

SOURCE = Path(__file__).parents[2] / "support" / "clockshift.c"


class MovedClocks:
    """``directory`` also holds the temporary files of all nodes, in ``tmp``."""

    def __init__(self, directory: Path) -> None:
        compiler = needs("gcc", "it compiles what moves the clocks of single nodes")
        self._directory, self._library, self.temporary = directory, directory / "clockshift.so", directory / "tmp"
        self.temporary.mkdir(parents=True)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", self._library, SOURCE], check=True)

    def cluster(self, spec: ClusterSpec) -> LocalCluster:
        """The nodes of a run (see drills/harness.Clusters)."""
        return _Cluster(spec, self)

    def move(self, node: str, seconds: float) -> None:
        """Set the clock of ``node`` to the right time and ``seconds``, which are rounded, all of a sudden."""
        with self._file(node).open("r+b") as file:
            file.write(struct.pack("=q", round(seconds)))

    def variables(self, node: str) -> dict[str, str]:
        """Of the environment of a node that starts, at the right time."""
        self._file(node).write_bytes(bytes(8))
        return {
            "LD_PRELOAD": str(self._library),
            "CLOCKSHIFT_FILE": str(self._file(node)),
            "TMPDIR": str(self.temporary),
        }

    def _file(self, node: str) -> Path:
        return self._directory / f"{node}.clock"


class _Cluster(LocalCluster):
    """Its nodes start by ``env``, which preloads the library."""

    def __init__(self, spec: ClusterSpec, clocks: MovedClocks) -> None:
        super().__init__(spec)
        self._clocks = clocks

    def command(self, name: str) -> list[str]:
        return ["env", *(f"{key}={text}" for key, text in self._clocks.variables(name).items()), *super().command(name)]
