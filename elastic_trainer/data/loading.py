"""How samples are fetched: the options of ``Session.batches`` that change when and where, never what."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import torch

from elastic_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loading:
    """``workers`` processes fetch ``prefetch`` micro-batches each ahead of use; with 0, samples are fetched on demand.
    ``pin_memory`` None: when the device is CUDA. ``bad_samples`` is raise or skip; ``max_bad_fraction`` of this rank's
    samples of an epoch may be bad before the job fails. ``multiprocessing_context`` is fork, spawn or forkserver.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool | None = None
    bad_samples: str = "raise"
    max_bad_fraction: float = 0.01
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers is {self.workers}", hint="it must not be negative")
        if self.prefetch < 1:
            raise ConfigError(f"prefetch is {self.prefetch}", hint="it must be at least 1")
        if self.bad_samples not in ("raise", "skip"):
            raise ConfigError(f"bad_samples is {self.bad_samples!r}", hint="use 'raise' or 'skip'")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise ConfigError(f"max_bad_fraction is {self.max_bad_fraction}", hint="it must be between 0 and 1")
        known = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context is not None and self.multiprocessing_context not in known:
            raise ConfigError(
                f"multiprocessing_context is {self.multiprocessing_context!r}", hint=f"use one of {', '.join(known)}"
            )

    def pins(self, device: torch.device) -> bool:
        """Whether batches for ``device`` pass through pinned memory; never where there is no CUDA to copy to."""
        wanted = self.pin_memory is None or self.pin_memory
        return wanted and device.type == "cuda"
