"""One step counts exactly once, or not at all; and what all ranks do between steps, at the same one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch

from elastic_trainer.clock import SystemClock
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, NonFiniteError, RoundBrokenError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.recovery import Recovery
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import (
    LONGEST_INTERVAL,
    Consensus,
    EveryStep,
    Flags,
    Scaling,
    Step,
    StepBoundaries,
    smoothed,
)
from elastic_trainer.worker.steps.options import CheckOptions
from tests.support.memory_store import ManualClock
from tests.unit.worker.ranks import run_ranks
from tests.unit.worker.toys import Job, data, linear, loss_of


@pytest.fixture
def job() -> Iterator[Job]:
    with Session(device="cpu") as session:
        yield Job(session)


def batch_of(job: Job, **options: Any) -> Any:
    return next(iter(job.session.batches(data(), global_batch_size=16, epochs=1, **options)))


def test_a_step_commits_with_the_optimizer_step(job: Job) -> None:
    """Step number, cursor and scheduler advance together, exactly once; the loss is there afterwards."""
    batch = batch_of(job)
    with job.session.step() as step:
        loss = loss_of(job.wrapped, batch)
        step.backward(loss)
        assert (step.committed, job.session.step_number) == (False, 0)
        job.optimizer.step()
        assert (step.committed, job.session.step_number, job.session.cursor) == (True, 1, Cursor(0, 16))
    assert step.loss == pytest.approx(float(loss.detach()))
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.99)


def failing(job: Job, step: Step, batch: Batch, *, commit: bool) -> None:
    with step:
        step.backward(loss_of(job.wrapped, batch))
        if commit:
            job.optimizer.step()
        raise RuntimeError("user")


def test_an_error_in_the_body_neither_repeats_nor_loses_a_step(job: Job) -> None:
    """Before the commit the same batch is repeated; after it the step counts and the next batch follows.

    The loss is the one that was known last, NaN where there was none; the log says once that it is not the step's own.
    """
    batches = job.session.batches(data(), global_batch_size=16, epochs=1)
    seen, drawn, done = [], list[Any](), 0
    with structlog.testing.capture_logs() as logs:
        for commit in (False, True, False):
            drawn.append(next(batches))
            step = job.session.step()
            with pytest.raises(RuntimeError, match="user"):
                failing(job, step, drawn[-1], commit=commit)
            done += commit
            assert (step.committed, job.session.step_number, job.session.cursor) == (commit, done, Cursor(0, 16 * done))
            seen.append(f"{step.loss:.4f}")
    assert [each.index for each in drawn] == [0, 0, 1]
    assert drawn[0].ids.tolist() == drawn[1].ids.tolist() != drawn[2].ids.tolist()
    assert seen[0] == "nan"
    assert seen[1] == seen[2] != "nan"
    assert [each["step"] for each in logs if each["event"] == "loss.substituted"] == [1]


def train_wrongly(job: Job, step: Step, batch: Batch, how: str) -> None:
    def backward(part: Batch, **counted: Any) -> None:
        step.backward(loss_of(job.wrapped, part), **counted)

    match how:
        case "two updates":
            backward(batch)
            job.optimizer.step()
            job.optimizer.step()
        case "batch used twice":
            backward(batch)
            job.optimizer.step()
            step.__exit__(None, None, None)
            job.session.step()
        case "no update":
            backward(batch)
        case "plain backward":
            loss_of(job.wrapped, batch).backward()  # type: ignore[no-untyped-call]
            job.optimizer.step()
        case "left early":
            for part in step.micro_batches(batch):
                backward(part)
                break
            job.optimizer.step()
        case "nested":
            job.session.step().__enter__()
        case "saved inside":
            job.session.save()
        case "evaluated inside":
            job.session.evaluate(job.wrapped, data(), 4, lambda module, batch: {"count": (len(batch), 1)})
        case "schedule twice":
            job.optimizer.zero_grad()
            backward(batch)
            job.scheduler._step_count += 1
            job.optimizer.step()
        case "first left out" | "last left out":
            for part in step.micro_batches(batch):
                if bool(part.start) == (how == "first left out"):
                    backward(part)
            job.optimizer.step()
        case "some counted":
            for part in step.micro_batches(batch):
                backward(part, count=None if part.start else 3)
        case "no number":
            backward(batch, count=math.nan)
        case "counted twice":
            backward(batch, count=3)
            backward(batch, count=3)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("two updates", "a second optimizer step"),
        ("batch used twice", "has been committed already"),
        ("no update", "without optimizer.step"),
        ("plain backward", "without step.backward"),
        ("left early", "not all micro-batches"),
        ("nested", "inside another one"),
        ("saved inside", "inside a step"),
        ("evaluated inside", "inside a step"),
        ("schedule twice", "remove scheduler.step"),
        ("first left out", "had no backward pass"),
        ("last left out", "had no backward pass"),
        ("some counted", "for all or none"),
        ("no number", "a count of nan"),
        ("counted twice", "add the losses up"),
    ],
)
def test_a_step_that_would_train_wrongly_is_refused(job: Job, how: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"outside session\.step"):
        job.optimizer.step()
    batch = batch_of(job, micro_batch_size=8)
    with pytest.raises(ConfigError, match=says), job.session.step() as step:
        train_wrongly(job, step, batch, how)


def scaled(overflow_at: int, *, by_scaler: bool, update: bool = False) -> tuple[list[float], list[torch.Tensor], int]:
    """Five steps with a scaler, one of which overflows: scales, weights, committed steps."""
    with Session(device="cpu", checkpoint_every_s=None) as session:
        module = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        wrapped = session.wrap(module, optimizer=optimizer, scaler=scaler)
        scales, weights = [], []
        for batch in session.batches(data(), global_batch_size=12, epochs=1):
            with session.step() as step:
                loss = loss_of(wrapped, batch)
                step.backward(loss * float("inf") if session.step_number == overflow_at else loss)
                step.clip(1.0)
                if by_scaler:
                    scaler.step(optimizer)
                    if update:
                        scaler.update()
                else:
                    optimizer.step()
            assert step.committed
            scales.append(scaler.get_scale())
            weights.append(module.weight.detach().clone())
        return scales, weights, session.step_number


@pytest.mark.parametrize(("by_scaler", "update"), [(False, False), (True, False), (True, True)])
def test_a_step_that_overflows_counts_and_changes_nothing_but_the_scale(by_scaler: bool, update: bool) -> None:
    """With optimizer.step() or scaler.step(), with or without update() by the script."""
    scales, weights, steps = scaled(2, by_scaler=by_scaler, update=update)
    assert steps == 5
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_overflow_in_the_shard_of_another_rank_skips_the_update_here_too(elsewhere: bool) -> None:
    """And lowers the scale, though all gradients here are finite; also if the script steps without clipping."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler, asked = torch.amp.GradScaler("cpu", init_scale=64.0), list[bool]()

    def anywhere(here: bool) -> bool:
        asked.append(here)
        return here or elsewhere

    scaling = Scaling(scaler, optimizer, anywhere)
    scaling.begin()
    scaling.scaled(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    assert asked == [False]
    assert bool((weight == (1.0 if elsewhere else 0.5)).all())
    scaling.after_update()
    assert scaler.get_scale() == (32.0 if elsewhere else 64.0)


def diverged(nonfinite: str, spoiled: float) -> tuple[int, int]:
    with Session(device="cpu", checks=CheckOptions(nonfinite=nonfinite)) as session:
        job = Job(session)
        for batch in session.batches(data(), global_batch_size=16, epochs=40):
            job.step(batch, lambda loss: loss + spoiled if session.step_number == 1 else loss)
        return session.step_number, session._here.tracker.pulse.nonfinite


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    """Soon, with the step in the message; with nonfinite='warn' it is logged, once where the parameters stay finite."""
    with pytest.raises(NonFiniteError, match="NaN or infinite by step"):
        diverged("raise", math.nan)
    with structlog.testing.capture_logs() as logs:
        steps, counted = diverged("warn", math.inf)
    assert steps == 160
    assert 1 <= counted <= 2  # what was on its way when it was found may count once more
    assert [each["event"] for each in logs].count("loss.nonfinite") == counted


@pytest.mark.parametrize(
    ("parts", "expected"), [([(1.0, 10.0), (3.0, 2.0), (0.0, 0.0)], 4.0 / 12.0), ([(0.0, 0.0), (0.0, 0.0)], 0.0)]
)
def test_a_counted_loss_is_the_sum_over_the_global_batch_divided_by_its_count(
    parts: list[tuple[float, float]], expected: float
) -> None:
    """Each item weighs the same, however they lie in micro-batches; a micro-batch may have none, or all of them."""
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session)
        for parameter in wrapped.parameters():
            torch.nn.init.zeros_(parameter)
        batch = next(session.batches(data(), global_batch_size=4 * len(parts), micro_batch_size=4, epochs=1))
        with session.step() as step:
            for part, (weight, count) in zip(step.micro_batches(batch), parts, strict=True):
                step.backward(weight * (wrapped(torch.ones_like(part.x)) - 1.0).sum(), count=count)
            assert torch.allclose(wrapped.weight.grad, torch.full((1, 4), 4 * expected))
            optimizer.step()
        assert step.loss == pytest.approx(-4 * expected)
        assert step.local_mean() == (pytest.approx(step.loss) if expected else None)  # the ledger's


