"""The whole state comes back, or nothing changes; that of several optimizers is the state of one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.state import shards
from elastic_trainer.worker.state.restore import identity, state_digest
from elastic_trainer.worker.state.training_state import (
    OptimizerSet,
    Position,
    SchedulerSet,
    TrainingState,
    load_exactly,
)
from elastic_trainer.worker.steps.engine import Before
from tests.unit.checkpoint.states import newest_of, same
from tests.unit.worker.toys import Counter, data

CPU = torch.device("cpu")


def make(build: Callable[[], nn.Module], optimizer: Any = torch.optim.AdamW, scheduler: bool = True) -> TrainingState:
    module = build()
    chosen = optimizer(module.parameters(), lr=0.1)
    return TrainingState(
        module=module,
        optimizer=chosen,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9) if scheduler else None,
        scaler=None,
        position=Position(),
        user={"counter": Counter()},
        pending={},
        device=CPU,
    )


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def trained() -> TrainingState:
    state = make(small)
    x, y = data().tensors
    for _ in range(3):
        state.optimizer.zero_grad()
        nn.functional.mse_loss(state.module(x), y).backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()
        state.scheduler.step()
    state.position.step, state.position.cursor, state.position.best = 3, Cursor(1, 7), {"accuracy": 0.5}
    state.user["counter"].load_state_dict({"values": [1, 2]})
    return state


def test_everything_comes_back() -> None:
    """Model, optimizer, schedule, position, registered parts and random generators."""
    old, new = trained(), make(small)
    tree = old.collect()
    expected = (random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist())
    new.apply(tree, first_rank=True)
    assert (random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist()) == expected
    there = new.module.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in old.module.state_dict().items())
    mine, theirs = new.optimizer.state_dict(), old.optimizer.state_dict()
    assert torch.equal(mine["state"][0]["exp_avg"], theirs["state"][0]["exp_avg"])
    assert mine["param_groups"] == theirs["param_groups"]
    assert new.scheduler.state_dict() == old.scheduler.state_dict()
    assert (new.position, new.user["counter"].state_dict()) == (old.position, {"values": [1, 2]})


class Master(torch.optim.Optimizer):
    """Keeps float32 weights for parameters of any type, and more that is not of their type."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in (each for group in self.param_groups for each in group["params"]):
            known = self.state[each]
            if not known:
                known |= {"master": each.detach().float(), "seen": torch.zeros((), dtype=torch.int64), "note": 1}
                known["sums"] = [torch.zeros(3), {"same": torch.zeros(3, dtype=each.dtype)}]
            known["master"].add_(each.grad.float(), alpha=-1e-3)
            known["sums"][0].add_(1 / 3)
            known["seen"] += 1
            each.data.copy_(known["master"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW, Master])
def test_the_optimizer_state_keeps_its_types(optimizer: Any, dtype: torch.dtype) -> None:
    """Torch casts it to the parameters', and a healed rank would then train apart from its source."""

    def made() -> TrainingState:
        return make(lambda: nn.Linear(4, 3).to(dtype), optimizer, scheduler=False)

    def step() -> None:
        for state in (old, new):
            for number, each in enumerate(state.module.parameters()):
                each.grad = torch.full_like(each, 0.3 + number)
            state.optimizer.step()

    old = new = made()
    step()
    new = made()
    new.apply(copy.deepcopy(old.collect()), first_rank=False)
    assert identity(new.committed(), 0, 1) == identity(old.committed(), 0, 1)
    step()
    assert identity(new.committed(), 0, 2) == identity(old.committed(), 0, 2)


SEEN: Any = "seen"


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state[SEEN] = self.state.get(SEEN, 0) + 1


def test_what_an_optimizer_keeps_for_all_parameters_comes_back(tmp_path: Path) -> None:
    old, new = (make(small, lambda each, lr: Counting(each, lr=lr, momentum=0.9)) for _ in range(2))
    before = old.size()
    for each in old.module.parameters():
        each.grad = torch.ones_like(each)
    old.optimizer.step()
    assert old.size() > before
    loaded = newest_of(stored(old, tmp_path), new.targets())
    new.apply(loaded.state, first_rank=True)
    assert new.optimizer.state[SEEN] == 1
    parameters: list[torch.Tensor] = [*old.module.parameters()]
    whole_state = shards.completed_optimizer(old.optimizer.state_dict(), parameters)  # as of a sharded model
    assert shards.placed_optimizer(whole_state, parameters)["state"]["seen"] == 1


def stored(state: TrainingState, directory: Path) -> CheckpointManager:
    manager = CheckpointManager(directory)
    manager.save(state.collect(), SaveInfo(3))
    return manager


