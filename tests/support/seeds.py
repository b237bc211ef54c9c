"""The seeds of drills that strike by chance."""

from __future__ import annotations

import os
import random

SEED = "ELASTIC_TRAINER_SOAK_SEED"


def seed(*, soak: bool) -> int:
    """The one in the environment; else 1, in a ``soak`` a new one. Printed: setting it plays the same faults again."""
    found = int(os.environ.get(SEED, "0")) or (random.SystemRandom().getrandbits(31) if soak else 1)
    print(f"{SEED}={found}", flush=True)
    return found
