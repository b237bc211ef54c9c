"""Facts about a job's data that must not change between its runs: kept with the state, compared before the rest of it.

*Runs in* every rank, main thread.
*Fails by* ConfigError naming the fact and what is different.
*Invariant*: a job never takes over a state whose numbers (class indices, say) mean other things to it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_trainer.errors import ConfigError

_SHOWN = 5


class TaskIdentity:
    """The facts that a task names (:meth:`Task.identity`), registered with the session."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        try:
            self._facts: dict[str, Any] = json.loads(json.dumps(dict(facts)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"identity() gives what JSON cannot say: {error}", hint="name plain values") from error

    def state_dict(self) -> dict[str, Any]:
        return {"facts": self._facts}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError about the first fact that is another here; those that only one side knows are no matter."""
        for name, mine in self._facts.items():
            difference = changed(name, state["facts"].get(name, mine), mine)
            if difference is not None:
                hint = "give the data that the run began with, or begin another one with its own checkpoint.directory"
                raise ConfigError(difference, hint=hint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)


def changed(name: str, was: Any, now: Any) -> str | None:
    """How the fact ``name`` changed, in one sentence; None if it did not. Pure."""
    if was == now:
        return None
    if not (_is_list(was) and _is_list(now)):
        return f"'{name}' is {reprlib.repr(now)} here and was {reprlib.repr(was)} when the run began"
    before, after = set(map(str, was)), set(map(str, now))
    added = [str(item) for item in now if str(item) not in before]
    removed = [str(item) for item in was if str(item) not in after]
    if not added and not removed:
        return f"'{name}' has the same entries as when the run began, but in another order or number"
    parts = [f"{_listed(items)} {verb}" for items, verb in ((added, "added"), (removed, "removed")) if items]
    return f"'{name}' changed since the run began: {', '.join(parts)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(reprlib.repr, items[:_SHOWN])) + more