def test_a_checkpoint_is_read_straight_into_model_average_and_optimizer(tmp_path: Path) -> None:
    """They hold it before it is applied, in their own memory; a fresh optimizer takes what was read as its own."""
    old, new = trained(), make(small)
    old.average, new.average = AveragedModel(old.module), AveragedModel(new.module)
    old.average.update_parameters(old.module)
    manager = stored(old, tmp_path)
    where = {name: each.data_ptr() for name, each in new.module.state_dict().items()}
    loaded = newest_of(manager, new.targets())
    assert same(dict(new.module.state_dict()), dict(old.module.state_dict()))
    assert same(dict(new.average.state_dict()), dict(old.average.state_dict()))
    new.apply(loaded.state, first_rank=True)
    assert {name: each.data_ptr() for name, each in new.module.state_dict().items()} == where
    assert all(each.requires_grad for each in new.module.parameters())
    assert state_digest(new.collect()) == state_digest(old.collect())
    moments = new.optimizer.state_dict()["state"][0]["exp_avg"]
    moments.zero_()
    again = newest_of(manager, new.targets())
    assert again.state["optimizer"]["state"]["state"][0]["exp_avg"] is moments
    assert moments.ne(0).any()


class Particular(Counter):
    def check_state(self, state: dict[str, Any]) -> None:
        if state["values"] == [1, 2]:
            raise ConfigError("not mine")


class Demanding(Counter):
    """Looks at numbers of its state, which are not there before it is read."""

    def check_state(self, state: dict[str, Any]) -> None:
        if float(state["tensor"].sum()) != 3.0:
            raise ConfigError("not mine")


@pytest.mark.parametrize("part", [Particular, Demanding], ids=["refuses", "looks at tensors"])
def test_a_checkpoint_that_does_not_fit_or_may_not_leaves_the_live_model_alone(
    tmp_path: Path, part: type[Counter]
) -> None:
    """It is read into new memory, and applying it says what is wrong, as without live tensors: the part that refuses is
    asked before the model is compared. It knows the reason of what would only look like another model."""
    old, new = trained(), make(wider if part is Particular else small)
    old.pending = {"other": {"values": [], "tensor": torch.ones(4)}}
    new.user = {"counter" if part is Particular else "other": part()}
    before = {name: each.clone() for name, each in new.module.state_dict().items()}
    loaded = newest_of(stored(old, tmp_path), new.targets())
    with pytest.raises(ConfigError, match="not mine"):
        new.apply(loaded.state, first_rank=True)
    assert same(dict(new.module.state_dict()), before)


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def shorter() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def halves(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=lr)


def backwards(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*parameters][::-1], lr=lr)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: make(wider), r"model tensor '0.weight' is float32\[5, 4\] here and float32\[3, 4\] in the checkpoint"),
        (lambda: make(shorter), "model tensor '2.weight' of the checkpoint is not in this model"),
        (lambda: make(lambda: nn.Sequential(small(), nn.Linear(1, 1))), "model tensor '0.0.weight' is not in"),
        (lambda: make(lambda: small().double()), r"'0.weight' is float64\[3, 4\] here and float32"),
        (lambda: make(small, torch.optim.SGD), "the optimizer is SGD here and AdamW in the checkpoint"),
        (lambda: make(small, scheduler=False), "has a scheduler"),
        (lambda: make(small, halves), "2 parameter groups here and 1"),
        (lambda: make(small, backwards), r"group 0 has '2\.bias' where the checkpoint has '0\.weight'"),
    ],
)
def test_a_state_of_another_job_is_refused_and_nothing_changes(other: Any, says: str) -> None:
    tree, state = trained().collect(), other()
    before = {name: value.clone() for name, value in state.module.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        state.apply(tree, first_rank=True)
    assert all(torch.equal(before[name], value) for name, value in state.module.state_dict().items())
    assert state.position == Position()


def compiled(module: nn.Module) -> nn.Module:
    """Its first computation would compile it, and there is none."""
    return cast("nn.Module", torch.compile(module))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, while it loads the compiler
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, compiled])
@pytest.mark.parametrize("stored_wrapped", [True, False])
def test_a_layer_may_be_wrapped_or_unwrapped_between_two_lives(
    wrap: Callable[[nn.Module], nn.Module], stored_wrapped: bool, tmp_path: Path
) -> None:
    """Tensors are read straight into those of the same name without wrappers; what was frozen stays frozen."""

    def life(*, wrapped: bool) -> TrainingState:
        torch.manual_seed(int(wrapped))
        frozen = nn.Linear(3, 3).requires_grad_(False)
        return make(lambda: nn.Sequential(wrap(nn.Linear(4, 3)) if wrapped else nn.Linear(4, 3), frozen))

    old, new = life(wrapped=stored_wrapped), life(wrapped=not stored_wrapped)
    for each in old.module[0].parameters():  # type: ignore[index]
        each.grad = torch.ones_like(each)
    old.optimizer.step()
    old.average, new.average = AveragedModel(old.module), AveragedModel(new.module)
    old.average.update_parameters(old.module)
    where = [each.data_ptr() for each in new.module.state_dict().values()]
    loaded = newest_of(stored(old, tmp_path), new.targets())
    assert all(map(torch.equal, new.module.state_dict().values(), old.module.state_dict().values()))
    new.apply(loaded.state, first_rank=True)
    assert [each.data_ptr() for each in new.module.state_dict().values()] == where
    assert [each.requires_grad for each in new.module.parameters()] == [True, True, False, False]
    assert all(map(torch.equal, new.average.state_dict().values(), old.average.state_dict().values()))
    assert identity(new.committed(), 0, 1) == identity(old.committed(), 0, 1)


