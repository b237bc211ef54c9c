"""Running averages of a model's parameters, as torch's own AveragedModel keeps them.

*Runs in* the worker's main thread. *Fails by* ConfigError for a decay that is none.
"""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_trainer.errors import ConfigError


def averaged(module: nn.Module, wanted: float | AveragedModel | None) -> AveragedModel | None:
    """The average to keep of ``module``: one with this decay, the given one, or none.

    With decay d, averaged parameters become d * averaged + (1 - d) * present at each step, from those of the first step
    on; a step that a GradScaler skipped counts too. Buffers are the present ones.
    """
    if wanted is None:
        return None
    if isinstance(wanted, AveragedModel):
        return wanted.to(next(module.parameters()).device)
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(checked_decay(wanted)))  # type: ignore[no-untyped-call]


def checked_decay(wanted: float | AveragedModel) -> float:
    """ConfigError for what is no decay."""
    if isinstance(wanted, AveragedModel):
        raise ConfigError("an AveragedModel of a sharded model", hint="give a decay, such as average=0.999")
    if not 0.0 < wanted < 1.0:
        raise ConfigError(f"average is {wanted:g}", hint="give a decay between 0 and 1, such as 0.999")
    return wanted
