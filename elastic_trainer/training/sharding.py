"""The first values of a sharded model: drawn whole, one parameter at a time, so that they depend on the seed alone.

*Runs in* each worker, main thread, before the session wraps the model.
*Fails by* CheckpointError for a shard that is not a box of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from elastic_trainer.checkpoint.sharded import box_of, local


@contextmanager
def whole(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """What to fill with the first values of ``parameter``: itself, or if it is a shard the whole, of which a part is
    kept. Every rank draws the same numbers, from torch's generator."""
    if not isinstance(parameter, DTensor):
        yield parameter
        return
    filled = torch.empty(parameter.shape, dtype=parameter.dtype)
    yield filled
    offset, shape = box_of(parameter)
    for dimension, (first, length) in enumerate(zip(offset, shape, strict=True)):
        filled = filled.narrow(dimension, first, length)
    with torch.no_grad():
        local(parameter).copy_(filled)
