"""Which box of a DTensor a rank holds, and which rank writes it: all boxes together are the tensor, each once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import empty as distributed
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_trainer.checkpoint import CheckpointManager, LoadInto, SaveInfo, ShardGroup, codec
from elastic_trainer.checkpoint.layout import STATE_FILE, place_of
from elastic_trainer.checkpoint.manifest import CHUNK
from elastic_trainer.checkpoint.storage import ByteSource, PosixStorage
from elastic_trainer.checkpoint.storage.posix import PosixSource
from elastic_trainer.checkpoint.tensors import TensorSlice, assemble
from elastic_trainer.errors import CheckpointError


@contextmanager
def rank(number: int, size: int) -> Iterator[None]:
    """This process as rank ``number`` of ``size``, whose operations do nothing."""
    dist.init_process_group("fake", rank=number, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def held(
    shape: Sequence[int], mesh_shape: tuple[int, ...], make: Callable[[DeviceMesh, Sequence[int]], torch.Tensor]
) -> list[list[TensorSlice]]:
    """What each rank of a mesh writes of a tensor."""
    found, size = [], math.prod(mesh_shape)
    for number in range(size):
        with rank(number, size):
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b", "c")[: len(mesh_shape)])
            encoder = codec._Encoder(ShardGroup(mesh))
            encoder.value({"t": make(mesh, shape)}, ())
            found.append(encoder._held)
    return found


SHAPES = [(8, 6), (7, 5), (1, 3), (3, 1), (2, 9), (0, 4)]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((1,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((5,), [Replicate()]),
        ((2, 3), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((3, 2), [Shard(1), Replicate()]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), Shard(1)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=2), Shard(1), Shard(0)]),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_boxes_of_all_ranks_are_the_tensor(
    mesh: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    """Even, uneven and empty shards; what is replicated is written once."""
    parts = held(shape, mesh, lambda found, size: distributed(size, device_mesh=found, placements=placements))
    (whole,) = assemble((each for part in parts for each in part), "here")
    assert (whole.name, whole.shape) == ("t", shape)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_tensor_of_a_part_of_the_mesh_is_written_by_the_first_such_part(name: str) -> None:
    """One that tensor parallel leaves alone is sharded by FSDP over each column of the mesh, alike."""
    parts = held((7, 3), (2, 3), lambda mesh, size: distributed(size, device_mesh=mesh[name], placements=[Shard(0)]))
    assert [number for number, part in enumerate(parts) if part] == ([0, 3] if name == "a" else [0, 1, 2])
    (whole,) = assemble((each for part in parts for each in part), "here")
    assert whole.shape == (7, 3)


def test_only_place_0_writes_what_is_not_sharded() -> None:
    state = {"plain": torch.randn(3), "step": 7, "bytes": b"x" * 9000}
    for number in range(2):
        with rank(number, 2):
            image = codec.encode(state, places=ShardGroup(init_device_mesh("cpu", (2,))))
        assert place_of(image.names) == (number, 2)
        assert (STATE_FILE in image.names) == (number == 0)
        assert (image.files[0].body_size > 0) == (number == 0)


def refused(make: Callable[[DeviceMesh], Any], sentence: str, *, part: bool = False) -> None:
    with rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        places = ShardGroup(mesh["a"] if part else mesh)
        with pytest.raises(CheckpointError, match=sentence):
            codec.encode({"t": make(mesh)}, places=places)


def test_what_is_no_box_or_not_known_is_refused_with_its_path() -> None:
    def placed(*placements: Placement, dtype: torch.dtype = torch.float32) -> Callable[[DeviceMesh], Any]:
        return lambda mesh: distributed(4, 4, dtype=dtype, device_mesh=mesh, placements=placements)

    refused(placed(Partial(), Replicate()), r"cannot save state\['t'\]: it is sharded as .*a part of a sum")
    refused(placed(_StridedShard(0, split_factor=2), Shard(1)), "its parts are interleaved")
    refused(placed(Shard(0), Replicate(), dtype=torch.complex64), "its numbers are complex")
    refused(placed(Shard(0), Shard(1)), "over ranks that are no places of this checkpoint", part=True)
    refused(
        lambda mesh: DTensor.from_local(
            torch.zeros(3, 4), mesh["a"], [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1)
        ),
        r"it holds \[3, 4\] where \[2, 4\] belongs",
    )


def test_without_places_a_sharded_tensor_is_refused() -> None:
    with rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(CheckpointError, match="save it with the places that hold it"):
            codec.encode({"t": distributed(4, device_mesh=mesh, placements=[Shard(0)])})


class CountingSource(PosixSource):
    """Notes the sizes of what is read."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        super().__init__(path)
        self._sizes = sizes

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        self._sizes.append(len(buffer))
        return super().read_into(buffer, offset)


class CountingStorage(PosixStorage):
    """Knows how many bytes were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sizes: list[int] = []

    def source(self, name: str, file: str) -> ByteSource:
        return CountingSource(self._root / name / file, self.sizes)


@pytest.mark.parametrize(("placement", "most"), [(Shard(0), 2), (Shard(1), 5)])
def test_a_rank_reads_the_chunks_of_its_own_box_alone(tmp_path: Path, placement: Shard, most: int) -> None:
    """A quarter of the rows is a quarter of the bytes, and the rest of the chunks at both ends; columns lie in all."""
    whole = torch.randn(4096, 2560)
    storage = CountingStorage(tmp_path)
    manager = CheckpointManager(tmp_path, storage=storage)
    image = manager.encode({"t": whole}, SaveInfo(1), parts=3)
    entry = manager.commit(image, manager.draft(SaveInfo(1))).entry
    storage.sizes.clear()
    with rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        live = distributed(4096, 2560, device_mesh=mesh, placements=[placement])
        manager.load(entry, LoadInto({"t": live}))
        assert torch.equal(live.to_local(), whole.chunk(4, placement.dim)[1])
    chunks = -(-whole.nbytes // CHUNK) + 2 if most == 5 else whole.nbytes // 4 // CHUNK + most
    assert sum(storage.sizes) < chunks * CHUNK + (1 << 20)
