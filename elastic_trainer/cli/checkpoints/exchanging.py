"""``checkpoints export`` and ``import``: from and to the files of other programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

from elastic_trainer.checkpoint import exporting
from elastic_trainer.checkpoint.exporting import AVERAGE, SHARD, CheckpointSource
from elastic_trainer.checkpoint.importing import Brought, bring
from elastic_trainer.checkpoint.storage import Storage, open_storage
from elastic_trainer.cli.checkpoints.places import (
    CHECKPOINT,
    Watched,
    add_json,
    checkpoint,
    progress,
    suggestion,
)
from elastic_trainer.cli.options import at_least
from elastic_trainer.cli.wording import named
from elastic_trainer.errors import ConfigError
from elastic_trainer.preflight.finding import size_text
from elastic_trainer.telemetry import logs

SAFETENSORS, TORCH, HUGGINGFACE = "safetensors", "torch", "huggingface"
_CONFIG = "config.json"


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("goal", metavar="DEST", type=Path, help="the file to write, or the folder for huggingface")
    targets = (SAFETENSORS, TORCH, HUGGINGFACE)
    add("--to", choices=targets, required=True, metavar="TARGET", help=f"{', '.join(targets)}")
    add("--part", metavar="PART", help=f"the part of the state to write; model by default, {AVERAGE} for the average")
    add("--all", action="store_true", help="the whole state, which import makes a checkpoint again")
    add("--config", type=Path, metavar="FILE", help="huggingface: the config.json to put beside the weights")
    add("--shard-size", type=int, default=SHARD, metavar="BYTES", help="huggingface: largest file (default: 5 GB)")
    add("--force", action="store_true", help="replace DEST if it exists")
    add_json(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Write it; nothing is left behind if that fails."""
    goal, target, part = arguments.goal, arguments.to, arguments.part or "model"
    if arguments.all and (target == HUGGINGFACE or arguments.part is not None):
        other = "--part" if arguments.part is not None else "--to huggingface"
        raise ConfigError(f"--all and {other} exclude each other", hint="a Hugging Face folder holds weights alone")
    at_least(1, arguments.shard_size, "--shard-size")
    inner, entry = checkpoint(arguments.checkpoint)
    config = _config(arguments.config, entry.manifest.fields) if target == HUGGINGFACE else b""
    files = [goal.name]
    left_out: tuple[str, ...] = ()
    with progress("export", entry.manifest.size) as heard:
        source = CheckpointSource(cast("Storage", Watched(inner, heard)), entry.manifest)
        if target == TORCH:
            exporting.to_torch(source, None if arguments.all else part, goal, force=arguments.force)
        elif arguments.all:
            exporting.whole_to_safetensors(source, goal, force=arguments.force)
        else:
            found = exporting.weights(source, part)
            left_out = found.left_out
            if target == SAFETENSORS:
                exporting.to_safetensors(source, found, goal, force=arguments.force)
            else:
                size = arguments.shard_size
                files = exporting.to_huggingface(source, found, goal, config, force=arguments.force, shard=size)
    what = "state" if arguments.all else part
    if arguments.json:
        values: dict[str, Any] = {"checkpoint": entry.name, "part": what, "to": target, "path": str(goal)}
        print(json.dumps({**values, "files": files, "left_out": left_out}, indent=2))
        return 0
    print(f"{goal}: the {what} of {entry.name}, {size_text(_size(goal))}")
    if target == HUGGINGFACE:
        print(f"files: {', '.join(files)}" + ("" if config else f"; give a {_CONFIG} by --config if it needs one"))
    if left_out:
        print(f"left out, since they are no tensors: {named(left_out)}")
    return 0


def _config(file: Path | None, fields: Any) -> bytes:
    """The user's config.json, or the one that was saved with the checkpoint as its field ``config``."""
    if file is None:
        saved = fields.get("config")
        return f"{json.dumps(saved, indent=2)}\n".encode() if isinstance(saved, dict) else b""
    try:
        content = file.read_bytes()
        json.loads(content)
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}", hint="check the path") from error
    except ValueError as error:
        raise ConfigError(f"--config {file} is not JSON", hint="give the config.json of the model") from error
    return content


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


# ---- import


def configure_import(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    what = "a .pt, .pth or .safetensors file, a Hugging Face folder, or a directory of torch's DCP"
    add("source", metavar="SOURCE", type=Path, help=f"{what}; nothing in it is executed")
    add("--into", required=True, metavar="DIR", help="the directory of checkpoints")
    add("--part", metavar="PART", help="the key of the weights, if the file holds more")
    add("--force", action="store_true", help="replace an earlier import of weights")
    add_json(parser)


def run_import(arguments: argparse.Namespace) -> int:
    """Say what it became and how to use it."""
    logs.configure(level="error")  # what happens is said below
    storage = open_storage(arguments.into)
    done = bring(arguments.source, storage, arguments.part, force=arguments.force)
    if arguments.json:
        values = {"path": done.path, "checkpoint": done.checkpoint, "step": done.step, "tensors": done.tensors}
        more = {"bytes": done.size, "outranked": done.outranked, "left_out": done.left_out, "stripped": done.stripped}
        print(json.dumps({**values, **more}, indent=2))
    elif done.checkpoint is not None:
        _say_checkpoint(done, arguments.into)
    else:
        _say_weights(done)
    return 0


def _say_checkpoint(done: Brought, directory: str) -> None:
    print(f"{done.path}: a checkpoint of step {done.step}, {_contents(done)}")
    if done.outranked is None:
        print(f"A job with checkpoint_dir={directory!r} and the same model resumes from it.")
    else:
        print(f"{done.outranked} counts as newer: a job resumes from that one.")
        print(f"See {suggestion('list', directory)}")


def _say_weights(done: Brought) -> None:
    print(f"{done.path}: weights, {_contents(done)}")
    if done.stripped:
        print(f"removed from the names: {', '.join(done.stripped)}")
    if done.left_out:
        print(f"left out: {named(done.left_out)}")
    print("No job resumes from weights alone. To begin with them, before session.wrap(model, ...):")
    print(f"  safetensors.torch.load_model(model, {done.path!r})")


def _contents(done: Brought) -> str:
    return f"{done.tensors} tensor{'s' * (done.tensors != 1)}, {size_text(done.size)}"
