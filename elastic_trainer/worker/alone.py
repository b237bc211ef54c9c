"""Lets frameworks believe that this process is alone: they place no data, average no gradients and save no checkpoint.

What they read is hidden: the variables of torchrun (and of SLURM and MPI, which they try next), and
``torch.distributed.is_initialized()``, which stays true for torch itself.

*Runs in* the worker's main thread. *Owns* these variables and that function from :func:`hide` until it is undone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch.distributed as dist

_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
)
_SEE = ("torch", "elastic_trainer")
"""Packages for which the process group is there."""


def hidden() -> bool:
    """Whether frameworks see no ranks here: hidden, or never there."""
    return "RANK" not in os.environ and (dist.is_initialized.__module__ == __name__ or not dist.is_initialized())


def hide() -> Callable[[], None]:
    """Hide the ranks; returns what shows them again."""
    kept = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    real = dist.is_initialized

    def is_initialized() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return real() if caller.partition(".")[0] in _SEE else False

    dist.is_initialized = is_initialized

    def show() -> None:
        dist.is_initialized = real
        os.environ.update(kept)

    return show