@pytest.mark.parametrize("wanted", [False, True])
def test_the_loss_is_that_of_all_backward_passes(wanted: bool) -> None:
    """Also where it was wanted early, and another pass has come behind the one that it was first found after."""
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session)
        next(session.batches(data(), global_batch_size=8, epochs=1))
        with session.step() as step:
            if wanted:
                step.want_loss()
            step.backward(wrapped(torch.ones(1, 4)).sum() * 0.0 + 2.0)
            step.backward(wrapped(torch.ones(1, 4)).sum() * 0.0 + 3.0)
            assert math.isnan(step.loss)
            optimizer.step()
        assert step.loss == pytest.approx(5.0)


class Lost:
    """A sum that never comes."""

    def wait(self) -> list[float]:
        raise RoundBrokenError("a peer was lost")


def test_a_loss_that_is_asked_for_later_is_the_same_or_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where it is unknown: a late reader must not have to handle the loss of a peer."""
    batch = batch_of(job)
    with job.session.step() as step:
        step.want_loss()
        step.backward(loss_of(job.wrapped, batch))
        with pytest.raises(ConfigError, match="later_loss"):
            step.later_loss()
        job.optimizer.step()
    assert step.later_loss().read() == pytest.approx(step.local_mean())
    monkeypatch.setattr(step, "_pending", Lost())
    assert step.later_loss().read() is None
    monkeypatch.setattr(step, "_control", Control())
    monkeypatch.setattr(step, "_pending", None)
    monkeypatch.setattr(step, "_mean", 0.5)
    assert step.later_loss().read() is None
    monkeypatch.undo()
    assert step.loss == pytest.approx(step.local_mean())
    batch = batch_of(job)
    unwanted = job.step(batch)
    with pytest.raises(ConfigError, match="want_loss"):
        unwanted.later_loss()


class RoundEnd:
    """A round whose end is absorbed, with what was seen then."""

    def __init__(self, inner: Any, seen: Callable[[], Any]) -> None:
        self._inner, self._seen, self.absorbed = inner, seen, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def postpone(self, error: BaseException) -> None:
        self.lost = error

    def absorb(self, step: Step, error: BaseException) -> bool:
        self.absorbed.append(self._seen())
        return True


@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_that_meets_the_end_of_the_round_in_the_body_is_the_last_of_the_step_there(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round begins behind the body, with the scale adapted, and nothing of the step is left to do there."""
    with Session(device="cpu") as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        optimizer, wrapped = linear(session, scaler=scaler)
        training: Any = session._training
        steps, crossed = training.steps, list[int]()
        end = RoundEnd(steps._recovery, scaler.get_scale)
        monkeypatch.setattr(steps, "_recovery", end)
        monkeypatch.setattr(steps, "_after_step", lambda step: crossed.append(step.number))
        batch = next(session.batches(data(), global_batch_size=16, epochs=1))
        with session.step() as step:
            step.backward(loss_of(wrapped, batch))
            scaler.step(optimizer)
            step._pending = Lost()  # type: ignore[assignment]
            if inside:
                assert step.loss == pytest.approx(step.local_mean())
                assert end.absorbed == []
            scaler.update()
        assert step.loss == pytest.approx(step.local_mean())
        assert end.absorbed == [16.0]
        assert crossed == ([] if inside else [1])
        monkeypatch.undo()


