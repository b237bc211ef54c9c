"""Which numbers of nodes a round may have, from ``--nnodes`` and the options. Pure.

*Fails by* ConfigError if none is left.
"""

from __future__ import annotations

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import RendezvousOptions


def allowed_sizes(options: RendezvousOptions, low: int, high: int) -> tuple[int, ...]:
    """Those from ``low`` to ``high`` that ``sizes`` and ``multiple_of`` allow, rising; empty: all."""
    if options.sizes is None and options.multiple_of == 1:
        return ()
    named = {int(size) for size in options.sizes.split(":")} if options.sizes else range(low, high + 1)
    allowed = tuple(sorted(size for size in named if low <= size <= high and size % options.multiple_of == 0))
    if not allowed:
        given = f"sizes={options.sizes}" if options.sizes else f"multiple_of={options.multiple_of}"
        raise ConfigError(
            f"--rdzv-conf {given} allows no number of nodes of --nnodes {low}:{high}", hint="change one of them"
        )
    return allowed
