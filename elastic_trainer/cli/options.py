"""What commands share: sub-commands, checks of torch and numbers, ``key=value`` lists, the console that tables go to.

*Fails by* ConfigError for values that make no sense.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

from elastic_trainer.cli.main import needs_torch
from elastic_trainer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from rich.console import Console


def ensure_torch() -> None:
    """ConfigError unless torch is installed, without loading it: for commands whose processes use it."""
    if find_spec("torch") is None:
        raise needs_torch()


def console(width: int = 80) -> Console:
    """A console on standard output; a file gets tables of ``width`` characters, or of as many as COLUMNS says if
    that is more."""
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = max(width, made.width)
    return made


def add_actions(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]],
) -> None:
    """Describe sub-commands, each by what describes its options, what runs it, and its help."""
    made = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, (describe, _, text) in actions.items():
        describe(made.add_parser(name, help=text, description=text))


def seconds(value: float, option: str, *, above_zero: bool = False) -> float:
    """``value``, if it is finite and not negative (or above zero)."""
    if not (math.isfinite(value) and value >= 0) or (above_zero and value == 0):
        what = " above 0" if above_zero else ""
        raise ConfigError(f"{option} {value} is not a number of seconds{what}", hint="give for example 60")
    return value


def at_least(least: int, value: int, option: str) -> int:
    """``value``, if it is not below ``least``."""
    if value < least:
        raise ConfigError(f"{option} {value} is below {least}", hint=f"give {least} or more")
    return value


def key_values(text: str) -> dict[str, str]:
    """Read ``key=value,...`` of ``--rdzv-conf``."""
    options: dict[str, str] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise ConfigError(f"--rdzv-conf: {part!r} is not key=value", hint="write --rdzv-conf ttl=5,last_call=1")
        options[name.strip()] = value.strip()
    return options
