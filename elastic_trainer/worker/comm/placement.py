"""The device on which this process computes, and the backend that reduces its gradients.

*Runs in* the worker's main thread, once. *Owns* the process's current CUDA device.
*Fails by* ConfigError when the requested device is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from elastic_trainer.errors import ConfigError

_NAME = re.compile(r"auto|cpu|mps|cuda(:(\d{1,3}))?")
NCCL = "cpu:gloo,cuda:nccl"
GLOO = "gloo"
AUTO = "auto"
BACKENDS = (AUTO, "gloo", "nccl")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, and the ``torch.distributed`` backend for it."""

    device: torch.device
    backend: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of this machine."""

    cuda_devices: int
    mps: bool

    @classmethod
    def present(cls) -> Hardware:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(cuda_devices=count, mps=torch.backends.mps.is_available())


def choose(asked: str, local_rank: int, world_size: int, hardware: Hardware, backend: str = AUTO) -> Placement:
    """The placement for the device ``asked`` (auto, cpu, mps, cuda or cuda:N). Pure; raises ConfigError.

    ``backend`` "gloo" lets several processes share one CUDA device, which NCCL refuses.
    """
    placement = _placement(asked, local_rank, world_size, hardware)
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}", hint=f"use one of {', '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and placement.backend != NCCL:
        raise ConfigError(f"backend 'nccl' cannot work on device {placement.device}", hint="omit it")
    return Placement(placement.device, GLOO) if backend == "gloo" else placement


def _placement(asked: str, local_rank: int, world_size: int, hardware: Hardware) -> Placement:
    match = _NAME.fullmatch(asked)
    if match is None:
        raise ConfigError(f"device {asked!r} is unknown", hint="use auto, cpu, cuda, cuda:N or mps")
    if asked.startswith("cuda") or (asked == "auto" and hardware.cuda_devices):
        return _cuda(asked, int(match[2]) if match[2] else local_rank, hardware)
    if asked == "mps" or (asked == "auto" and hardware.mps and world_size == 1):
        return _mps(world_size, hardware)
    return Placement(torch.device("cpu"), GLOO)


def _cuda(asked: str, index: int, hardware: Hardware) -> Placement:
    if not hardware.cuda_devices:
        raise ConfigError(
            f"device {asked!r} was requested, but this machine has no CUDA device", hint="use device='auto' or 'cpu'"
        )
    if index >= hardware.cuda_devices:
        raise ConfigError(
            f"this process needs CUDA device {index}, but this machine has {hardware.cuda_devices}",
            hint=f"start at most {hardware.cuda_devices} processes per node (--nproc-per-node), or use device='cpu'",
        )
    return Placement(torch.device("cuda", index), NCCL)


def _mps(world_size: int, hardware: Hardware) -> Placement:
    if not hardware.mps:
        raise ConfigError("device 'mps' was requested, but this machine has none", hint="use device='auto' or 'cpu'")
    if world_size > 1:
        raise ConfigError("device 'mps' cannot take part in distributed training", hint="use device='cpu'")
    return Placement(torch.device("mps"), GLOO)


def take(asked: str, local_rank: int, world_size: int, backend: str = AUTO) -> Placement:
    """Choose the device of this process and make it current."""
    placement = choose(asked, local_rank, world_size, Hardware.present(), backend)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    return placement
