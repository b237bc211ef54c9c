"""Scripts written without this package in mind, in place and under faults: right, or refused in a sentence."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from elastic_trainer.errors import EXIT_CONFIG
from tests.drills.inplace.leading import LIMIT_S, SAMPLES, Fault, Lead, Worker
from tests.drills.inplace.scripts.habits import adapted, generator, trained
from tests.unit.worker.toys import data

LORA_B = "base_model.model.0.lora_B.default.weight"
STEPS = 8
"""Two epochs in batches of 16."""


def begun(lead: Lead, names: str, faults: Sequence[Fault] = (), **values: Any) -> list[Worker]:
    workers = lead.begin("habits.py", names, faults, **values)
    lead.form(workers)
    return workers


def assert_like(result: dict[str, Any], expected: Sequence[torch.Tensor], atol: float = 1e-4) -> None:
    for got, wanted in zip(result["state"], expected, strict=True):
        assert torch.allclose(torch.tensor(got), wanted, atol=atol)


def test_a_script_may_log_evaluate_and_save_behind_a_step_that_did_not_commit(lead: Lead) -> None:
    """It reads the loss known last, NaN before any, and all ranks do the same collectives. An optimizer beside the
    session's, whose update could not be undone, is refused.

    Both give the first step up, and a third; in the fifth one has committed, and the other is given its state.
    """
    faults = [("all", 1, "forward", "lose"), ("all", 3, "before_update", "lose"), ("a", 5, "before_update", "lose")]
    workers = begun(lead, "ab", faults, habit="naive", checkpoints=str(lead.directory / "checkpoints"))
    assert lead.regroup(workers, workers) == [0, 0]
    assert lead.regroup(workers, workers) == [2, 2]
    assert lead.regroup(workers, workers[:1], workers[1:]) == [4, 5]
    first, second = lead.results(workers)
    assert [line.split()[0] for line in first["lines"]] == [line.split()[0] for line in second["lines"]]
    assert first["lines"][0] == second["lines"][0] == "0 nan True"
    steps = [line.split() for line in second["lines"]]
    assert [step for step, _, _ in steps] == ["0", "1", "2", "2", *map(str, range(3, STEPS + 1))]
    assert steps[3] == ["2", steps[2][1], "True"]  # of the step before the one that was given up
    for worker in workers:
        assert worker.log.read_text().count("loss.substituted") == 1


def test_a_batch_that_is_tried_again_is_this_ranks_new_part(lead: Lead) -> None:
    """C dies in the middle of it: A and B, which hold the batch, train on C's samples too.

    The last step of the limited run is made once by all: A fails in it when B has made it and waits at the end. A is
    given it, and makes no more.
    """
    faults = [("c", 4, "forward", "kill"), ("a", STEPS, "before_update", "lose")]
    workers = begun(lead, "abc", faults, habit="loop", retry=True, steps=STEPS)
    lead.regroup(workers[:2], workers[:2])
    assert lead.regroup(workers[:2], workers[:1], workers[1:2]) == [STEPS - 1, STEPS]
    first, second = lead.results(workers[:2])
    assert first["step"] == second["step"] == second["passes"] == STEPS


def test_data_that_was_read_before_the_ranks_changed_is_not_trained_on(lead: Lead) -> None:
    """It is of the old part, and the samples of the new one would be missing: the sentence says what to do."""
    workers = begun(lead, "abc", [("c", 4, "forward", "kill")], habit="loop", retry=True, held=True)
    lead.tolerate(workers[:2])
    lead.regroup(workers[:2], workers[:2])
    for worker in workers[:2]:
        assert worker.process.wait(LIMIT_S) == EXIT_CONFIG
        assert "the loss is of data read before the ranks changed" in worker.log.read_text()
    assert max(line.step for line in lead.lines()) == 3


def parts() -> list[list[int]]:
    return [list(range(first, min(first + 16, SAMPLES))) for _ in range(2) for first in range(0, SAMPLES, 16)]


def alone(
    kind: Any, without: int = 0, steps: Sequence[Sequence[int]] | None = None, **options: Any
) -> list[torch.Tensor]:
    """The parameters after the same training by hand, on one rank and without faults, or ``without`` a step."""
    torch.manual_seed(5)
    layer = torch.nn.Linear(4, 1)
    optimizer = kind(layer.parameters(), **options)
    x, y = data().tensors
    for number, part in enumerate(steps if steps is not None else parts(), 1):
        if number == without:
            continue

        def closure(part: Sequence[int] = part) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(layer(x[part]), y[part])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
    return [each.detach().flatten() for each in layer.parameters()]


def test_a_framework_may_begin_and_end_steps_around_code_that_knows_of_no_rounds(lead: Lead) -> None:
    """A round ends in a forward pass, then C dies in its backward pass: no error reaches the loop, and the batch comes
    again. Each rank makes two passes a step, whatever their number, and those for nothing leave no trace in buffers."""
    faults = [("all", 2, "forward", "lose"), ("c", 4, "backward", "kill")]
    workers = begun(lead, "abc", faults, habit="driven", unshuffled=True, passes=2)
    assert lead.regroup(workers, workers) == [1, 1, 1]
    assert lead.regroup(workers[:2], workers[:2]) == [3, 3]
    expected = alone(torch.optim.AdamW, lr=0.01)
    for result in lead.results(workers[:2]):
        lost = [f"{step} 2 {step in (2, 4)} False" for step in (2, 4)]
        assert [line for line in result["lines"] if "True False" in line] == lost
        assert [line for line in result["lines"] if "False True" in line] == [f"{n} 2 False True" for n in range(1, 9)]
        assert result["passes"] == 2 * STEPS
        assert_like(result, expected)


@pytest.mark.parametrize("policy", ["halve", "skip"])
def test_a_rank_that_runs_out_of_memory_takes_all_out_of_the_step(lead: Lead, policy: str) -> None:
    """They keep their processes. The batch is repeated in halves, and so are later ones; or it is passed over, and the
    others count."""
    values = {"habit": "loop", "unshuffled": True, "checks": {"out_of_memory": policy}}
    workers = begun(lead, "ab", [("a", 3, "forward", "memory")], **values)
    assert lead.regroup(workers, workers) == [2, 2]
    assert lead.gave_up(workers) == ["a"]
    expected = alone(torch.optim.AdamW, lr=0.01, without=3 if policy == "skip" else 0)
    for result in lead.results(workers, exact=policy == "halve"):
        assert result["step"] == STEPS
        steps = [line.split(maxsplit=2) for line in result["lines"]]
        assert steps[:3] == [["1", "True", "[8]"], ["2", "True", "[8]"], ["3", "False", "[8]"]]
        if policy == "halve":
            assert steps[3:5] == [["3", "True", "[4, 4]"], ["4", "True", "[3, 3]"]]
        else:
            assert [number for number, *_ in steps[3:]] == ["4", "5", "6", "7", "8"]
        assert_like(result, expected)
    said = workers[0].log.read_text()
    assert said.count("memory.exhausted") == 1
    assert said.count("batch.repeated" if policy == "halve" else "batch.skipped") == 1


@pytest.mark.parametrize("optimizer", ["adamw", "lbfgs"])
def test_an_optimizer_may_have_a_closure(lead: Lead, optimizer: str) -> None:
    """Its collectives may fail in any of its calls: the step is undone, with all that the calls before have changed.

    So is a buffer that each forward pass replaces. All ranks decide alike how often LBFGS calls it.
    """
    later = 2 if optimizer == "lbfgs" else 0
    faults = [("all", 3, "backward", "lose"), ("a", 5, "backward", "lose")]
    workers = begun(lead, "ab", faults, habit="closure", optimizer=optimizer, at_call=later, unshuffled=True)
    assert lead.regroup(workers, workers) == [2, 2]
    assert lead.regroup(workers, workers[:1], workers[1:]) == [4, 4]
    first, second = lead.results(workers)
    assert first["lines"] == second["lines"]
    assert first["passes"] == second["passes"]
    lbfgs = optimizer == "lbfgs"
    assert lbfgs or first["passes"] == STEPS
    assert_like(first, alone(torch.optim.LBFGS, lr=0.5) if lbfgs else alone(torch.optim.AdamW, lr=0.01))


def gan_alone() -> tuple[list[torch.Tensor], list[float]]:
    """The parameters after the same training by hand, and the loss of each step."""
    torch.manual_seed(5)
    critic, maker = torch.nn.Linear(4, 1), generator()
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.01)
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(of_maker, 0.9)
    x, y = data().tensors
    losses = []
    for first in [*range(0, SAMPLES, 16)] * 2:
        part = slice(first, first + 16)
        of_critic.zero_grad()
        fake = maker(x[part])
        one = torch.nn.functional.mse_loss(critic(x[part]), y[part]) + critic(fake.detach()).square().mean()
        one.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        of_critic.step()
        of_maker.zero_grad()
        other = (critic(fake) - 1.0).square().mean()
        other.backward()
        of_maker.step()
        schedule.step()
        losses.append(float(one.detach() + other.detach()))
    return [each.detach().flatten() for model in (critic, maker) for each in model.parameters()], losses


def test_several_models_are_trained_in_one_step_or_not_at_all(lead: Lead) -> None:
    """Rounds end between the two updates of a step, on all ranks and then by C's death, and before the second update
    on one rank alone: the first update is undone with the rest, or the others are given the state with both."""
    faults = [("all", 2, "between", "lose"), ("a", 3, "before_update", "lose"), ("c", 5, "between", "kill")]
    workers = begun(lead, "abc", faults, habit="gan", checkpoints=str(lead.directory / "checkpoints"))
    assert lead.regroup(workers, workers) == [1, 1, 1]
    assert lead.regroup(workers, workers[:1], workers[1:]) == [2, 3, 3]
    assert lead.regroup(workers[:2], workers[:2]) == [4, 4]
    expected, losses = gan_alone()
    for result in lead.results(workers[:2]):
        assert result["step"] == STEPS
        assert_like(result, expected)
        seen = {int(line.split()[0]): float(line.split()[1]) for line in result["lines"]}
        assert seen.keys() >= {1, 2, 4, 5, 6, 7, 8}
        assert all(abs(loss - losses[step - 1]) < 1e-3 for step, loss in seen.items())


def test_adapters_of_a_frozen_model_are_trained_and_saved_as_without_a_session(lead: Lead) -> None:
    """PEFT's. Both give up a step, and B dies in another; A, which goes on alone, saves through the wrapped model."""
    from peft import PeftModel  # slow to import

    faults = [("all", 2, "forward", "lose"), ("b", 5, "forward", "kill")]
    workers = begun(lead, "ab", faults, habit="lora", checkpoints=str(lead.directory / "checkpoints"))
    assert lead.regroup(workers, workers) == [1, 1]
    assert lead.regroup(workers[:1], workers[:1]) == [4]
    assert workers[1].process.wait(LIMIT_S) == -signal.SIGKILL
    (result,) = lead.results(workers[:1])
    expected, frozen = adapted(), [each.clone() for each in adapted().parameters() if not each.requires_grad]
    optimizer = torch.optim.AdamW(trained(expected), lr=0.01)
    x, y = data().tensors
    for part in parts():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(expected(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert result["lines"] == list(expected.state_dict())
    saved = PeftModel.from_pretrained(adapted().unload(), lead.directory / "a-adapter", is_trainable=True)
    named = dict(zip([name for name, _ in expected.named_parameters()], result["state"][2:], strict=True))
    for name, wanted in expected.named_parameters():
        assert torch.allclose(torch.tensor(named[name]), wanted.detach().flatten(), atol=1e-5), name
        assert torch.equal(torch.tensor(named[name]), saved.get_parameter(name).detach().flatten()), name
    assert all(any(torch.equal(each, kept) for kept in frozen) for each in saved.parameters() if not each.requires_grad)
    assert not torch.equal(saved.get_parameter(LORA_B), torch.zeros(8, 2)), "the adapter was trained"


def turns(batch: int) -> list[int]:
    """The samples of a step over four streams of 20 samples, which begin anew: four of each."""
    return [(index % 20 * 4 + stream) % SAMPLES for stream in range(4) for index in range(batch * 4, batch * 4 + 4)]


@pytest.mark.parametrize(
    ("habit", "samples", "steps"), [("loader", SAMPLES, parts()), ("streams", STEPS * 16, [*map(turns, range(STEPS))])]
)
def test_data_from_outside_are_used_exactly_once(habit: str, samples: int, steps: list[list[int]], lead: Lead) -> None:
    """All give up a step for which more was fetched or read ahead, C dies in one, and D comes in its place: it reads
    its streams on from where their last states are, not from their beginning."""
    faults = [("all", 2, "forward", "lose"), ("c", 5, "forward", "kill")]
    workers = begun(lead, "abc", faults, habit=habit, checkpoints=str(lead.directory / "checkpoints"))
    (newcomer,) = lead.begin("habits.py", "d", habit=habit, checkpoints="checkpoints")
    assert lead.regroup(workers, workers) == [1, 1, 1]
    lead.await_failed(workers[:2])
    assert workers[2].process.wait(LIMIT_S) == -signal.SIGKILL
    lead.end()
    assert [state[1] for state in lead.await_ready(workers[:2]) if state is not None] == [4, 4]
    lead.form([*workers[:2], newcomer])
    ended = lead.results([*workers[:2], newcomer], samples=samples)
    for result in ended:
        assert result["step"] == STEPS
        assert_like(result, alone(torch.optim.AdamW, steps=steps, lr=0.01), 1e-5)
    if habit == "streams":
        assert int(ended[2]["lines"][-1]) <= 16  # four steps of four samples, to the end of a pass
