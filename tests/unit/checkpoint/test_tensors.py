"""Files of tensors, parsed as if an enemy had written them; boxes of sharded ones; reading boxes into live tensors."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import empty as distributed
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_trainer.checkpoint import (
    CheckpointManager,
    DamagedError,
    LoadInto,
    SaveInfo,
    ShardGroup,
    codec,
    reading,
)
from elastic_trainer.checkpoint.codec import (
    ELEMENT_SIZE,
    TensorEntry,
    TensorSlice,
    assemble,
    by_name,
    file_header,
    lay_out,
    parse_header,
    slice_notes,
    slices_of,
    split_tensors,
)
from elastic_trainer.checkpoint.commit import commit
from elastic_trainer.checkpoint.manifest import (
    CHUNK,
    STATE_FILE,
    TENSORS_FILE,
    CheckpointName,
    FileImage,
    Image,
    Manifest,
    from_bytes,
    part_of,
    tensor_files,
    tensors_file,
)
from elastic_trainer.checkpoint.storage import PosixStorage
from elastic_trainer.errors import CheckpointError
from tests.unit.checkpoint.states import flip_bit, load_newest, newest_of, raw, same, training_state


def head(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    """A header entry, right unless told otherwise."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_SIZE)), st.lists(st.integers(0, 4), max_size=3)), max_size=8))
def test_a_built_header_parses_back_aligned(kinds: list[tuple[str, list[int]]]) -> None:
    """Each tensor begins at a multiple of its element size, without gaps; the header's length keeps data aligned."""
    placed = lay_out([TensorEntry(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(kinds)])
    text = file_header(placed)
    assert len(text) % 8 == 0
    parsed, _ = parse_header(text, sum(each.size for each in placed), "here")
    assert set(parsed) == set(placed)
    assert all(each.begin % ELEMENT_SIZE[each.dtype] == 0 for each in parsed)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x01\x00", head({})[:-1], head({}) + b" ", (1 << 63).to_bytes(8, "little") + b"{}", head(b"{"),
        head(b"\xff\xfe"), head([]), head(b'{"a":' * 50_000),
        head(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        ),
        head({"a": 1}), head({"a": {"dtype": "F32"}}), head({"a": tensor(dtype="F31")}),
        head({"a": tensor(dtype=["F32"])}), head({"a": tensor(shape=[-2])}), head({"a": tensor(shape=[2.0])}),
        head({"a": tensor(shape=[True, 2])}), head({"a": tensor(shape=[1 << 62, 1 << 62])}),
        head({"a": tensor(shape="2")}), head({"a": tensor(begin=8, end=0)}), head({"a": tensor(end=12)}),
        head({"a": tensor(begin=8, end=16)}), head({"a": tensor(), "b": tensor()}),
        head({"a": tensor(), "b": tensor(begin=4, end=12)}), head({"a": tensor(), "b": tensor(begin=8, end=16)}),
        head({"a": tensor("U8", [3], 0, 3), "b": tensor("F32", [1], 3, 7), "c": tensor("U8", [1], 7, 8)}), head({}),
    ],
    ids=lambda content: repr(content[:60]),
)  # fmt: skip
def test_a_header_that_does_not_fit_eight_bytes_of_data_is_damage(content: bytes) -> None:
    """Wrong lengths, types, shapes, gaps, overlaps and misalignment are all refused before memory is asked for."""
    with pytest.raises(DamagedError):
        parse_header(content, 8, "here")


HEADER = file_header(lay_out([TensorEntry("weight", "F32", (2, 3)), TensorEntry("bias", "F32", (3,))]))
"""Of 36 bytes of data."""


@given(
    st.integers(0, len(HEADER) - 1),
    st.integers(0, 8),
    st.binary(max_size=8) | st.sampled_from([b'"', b"-1", b"1e9", b"[]"]),
)
def test_no_mutation_breaks_the_parser(start: int, cut: int, put: bytes) -> None:
    """A header of which a few bytes were changed, cut or added gives tensors within the data, or DamagedError."""
    try:
        found, _ = parse_header(HEADER[:start] + put + HEADER[start + cut :], 36, "here")
    except DamagedError:
        return
    assert sorted((each.begin, each.begin + each.size) for each in found)[-1][1] == 36


