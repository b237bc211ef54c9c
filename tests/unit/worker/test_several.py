"""Several models and optimizers in one session of one process: saving, resuming, refusing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import Step
from elastic_trainer.worker.steps.training import SecondOptimizers
from tests.unit.worker.toys import data, loss_of


class Gan:
    def __init__(self, session: Session, kind: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.session = session
        self.critic: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
        self.maker: nn.Module = nn.Linear(4, 4)
        self.critics = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.makers = kind(self.maker.parameters(), lr=0.01)
        wrapped: Any = session.wrap(
            {"critic": self.critic, "maker": self.maker},
            optimizer={"critic": self.critics, "maker": self.makers},
            scheduler={"critic": torch.optim.lr_scheduler.ExponentialLR(self.critics, 0.9)},
            average=0.9,
        )
        assert wrapped["maker"] is self.maker
        assert set(wrapped.keys()) == {"critic", "maker"}
        assert "maker.weight" in wrapped.state_dict()

    def train(self, stop_at: int | None = None) -> None:
        for _ in self.session.batches(data(), global_batch_size=16, micro_batch_size=8, epochs=2):
            with self.session.step() as step:
                self.critic.requires_grad_(True)
                for part in step.micro_batches():
                    step.backward(loss_of(self.critic, part) + self.critic(self.maker(part.x).detach()).square().mean())
                self.critics.step()
                self.critic.requires_grad_(False)
                for part in step.micro_batches():
                    step.backward((self.critic(self.maker(part.x)) - 1.0).square().mean())
                self.makers.step()
            if self.session.step_number == stop_at:
                self.session.save(wait=True)
                break

    def fingerprint(self) -> list[torch.Tensor]:
        parts = (self.critic, self.maker, self.session.average)
        return [each.clone() for part in parts for each in part.state_dict().values()]


def test_a_resumed_job_ends_bit_by_bit_like_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """With all models, optimizers, the schedule and the average, left in mid-epoch."""
    with Session(device="cpu") as session:
        whole = Gan(session)
        before = whole.fingerprint()
        whole.train()
        expected = whole.fingerprint()
    assert not all(map(torch.equal, before, expected))
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        Gan(session).train(stop_at=3)
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        resumed = Gan(session)
        assert session.step_number == 3
        resumed.train()
        assert session.step_number == 8
        assert all(map(torch.equal, resumed.fingerprint(), expected))


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        Gan(session).train(stop_at=1)
    with (
        pytest.raises(CheckpointError, match=r"is SGD \+ Adagrad here and SGD \+ AdamW in the checkpoint"),
        Session(tmp_path, device="cpu") as session,
    ):
        Gan(session, kind=torch.optim.Adagrad)


def test_one_model_may_have_two_optimizers_of_which_a_step_uses_some() -> None:
    """The step counts once, when its block ends; what was not stepped stays as it was."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with Session(device="cpu") as session:
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in module)
        wrapped = session.wrap(module, optimizer={"first": first, "second": second})
        for batch in session.batches(data(), global_batch_size=16, epochs=1):
            before = [each.detach().clone() for each in module.parameters()]
            with session.step() as step:
                step.want_loss()
                loss = loss_of(wrapped, batch)
                step.backward(loss)
                first.step()
                if step.number % 2:
                    second.step()
                assert not step.committed
            assert step.committed
            assert step.later_loss().read() == pytest.approx(float(loss.detach()))
            changed = [not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)]
            assert changed == [True, True, bool(step.number % 2), bool(step.number % 2)]
        assert session.step_number == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reduction": "tree"}, "reduction='tree' does not go with several"),
        ({"sync_batchnorm": True}, "sync_batchnorm does not go with several"),
        ({"ddp_options": {"find_unused_parameters": True}}, "ddp_options does not go with several"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler does not go with several"),
        ({"model": {"a.b": nn.Linear(1, 1)}}, "a model cannot have that name"),
        ({"model": {"keys": nn.Linear(1, 1)}}, "cannot have that name"),
        ({"model": {}}, "empty"),
        ({"optimizer": {}}, "optimizer is an empty dictionary"),
        (
            {"optimizer": {"a": torch.optim.SGD([nn.Parameter(torch.ones(1))])}},
            "a parameter that is not in the model",
        ),
    ],
)
def test_what_does_not_go_with_several_is_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    critic, maker = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizers = {"critic": torch.optim.SGD(critic.parameters()), "maker": torch.optim.SGD(maker.parameters())}
    given = {"model": {"critic": critic, "maker": maker}, "optimizer": optimizers, **options}
    with Session(device="cpu") as session, pytest.raises(ConfigError, match=sentence):
        session.wrap(**given)


def train_wrongly(step: Step, gan: Gan, loss: torch.Tensor, how: str) -> None:
    if how != "blind":
        step.backward(loss, *([3] if how == "counted" else []))
    if how == "closure":
        gan.critics.step(lambda: 0.0)
    if how in ("blind", "late skip"):
        gan.critics.step()
    if how == "late skip":
        step.skip()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("counted", "passes have no common count"),
        ("closure", "one of several optimizers does not go with a closure"),
        ("unused", "the step ended without optimizer.step()"),
        ("blind", "without step.backward"),
        ("late skip", "after optimizer.step()"),
    ],
)
def test_steps_that_would_train_wrongly_are_refused(how: str, sentence: str) -> None:
    with Session(device="cpu") as session:
        gan = Gan(session)
        with pytest.raises(ConfigError, match=r"begin_step\(\) with several models or optimizers"):
            session.begin_step()
        batch = next(session.batches(data(), global_batch_size=16, epochs=1))
        with pytest.raises(ConfigError, match=sentence), session.step() as step:
            train_wrongly(step, gan, loss_of(gan.critic, batch), how)
        assert session.step_number == 0


class Outer(torch.optim.Optimizer):
    """An optimizer made of another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def test_a_second_optimizer_is_refused_where_its_update_could_not_be_taken_back() -> None:
    """In place, before it has changed anything. One that lives no longer than the step is free, and so is one inside
    the session's own."""
    module, known, free = nn.Linear(4, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    bias, own = module.bias, Outer(torch.optim.SGD(module.parameters(), lr=0.1))
    parameters = ([bias], known.parameters(), free.parameters())
    trained, registered, lasting = (torch.optim.SGD(each, lr=1.0) for each in parameters)
    with Session(device="cpu") as session:
        session.register("known", known)
        wrapped = session.wrap(module, optimizer=own)
        batches = session.batches(data(), global_batch_size=4, epochs=2)

        def twice(second: Any, *, behind: bool) -> None:
            for _ in range(2):
                batch = next(batches)
                with session.step() as step:
                    step.backward(loss_of(wrapped, batch))
                    before = bias.detach().clone()
                    if not behind:
                        try:
                            second().step()
                        finally:
                            assert torch.equal(bias, before)
                    own.step()
                if behind:
                    second().step()

        with closing(SecondOptimizers(module, [own], session._user, session._trained.steps)):
            for second, behind, says in (
                (trained, False, "was about to change parameters of the wrapped model"),
                (trained, True, "was about to change parameters of the wrapped model"),
                (registered, False, r"was about to make an update inside session.step\(\)"),
                (lasting, False, r"was about to make an update inside session.step\(\)"),
            ):
                with pytest.raises(ConfigError, match=says):
                    twice(lambda second=second: second, behind=behind)
            twice(lambda: registered, behind=True)
            twice(lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)]), behind=False)