class Refusing(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["values"] == [1, 2]:
            raise KeyError("what is this?")
        super().load_state_dict(state)


def test_a_registered_part_that_refuses_its_state_undoes_the_others() -> None:
    tree = trained().collect()
    tree["user"]["second"] = {"values": [9]}
    state = make(small)
    state.user = {"second": Counter(), "counter": Refusing()}
    with pytest.raises(CheckpointError, match="refused its state: KeyError"):
        state.apply(tree, first_rank=True)
    assert state.user["second"].state_dict() == {"values": []}
    assert state.scheduler.last_epoch == 0


def test_a_part_registered_after_resuming_gets_its_state_then() -> None:
    state = make(small)
    state.user = {}
    state.apply(trained().collect(), first_rank=True)
    assert state.collect()["user"] == {"counter": {"values": [1, 2]}}
    late = Counter()
    state.register("counter", late)
    assert (late.values, state.pending) == ([1, 2], {})
    with pytest.raises(ConfigError, match="the name is taken"):
        state.register("counter", late)
    with pytest.raises(ConfigError, match=r"has no state_dict\(\)"):
        state.register("number", 3)  # type: ignore[arg-type]


def optimized(steps: int, seed: int = 0) -> tuple[nn.Module, OptimizerSet]:
    """Two layers with an optimizer each, the second one with two groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    groups: list[dict[str, Any]] = [{"params": [model[1].weight]}, {"params": [model[1].bias], "lr": 0.5}]
    second = torch.optim.AdamW(groups, lr=0.01)
    optimizers = OptimizerSet({"first": first, "second": second})
    for _ in range(steps):
        optimizers.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for each in optimizers.members:
            each.step()
    return model, optimizers


def test_the_state_is_that_of_one_optimizer_with_all_groups() -> None:
    """Numbered as torch numbers it: one optimizer of the same groups has the same numbers."""
    model, optimizers = optimized(1)
    one = torch.optim.SGD([{"params": list(group["params"])} for group in optimizers.param_groups], lr=0.1)
    found = optimizers.state_dict()
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in one.state_dict()["param_groups"]
    ]
    assert [group["lr"] for group in found["param_groups"]] == [0.1, 0.01, 0.5]
    assert sorted(found["state"]) == [0, 1, 2, 3]
    assert set(found["state"][1]) == {"momentum_buffer"}
    assert {"exp_avg", "exp_avg_sq"} <= set(found["state"][2])
    assert set(map(id, optimizers.state)) == set(map(id, model.parameters()))


class Loads(torch.optim.NAdam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def stepped(kind: type[torch.optim.Optimizer] = torch.optim.NAdam) -> torch.optim.Optimizer:
    parameter = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = kind([parameter])  # type: ignore[call-arg]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def known(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(iter(optimizer.state.values()))


def test_an_optimizer_that_loads_in_a_way_of_its_own_is_left_to_that() -> None:
    """Of others the types stay that torch would cast."""
    plain, hooked, own = stepped(), stepped(), stepped(Loads)
    hooked.register_load_state_dict_pre_hook(lambda _, state: state)
    for each, dtype in ((plain, torch.float32), (hooked, torch.bfloat16), (own, torch.bfloat16)):
        load_exactly(each, copy.deepcopy(each.state_dict()))
        assert known(each)["mu_product"].dtype is dtype


def test_what_a_closure_changed_comes_back_in_its_types() -> None:
    optimizer = stepped()
    before, expected = Before(optimizer), copy.deepcopy(known(optimizer))
    optimizer.step()
    before.restore()
    assert all(map(torch.equal, known(optimizer).values(), expected.values()))
    assert [each.dtype for each in known(optimizer).values()] == [each.dtype for each in expected.values()]


def test_what_cannot_be_trained_together_is_refused() -> None:
    shared = nn.Linear(2, 1)
    one, other = torch.optim.SGD(shared.parameters()), torch.optim.SGD([shared.bias])
    with pytest.raises(ConfigError, match="optimizers 'a' and 'b' hold the same parameter"):
        OptimizerSet({"a": one, "b": other})
    with pytest.raises(ConfigError, match="empty dictionary"):
        OptimizerSet({})


def test_schedulers_advance_together_and_keep_their_states() -> None:
    def made() -> tuple[SchedulerSet, list[Any]]:
        first, second = optimized(0)[1].members
        schedule = torch.optim.lr_scheduler.ExponentialLR
        schedulers = SchedulerSet({"a": schedule(first, 0.5), "b": schedule(second, 0.1)})
        for each in (first, second):
            each.step()
        return schedulers, [first, second]

    (ahead, _), (behind, optimizers) = made(), made()
    ahead.step()
    behind.load_state_dict(ahead.state_dict())
    assert behind._step_count == ahead._step_count
    behind.step()
    assert [group["lr"] for each in optimizers for group in each.param_groups] == pytest.approx([0.05, 0.001, 0.05])
    with pytest.raises(ValueError, match=r"schedulers \['c'\], this job \['a', 'b'\]"):
        behind.load_state_dict({"c": {}})
