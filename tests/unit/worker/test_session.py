"""A session in one process: saving, resuming, refusing."""

from __future__ import annotations

import io
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.errors import ConfigError, DataError, NonFiniteError, StorageError
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.report import Ledger
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.state.saver import FIELD, FIRST_S, SHORTEST_S, Experience, best_interval_s
from elastic_trainer.worker.steps.options import CheckOptions, SavingOptions
from tests.unit.worker.toys import Counter, Job, data, loss_of, model, steps


def uninterrupted(epochs: int) -> list[torch.Tensor]:
    with Session(device="cpu") as session:
        job = Job(session)
        job.train(epochs)
        return job.fingerprint()


def test_a_resumed_job_ends_bit_by_bit_like_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """With dropout, BatchNorm, AdamW and a schedule, left three times in mid-epoch."""
    for stop_at in (3, 6, 9):
        with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
            job = Job(session)
            job.train(3, stop_at=stop_at)
    with Session(tmp_path, device="cpu") as session:
        job = Job(session)
        assert (session.step_number, session.cursor, session.round) == (9, Cursor(2, 16), 3)
        job.train(3)
        assert job.counter.values == list(range(1, 13))
        resumed = job.fingerprint()
    assert all(torch.equal(a, b) for a, b in zip(resumed, uninterrupted(3), strict=True))


def test_a_script_with_two_loops_resumes_in_either(tmp_path: Path) -> None:
    """In the first, between them, and twice in the second, whose batches are larger: exact, as without the faults."""

    def life(directory: Path | None, stop_at: int | None) -> list[torch.Tensor]:
        with Session(directory, device="cpu", checkpoint_every_s=None) as session:
            job = Job(session)
            for epochs, size in ((2, 16), (4, 30)):
                job.train(epochs, stop_at=stop_at, size=size)
                if session.step_number == stop_at:
                    break
            return job.fingerprint()

    for stop_at in (6, 8, 9, 11):
        life(tmp_path, stop_at)
    assert all(map(torch.equal, life(tmp_path, None), life(None, None)))


def test_a_job_that_has_ended_has_nothing_left_to_do(tmp_path: Path) -> None:
    with Session(tmp_path, device="cpu") as session:
        Job(session).train(2)
    names = sorted(path.name for path in tmp_path.iterdir())
    with Session(tmp_path, device="cpu") as session:
        job = Job(session)
        job.train(2)
        assert (session.step_number, session.resumed_from) == (8, names[-1])
        assert session._here.tracker.pulse.step == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(("closes", "again"), [(False, [(0, 2)]), (True, [])])
def test_epochs_continue_in_the_middle_and_end_their_body_once_more(
    tmp_path: Path, closes: bool, again: list[tuple[int, int]]
) -> None:
    """What follows the batches of an epoch (evaluation) is repeated if the job was left inside it, and not if the
    script has saved behind it."""
    seen: list[tuple[int, int]] = []

    def run(leave: bool) -> None:
        with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
            job = Job(session)
            for epoch in session.epochs(2):
                list(steps(session, job.optimizer, job.wrapped, 30))
                seen.append((epoch, session.step_number))
                if closes:
                    session.save()
                if leave:
                    return

    run(leave=True)
    run(leave=False)
    assert seen == [(0, 2), *again, (1, 4)]
    run(leave=False)
    assert seen[-1] == (1, 4)
    assert len(seen) == 2 + len(again)


def test_checkpoints_are_saved_by_steps_and_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with Session(first, device="cpu", checkpoint_every_steps=3, checkpoint_every_s=None, keep_last=2) as session:
        Job(session).train(2)
    assert [entry.step for entry in CheckpointManager(first).entries()] == [8, 6]
    with Session(second, device="cpu", checkpoint_every_s=1e-9, keep_last=100) as session:
        Job(session).train(2)
    assert len(CheckpointManager(second).entries()) > 1