def draft() -> Manifest:
    name = str(CheckpointName(round=1, step=7))
    return Manifest(name=name, step=7, round=1, epoch=0, samples=0, world_size=1, created=0.0, files=())


def saved_by(parts: int, state: dict[str, Any], directory: Path) -> tuple[PosixStorage, Manifest]:
    """``state``, committed as ``parts`` writers would encode it."""
    storage = PosixStorage(directory)
    storage.prepare()
    return storage, commit(storage, codec.encode(state, parts=parts), draft())


def large_state() -> dict[str, Any]:
    """Some that are cut, by rows, in a dimension behind one of a single row, or not at all; many that are not."""
    torch.manual_seed(3)
    wide, tied = torch.randn(1, 1, 900_000), torch.randn(1000, 700, dtype=torch.float64)
    scalars = {f"step{number}": torch.tensor(float(number)) for number in range(40)}
    return {
        **training_state(), "wide": wide, "tied": [tied, tied], "half": torch.randn(1001, 999).to(torch.bfloat16),
        "blob": bytes(range(256)) * 9000, "none": torch.empty(0, 5), "complex": torch.randn(300, 700) * 1j, **scalars,
    }  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_what_several_write_is_loaded_as_one_state(parts: int, tmp_path: Path) -> None:
    """Every bit and type; the shares differ by less than what is never cut; one writer writes format 1 as before."""
    state = large_state()
    storage, manifest = saved_by(parts, state, tmp_path)
    assert manifest.format == (1 if parts == 1 else 2)
    assert [each.name for each in manifest.tensor_files()] == [tensors_file(part, parts) for part in range(parts)]
    reading.verify(storage, manifest)
    back = reading.read_state(storage, reading.read_manifest(storage, manifest.name))
    assert same(back, state)
    assert back["tied"][0] is back["tied"][1]
    sizes = [each.size - each.head_size for each in manifest.tensor_files()]
    assert max(sizes) - min(sizes) < 2 * codec.UNCUT


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_SIZE)), SHAPES), max_size=9), st.integers(1, 5), st.randoms())
def test_a_division_loses_nothing_and_does_not_depend_on_the_order(
    kinds: list[tuple[str, tuple[int, ...]]], parts: int, random: Any
) -> None:
    """Even where all that can be cut is cut."""
    described = [TensorEntry(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "UNCUT", 0)
        divided = split_tensors(described, parts)
        assert split_tensors(random.sample(described, len(described)), parts) == divided
    assert len(divided) == parts
    together = assemble((each for part in divided for each in part), "here")
    assert {(each.name, each.dtype, each.shape) for each in together} == {(d.name, d.dtype, d.shape) for d in described}
    for part in divided:
        found = by_name(part)
        placed = [TensorEntry(name, each.dtype, each.shape) for name, each in found.items()]
        assert slices_of(placed, json.loads(json.dumps(slice_notes(found))), "here") == tuple(found.values())
        assert all(each.span is not None for each in part)


def test_a_tensor_that_is_called_like_a_slice_keeps_its_name() -> None:
    cut = TensorSlice("w", "U8", (4,), (0,), (2,))
    odd = TensorSlice("w[0:2]", "U8", (2,), (0,), (2,))
    assert by_name([cut, odd]) == {"w[0:2]#": cut, "w[0:2]": odd}


# ---- boxes, as sharded models have them


def boxes(whole: torch.Tensor, name: str, cuts: Sequence[Sequence[int]]) -> list[tuple[TensorSlice, torch.Tensor]]:
    ends = [list(zip([0, *each], [*each, size], strict=True)) for each, size in zip(cuts, whole.shape, strict=True)]
    return [
        (
            TensorSlice(name, "F32", tuple(whole.shape), (top, left), (down - top, right - left)),
            whole[top:down, left:right],
        )
        for top, down in ends[0]
        for left, right in ends[1]
    ]


def box_image(files: Sequence[Sequence[tuple[TensorSlice, torch.Tensor]]], names: Sequence[str]) -> Image:
    """The tensors ``names`` in ``files``, whether they make sense or not."""
    images = [_file(pairs, number, len(files)) for number, pairs in enumerate(files)]
    marks = {name: {"$": "tensor", "name": name} for name in names}
    state = json.dumps({"version": 1, "state": marks}, separators=(",", ":"))
    return Image((*images, from_bytes(STATE_FILE, state.encode())))


def committed(files: Sequence[Any], names: Sequence[str], directory: Path) -> tuple[PosixStorage, Manifest]:
    storage = PosixStorage(directory)
    storage.prepare()
    return storage, commit(storage, box_image(files, names), draft())


def _file(pairs: Sequence[tuple[TensorSlice, torch.Tensor]], number: int, count: int) -> FileImage:
    found = by_name([each for each, _ in pairs])
    data = dict(zip(found, (raw(tensor) for _, tensor in pairs), strict=True))
    placed = lay_out([TensorEntry(name, each.dtype, each.shape) for name, each in found.items()])
    content = b"".join(data[each.name] for each in placed)
    return FileImage(
        tensors_file(number, count),
        file_header(placed, slice_notes(found)),
        len(content),
        lambda: (memoryview(content),),
    )


WHOLE = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda found: found[:-1], "overlap, or leave a part of it out"),
        (lambda found: [*found, found[0]], "overlap, or leave a part of it out"),
        (lambda found: [*found[:-1], found[0]], "overlap, or leave a part of it out"),
        (lambda found: [*found[:-1], found[1]], "overlap, or leave a part of it out"),  # as large as the one left out
        (lambda found: [found[0], (TensorSlice("w", "F32", (4, 4), (2, 0), (2, 2)), WHOLE[2:, :2])], "do not agree"),
        (lambda found: [*found[:-1], (TensorSlice("w", "I32", (4, 3), (2, 2), (2, 1)), WHOLE[2:, 2:])], "do not agree"),
        (lambda found: [(TensorSlice("w", "F32", (4, 3), (2, 2), (2, 2)), WHOLE[:2, :2])], "reaches beyond its tensor"),
        (lambda found: [(TensorSlice("w", "F32", (4,), (2, 0), (2, 2)), WHOLE[:2, :2])], "describes slices wrongly"),
        (lambda found: [(TensorSlice("w", "F32", (4, -3), (0, 0), (2, 2)), WHOLE[:2, :2])], "describes slices wrongly"),
    ],
)
def test_slices_that_do_not_make_their_tensor_are_damage(change: Any, sentence: str, tmp_path: Path) -> None:
    """Gaps, overlaps, other shapes or types; two in one file get names of their own there."""
    found = change(boxes(WHOLE, "w", [[2], [2]]))
    storage, manifest = committed([[each] for each in found] + [[]], ["w"], tmp_path)
    with pytest.raises(DamagedError, match=sentence):
        reading.read_state(storage, manifest)


