"""Which device and backend a process gets."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.placement import GLOO, NCCL, Hardware, choose

NOTHING, TWO_GPUS, MAC = Hardware(0, False), Hardware(2, False), Hardware(0, True)


@pytest.mark.parametrize(
    ("device", "local_rank", "world", "hardware", "wanted", "chosen", "backend"),
    [
        ("auto", 0, 1, NOTHING, "auto", "cpu", GLOO),
        ("auto", 1, 2, TWO_GPUS, "auto", "cuda:1", NCCL),
        ("cuda", 1, 2, TWO_GPUS, "nccl", "cuda:1", NCCL),
        ("cuda:0", 1, 2, TWO_GPUS, "auto", "cuda:0", NCCL),
        ("cuda:0", 1, 2, TWO_GPUS, "gloo", "cuda:0", GLOO),
        ("cpu", 1, 2, TWO_GPUS, "auto", "cpu", GLOO),
        ("auto", 0, 1, MAC, "auto", "mps", GLOO),
        ("auto", 0, 2, MAC, "auto", "cpu", GLOO),
        ("mps", 0, 1, MAC, "auto", "mps", GLOO),
    ],
)
def test_each_process_gets_the_device_and_backend_that_fit(
    device: str, local_rank: int, world: int, hardware: Hardware, wanted: str, chosen: str, backend: str
) -> None:
    """auto prefers CUDA by local rank, then mps where it works, then the CPU; gloo lets processes share a device."""
    placement = choose(device, local_rank, world, hardware, wanted)
    assert (str(placement.device), placement.backend) == (chosen, backend)


@pytest.mark.parametrize(
    ("device", "local_rank", "world", "hardware", "backend", "says"),
    [
        ("cuda", 0, 1, NOTHING, "auto", "no CUDA device"),
        ("auto", 2, 3, TWO_GPUS, "auto", "needs CUDA device 2, but this machine has 2"),
        ("cuda:5", 0, 1, TWO_GPUS, "auto", "needs CUDA device 5"),
        ("mps", 0, 1, NOTHING, "auto", "has none"),
        ("mps", 0, 2, MAC, "auto", "cannot take part"),
        ("tpu", 0, 1, NOTHING, "auto", "'tpu' is unknown"),
        ("cpu", 0, 2, NOTHING, "mpi", "backend is 'mpi'"),
        ("cpu", 0, 2, NOTHING, "nccl", "cannot work on device cpu"),
    ],
)
def test_a_missing_device_or_impossible_backend_is_refused(
    device: str, local_rank: int, world: int, hardware: Hardware, backend: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(device, local_rank, world, hardware, backend)
