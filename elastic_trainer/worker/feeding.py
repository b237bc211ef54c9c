"""What a session trains on: its batches, of a data set, of a DataLoader of the script's own, or of streams.

*Runs in* the worker's main thread.
*Fails by* ConfigError and DataError for data that cannot be divided among ranks and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_trainer.data.loaders import LoaderSource, SessionSampler
from elastic_trainer.data.loading import Loading
from elastic_trainer.data.plan import EpochPlan, LrRule
from elastic_trainer.data.sampler import Batch, Collate
from elastic_trainer.data.sources import checked_length, is_stream
from elastic_trainer.data.streams import Streams
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.standing import SessionStanding
from elastic_trainer.worker.state.training_state import Stateful, check_part
from elastic_trainer.worker.steps.options import SessionOptions, one_of


class SessionData(SessionStanding):
    """See the module."""

    def __init__(self, options: SessionOptions, environment: WorkerEnvironment) -> None:
        super().__init__(environment)
        self._options = options
        self._user: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Save and resume ``part`` too, before or after :meth:`wrap`; its state must be the same on all ranks.

        In place a rank may receive the state of another that is one collective ahead: change ``part`` only after the
        collectives that follow a step (``step.loss``, ``save``, ...).
        """
        if self._training is not None:
            self._training.state.register(name, part)
        else:
            check_part(name, part, self._user)
            self._user[name] = part

    # ---- data

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the cursor's to ``total - 1``; the cursor moves on when the body of one ends.

        A life that resumes behind the last step of an epoch runs what is left of the body, with no batch; behind a
        :meth:`save` there, it begins with the next epoch.
        """
        return self._here.feed.epochs(total)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        passes: int | None = None,
        shuffle: bool = True,
        scale_from: int | None = None,
        lr_rule: str = LrRule.NONE,
        collate: Collate | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        bad_samples: str = "raise",
        max_bad_fraction: float = 0.01,
        multiprocessing_context: str | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from the cursor on: of the present epoch, or of all up to ``epochs``.

        With ``steps`` as many epochs as it takes until the run, with all its lives, has made that many steps.

        A batch comes again until a step has committed it. ``dataset`` is map-style, or a SeekableStream (with
        ``shuffle=False``: it comes in its own order). Random numbers drawn for a sample are keyed by (seed, epoch,
        sample), so its augmentation does not depend on where it is drawn; a data set with ``deterministic = True``
        draws none, one with ``generators = ("random",)`` draws from that one alone (of "random", "numpy", "torch") and
        costs less; ``set_epoch(epoch)`` is called for each epoch, in every process, if the data set has it.

        The global batch is the same at any number of ranks. With ``scale_from=R`` it is the one for R ranks, and with W
        ranks W / R times as large (rounded); the learning rate that the optimizer has is then multiplied by what
        ``lr_rule`` says ("linear", "sqrt", "none") for each update. Both are kept in the checkpoint.

        With ``passes`` each rank computes its part in that many micro-batches, whatever the number of ranks.

        The last global batch of an epoch is smaller if the samples do not fill it. With ``drop_last`` they are left
        out (with ``passes``: those that do not fill a pass of ``global_batch_size / passes`` samples).

        With ``workers`` that many processes per rank fetch ``prefetch`` micro-batches each ahead of use (plain tensors
        are always taken directly). They hold the data set as it was at the first batch, and none of its sockets.
        ``pin_memory`` None: when the device is CUDA.

        ``bad_samples="skip"`` leaves out samples that raise: they are logged and counted (``skipped_samples``), and
        the gradient is that of the sum over the samples present, divided by the planned size of the global batch.
        DataError when more than ``max_bad_fraction`` of this rank's samples of an epoch (and more than 8) are bad, or
        all of a micro-batch.
        """
        change, rule = self._trained.round_end.change, one_of(LrRule, lr_rule, "lr_rule")
        length, seed = checked_length(dataset), self._options.seed
        size, micro = global_batch_size, micro_batch_size
        plan = EpochPlan(length, size, micro, seed, shuffle, scale_from, rule, passes, drop_last)
        loading = Loading(workers, prefetch, pin_memory, bad_samples, max_bad_fraction, multiprocessing_context)
        if isinstance(dataset, Streams):
            change = self._reading(dataset, plan, loading, epochs)
        return self._here.feed.batches(dataset, plan, collate, epochs, steps, loading, change)

    def _reading(self, streams: Streams, plan: EpochPlan, loading: Loading, epochs: int | None) -> Callable[[], bool]:
        """Keep where ``streams`` are with the state; what is to be called before a batch is drawn."""
        if epochs is not None or self.within_epochs:
            raise ConfigError("streams have no end, and so no epochs", hint="say steps=N")
        for option, given in (
            ("scale_from", plan.scale_from is not None),
            ("workers", loading.workers > 0),
            ("bad_samples='skip'", loading.bad_samples != "raise"),
            ("reduction='local_sgd' or 'diloco'", self._trained.replica.apart),
        ):
            if given:
                raise ConfigError(
                    f"{option} does not go with Streams",
                    hint="leave it out; a stream may read ahead itself, as torchdata's StatefulDataLoader does",
                )
        if self._trained.state.user.get(streams.name) is not streams:
            self.register(streams.name, streams)
        streams.begin(plan.global_batch)
        change, everyone, position = self._trained.round_end.change, self._all, self._position

        def changed() -> bool:
            if change():
                return True
            if streams.due(position.step):
                everyone.exchange(streams)
            return False

        return changed

    def sampler(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        passes: int | None = None,
        shuffle: bool = True,
        scale_from: int | None = None,
        lr_rule: str = LrRule.NONE,
        drop_last: bool = False,
    ) -> SessionSampler:
        """The batch sampler of a DataLoader of your own, or of torchdata's StatefulDataLoader.

        ``DataLoader(dataset, batch_sampler=sampler, ...)``, then ``for batch in sampler.batches(loader, epochs=N)``.
        The arguments are those of :meth:`batches`; ``dataset`` is map-style.
        """
        if is_stream(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} is a stream, whose samples have no numbers for a sampler",
                hint="give it to session.batches(..., shuffle=False)",
            )
        training, rule = self._trained, one_of(LrRule, lr_rule, "lr_rule")
        length, seed, feed = checked_length(dataset), self._options.seed, self._here.feed
        size, micro = global_batch_size, micro_batch_size
        plan = EpochPlan(length, size, micro, seed, shuffle, scale_from, rule, passes, drop_last)

        def begin(source: LoaderSource, epochs: int | None, steps: int | None) -> Iterator[Batch]:
            return feed.batches(dataset, plan, None, epochs, steps, source, training.round_end.change)

        return SessionSampler(dataset, plan, self.device, begin)

    @property
    def skipped_samples(self) -> int:
        """How many samples this process has left out because they raise."""
        return self._here.feed.tally.total