def test_a_slice_that_the_file_does_not_hold_is_damage() -> None:
    about = {"slices": json.dumps({"w[0:1]": {"tensor": "w", "shape": [2], "offset": [0]}})}
    with pytest.raises(DamagedError, match="does not hold"):
        slices_of([], about, "here")
    for nonsense in ({"slices": 3}, {"slices": "[1]"}, {"slices": "{"}, {"slices": '{"a": 1}'}):
        with pytest.raises(DamagedError, match="slices"):
            slices_of([TensorEntry("a", "U8", (1,))], nonsense, "here")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([TENSORS_FILE, "other"], [TENSORS_FILE]),
        ([tensors_file(1, 2), tensors_file(0, 2)], [tensors_file(0, 2), tensors_file(1, 2)]),
        ([tensors_file(0, 2)], []),
        ([tensors_file(0, 2), tensors_file(1, 3)], []),
        ([tensors_file(0, 2), tensors_file(1, 2), TENSORS_FILE], []),
        (["tensors-00001-of-00001.safetensors"], []),
        (["tensors-00000-of-00000.safetensors"], []),
        ([], []),
    ],
)
def test_files_of_tensors_are_one_or_all_of_several(names: list[str], found: list[str]) -> None:
    """A file too few, or of another number, is no set."""
    assert list(tensor_files(names)) == found


