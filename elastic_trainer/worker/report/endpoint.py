"""The metrics endpoint of a worker whose metrics no agent exports: under torchrun's own rendezvous, or alone.

*Runs in* the server's threads; the session closes it. *Fails by* ConfigError when it cannot listen.
"""

from __future__ import annotations

from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc.page import PageReader, Reading
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.node import EndpointOptions, NodeEndpoint
from elastic_trainer.web.node_metrics import NodeCollector
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter


def open_endpoint(environment: WorkerEnvironment, tracker: HeartbeatReporter) -> NodeEndpoint | None:
    """This process's own endpoint, if requested and if no agent reads its page."""
    if environment.pages is not None or not environment.metrics_base_port:
        return None
    if (environment.metrics_cert is None) != (environment.metrics_key is None):
        raise ConfigError(
            "environment: ELASTIC_TRAINER_METRICS_CERT and ELASTIC_TRAINER_METRICS_KEY need each other",
            hint="set both or neither",
        )
    reader = PageReader.of(tracker.page.memory)

    def look() -> list[Reading]:
        reading = reader.read()
        return [reading] if reading is not None else []

    collector = NodeCollector(
        environment.run_id, environment.node, look, lambda reading: reading.pulse.nonfinite, dict, None
    )
    options = EndpointOptions(
        environment.metrics_address,
        environment.metrics_base_port + environment.local_rank,
        environment.metrics_token_file,
        environment.metrics_cert,
        environment.metrics_key,
    )
    endpoint = NodeEndpoint(options, collector)
    logger().info("endpoint.opened", url=endpoint.url(options.address))
    return endpoint