def test_an_automatic_interval_follows_the_cost_of_saves_and_the_failures(tmp_path: Path) -> None:
    """It is shown as soon as a save was measured; a life that had lost steps counts as a failure, one that had not does
    not. Without ``auto`` checkpoints hold nothing of it."""

    def life(*, steps: int, fails: bool) -> Experience:
        with (
            suppress(KeyboardInterrupt),
            Session(tmp_path, device="cpu", checkpoint_every_steps=2, checkpoint_every_s="auto") as session,
        ):
            job = Job(session)
            pulse, saver = session._here.tracker.pulse, session._trained.saver
            assert pulse.save_interval_s == FIRST_S
            job.train(99, stop_at=session.step_number + steps)
            assert SHORTEST_S <= pulse.save_interval_s == pytest.approx(best_interval_s(saver._seen()), rel=0.01)
            assert saver._seen().cost_s is not None
            saver.wait()
            if fails:
                raise KeyboardInterrupt
            return saver._seen()
        return Experience()

    life(steps=3, fails=True)
    seen = life(steps=3, fails=False)
    assert (seen.failures, seen.trained_s > 0.0) == (1, True)
    assert life(steps=3, fails=True) == Experience()
    newest = CheckpointManager(tmp_path).newest()
    assert newest is not None
    kept = Experience.from_checkpoint(newest.manifest.fields)
    with Session(tmp_path / "plain", device="cpu") as session:
        Job(session).train(1)
    plain = CheckpointManager(tmp_path / "plain").newest()
    assert plain is not None
    assert FIELD not in plain.manifest.fields
    assert (kept.failures, kept.trained_s > seen.trained_s) == (2, True)


def test_the_session_knows_that_a_checkpoint_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, encode = list[bool](), CheckpointManager.encode

    def noted(manager: CheckpointManager, *arguments: Any, **options: Any) -> Any:
        seen.append(session._here.tracker.saving)
        return encode(manager, *arguments, **options)

    monkeypatch.setattr(CheckpointManager, "encode", noted)
    with Session(tmp_path, device="cpu", checkpoint_every_steps=3, checkpoint_every_s=None) as session:
        job = Job(session)
        job.train(1)
        assert (seen, session._here.tracker.saving) == ([True], False)
        session.save()
        job.train(2, stop_at=5)
        assert not session._here.tracker.saving
    assert seen == [True] * 3


def test_save_takes_metrics_and_keeps_the_best(tmp_path: Path) -> None:
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        job = Job(session)
        job.train(1)
        name = session.save({"accuracy": 0.75}, best=True)
        job.train(2)
    best = CheckpointManager(tmp_path).best()
    assert best is not None
    assert (best.name, best.manifest.metrics) == (name, {"accuracy": 0.75})
    with Session(tmp_path, device="cpu") as session:
        Job(session)
        assert session.best_metrics == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("field", "options", "dataset", "size"),
    [
        ("length", {}, data(50), 16),
        ("global_batch", {}, data(), 12),
        ("seed", {"seed": 5}, data(), 16),
    ],
)
def test_a_job_whose_data_changed_is_refused_by_name(
    tmp_path: Path, field: str, options: dict[str, Any], dataset: Any, size: int
) -> None:
    """Unless the change is allowed; the message says from what to what. A life that saves before it draws keeps how the
    data was cut: else the next one could cut it otherwise, and samples would be missed without a word."""
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        Job(session).train(1, stop_at=2)
    with Session(tmp_path, device="cpu", **options) as session:
        Job(session)
        session.save(best=True)
    with Session(tmp_path, device="cpu", **options) as session:
        Job(session)
        with pytest.raises(ConfigError, match=f"'{field}' is .* here and was"):
            session.batches(dataset, global_batch_size=size, epochs=1)
    with Session(tmp_path, device="cpu", allow_changed=[field], **options) as session:
        Job(session)
        assert next(session.batches(dataset, global_batch_size=size, epochs=1)).ids.size
    with Session(tmp_path, device="cpu", allow_changed=["colour"]) as session:
        Job(session)
        with pytest.raises(ConfigError, match="no field 'colour'"):
            session.batches(data(), global_batch_size=16, epochs=1)


def test_a_directory_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), Session(tmp_path / "file" / "runs", device="cpu"):
        pass


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure(stream, json=True)
    yield stream
    logs.configure()


def full_disk(manager: CheckpointManager, state: Any, info: Any, stop: Any) -> Any:
    raise StorageError("no space left")