@pytest.mark.parametrize("parts", [1, 2])
def test_of_tensors_that_nobody_wants_only_shared_chunks_are_read(parts: int, tmp_path: Path) -> None:
    """One tensor of several costs its own chunks, which are verified as ever."""
    state = {name: torch.randn(3, 2 << 20) for name in ("a", "b", "c")}
    storage, manifest = saved_by(parts, state, tmp_path)
    sizes: list[int] = []
    found, slabs = reading.read_tensors(reading.WatchedFiles(storage, sizes.append), manifest, {"a"})
    (name, array), *more = codec.arrays(found, slabs).items()
    assert (name, more, array.tobytes()) == ("a", [], raw(state["a"]))
    assert sum(sizes) <= 4 * CHUNK + 4096
    flip_bit(tmp_path / manifest.name / tensors_file(0, parts), 8 * 9000)
    with pytest.raises(DamagedError, match="checksum"):
        reading.read_tensors(storage, manifest, {"a"})


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


MESH_SHAPES = [(8, 6), (7, 5), (1, 3), (3, 1), (2, 9), (0, 4)]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((1,), [Shard(0)]), ((4,), [Shard(0)]), ((3,), [Shard(1)]), ((5,), [Replicate()]),
        ((2, 3), [Shard(0), Shard(1)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Replicate(), Shard(0)]),
        ((3, 2), [Shard(1), Replicate()]), ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), Shard(1)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=2), Shard(1), Shard(0)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", MESH_SHAPES)
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
            image = codec.encode(state, shard_group=ShardGroup(init_device_mesh("cpu", (2,))))
        assert part_of(image.names) == (number, 2)
        assert (STATE_FILE in image.names) == (number == 0)
        assert (image.files[0].body_size > 0) == (number == 0)


def refused(make: Callable[[DeviceMesh], Any], sentence: str, group: str = "ab") -> None:
    """Saved by the ranks of the dimensions ``group``."""
    with rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        shard_group = ShardGroup(mesh[tuple(group)]) if group else None
        with pytest.raises(CheckpointError, match=sentence):
            codec.encode({"t": make(mesh)}, shard_group=shard_group)


def test_what_is_no_box_or_not_known_is_refused_with_its_path() -> None:
    def placed(*placements: Placement, dtype: torch.dtype = torch.float32) -> Callable[[DeviceMesh], Any]:
        return lambda mesh: distributed(4, 4, dtype=dtype, device_mesh=mesh, placements=placements)

    refused(placed(Partial(), Replicate()), r"cannot save state\['t'\]: it is sharded as .*a part of a sum")
    refused(placed(_StridedShard(0, split_factor=2), Shard(1)), "its parts are interleaved")
    refused(placed(Shard(0), Replicate(), dtype=torch.complex64), "its numbers are complex")
    refused(placed(Shard(0), Shard(1)), "over ranks that are no places of this checkpoint", "a")
    refused(placed(Shard(0), Shard(1)), "save it with the places that hold it", "")
    refused(
        lambda mesh: DTensor.from_local(
            torch.zeros(3, 4), mesh["a"], [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1)
        ),
        r"it holds \[3, 4\] where \[2, 4\] belongs",
    )


