"""The codec: what goes in comes out bit by bit; what cannot is refused by its path."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint.manifest import STATE_FILE, TENSORS_FILE, DamagedError
from elastic_trainer.errors import CheckpointError
from tests.unit.checkpoint.states import same


def through_bytes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Encode to file contents and decode from them, without a disk."""
    files = {file.name: file for file in codec.encode(state).files}
    body = b"".join(files[TENSORS_FILE].body())
    skeleton = b"".join(files[STATE_FILE].body())
    assert len(body) == files[TENSORS_FILE].body_size
    placed, _ = codec.parse_header(files[TENSORS_FILE].head, len(body), "here")
    slabs = codec.allocate(placed)
    for slab in slabs:
        slab.view[:] = body[slab.begin : slab.begin + len(slab.view)]
    return codec.decode(skeleton, codec.build(placed, slabs), "here")


DTYPES = [each for each in codec._types() if each is not torch.bool]  # arbitrary bytes are no bools
DTYPES += [torch.complex64, torch.complex128]  # of which the file format has none
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_shape_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Random bit patterns (NaNs with payloads among them) come back; empty and 0-d shapes too."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensor = data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    state = {"odd": torch.ones(3, dtype=torch.bool), "it": tensor}
    assert same(through_bytes(state), state)


def test_views_and_strides_are_saved_by_value() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "transposed": base.t(), "strided": base[::2, 1::3], "expanded": torch.tensor([1.5]).expand(5),
        "conjugate": torch.complex(base, base).conj(), "offset": base.reshape(-1)[7:9],
        "negated": torch._neg_view(base), "parameter": torch.nn.Parameter(base[1]),
    }  # fmt: skip
    back = through_bytes(state)
    assert all(torch.equal(back[name], tensor.resolve_conj()) for name, tensor in state.items())


def test_a_tensor_in_two_places_is_stored_once_and_comes_back_as_one() -> None:
    """Tied weights stay tied; a different view of the same memory is a tensor of its own."""
    weight = torch.randn(8, 8)
    state = {"encoder": weight, "decoder": weight, "row": weight[0]}
    assert codec.encode(state).files[0].body_size == weight.nbytes + weight[0].nbytes
    back = through_bytes(state)
    assert back["encoder"] is back["decoder"]
    back["row"].add_(100)
    assert torch.equal(back["encoder"], weight)


def test_saving_reads_tensors_in_place() -> None:
    """The bytes written are the tensor's own memory: no copy of a contiguous tensor is made."""
    tensor = torch.zeros(1000)
    (view,) = codec.encode({"it": tensor}).files[0].body()
    tensor[0] = 1.0
    assert bytes(view[:4]) == struct.pack("<f", 1.0)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=-(1 << 4000), max_value=1 << 4000),
    st.floats(allow_nan=True, allow_infinity=True), st.text(st.characters(), max_size=8), st.binary(max_size=8),
)  # fmt: skip
KEYS = st.one_of(st.text(st.characters(), max_size=5), st.integers(), st.just("$"))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, STATES, max_size=4))
def test_any_nesting_comes_back(state: dict[Any, Any]) -> None:
    assert same(through_bytes(state), state)