@pytest.mark.parametrize("required", [False, True])
def test_a_save_that_the_storage_refuses_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    """On schedule or asked for, it costs nothing but itself; the last one ends the job where the job wants that."""
    steps: list[int] = []

    def run() -> None:
        with Session(
            tmp_path, device="cpu", checkpoint_every_steps=2, saving=SavingOptions(require_last_save=required)
        ) as session:
            job = Job(session)
            assert session.save({"accuracy": 0.5}, best=True) is not None
            with monkeypatch.context() as patch:
                patch.setattr(CheckpointManager, "commit", full_disk)
                job.train(1)
                assert session.save({"accuracy": 0.75}, best=True) is None
                assert session.best_metrics == {"accuracy": 0.5}
            assert session.save(wait=True) == CheckpointManager(tmp_path).entries()[0].name
            monkeypatch.setattr(CheckpointManager, "commit", full_disk)
            job.train(2)
            steps.append(session.step_number)

    with pytest.raises(SystemExit, match="73") if required else nullcontext():
        run()
    assert steps == [8]


def test_a_training_that_was_under_way_goes_on_where_nothing_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes its place again begins from the newest checkpoint; where there is none to begin from, and no
    step is known to have been made, the directory is a mistake."""

    def unwritable(manager: CheckpointManager) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(CheckpointManager, "check_writable", unwritable)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(StorageError), Session(tmp_path, device="cpu"):
        pass
    monkeypatch.setenv("ELASTIC_TRAINER_REACHED", "3")
    with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
        Job(session).train(1)
    monkeypatch.delenv("ELASTIC_TRAINER_REACHED")
    with Session(tmp_path, device="cpu") as session:
        Job(session)
        assert session.step_number == 4


def test_the_ledger_waits_for_the_disk_and_loses_no_line(tmp_path: Path, said: io.StringIO) -> None:
    """It refuses at any byte of a line, or to be opened at all; whatever waits is written when there is room."""
    ledger = Ledger(WorkerEnvironment(ledger_dir=tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (100, 1000, 1001):  # what a full disk does, to this process alone
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            for number in range(20):
                ledger.write("step", number=[size, number])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, was)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 1001
    assert said.getvalue().count("ledger.not_written") == 1
    ledger.write("closed", number=None)
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert numbers == [*([size, number] for size in (100, 1000, 1001) for number in range(20)), None]
    ledger.close()
    with pytest.raises(StorageError, match="the ledger cannot be written"):
        Ledger(WorkerEnvironment(ledger_dir=path / "below-a-file"))
    assert Ledger(WorkerEnvironment(ledger_dir=path / "below-a-file", reached=1)).enabled


@pytest.mark.parametrize("wait", [True, False])
def test_a_diverged_state_is_never_saved(tmp_path: Path, wait: bool) -> None:
    """The newest checkpoint stays a good one, and the message names the parameter; without wait, at a next save."""

    def run() -> None:
        with Session(tmp_path, device="cpu", checkpoint_every_s=None) as session:
            job = Job(session)
            job.train(1, stop_at=2)
            session.save()
            with torch.no_grad():
                job.module[4].bias.fill_(float("nan"))  # type: ignore[index]
            for _ in range(1 if wait else 9):  # two may be on their way to storage
                session.save(wait=wait)

    with pytest.raises(NonFiniteError, match=r"'4\.bias' is no longer finite"):
        run()
    assert [entry.step for entry in CheckpointManager(tmp_path).entries()] == [2]


def measured(module: nn.Module, batch: Any) -> dict[str, Any]:
    assert not module.training
    assert not torch.is_grad_enabled()
    return {"x": (batch.x.sum(), len(batch)), "half": (float(len(batch)), 2 * len(batch))}


def test_evaluation_counts_each_sample_once_and_leaves_the_model_as_it_was() -> None:
    """Exact means, training modes (also frozen ones) and BatchNorm statistics untouched; without counts, refused."""
    with Session(device="cpu") as session:
        job = Job(session)
        job.module[1].eval()  # type: ignore[index]
        before = job.fingerprint()
        result = session.evaluate(job.wrapped, data(), 7, measured)
        assert [each.training for each in job.module] == [True, False, True, True, True]  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(before, job.fingerprint(), strict=True))
        assert result == {"x": pytest.approx(float(data().tensors[0].double().sum()) / 60), "half": 0.5}
        with pytest.raises(ConfigError, match=r"'loss' is not a \(sum, count\) pair"):
            session.evaluate(model(), data(), 8, lambda module, batch: {"loss": torch.tensor(1.0)})  # type: ignore[dict-item]
        with pytest.raises(DataError, match="empty"):
            session.evaluate(model(), [], 8, measured)


def test_a_step_is_in_the_ledger_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its round ends between the commit and the boundary behind it, it is recorded before that."""
    monkeypatch.setenv("ELASTIC_TRAINER_LEDGER_DIR", str(tmp_path))
    with Session(device="cpu") as session:
        job = Job(session)
        batch = next(iter(session.batches(data(), global_batch_size=16, epochs=1)))
        with session.step() as step:
            step.backward(loss_of(job.wrapped, batch))
            job.optimizer.step()
            session._here.record(step)
        assert step.recorded
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["opened", "step", "closed"]


