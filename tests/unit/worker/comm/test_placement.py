"""Which device a process gets."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.placement import GLOO, NCCL, Hardware, choose

NOTHING, TWO_GPUS, MAC = Hardware(0, False), Hardware(2, False), Hardware(0, True)


@pytest.mark.parametrize(
    ("asked", "local_rank", "world", "hardware", "device", "backend"),
    [
        ("auto", 0, 1, NOTHING, "cpu", GLOO),
        ("auto", 1, 2, TWO_GPUS, "cuda:1", NCCL),
        ("cuda", 1, 2, TWO_GPUS, "cuda:1", NCCL),
        ("cuda:0", 1, 2, TWO_GPUS, "cuda:0", NCCL),
        ("cpu", 1, 2, TWO_GPUS, "cpu", GLOO),
        ("auto", 0, 1, MAC, "mps", GLOO),
        ("auto", 0, 2, MAC, "cpu", GLOO),
        ("mps", 0, 1, MAC, "mps", GLOO),
    ],
)
def test_each_process_gets_the_device_that_fits(
    asked: str, local_rank: int, world: int, hardware: Hardware, device: str, backend: str
) -> None:
    """auto prefers CUDA by local rank, then mps where it works, then the CPU; names are obeyed."""
    placement = choose(asked, local_rank, world, hardware)
    assert (str(placement.device), placement.backend) == (device, backend)


@pytest.mark.parametrize(
    ("asked", "local_rank", "world", "hardware", "says"),
    [
        ("cuda", 0, 1, NOTHING, "no CUDA device"),
        ("auto", 2, 3, TWO_GPUS, "needs CUDA device 2, but this machine has 2"),
        ("cuda:5", 0, 1, TWO_GPUS, "needs CUDA device 5"),
        ("mps", 0, 1, NOTHING, "has none"),
        ("mps", 0, 2, MAC, "cannot take part"),
        ("tpu", 0, 1, NOTHING, "'tpu' is unknown"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    asked: str, local_rank: int, world: int, hardware: Hardware, says: str
) -> None:
    """The sentence says what is missing."""
    with pytest.raises(ConfigError, match=says):
        choose(asked, local_rank, world, hardware)


@pytest.mark.parametrize(
    ("asked", "hardware", "backend", "expected"),
    [
        ("cuda:0", TWO_GPUS, "gloo", GLOO),
        ("cuda", TWO_GPUS, "nccl", NCCL),
        ("auto", TWO_GPUS, "auto", NCCL),
        ("cpu", TWO_GPUS, "gloo", GLOO),
    ],
)
def test_a_backend_may_be_asked_for(asked: str, hardware: Hardware, backend: str, expected: str) -> None:
    """gloo lets several processes share a CUDA device."""
    assert choose(asked, 0, 2, hardware, backend).backend == expected


@pytest.mark.parametrize(("backend", "says"), [("mpi", "backend is 'mpi'"), ("nccl", "cannot work on device cpu")])
def test_a_backend_that_cannot_work_is_refused(backend: str, says: str) -> None:
    """With the alternatives."""
    with pytest.raises(ConfigError, match=says):
        choose("cpu", 0, 2, NOTHING, backend)
