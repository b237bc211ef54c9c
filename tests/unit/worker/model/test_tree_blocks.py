"""The sum of all leaves is the same tree however the leaves are dealt out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.plan import cut
from elastic_trainer.worker.model.tree import Block, Stack, blocks_of, fold


def joined(left: str, right: str) -> str:
    return f"({left}+{right})"


def over(total: int, world: int) -> str:
    """The tree as a formula, put together by ``world`` ranks."""
    found: dict[Block, str] = {}
    for rank in range(world):
        stack: Stack[str] = Stack(joined)
        for leaf in range(*cut(total, world, rank)):
            stack.push(leaf, str(leaf))
        assert tuple(block for block, _ in stack.held) == blocks_of(total, world, rank)
        found |= dict(stack.held)
    return fold(total, found, joined)


@given(total=st.integers(1, 70), world=st.integers(1, 80))
def test_the_order_of_additions_does_not_depend_on_the_ranks(total: int, world: int) -> None:
    """Also where there are more ranks than leaves, and where neither is a power of two."""
    assert over(total, world) == over(total, 1)


def test_the_tree_is_the_one_described() -> None:
    """Halves are whole powers of two; what lies beyond the last leaf does not exist."""
    assert over(1, 1) == "0"
    assert over(4, 2) == "((0+1)+(2+3))"
    assert over(7, 3) == "(((0+1)+(2+3))+((4+5)+6))"


@given(total=st.integers(1, 4096), world=st.integers(1, 64))
def test_a_rank_exchanges_few_sums(total: int, world: int) -> None:
    """No more than two for each level of the tree, one where ranks divide the leaves as powers of two."""
    most = max(len(blocks_of(total, world, rank)) for rank in range(world))
    assert most <= 2 * total.bit_length()
    if total % world == 0 and (total // world) & (total // world - 1) == 0:
        assert most == 1


def test_a_missing_leaf_is_an_error() -> None:
    """Never a sum of the others."""
    with pytest.raises(ValueError, match="leaf 2 of 3"):
        fold(3, {Block(0, 1): "x"}, joined)
    with pytest.raises(ValueError, match="at least one"):
        fold(0, {}, joined)