class ShardedOptimizer(torch.optim.SGD):
    """Stands for torch's own optimizers that communicate."""

    __module__ = "torch.distributed.optim.zero_redundancy_optimizer"


def wrap(session: Session, kind: Any = torch.optim.SGD, **options: Any) -> nn.Module:
    module = model()
    return session.wrap(module, optimizer=kind(module.parameters(), lr=0.1), **options)


def drawn(session: Session, **length: Any) -> Any:
    return session.batches(data(), global_batch_size=4, **length)


def plateau(session: Session) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters())
    session.wrap(module, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda session: (wrap(session), wrap(session)), "was called before"),
        (lambda session: drawn(session, epochs=1), "no model yet"),
        (lambda session: (wrap(session), drawn(session)), "how many epochs"),
        (lambda session: (wrap(session), drawn(session, steps=3, epochs=2)), "with both steps and epochs"),
        (lambda session: (wrap(session), [drawn(session, steps=3) for _ in session.epochs(1)]), "with both steps and"),
        (plateau, "needs a metric"),
        (lambda session: session.wrap(model(), optimizer=torch.optim.SGD(model().parameters())), "not in the model"),
        (lambda session: wrap(session, ddp_options={"static_graph": True}), "static_graph"),
        (lambda session: wrap(session, ddp_options={"init_sync": True}), "'init_sync' is set by the session"),
        (lambda session: wrap(session, ShardedOptimizer), "communicates with other ranks"),
        (lambda session: wrap(session, reduction="bush"), "'ddp', 'tree'"),
        *((lambda session, decay=decay: wrap(session, average=decay), "between 0 and 1") for decay in (0.0, 1.0, -1.0)),
        (lambda session: wrap(session, average=float("nan")), "between 0 and 1"),
        (lambda session: (wrap(session), session.average), r"average=0\.999"),
        (lambda session: [session.register("a", Counter()) for _ in range(2)], "the name is taken"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(mistake: Any, says: str) -> None:
    with Session(device="cpu") as session, pytest.raises(ConfigError, match=says):
        mistake(session)


def test_a_session_must_be_opened_and_its_options_make_sense() -> None:
    with pytest.raises(ConfigError, match="not open"):
        _ = Session().rank
    for options, says in (
        ({"seed": -1}, "seed is -1"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps is 0"),
        ({"checkpoint_every_s": 0.0}, "checkpoint_every_s is 0"),
        ({"keep_last": 0}, "keep_last is 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            Session(**options)
    with pytest.raises(ConfigError, match="'ignore'"):
        CheckOptions(nonfinite="ignore")


def test_a_plain_process_needs_no_process_group() -> None:
    """No group, no port; the small collectives answer for themselves."""
    with Session(device="cpu") as session:
        module = model()
        assert session.wrap(module, optimizer=torch.optim.SGD(module.parameters())).module is module
        assert not torch.distributed.is_initialized()
        assert (session.rank, session.world_size, session.is_rank0) == (0, 1, True)
        assert session.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
        session.barrier()
        assert session.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]]
        assert session.broadcast(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("launched", "kept", "warned"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_launched_session_without_a_directory_says_once_that_nothing_is_saved(
    launched: bool, kept: bool, warned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that a person starts by hand to try something is spared."""
    if launched:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
            monkeypatch.setenv(name, value)
    with (
        structlog.testing.capture_logs() as said,
        Session(tmp_path if kept else None, device="cpu", checkpoint_every_s=None) as session,
    ):
        Job(session).train(1)
    effects = [each["effect"] for each in said if each["event"] == "checkpoint.disabled"]
    assert effects == ["the session saves nothing: if all workers end at once, what they trained is lost"] * warned
