"""Everything about torch's tensors: which can be saved, and how to get their bytes out and in.

torch and numpy are imported by the functions, not here. *Fails by* a problem in words (:func:`problem_with`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from elastic_trainer.checkpoint import sharded
from elastic_trainer.checkpoint.goals import Goal
from elastic_trainer.checkpoint.image import OnDevice
from elastic_trainer.checkpoint.tensorfile import ELEMENT_SIZE, Placed

if TYPE_CHECKING:
    import torch

SLAB = 16 << 20
"""Small tensors share memory up to this size: fresh memory in small portions costs a page fault every 4 KiB."""
OWN_SLAB = 4 << 20
"""From this size on a tensor has memory of its own."""
_ALIGNMENT = 64
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of what is in a module that they wrap."""


def plain_name(name: str) -> str:
    """The name of a tensor as if no module were wrapped: the same before and after one was."""
    for each in WRAPPERS:
        name = name.replace(each, "")
    return name


@cache
def _types() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }


def problem_with(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why ``tensor`` cannot be saved and what to do about it, or None."""
    import torch

    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        hint = (
            "save it with the places that hold it, or its .full_tensor()"
            if sharded.is_sharded(tensor)
            else "save the plain tensor that it stands for"
        )
        return f"it is a tensor of type {kind.__module__}.{kind.__qualname__}", hint
    if tensor.layout is not torch.strided:
        return f"it is a tensor of layout {tensor.layout}", "convert it with .to_dense()"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data", "materialize it first"
    if tensor.dtype not in _types() and tensor.dtype not in (torch.complex64, torch.complex128):
        return f"its element type is {tensor.dtype}", "convert it to a common type, say torch.float32"
    return None


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that show the same elements of the same memory in the same way."""
    place = (str(tensor.device), tensor.data_ptr(), tensor.dtype)
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without history and lazy sign; complex numbers become a last dimension of two."""
    import torch

    resolved = tensor.detach()
    if resolved.is_conj() or resolved.is_neg():
        resolved = resolved.resolve_conj().resolve_neg()
    return torch.view_as_real(resolved) if resolved.is_complex() else resolved


def element_type(tensor: torch.Tensor) -> str:
    """The name of the plain ``tensor``'s element type in a file."""
    return _types()[tensor.dtype]


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of the plain ``tensor``: its own memory if possible, else a copy of this one tensor."""
    import torch

    try:
        array = tensor.numpy()
        if array.flags.c_contiguous:
            return array.data.cast("B")
    except (TypeError, RuntimeError, ValueError, BufferError):  # on a device, or of a type that numpy does not have
        pass
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def source(tensor: torch.Tensor) -> memoryview | OnDevice:
    """The bytes of the plain ``tensor``, left on a CUDA device if they are there."""
    import torch

    return OnDevice(tensor.contiguous().reshape(-1).view(torch.uint8)) if tensor.is_cuda else memory(tensor)


def buffer(tensor: torch.Tensor) -> Any:
    """The bytes of ``tensor`` in the order of its elements, as :func:`memory` gives them but sooner, in any shape."""
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # on a device, with a history, or of a type that numpy does not have
        return memory(plain(tensor))
    return array if array.flags.c_contiguous else memory(tensor)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """The complex tensor that was stored as ``pairs``."""
    import torch

    return torch.view_as_complex(pairs)


@dataclass(frozen=True, slots=True)
class Slab:
    """Fresh memory for consecutive tensors of a file, from byte ``begin`` of its data on."""

    begin: int
    tensors: tuple[Placed, ...]
    array: Any

    @property
    def view(self) -> memoryview:
        return memoryview(self.array)


def allocate(placed: Sequence[Placed]) -> tuple[Slab, ...]:
    """Memory for all of ``placed`` that has data, in file order without gaps."""
    return tuple(Slab(group[0].begin, tuple(group), fresh(group[-1].end - group[0].begin)) for group in _groups(placed))


def _groups(placed: Iterable[Placed]) -> Iterator[list[Placed]]:
    group: list[Placed] = []
    for tensor in placed:
        if not tensor.size:
            continue
        if group and (tensor.size >= OWN_SLAB or tensor.end - group[0].begin > SLAB):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def fresh(size: int) -> Any:
    """Uninitialized bytes at an aligned address (numpy asks the kernel for huge pages; malloc does not)."""
    import numpy as np

    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


def arrays(placed: Sequence[Placed], slabs: Sequence[Slab]) -> dict[str, Any]:
    """The bytes of each tensor in ``slabs``, as numpy arrays of bytes that share their memory."""
    found = {each.name: fresh(0) for each in placed if not each.size}
    for slab in slabs:
        found |= {each.name: slab.array[each.begin - slab.begin : each.end - slab.begin] for each in slab.tensors}
    return found


def goals_in(slabs: Sequence[Slab]) -> dict[str, Goal]:
    """The destinations of the data of each tensor in ``slabs``."""
    return {each.name: _goal_in(slab, each) for slab in slabs for each in slab.tensors}


def _goal_in(slab: Slab, tensor: Placed) -> Goal:
    begin, element = tensor.begin - slab.begin, ELEMENT_SIZE[tensor.dtype]
    array = slab.array[begin : begin + tensor.size].reshape(*tensor.shape, element)

    def put(box: tuple[slice, ...], data: Any) -> None:
        array[box] = data

    return Goal((0,) * len(tensor.shape), tensor.shape, put, slab.view, begin)


def goal_of(tensor: torch.Tensor) -> Goal:
    """The destination of this process's data of ``tensor``: the tensor's memory, if that is plain."""
    import torch

    offset = sharded.box_of(cast("Any", tensor))[0] if sharded.is_sharded(tensor) else (0,) * tensor.dim()
    held = sharded.local(tensor)

    def put(box: tuple[slice, ...], data: Any) -> None:
        with torch.no_grad():
            held[box].copy_(torch.from_numpy(data.reshape(-1)).view(held.dtype).view(held[box].shape))

    if held.device.type != "cpu" or not held.is_contiguous() or not held.numel():
        return Goal(offset, tuple(held.shape), put)
    plain: Any = held.reshape(-1).view(torch.uint8).numpy()
    return Goal(offset, tuple(held.shape), put, memoryview(plain))


def fits(tensor: Any, stored: Placed) -> bool:
    """Whether ``stored`` can be read into ``tensor``: a tensor of its type and shape, whose elements are apart."""
    import torch

    if not isinstance(tensor, torch.Tensor) or problem_with(sharded.local(tensor)) is not None:
        return False
    held = sharded.local(tensor)
    if tuple(tensor.shape) != stored.shape or _types().get(held.dtype) != stored.dtype:
        return False
    return all(stride or size < 2 for stride, size in zip(held.stride(), held.shape, strict=True))


def new_like(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor without content, sharded and on the device as ``tensor`` is."""
    import torch

    dtypes = {name: each for each, name in _types().items()}
    return torch.empty_like(tensor.detach(), dtype=dtypes[dtype])


def without_data(placed: Iterable[Placed], blobs: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of their types and shapes, on the meta device; zeros for those that stand for bytes."""
    import torch

    dtypes = {name: dtype for dtype, name in _types().items()}
    return {
        each.name: torch.empty(each.shape, dtype=dtypes[each.dtype], device="meta")
        if each.name not in blobs
        else torch.zeros(each.shape, dtype=torch.uint8)
        for each in placed
    }


def build(placed: Sequence[Placed], slabs: Sequence[Slab]) -> dict[str, torch.Tensor]:
    """The tensors of a file whose data were read into ``slabs``; they share the slabs' memory."""
    import torch

    dtypes = {name: dtype for dtype, name in _types().items()}
    data = arrays(placed, slabs)
    return {
        each.name: torch.from_numpy(data[each.name]).view(dtypes[each.dtype]).reshape(each.shape) for each in placed
    }
