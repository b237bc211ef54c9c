"""Several optimizers have the state of one, and take it back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.state.training_state import OptimizerSet, SchedulerSet, kind_of, load_exactly
from elastic_trainer.worker.steps.engine import Before


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, OptimizerSet]:
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
    model, optimizers = trained(1)
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


def test_what_belongs_to_a_whole_optimizer_stays_its_own() -> None:
    key: Any = "seen"
    _, optimizers = trained(1)
    for number, each in enumerate(optimizers.members):
        each.state[key] = number
    _, loaded = trained(1)
    loaded.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    assert [each.state[key] for each in loaded.members] == [0, 1]


def test_a_loaded_state_goes_on_as_the_one_that_was_saved() -> None:
    model, optimizers = trained(2)
    other, loaded = trained(1, seed=1)
    loaded.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    other.load_state_dict(model.state_dict())
    for module, each in ((model, optimizers), (other, loaded)):
        each.zero_grad()
        module(torch.full((2, 3), 0.5)).square().sum().backward()
        for member in each.members:
            member.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


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


def test_a_loaded_state_keeps_the_types_that_torch_would_cast() -> None:
    """The tensors are the optimizer's own, where torch casts nothing as they were given."""
    optimizer, state = stepped(), copy.deepcopy(stepped().state_dict())
    given = dict(state["state"][0])
    OptimizerSet({"first": trained(0)[1].members[0], "second": optimizer}).load_state_dict(
        {
            "state": {2: state["state"][0]},
            "param_groups": [{"params": [0, 1]}, {**state["param_groups"][0], "params": [2]}],
        }
    )
    found = known(optimizer)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in given.items()}
    assert found["mu_product"].dtype is torch.float32
    assert found["mu_product"] is not given["mu_product"]
    assert all(found[name] is given[name] for name in ("step", "exp_avg", "exp_avg_sq"))


def test_an_optimizer_that_loads_in_a_way_of_its_own_is_left_to_that() -> None:
    hooked, own = stepped(), stepped(Loads)
    hooked.register_load_state_dict_pre_hook(lambda _, state: state)
    for each in (hooked, own):
        load_exactly(each, copy.deepcopy(each.state_dict()))
        assert known(each)["mu_product"].dtype is torch.bfloat16


def test_what_a_closure_changed_comes_back_in_its_types() -> None:
    optimizer = stepped()
    before, expected = Before(optimizer), copy.deepcopy(known(optimizer))
    optimizer.step()
    before.restore()
    assert all(map(torch.equal, known(optimizer).values(), expected.values()))
    assert [each.dtype for each in known(optimizer).values()] == [each.dtype for each in expected.values()]


def test_the_kind_names_all_types_in_their_order() -> None:
    assert kind_of(trained(0)[1]) == "SGD + AdamW"
    assert kind_of(torch.optim.SGD([torch.ones(1, requires_grad=True)])) == "SGD"


def test_what_cannot_be_trained_together_is_refused() -> None:
    shared = nn.Linear(2, 1)
    one, other = torch.optim.SGD(shared.parameters()), torch.optim.SGD([shared.bias])
    with pytest.raises(ConfigError, match="optimizers 'a' and 'b' hold the same parameter"):
        OptimizerSet({"a": one, "b": other})
    with pytest.raises(ConfigError, match="empty dictionary"):
        OptimizerSet({})


def test_schedulers_advance_together_and_keep_their_states() -> None:
    def made() -> tuple[SchedulerSet, list[Any]]:
        first, second = trained(0)[1].members
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
