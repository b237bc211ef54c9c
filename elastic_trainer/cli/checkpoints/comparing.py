"""``checkpoints diff A B``: exit code 0 if nothing differs, 1 if something does, 2 if one of them cannot be read."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import Any, cast

from elastic_trainer.checkpoint.comparison import Differences, Side, TensorDifference, ValueDifference, compare
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.cli.checkpoints.places import CHECKPOINT, Watched, add_json, checkpoint, progress
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.store.untrusted import plain

EXIT_TROUBLE = 2
_MOST = 40
_LONGEST = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("left", metavar="A", help=CHECKPOINT)
    parser.add_argument("right", metavar="B", help="the other one")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """See the module."""
    try:
        chosen = [checkpoint(each) for each in (arguments.left, arguments.right)]
        with progress("compare", sum(entry.manifest.size for _, entry in chosen)) as heard:
            left, right = (Side(cast("Storage", Watched(storage, heard)), entry.manifest) for storage, entry in chosen)
            found = compare(left, right)
    except CheckpointError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_TROUBLE
    if arguments.json:
        print(json.dumps(as_json(found, left.manifest.name, right.manifest.name), indent=2))
    else:
        _show(found)
    return 1 if found else 0


def as_json(found: Differences, left: str, right: str) -> dict[str, Any]:
    """All differences as plain values; those that are no finite numbers as strings."""
    tensors = [asdict(each) for each in found.tensors]
    for each in tensors:
        if each["largest"] is not None and not math.isfinite(each["largest"]):
            each["largest"] = str(each["largest"])
    groups = {"facts": found.facts, "values": found.values}
    plain_groups = {name: [_as_json(each) for each in group] for name, group in groups.items()}
    return {"left": left, "right": right, **plain_groups, "tensors": tensors, "equal_tensors": found.equal}


def _as_json(each: ValueDifference) -> dict[str, Any]:
    sides = [value if _is_json(value) else repr(value) for value in (each.left, each.right)]
    return {"path": each.path, "left": sides[0], "right": sides[1]}


def _is_json(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return finite and isinstance(value, str | int | float | bool | list | dict | None)


def _show(found: Differences) -> None:
    for title, group in (("known of them", found.facts), ("values", found.values)):
        lines = [f"  {each.path}: {_text(each.left)} -> {_text(each.right)}" for each in group]
        _block(title, lines)
    _block("tensors", [f"  {_line(each)}" for each in found.tensors])
    if not found:
        print("no differences")
    print(f"tensors: {found.equal} equal, {len(found.tensors)} different")


def _block(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title}:")
    for line in lines[:_MOST]:
        print(plain(line))
    if len(lines) > _MOST:
        print(f"  and {len(lines) - _MOST} more, which --json lists")


def _line(each: TensorDifference) -> str:
    if each.largest is None:
        return f"{each.path}: {each.left or 'missing'} -> {each.right or 'missing'}"
    share = f"{each.different} of {each.elements}"
    return f"{each.path} {each.left}: {share} differ, by up to {each.largest:.3g}"


def _text(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
