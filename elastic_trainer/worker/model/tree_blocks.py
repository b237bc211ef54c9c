"""Which partial sums make up the one binary tree in which the gradients of a global batch are added. Pure.

Floating point addition is not associative, so the sum of V micro-batches has the same bits at any number of ranks only
if the same pairs are added in the same order. The tree over V leaves is fixed: a node of level k begins at a multiple
of 2^k and adds its two halves of level k - 1; if a half lies beyond V, the node is its left half. Each rank has a
contiguous run of leaves, and adds whole nodes of the tree within it: at most two per level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from elastic_trainer.data.plan import cut

Value = TypeVar("Value")
Add = Callable[[Value, Value], Value]
"""Returns the sum of its arguments, possibly in the first one's memory."""


class Block(NamedTuple):
    """The node of the tree that begins at leaf ``start`` and spans up to 2^``level`` leaves."""

    start: int
    level: int

    @property
    def sibling(self) -> Block:
        return Block(self.start ^ (1 << self.level), self.level)


class Stack(Generic[Value]):
    """Adds the leaves of one rank, which come in order, as far as the tree allows.

    It holds at most two values per level, hence about log2 of the leaves.
    """

    def __init__(self, add: Add[Value]) -> None:
        self._add = add
        self.held: list[tuple[Block, Value]] = []
        """Blocks from left to right, with their sums."""

    def push(self, leaf: int, value: Value) -> None:
        block = Block(leaf, 0)
        while self.held and self.held[-1][0] == block.sibling and block.sibling.start < block.start:
            left, held = self.held.pop()
            block, value = Block(left.start, block.level + 1), self._add(held, value)
        self.held.append((block, value))


@lru_cache(maxsize=64)
def blocks_of(total: int, world: int, rank: int) -> tuple[Block, ...]:
    """The blocks that ``rank`` is left with when ``total`` leaves are dealt out as by :func:`plan.share`."""
    stack: Stack[None] = Stack(lambda left, right: None)
    for leaf in range(*cut(total, world, rank)):
        stack.push(leaf, None)
    return tuple(block for block, _ in stack.held)


def fold(total: int, found: Mapping[Block, Value], add: Add[Value]) -> Value:
    """The sum of all ``total`` leaves from the sums of blocks that cover them."""

    def summed(block: Block) -> Value:
        if block in found:
            return found[block]
        if block.level == 0:
            raise ValueError(f"leaf {block.start} of {total} is missing")
        middle = block.start + (1 << (block.level - 1))
        left = summed(Block(block.start, block.level - 1))
        return left if middle >= total else add(left, summed(Block(middle, block.level - 1)))

    if total < 1:
        raise ValueError("a tree has at least one leaf")
    return summed(Block(0, (total - 1).bit_length()))
