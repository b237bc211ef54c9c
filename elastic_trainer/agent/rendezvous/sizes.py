"""The allowed node counts of a round, from ``--nnodes`` and the options. Pure.

*Fails by* ConfigError if none is left, and for counts that do not divide into shard groups.
"""

from __future__ import annotations

import math

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import RendezvousOptions


def allowed_sizes(options: RendezvousOptions, low: int, high: int) -> tuple[int, ...]:
    """Counts from ``low`` to ``high`` that ``sizes``, ``multiple_of``, ``shard_nodes`` allow, ascending; empty: all."""
    named = {int(size) for size in options.sizes.split(":")} if options.sizes else None
    group = options.shard_nodes
    for given, counts in ((f"--nnodes {low}:{high}", {low, high}), (f"sizes={options.sizes}", named or ())):
        if any(count % group for count in counts):
            raise ConfigError(
                f"{given} does not divide into shard groups of {group} nodes (--rdzv-conf shard_nodes={group})",
                hint=f"these numbers count nodes, not groups: use multiples of {group}",
            )
    if named is None and options.multiple_of == group == 1:
        return ()
    step = math.lcm(options.multiple_of, group)
    allowed = tuple(size for size in sorted(named or range(low, high + 1)) if low <= size <= high and size % step == 0)
    if not allowed:
        given = f"sizes={options.sizes}" if options.sizes else f"multiple_of={options.multiple_of}"
        raise ConfigError(
            f"--rdzv-conf {given} allows no node count within --nnodes {low}:{high}", hint="change one of them"
        )
    return allowed
