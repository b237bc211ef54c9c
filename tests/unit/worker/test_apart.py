"""Ranks that train apart between synchronisations, in one process: what is refused, what is counted, where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.model.local import OuterSGD
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import data, linear, loss_of, steps

DILOCO: dict[str, Any] = {"reduction": "diloco", "sync_every": 3}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reduction": "diloco"}, "reduction='diloco' with sync_every=None"),
        ({"reduction": "local_sgd", "sync_every": 0}, "reduction='local_sgd' with sync_every=0"),
        ({"sync_every": 30}, "sync_every with reduction='ddp'"),
        ({"reduction": "local_sgd", "sync_every": 3, "outer_lr": 1.0}, "outer_lr and outer_momentum without"),
        ({**DILOCO, "outer_lr": 0.0}, "outer_lr is 0"),
        ({**DILOCO, "outer_momentum": 1.0}, "outer_momentum 1"),
        ({**DILOCO, "sync_batchnorm": True}, "sync_batchnorm does not go with reduction='diloco'"),
        ({**DILOCO, "ddp_options": {"find_unused_parameters": True}}, "ddp_options does not go"),
        ({**DILOCO, "average": 0.9}, "average does not go"),
        ({**DILOCO, "scaler": torch.amp.GradScaler("cpu")}, "a GradScaler .* does not go"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any], sentence: str) -> None:
    with Session(device="cpu") as session, pytest.raises(ConfigError, match=sentence):
        linear(session, **options)


def test_options_of_a_session_that_need_one_state_in_each_step_are_refused() -> None:
    for options, sentence in (
        ({"checkpoint_every_steps": 4}, "checkpoint_every_steps is 4"),
        ({"checks": CheckOptions(out_of_memory="skip")}, "out_of_memory does not go with reduction='diloco'"),
    ):
        with Session(device="cpu", **options) as session, pytest.raises(ConfigError, match=sentence):
            linear(session, **DILOCO)


def test_steps_that_a_fault_could_not_undo_are_refused() -> None:
    with Session(device="cpu") as session:
        optimizer, _ = linear(session, **DILOCO)
        for _ in session.batches(data(), global_batch_size=16, epochs=1):
            with pytest.raises(ConfigError, match=r"begin_step\(\) of ranks that train apart"):
                session.begin_step()
            with pytest.raises(ConfigError, match="does not go with a closure"), session.step():
                optimizer.step(lambda: 0.0)
            session.barrier()  # no step was made
            break


def test_calls_of_all_ranks_are_made_at_synchronisations_alone(tmp_path: Path) -> None:
    may = []
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        optimizer, wrapped = linear(session, **DILOCO)
        for step in steps(session, optimizer, wrapped, 16, epochs=2):
            if step.number in (3, 4, 6, 8):
                may.append(session.save())
                continue
            with pytest.raises(ConfigError, match=f"a call of all ranks after step {step.number}"):
                session.save()
    assert len({*may}) == 4


def test_parameters_are_frozen_at_synchronisations_alone() -> None:
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session, **DILOCO)
        for batch in session.batches(data(), global_batch_size=16, epochs=2):
            if session.step_number == 3:
                wrapped.bias.requires_grad_(False)
                frozen = wrapped.bias.detach().clone()
            if session.step_number == 7:
                wrapped.bias.requires_grad_(True)
                with pytest.raises(ConfigError, match="'bias' was unfrozen between two"), session.step():
                    pass
                break
            with session.step() as step:
                step.backward(loss_of(wrapped, batch))
                optimizer.step()
    assert torch.equal(wrapped.bias, frozen)


def left_and_undone(*, healed: bool) -> None:
    """A script leaves its loop two steps behind a synchronisation, and the round ends in the one that follows."""
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session, **DILOCO)
        for step in steps(session, optimizer, wrapped, 8, epochs=1):
            if step.number == 5:
                break
        training: Any = session._training
        training.steps.sync._take_over = lambda kept: None
        training.steps.sync.undo()
        if healed:
            position = training.context.position
            training.steps.sync._attempted = position.step, position.lineage
            training.steps.sync.healed()


def test_steps_that_are_undone_after_the_script_has_left_its_loop_are_no_success() -> None:
    """The ranks would end with an older state, and say nothing. With the state of a peer that had completed the
    synchronisation they do not."""
    with pytest.raises(ConfigError, match="2 steps since the last synchronisation were undone"):
        left_and_undone(healed=False)
    left_and_undone(healed=True)


def test_the_outer_options_are_those_of_the_script_and_its_momentum_that_of_the_checkpoint() -> None:
    parameter = nn.Parameter(torch.ones(2))
    before = OuterSGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    parameter.grad = torch.ones(2)
    before.step()
    after = OuterSGD([parameter], lr=0.5, momentum=0.8, nesterov=True)
    after.load_state_dict(before.state_dict())
    assert (after.param_groups[0]["lr"], after.param_groups[0]["momentum"]) == (0.5, 0.8)
    assert torch.equal(after.state[parameter]["momentum_buffer"], torch.ones(2))
