"""Small collectives: the rules that need no second rank."""

from __future__ import annotations

import pytest

from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.worker.comm.control import Control, Purpose


def test_purposes_cannot_be_confused_by_a_coincidence_of_sums() -> None:
    """1 + 3 = 2 + 2: the squares distinguish different purposes with the same sum."""
    control = Control(None, 0, 2)
    with pytest.raises(ConfigError):
        control.checked([4.0, 10.0, 0.0], Purpose.LOSS)
    assert control.checked([4.0, 8.0, 7.0], Purpose.LOSS) == [7.0]


def test_a_process_that_is_alone_raises_its_own_error() -> None:
    Control().agree(None)
    with pytest.raises(CheckpointError, match="alone"):
        Control().agree(CheckpointError("alone"))