def test_random_numbers_of_a_micro_batch_depend_on_its_place_in_the_epoch(job: Job) -> None:
    """Not on how many micro-batches a rank has before it; two places draw different numbers."""

    def drawn(micro: int) -> dict[int, float]:
        found: dict[int, float] = {}
        batch = batch_of(job, micro_batch_size=micro)
        with suppress(InterruptedError), job.session.step() as step:
            for part in step.micro_batches(batch):
                found[part.start] = float(torch.rand(()))
            raise InterruptedError
        return found

    four, eight = drawn(4), drawn(8)
    assert sorted(four) == [0, 4, 8, 12]
    assert len(set(four.values())) == 4
    assert eight == {start: four[start] for start in (0, 8)}


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # torch's LBFGS does, by hand
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_an_optimizer_may_be_given_a_closure(kind: Any) -> None:
    """The same parameters as by hand, however often the optimizer calls it; the loss is that of its last call."""

    def trained(session: Session | None) -> tuple[torch.Tensor, list[float]]:
        torch.manual_seed(1)
        module = torch.nn.Linear(4, 1)
        optimizer, losses = kind(module.parameters(), lr=0.1), []
        if session is not None:
            session.wrap(module, optimizer=optimizer)
        x, y = data().tensors
        for _ in range(3):
            with session.step() if session is not None else nullcontext() as step:

                def closure(step: Any = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(module(x), y)
                    (step.backward if step is not None else torch.Tensor.backward)(loss)
                    losses.append(loss.item())
                    return loss

                optimizer.step(closure)
            assert step is None or step.loss == pytest.approx(losses[-1])
        return module.weight.detach().clone(), losses

    with Session(device="cpu") as session:
        weight, losses = trained(session)
        assert session.step_number == 3
    expected = trained(None)
    assert torch.equal(weight, expected[0])
    assert losses == expected[1]


def test_an_optimizer_that_repeats_its_closure_takes_no_scaler() -> None:
    """It would see scaled gradients, and no overflow."""
    with Session(device="cpu") as session:
        module = torch.nn.Linear(4, 1)
        optimizer: Any = torch.optim.LBFGS(module.parameters())
        session.wrap(module, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ConfigError, match="does not go with LBFGS"), session.step():
            optimizer.step(lambda: module(torch.ones(1, 4)).sum())


class SteppedClock(ManualClock):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def monotonic(self) -> float:
        self.advance(self.step_s)
        return super().monotonic()


def test_one_long_pause_moves_the_average_little_and_a_lasting_change_soon() -> None:
    """A checkpoint between two steps must not make the sums more frequent; steps that stay ten times longer must."""
    assert smoothed(0.0, 0.02) == 0.02
    assert smoothed(0.02, 5.0) <= 0.02 * 1.61
    average = 0.02
    for _ in range(12):
        average = smoothed(average, 0.2)
    assert average == pytest.approx(0.2, rel=0.1)
    for _ in range(12):
        average = smoothed(average, 0.02)
    assert average == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.1, 3.0])
