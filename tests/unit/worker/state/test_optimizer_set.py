"""Several optimizers have the state of one, and take it back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.state.optimizer_set import OptimizerSet, SchedulerSet, kind_of


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


def test_the_kind_names_all_types_in_their_order() -> None:
    """A checkpoint of other optimizers does not fit."""
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
