"""Which of torch's schedules computes a model in stages."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.model.stages import schedule_for


@pytest.mark.parametrize(
    ("name", "micro_batches", "stages", "expected"),
    [
        (None, 4, 4, Schedule1F1B),
        ("1F1B", 3, 4, ScheduleGPipe),
        ("GPipe", 9, 4, ScheduleGPipe),
        (None, 8, 8, ScheduleInterleaved1F1B),
        (None, 3, 8, ScheduleInterleaved1F1B),
        ("Interleaved1F1B", 10, 8, ScheduleInterleaved1F1B),
        ("Interleaved1F1B", 9, 8, ScheduleLoopedBFS),
        ("LoopedBFS", 8, 8, ScheduleLoopedBFS),
        ("V", 8, 4, None),
        ("LoopedBFS", 8, 4, None),
        ("GPipe", 8, 8, None),
    ],
)
def test_a_schedule_is_taken_that_can_compute_the_micro_batches(
    name: str | None, micro_batches: int, stages: int, expected: type | None
) -> None:
    """On four ranks: nine micro-batches do not divide into the two rounds that they would make. One for another number
    of stages is refused."""
    if expected is not None:
        assert schedule_for(name, micro_batches, stages, 4) is expected
        return
    has = "one stage" if stages == 4 else "several stages"
    with pytest.raises(
        ConfigError, match=rf"schedule='{name}'\), and each rank has {has} \(known are 1F1B, GPipe with"
    ):
        schedule_for(name, micro_batches, stages, 4)
