"""torchrun's entry point for ``--rdzv-backend etcd3``.

torchrun loads every plugin at its start, and only warns when loading fails: so nothing is imported here until this
backend is asked for, and what can go wrong does so in :func:`create`.

*Runs in* torchrun's main thread.
*Fails by* one sentence on stderr and an exit code (SystemExit), never a traceback for what the user can mend.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls when it loads the plugin: the function that makes the handler."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler for torchrun's ``parameters``, or end the process with a sentence."""
    from elastic_trainer.agent.rendezvous import launcher

    launcher.listen_for_sigterm()
    from elastic_trainer import torch_internals
    from elastic_trainer.agent.rendezvous.in_place import InPlaceHandler
    from elastic_trainer.agent.rendezvous.restart import Etcd3RendezvousHandler, end
    from elastic_trainer.agent.workers import compile_cache, orphan_reaper
    from elastic_trainer.errors import ElasticTrainerError
    from elastic_trainer.model import RecoveryMode
    from elastic_trainer.settings import rendezvous_options
    from elastic_trainer.telemetry import logs
    from elastic_trainer.warm.template import skip_last_collection

    logs.configure()
    atexit.register(skip_last_collection)
    in_place = parameters.config.get("recovery") == RecoveryMode.IN_PLACE
    kind = InPlaceHandler if in_place else Etcd3RendezvousHandler
    try:
        options = rendezvous_options(parameters.config)
        if in_place:
            torch_internals.survive_nccl_errors()
        compiled = compile_cache.claim(launcher.launched_script(), options.compile_cache_mb)
        await_imports = launcher.start_workers_warm(options.preload)
        handler = kind.from_parameters(parameters, options, await_imports, compiled)
        orphan_reaper.install(options.stop_grace)
    except ElasticTrainerError as error:
        end(error)
    return handler
