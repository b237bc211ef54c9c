"""The earlier name of the ready-made tasks: their modules are those of :mod:`elastic_trainer.jobs`."""

from __future__ import annotations

import sys

from elastic_trainer import jobs
from elastic_trainer.jobs import corpus, digits, gpt, scripts, texts

_HOMES = {
    "language": jobs,
    "language.corpus": corpus,
    "language.gpt": gpt,
    "language.text_files": texts,
    "language.transformer": gpt,
    "scripts": scripts,
    "vision": jobs,
    "vision.digits": digits,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _HOMES.items()})
