"""Notices of clouds that take a machine back, from metadata services on loopback."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from elastic_trainer.agent.health.service import CLOUDS, EVERY_S, SILENT_TURNS, PreemptionWatch
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import rendezvous_options
from tests.support.metadata import MetadataServer


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_node_leaves_once_when_its_cloud_says_so(cloud: str) -> None:
    """Not before, and not for another machine of its scale set or for a pause; what the log says names the notice."""
    left: list[str] = []
    with MetadataServer() as server, capture_logs() as logs:
        watch = PreemptionWatch("n0", f"{cloud}@{server.url}", leave=lambda reason: left.append(cloud))
        assert [watch.turn() for _ in range(3)] == [EVERY_S] * 3
        assert not left
        server.preempt()
        assert watch.turn() > 1000  # it has left: there is nothing more to ask
    assert left == [cloud]
    (told,) = [each for each in logs if each["event"] == "node.preempted"]
    assert told["node"] == "n0"
    assert any(word in told["reason"] for word in ("terminate", "preempted", "Preempt"))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_does_not_answer_is_logged_once_and_asked_again(cloud: str) -> None:
    """Errors and closed ports are no notice; the node trains on, and obeys as soon as the service is there."""
    left: list[str] = []
    with MetadataServer() as server, capture_logs() as logs:
        watch = PreemptionWatch("n0", f"{cloud}@{server.url}", leave=lambda reason: left.append(cloud))
        server.broken = True
        for _ in range(SILENT_TURNS + 2):
            assert watch.turn() == EVERY_S
        assert [each["event"] for each in logs] == ["preemption.unwatched"]
        assert not left
        server.broken = False
        server.preempt()
        watch.turn()
    assert left == [cloud]
    gone = PreemptionWatch("n0", f"{cloud}@{server.url}", leave=lambda reason: left.append("again"))
    assert gone.turn() == EVERY_S
    assert left == [cloud]


def test_a_cloud_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="preemption"):
        rendezvous_options({"preemption": "ec3"})
