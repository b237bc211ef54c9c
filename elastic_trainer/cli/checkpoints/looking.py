"""``checkpoints list``, ``show`` and ``verify``: what is there, what one holds, and whether every byte is right.

Changes nothing. *Fails by* ConfigError for what is not there; exit code 1 when something is damaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from elastic_trainer.checkpoint import Description, Entry, Soundness
from elastic_trainer.checkpoint.faults import DamagedError, UnreadableError
from elastic_trainer.checkpoint.inventory import describe
from elastic_trainer.checkpoint.reading import read_headers, verify, whole_tensors
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.tensorfile import Placed
from elastic_trainer.cli.checkpoints.places import CHECKPOINT, Watched, add_json, checkpoint, directory, progress
from elastic_trainer.cli.options import console
from elastic_trainer.cli.wording import duration, moment
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import EXIT_FAILURE, ConfigError
from elastic_trainer.preflight.finding import size_text
from elastic_trainer.store.untrusted import plain

if TYPE_CHECKING:
    from rich.table import Table

FACTS = ("run", "step", "round", "epoch", "samples", "world_size", "created", "metrics", "best", "size")
_BAD = {Soundness.DAMAGED, Soundness.UNREADABLE}


def configure_list(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("directory", metavar="DIR", help="a directory of checkpoints")
    add_json(parser)


def run_list(arguments: argparse.Namespace) -> int:
    """By the manifests alone; 1 if one of them is damaged or unreadable."""
    storage = directory(arguments.directory)
    found = describe(storage.location, read_all=False)
    if arguments.json:
        _print({"directory": arguments.directory, "checkpoints": [as_json(each) for each in found]})
    elif not found:
        print(f"no checkpoints in {arguments.directory}")
    else:
        console(160).print(table(found, SYSTEM.wall()))
        _print_problems(found)
    return EXIT_FAILURE if any(each.status in _BAD for each in found) else 0


def as_json(each: Description) -> dict[str, Any]:
    """One entry as plain values; what its manifest says is left out where that cannot be read."""
    values: dict[str, Any] = {"name": each.name, "path": str(each.path), "status": str(each.status)}
    if each.problem:
        values["problem"] = each.problem
    if each.manifest is not None:
        values |= {key: getattr(each.manifest, key) for key in FACTS}
    return values


def table(found: Sequence[Description], now: float) -> Table:
    """The entries as a table; the name of each begins with step and round."""
    result = _table(
        ("checkpoint", ""), ("epoch", "right"), ("age", "right"), ("size", "right"), ("metrics", ""), ("status", "")
    )
    # A checkpoint says whether it was the best when it was written: the newest that does is the best now.
    best = next((each.name for each in found if each.manifest is not None and each.manifest.best), None)
    for each in found:
        _add(result, each.name, *_cells(each, now, best=each.name == best), str(each.status))
    return result


def _cells(each: Description, now: float, *, best: bool) -> tuple[str, ...]:
    if each.manifest is None:
        return ("-",) * 4
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(each.manifest.metrics.items()))
    age = duration(max(0.0, now - each.manifest.created))
    mark = " (best)" if best else ""
    return str(each.manifest.epoch), age, size_text(each.manifest.size), (metrics or "-") + mark


# ---- show


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add_json(parser)


def run_show(arguments: argparse.Namespace) -> int:
    """By its manifest and the headers of its files, which are verified."""
    storage, entry = checkpoint(arguments.checkpoint)
    files = read_headers(storage, entry.manifest)
    tensors = whole_tensors(files, entry.manifest)
    if arguments.json:
        _print({**_facts(storage, entry), "tensors": [_tensor(each) for each in tensors], "parts": _parts(tensors)})
        return 0
    facts = _table(("", ""), ("", ""))
    for key, value in _flat(_facts(storage, entry)):
        _add(facts, key, value)
    kinds = _table(("tensor", ""), ("dtype", ""), ("shape", ""), ("size", "right"))
    for each in tensors:
        _add(kinds, each.name, each.dtype, str(list(each.shape)), size_text(each.size))
    totals = _table(("part", ""), ("tensors", "right"), ("size", "right"))
    for name, part in (*_parts(tensors).items(), ("all", _total(tensors))):
        _add(totals, name, str(part["tensors"]), size_text(part["bytes"]))
    for each_table in (facts, kinds, totals):
        console(160).print(each_table)
    return 0


def _facts(storage: Storage, entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    values = {"name": entry.name, "path": f"{storage.location}/{entry.name}", "format": manifest.format}
    files = {each.name: each.size for each in manifest.files}
    more = {"fields": manifest.fields, "versions": manifest.versions, "files": files}
    return {**values, **{key: getattr(manifest, key) for key in FACTS}, **more}


def _flat(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """One line for each, those of groups by their own names."""
    for key, value in facts.items():
        if isinstance(value, dict):
            sizes = key == "files"
            inner = ((f"{key}.{name}", size_text(each) if sizes else json.dumps(each)) for name, each in value.items())
            yield from ((name, text.strip('"')) for name, text in inner)
        elif value is not None:
            yield key, moment(value) if key == "created" else size_text(value) if key == "size" else str(value)


def _tensor(each: Placed) -> dict[str, Any]:
    return {"name": each.name, "dtype": each.dtype, "shape": each.shape, "bytes": each.size}


def _parts(tensors: Iterable[Placed]) -> dict[str, dict[str, int]]:
    """By the first part of their names: model, optimizer and others."""
    groups: dict[str, list[Placed]] = {}
    for each in tensors:
        groups.setdefault(each.name.partition("/")[0], []).append(each)
    return {name: _total(group) for name, group in groups.items()}


def _total(tensors: Sequence[Placed]) -> dict[str, int]:
    return {"tensors": len(tensors), "bytes": sum(each.size for each in tensors)}


# ---- verify


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("--all", action="store_true", help="all checkpoints of the directory")
    add_json(parser)


def run_verify(arguments: argparse.Namespace) -> int:
    """1 if anything is damaged or cannot be read."""
    if arguments.all:
        storage = directory(arguments.checkpoint)
        found = describe(storage.location, read_all=False)
    else:
        storage, entry = checkpoint(arguments.checkpoint)
        found = [each for each in describe(storage.location, read_all=False) if each.name == entry.name]
    if not found:
        raise ConfigError(f"there are no checkpoints in {storage.location}", hint="nothing was verified")
    total = sum(each.manifest.size for each in found if each.manifest is not None)
    with progress("verify", total) as heard:
        watched = cast("Storage", Watched(storage, heard))
        results = [_verified(watched, each) for each in found]
    if arguments.json:
        _print({"directory": storage.location, "checkpoints": [as_json(each) for each in results]})
    else:
        for each in results:
            size = "" if each.manifest is None else f", {size_text(each.manifest.size)}"
            print(f"{each.name}: {each.status}{size}")
        _print_problems(results)
    return EXIT_FAILURE if any(each.status in _BAD for each in results) else 0


def _verified(storage: Storage, each: Description) -> Description:
    if each.manifest is None or each.status is not Soundness.UNVERIFIED:
        return each
    try:
        verify(storage, each.manifest)
    except DamagedError as error:
        return Description(each.name, each.path, Soundness.DAMAGED, each.manifest, str(error))
    except UnreadableError as error:
        return Description(each.name, each.path, Soundness.UNREADABLE, each.manifest, str(error))
    return Description(each.name, each.path, Soundness.VERIFIED, each.manifest)


# ---- text


def _print(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2))


def _print_problems(found: Iterable[Description]) -> None:
    for each in found:
        if each.problem:
            print(plain(f"{each.name}: {each.problem}"))


def _table(*columns: tuple[str, str]) -> Table:
    from rich.table import Table

    result = Table(box=None, pad_edge=False, show_header=any(name for name, _ in columns))
    for number, (name, side) in enumerate(columns):
        right = side == "right"
        result.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right or number == 0)
    return result


def _add(table: Table, *cells: str) -> None:
    from rich.text import Text

    table.add_row(*(Text(plain(cell)) for cell in cells))
