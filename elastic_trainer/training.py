"""``python -m elastic_trainer.training JOB`` runs a job: the command's name of :mod:`elastic_trainer.jobs`.

Imports from here go on working: they give the modules of ``elastic_trainer.jobs``.
"""

from __future__ import annotations

import sys

from elastic_trainer.jobs.main import main

if __name__ == "__main__":
    sys.exit(main())

from elastic_trainer.checkpoint import codec
from elastic_trainer.jobs import config, curves, loggers, reporting, task, trainer

_HOMES = {
    "config": config,
    "curves": curves,
    "loading": config,
    "loggers": loggers,
    "run_log": reporting,
    "sharding": codec,
    "task": task,
    "trainer": trainer,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _HOMES.items()})