@pytest.mark.parametrize(("placement", "most"), [(Shard(0), 2), (Shard(1), 5)])
def test_a_rank_reads_the_chunks_of_its_own_box_alone(tmp_path: Path, placement: Shard, most: int) -> None:
    """A quarter of the rows is a quarter of the bytes, and the rest of the chunks at both ends; columns lie in all."""
    whole, sizes = torch.randn(4096, 2560), list[int]()
    storage, manifest = saved_by(3, {"t": whole}, tmp_path)
    with rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        live = distributed(4096, 2560, device_mesh=mesh, placements=[placement])
        reading.read_state(reading.WatchedFiles(storage, sizes.append), manifest, LoadInto({"t": live}))
        assert torch.equal(live.to_local(), whole.chunk(4, placement.dim)[1])
    chunks = -(-whole.nbytes // CHUNK) + 2 if most == 5 else whole.nbytes // 4 // CHUNK + most
    assert sum(sizes) < chunks * CHUNK + (1 << 20)


# ---- from boxes in files to boxes in memory: whatever is cut how, each byte arrives where it belongs, and no other


KINDS = ((torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.bool, "BOOL"), (torch.int64, "I64"))


def cuts(shape: tuple[int, ...], chance: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that make up ``shape``: offsets and shapes."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(chance.randrange(6)):
        offset, size = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(len(shape))
        first = chance.randint(0, size[axis])
        for begin, end in ((0, first), (first, size[axis])):
            moved = tuple(o + begin * (a == axis) for a, o in enumerate(offset))
            boxes.append((moved, tuple(end - begin if a == axis else s for a, s in enumerate(size))))
    return [box for box in boxes if all(box[1])]


@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_any_cut_are_read_into_live_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Contiguous and strided ones, of several types; what is around them in memory stays."""
    monkeypatch.setattr(reading, "MOST_STAGED", 300)
    chance = random.Random(seed)
    wholes: dict[str, torch.Tensor] = {}
    parts = []
    for number, (dtype, kind) in enumerate(KINDS):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(1, 3)))
        whole = wholes[f"t{number}"] = torch.randint(0, 100, shape).to(dtype)
        for offset, size in cuts(shape, chance):
            box = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
            parts.append((TensorSlice(f"t{number}", kind, shape, offset, size), box))
    chance.shuffle(parts)
    storage, manifest = committed([parts[0::2], parts[1::2]], list(wholes), tmp_path)
    live: dict[str, torch.Tensor] = {}
    around: dict[str, torch.Tensor] = {}
    for name, whole in wholes.items():
        wide = torch.full([size + 2 for size in whole.shape], 1).to(whole.dtype)
        inner = wide[tuple(slice(1, -1) for _ in whole.shape)]
        live[name], around[name] = (inner, wide) if chance.random() < 0.5 else (torch.zeros_like(whole), wide)
    state = reading.read_state(storage, manifest, LoadInto(live))
    assert same(state, wholes)
    assert all(state[name] is live[name] for name in wholes)
    for name, wide in around.items():
        wide[tuple(slice(1, -1) for _ in wide.shape)] = 1
        assert bool((wide == 1).all()), name


def saved(directory: Path, state: dict[str, Any]) -> CheckpointManager:
    manager = CheckpointManager(directory)
    manager.save(state, SaveInfo(1))
    return manager


def test_live_tensors_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    """What has another shape or type, or is not there, comes back as new tensors."""
    tied = torch.randn(4)
    state = {
        "a": torch.randn(3, 2), "b": torch.randn(5), "c": [tied, tied], "bytes": b"y" * 9000,
        "z": torch.ones(2) * 1j,
    }  # fmt: skip
    live: dict[str, Any] = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.float64), "z": torch.ones(2)}
    live["c"] = [torch.zeros(4)]
    loaded = newest_of(saved(tmp_path, state), LoadInto(live))
    assert same(loaded.state, state)
    assert loaded.state["a"] is live["a"]
    assert loaded.state["c"][0] is loaded.state["c"][1]
    assert live["b"].eq(0).all()


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """The check sees types and shapes before a byte of the tensors is read."""
    manager = saved(tmp_path, {"a": torch.randn(3, 2), "step": 7})
    seen: list[Any] = []

    def fits(state: dict[str, Any]) -> bool:
        seen.extend((state["a"].shape, state["a"].device.type, state["step"]))
        raise CheckpointError("of another model")

    live = {"a": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError, match="of another model"):
        load_newest(manager, LoadInto(live, fits=fits))
    assert seen == [(3, 2), "meta", 7]
    loaded = newest_of(manager, LoadInto(live, fits=lambda state: False))
    assert loaded.state["a"].ne(0).all()
    assert live["a"].eq(0).all()
