"""``python -m tests.simulation SEED``: play one schedule and print its trace."""

from __future__ import annotations

import sys

from tests.simulation.world import play

if __name__ == "__main__":
    print(play(int(sys.argv[1]), print))