def test_awkward_values_come_back() -> None:
    """Infinities, NaN payloads, huge integers, lone surrogates, large bytes, and keys that look like ours."""
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]
    numbers = [math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, nan, [-(1 << 20000)]]
    texts = ["\ud800", "\ud83d\ude00", b"\0" * 5000, b""]
    for value in (*numbers, *texts, {"$": 1}, {1: "int", "1": "str"}, {1 << 20000: torch.ones(2)}):
        assert same(through_bytes({"it": value}), {"it": value})


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_the_state_of_every_common_scheduler_can_be_kept() -> None:
    o, kinds = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9), torch.optim.lr_scheduler
    schedulers = [
        kinds.StepLR(o, 2), kinds.MultiStepLR(o, [1, 3]), kinds.CosineAnnealingLR(o, 10),
        kinds.CosineAnnealingWarmRestarts(o, 4), kinds.OneCycleLR(o, 0.1, total_steps=20),
        kinds.CyclicLR(o, 0.01, 0.1), kinds.ReduceLROnPlateau(o), kinds.LambdaLR(o, lambda epoch: 0.9**epoch),
        kinds.SequentialLR(o, [kinds.ConstantLR(o), kinds.ExponentialLR(o, 0.9)], [2]),
    ]  # fmt: skip
    for each in schedulers:
        assert same(through_bytes(each.state_dict()), each.state_dict())


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1.0), ["numpy.float64", ".item()"]), (np.int32(1), ["numpy.int32", ".item()"]),
        (np.bool_(True), ["numpy.bool", ".item()"]), (np.zeros(2), ["numpy.ndarray", "torch.from_numpy()"]),
        ({1, 2}, ["set", "supported are"]), (Point(1, 2), ["Point", "tuple()"]),
        (defaultdict(int), ["defaultdict", "dict()"]), (torch.float32, ["torch.dtype"]), (object(), ["object"]),
        (1j, ["complex"]), (torch.eye(2).to_sparse(), ["layout", ".to_dense()"]),
        (torch.empty(2, device="meta"), ["meta device"]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_its_path(value: object, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        codec.encode({"optimizer": {"state": [0, {3: value}]}})
    text = str(caught.value)
    assert "state['optimizer']['state'][1][3]" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("key", [1.5, True, None, (1, 2), np.int64(3)], ids=repr)
def test_keys_other_than_str_and_int_are_refused(key: object) -> None:
    """A key that JSON would silently turn into a string is an error."""
    with pytest.raises(CheckpointError, match=r"state\['a'\].*key"):
        codec.encode({"a": {key: 1}})


def test_a_state_that_contains_itself_is_refused() -> None:
    """A cycle ends in a sentence, not in a RecursionError; sharing without a cycle is fine."""
    shared = [1]
    assert through_bytes({"a": shared, "b": shared}) == {"a": [1], "b": [1]}
    loop: dict[str, Any] = {}
    loop["me"] = [loop]
    with pytest.raises(CheckpointError, match="contains itself"):
        codec.encode({"loop": loop})


def test_nesting_comes_back_up_to_the_limit_and_is_refused_beyond() -> None:
    """Before the JSON module fails on it."""
    deep: Any = torch.ones(1)
    for level in range(codec.DEEPEST - 1):
        deep = OrderedDict({level: deep})
    assert same(through_bytes({"deep": deep}), {"deep": deep})
    for levels in (1, 5000):
        for _ in range(levels):
            deep = [deep]
        with pytest.raises(CheckpointError, match="nested deeper"):
            codec.encode({"deep": deep})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"version":1,"state":[]}', '{"version":2,"state":{}}',
        '{"version":1,"state":{"a":{"$":"pickle"}}}', '{"version":1,"state":{"a":{"$":["tuple"]}}}',
        '{"version":1,"state":{"a":{"$":"tensor","name":"nowhere"}}}',
        '{"version":1,"state":{"a":{"$":"bytes","base64":"?"}}}',
        '{"version":1,"state":{"a":{"$":"float","bits":"00"}}}',
        '{"version":1,"state":{"a":{"$":"dict","items":[1]}}}',
        '{"version":1,"state":{"a":{"$":"dict","items":[[[],1]]}}}',
        '{"version":1,"state":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_skeleton_that_makes_no_sense_is_damage(text: str) -> None:
    """Nothing in a state file can raise anything but DamagedError, and nothing in it is executed."""
    with pytest.raises(DamagedError):
        codec.decode(text.encode(), {}, "here")


def test_names_of_tensors_are_readable_and_unique() -> None:
    """Tensor names are paths; an int key beside its spelling as a str does not clash."""
    state = {"model": {"w": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)}, "__metadata__": torch.ones(4)}
    head = codec.encode(state).files[0].head
    names = set(json.loads(head[8:])) - {"__metadata__"}
    assert {"model/w", "model/1", "model/1#2"} < names
    assert same(through_bytes(state), state)
