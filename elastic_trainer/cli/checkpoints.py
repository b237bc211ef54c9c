"""``elastic-trainer checkpoints DIR``: what is there, what it holds, and with ``--verify`` whether every byte is right.

Changes nothing. *Fails by* ConfigError for a directory that is not there; exit code 1 when something is damaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from elastic_trainer.checkpoint import Description, Soundness, describe
from elastic_trainer.cli.options import console
from elastic_trainer.cli.wording import moment
from elastic_trainer.errors import EXIT_FAILURE, ConfigError
from elastic_trainer.preflight.finding import size_text
from elastic_trainer.store.untrusted import plain


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare it with its checksum")
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """List them, newest first; 1 if one of them is damaged or unreadable."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {str(directory)!r}", hint="give the checkpoint.directory of a job")
    found = describe(directory, read_all=arguments.verify)
    if arguments.json:
        print(json.dumps({"directory": str(directory), "checkpoints": [as_json(each) for each in found]}, indent=2))
    else:
        _show(found, directory)
    bad = {Soundness.DAMAGED, Soundness.UNREADABLE}
    return EXIT_FAILURE if any(each.status in bad for each in found) else 0


def as_json(each: Description) -> dict[str, Any]:
    """One entry as plain values; what its manifest says is left out where that cannot be read."""
    values: dict[str, Any] = {"name": each.name, "path": str(each.path), "status": str(each.status)}
    if each.problem:
        values["problem"] = each.problem
    if each.manifest is not None:
        keys = ("run", "step", "round", "epoch", "samples", "world_size", "created", "metrics", "best", "size")
        values |= {key: getattr(each.manifest, key) for key in keys}
    return values


def _show(found: Sequence[Description], directory: Path) -> None:
    if not found:
        print(f"no checkpoints in {directory}")
        return
    console(160).print(table(found))
    for each in found:
        if each.problem:
            print(plain(f"{each.name}: {each.problem}"))


def table(found: Sequence[Description]) -> Table:
    """The entries as a table."""
    result = Table()
    for column in ("checkpoint", "step", "round", "epoch", "ranks", "metrics", "size", "created", "status"):
        number = column in ("step", "round", "epoch", "ranks", "size")
        result.add_column(column, justify="right" if number else "left", overflow="fold")
    # A checkpoint says whether it was the best when it was written: the newest that does is the best now.
    best = next((each.name for each in found if each.manifest is not None and each.manifest.best), None)
    for each in found:
        cells = (each.name, *_cells(each, best=each.name == best), str(each.status))
        result.add_row(*(Text(plain(cell)) for cell in cells))
    return result


def _cells(each: Description, *, best: bool) -> tuple[str, ...]:
    manifest = each.manifest
    if manifest is None:
        return ("-",) * 7
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(manifest.metrics.items()))
    numbers = (manifest.step, manifest.round, manifest.epoch, manifest.world_size)
    return (
        *map(str, numbers),
        (metrics or "-") + (" (best)" if best else ""),
        size_text(manifest.size),
        moment(manifest.created),
    )
