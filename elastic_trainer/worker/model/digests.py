"""One number per tensor that depends on every bit and its position.

On the CPU it is the XXH3 of the bytes. A CUDA device adds up integers modulo 2**64: each element, as an integer, times
a factor of its own (a multiple of an odd number, so that swapped elements are noticed). Tensors are joined for that,
since a kernel costs more than the sum of a small one; the result arrives while training goes on. The two kinds of
numbers cannot be compared with each other.

*Runs in* the worker's main thread. *Owns* on a device 24 bytes times SEGMENT while it adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash

from elastic_trainer.checkpoint import codec

SEGMENT = 1 << 21
"""Elements joined at a time."""
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Numbers = Callable[[], Sequence[int]]
"""Gives the numbers, after a wait for the device if necessary."""


def on_device(of: Sequence[torch.Tensor]) -> bool:
    """Whether the numbers of these are found by a device."""
    return bool(of) and all(each.is_cuda for each in of)


def begun(of: Sequence[torch.Tensor]) -> Numbers:
    """The present numbers of all tensors, which may change meanwhile (in the order of the device's stream)."""
    if not on_device(of):
        found = [xxhash.xxh3_64_intdigest(codec.buffer(each.detach())) for each in of]
        return lambda: found
    host = torch.empty(len(of), dtype=torch.int64, pin_memory=True)
    host.copy_(summed(of), non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def arrived() -> Sequence[int]:
        event.synchronize()
        return [number % (1 << 64) for number in host.tolist()]

    return arrived


@torch.no_grad()
def summed(of: Sequence[torch.Tensor]) -> torch.Tensor:
    """One 64-bit integer per tensor, on their device."""
    device = of[0].device
    factors = torch.arange(1, SEGMENT + 1, device=device) * _ODD
    indices: list[int] = []
    sums: list[torch.Tensor] = []
    for count, segment in enumerate(_segments(of)):
        indices += [index for index, _ in segment]
        pieces = [piece for _, piece in segment]
        joined = torch.cat(pieces).to(torch.int64)
        ends = torch.tensor([len(piece) for piece in pieces], device=device).cumsum(0)
        totals = joined.mul_(factors[: len(joined)]).cumsum(0)[ends - 1]
        totals[1:] -= totals[:-1].clone()
        sums.append(totals * (2 * count + 1))
    result = torch.zeros(len(of), dtype=torch.int64, device=device)
    return result.index_add_(0, torch.tensor(indices, device=device), torch.cat(sums)) if sums else result


def _segments(of: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Pieces of all tensors with the tensors' indices, in portions of up to SEGMENT elements."""
    segment: list[tuple[int, torch.Tensor]] = []
    room = SEGMENT
    for index, tensor in enumerate(of):
        plain = codec.plain(tensor).contiguous().view(-1)
        flat = plain.view(_INTEGERS[plain.element_size()])
        while len(flat):
            piece, flat = flat[:room], flat[room:]
            segment.append((index, piece))
            room -= len(piece)
            if not room:
                yield segment
                segment, room = [], SEGMENT
    if segment:
        yield segment