def test_a_wish_of_one_rank_reaches_all_at_the_same_boundary(step_s: float) -> None:
    """Rank 1 wants to stop at boundary 60; all learn it at one and the same later boundary, soon after."""

    def body(control: Control) -> list[tuple[int, Flags]]:
        consensus, heard = Consensus(control, SteppedClock(step_s * (1 + control.rank))), []
        for boundary in range(1, 200):
            late, early = control.rank == 1 and boundary >= 60, control.rank == 0 and boundary == 1
            wishes = Flags(stop=late, save=early, copy=control.rank > 0 and boundary >= 60)
            agreed = consensus.boundary(lambda wishes=wishes: wishes)  # type: ignore[misc]
            if agreed is not None and agreed != Flags():
                heard.append((boundary, agreed))
        consensus.drain()
        return heard

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first[0] == (2, Flags(save=True))
    stops = [boundary for boundary, flags in first if flags.stop]
    assert 61 <= stops[0] <= 61 + LONGEST_INTERVAL
    assert not any(flags.save for _, flags in first[1:])
    assert all(flags.copy for _, flags in first[1:])


def context(
    tracker: HeartbeatReporter, *, nonfinite: str = "raise", plan_check: Any = None, signals: Any = None
) -> Any:
    return SimpleNamespace(
        tracker=tracker,
        signals=signals,
        feed=SimpleNamespace(plan_check=plan_check, lr_factor=1.0),
        records=SimpleNamespace(mark=lambda: 0),
        options=SimpleNamespace(checks=CheckOptions(nonfinite=nonfinite), replay=None),
    )


def boundaries(tracker: HeartbeatReporter, *, finite: bool, fatal: bool) -> StepBoundaries:
    steps: Any = SimpleNamespace(
        nonfinite=lambda: not finite,
        position=SimpleNamespace(step=7),
        sync=EveryStep(),
        forgive=lambda: None,
        lr=lambda: 0.1,
    )
    none: Any = None
    where = context(tracker, nonfinite="raise" if fatal else "warn")
    return StepBoundaries(Control(), where, none, steps, none, Recovery(cast("Any", None)))


def test_a_state_that_is_not_finite_goes_into_no_other_round() -> None:
    """Also where the round ended before the ranks had agreed on that; it is counted. With 'warn' it goes on."""
    tracker = HeartbeatReporter()
    with pytest.raises(NonFiniteError, match="by step 7"):
        boundaries(tracker, finite=False, fatal=True).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
    boundaries(tracker, finite=True, fatal=True).refuse_nonfinite()
    boundaries(tracker, finite=False, fatal=False).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1


class Both:
    """A sum over this rank and another one, which wishes the same."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = [2.0 * value for value in values]

    def wait(self) -> list[float]:
        return self._values


class Two:
    """Boundaries of rank 0 of two, with steps of a second: a sum begins at each boundary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, due: bool = False) -> None:
        self.clock, self.saves, self.wishes = ManualClock(), list[int](), list[bool]()
        monkeypatch.setattr(SystemClock, "monotonic", lambda _: self.clock.monotonic())
        control: Any = SimpleNamespace(rank=0, world_size=2, alone=False, start=self._start)
        self.signals = cast("Any", SimpleNamespace(requested=None, save_requested=False))
        self.position = SimpleNamespace(step=0)
        self.due = due
        steps: Any = SimpleNamespace(nonfinite=lambda: False, position=self.position, sync=EveryStep(), lr=lambda: 0.1)
        saver: Any = SimpleNamespace(
            note_ended_saves=lambda: None,
            refused=lambda: False,
            copy_if_due=lambda: None,
            prepare=lambda: None,
            due_by_step=lambda step: False,
            due_by_time=lambda: self.due,
            due_on_demand=lambda: False,
            possible=True,
            attempt=self._attempt,
            wants_copy=lambda: False,
        )
        quiet: Any = SimpleNamespace(fingerprint=lambda: 0, after_step=lambda step: None)
        where = context(HeartbeatReporter(), plan_check=quiet, signals=self.signals)
        self.boundaries = StepBoundaries(control, where, saver, steps, quiet, Recovery(cast("Any", None)))

    def _start(self, purpose: object, values: list[float]) -> Both:
        self.wishes.append(bool(values[1]))
        return Both(values)

    def _attempt(self) -> None:
        self.saves.append(self.position.step)
        self.due = False

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(1.0)
            self.position.step += 1
            self.boundaries.after_step(self.position.step)


def test_a_signal_saves_once_at_a_later_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the next sum has begun by then; one that comes afterwards saves again."""
    two = Two(monkeypatch)
    two.steps(3)
    two.signals.save_requested = True
    two.steps(4)
    assert two.saves == [5]
    assert two.wishes.count(True) == 2
    two.signals.save_requested = True
    two.steps(3)
    assert two.saves == [5, 9]


def test_a_save_by_time_is_made_once_though_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that begins at the boundary of the save was asked before it."""
    two = Two(monkeypatch, due=True)
    two.steps(6)
    assert two.saves == [2]
