"""Imports files into a checkpoint directory: a whole state becomes a checkpoint, weights become a file of weights.

A session resumes from a whole state: model, optimizer with the names of its parameters, random number generators,
position in the data. Only files exported from a checkpoint have all of these. From any other file only the weights are
imported.

*Runs in* any process; torch is imported for torch's own files only. *Owns* the lock of the directory for a moment.
*Fails by* ConfigError for a file that cannot be read, StorageError where the directory is in use or full.
*Invariant*: no code of the file is run (no pickle but what ``weights_only`` allows), and nothing is overwritten.
"""

from __future__ import annotations

import json
import mmap
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic_trainer.checkpoint import codec, dcp, tensorfile, tensors
from elastic_trainer.checkpoint.claim import Owner
from elastic_trainer.checkpoint.exporting import FIELDS, NOTE, replaced, write_tensors
from elastic_trainer.checkpoint.faults import DamagedError
from elastic_trainer.checkpoint.image import FileImage, Image, from_bytes
from elastic_trainer.checkpoint.layout import STATE_FILE, TENSORS_FILE
from elastic_trainer.checkpoint.manager import CheckpointManager, SaveInfo
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.tensorfile import Placed
from elastic_trainer.errors import ConfigError

Value = TypeVar("Value")

KNOWN = ("model", "state_dict", "model_state_dict", "module", "weights", "params")
"""Keys under which programs store a model's state_dict among other values."""
INDEX = ".safetensors.index.json"
"""The suffix of the index file of a Hugging Face folder."""
PARALLEL = "module."
"""What DistributedDataParallel puts in front of every name."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The result of an import: ``checkpoint`` is its name; None for weights, which are in ``path``."""

    path: str
    tensors: int
    size: int
    checkpoint: str | None = None
    step: int | None = None
    outranked: str | None = None
    """An existing checkpoint that counts as newer."""
    left_out: tuple[str, ...] = ()
    """Other contents of the file."""
    stripped: tuple[str, ...] = ()
    """What wrappers had put into the names, and was removed."""


def bring(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    """Import ``source``, a file or a folder; ``part`` names the weights in one that holds more than weights."""
    if source.is_dir():
        return _from_folder(source, storage, part, force=force)
    if not source.is_file():
        raise ConfigError(f"there is no {str(source)!r}", hint="give a .pt, .pth or .safetensors file, or a folder")
    if source.suffix == ".safetensors":
        return _from_safetensors(source, storage, part, force=force)
    if source.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _from_torch(source, storage, part, force=force)
    raise ConfigError(
        f"{source} is not a .pt, .pth or .safetensors file", hint="rename it to the extension of its format"
    )


# ---- safetensors


def _from_safetensors(
    source: Path, storage: Storage, part: str | None, *, force: bool, folder: Path | None = None
) -> Brought:
    """``folder`` is called as the weights are to be, if it is not the file."""
    data = _mapped(source)
    placed, notes, begin = _header(source, data)
    if NOTE in notes and part is None:
        return _restored(source, storage, placed, notes[NOTE], data[begin:])
    chosen, stripped = _stripped(_chosen(source, placed, part))
    found = {name: _value(name, each, data, begin) for name, each in chosen.items()}
    about = _kept_notes(notes) if part is None and not stripped else {}
    left_out = tuple(each.name for each in placed if each not in chosen.values())
    return _weights(folder or source, storage, found, about, stripped, left_out, force=force)


def _kept_notes(notes: Mapping[str, Any]) -> dict[str, str]:
    """What still holds as long as the names are the same: further names of tensors."""
    return {key: str(value) for key, value in notes.items() if key not in ("format", NOTE)}


def _value(name: str, placed: Placed, data: memoryview, begin: int) -> tuple[Placed, memoryview]:
    """A tensor of a mapped file, under the name ``name``."""
    return Placed(name, placed.dtype, placed.shape), data[begin + placed.begin : begin + placed.end]


def _chosen(source: Path, placed: tuple[Placed, ...], part: str | None) -> dict[str, Placed]:
    """The tensors by their names as weights. Those of a whole state have the path of each in the state."""
    if part is None:
        return {each.name: each for each in placed}
    found = {each.name.removeprefix(f"{part}/"): each for each in placed if each.name.startswith(f"{part}/")}
    if not found:
        raise ConfigError(f"{source} has no tensors under {part!r}", hint="leave --part out")
    return found


def _mapped(source: Path) -> memoryview:
    """The bytes of a file, which are read when they are needed."""
    try:
        with source.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise dcp.unreadable(source, error) from error


def _header(source: Path, data: memoryview) -> tuple[tuple[Placed, ...], Mapping[str, Any], int]:
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin > min(len(data), tensorfile.LONGEST_HEADER):
        raise ConfigError(f"{source} is not a safetensors file, or is cut off", hint="fetch it again")
    head = bytes(data[:begin])
    try:
        return tensorfile.parse(head, len(data) - begin, str(source)), tensorfile.metadata(head, str(source)), begin
    except DamagedError as error:
        raise ConfigError(
            str(error), hint="the file is damaged, or has a dtype that this torch does not know"
        ) from error


def _restored(source: Path, storage: Storage, placed: tuple[Placed, ...], note: str, data: memoryview) -> Brought:
    """A whole state, byte by byte as it was exported; no tensor library is needed."""
    try:
        about = json.loads(note)
        info, run, skeleton = _info(about["manifest"]), about["manifest"].get("run"), about["state"].encode()
        wanted = {leaf.tensor for leaf in codec.outline(skeleton, str(source)).values()} - {None}
    except (AttributeError, KeyError, TypeError, ValueError, DamagedError) as error:
        raise ConfigError(f"{source}: its description of the state is invalid", hint="export again") from error
    if wanted != {each.name for each in placed}:
        raise ConfigError(f"{source} does not hold the tensors of the state it describes", hint="export it again")
    again = tensorfile.place(placed)
    where = {each.name: each for each in placed}
    body = [data[where[each.name].begin : where[each.name].end] for each in again if each.size]
    file = FileImage(TENSORS_FILE, tensorfile.header(again), sum(map(len, body)), lambda: iter(body))
    image = Image((file, from_bytes(STATE_FILE, skeleton)))
    return _committed(storage, run, info, lambda manager: image, len(placed))


# ---- folders


def _from_folder(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    if (source / dcp.METADATA).is_file():
        folder = dcp.open_folder(source)
        weights, left_out = _found(source, folder.state, part)
        read = dict(zip(weights, folder.read(weights.values()), strict=True))
        return _tensors(source, storage, read, left_out, force=force)
    indices = sorted(source.glob(f"*{INDEX}"))
    if len(indices) > 1:
        raise ConfigError(f"{source} holds several models: {', '.join(each.name for each in indices)}", hint="keep one")
    if indices:
        return _from_shards(source, indices[0], storage, part, force=force)
    files = sorted(source.glob("*.safetensors"))
    if len(files) == 1:
        return _from_safetensors(files[0], storage, part, force=force, folder=source)
    raise ConfigError(
        f"{source} is not a folder of weights: it has {len(files) or 'no'} .safetensors files, and no index of them",
        hint="give a Hugging Face folder with safetensors, a directory of torch's DCP, or a file",
    )


def _from_shards(source: Path, index: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    """A Hugging Face folder: its index says which file has which tensor."""
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(where.values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("it lists no file of this folder")
    except OSError as error:
        raise dcp.unreadable(index, error) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{index} is not a valid index of weights", hint="fetch it again") from error
    values: dict[str, tuple[Placed, memoryview]] = {}
    about: dict[str, str] = {}
    for name in names:
        data = _mapped(source / name)
        placed, notes, begin = _header(source / name, data)
        about |= _kept_notes(notes)
        values |= {each.name: _value(each.name, each, data, begin) for each in placed if where.get(each.name) == name}
    missing = next((tensor for tensor in where if tensor not in values), None)
    if missing is not None:
        raise ConfigError(
            f"{source / where[missing]} does not hold {missing!r}, as the index says", hint="fetch it again"
        )
    chosen, stripped = _stripped(_chosen(source, tuple(placed for placed, _ in values.values()), part))
    found = {name: (Placed(name, each.dtype, each.shape), values[each.name][1]) for name, each in chosen.items()}
    left_out = tuple(sorted(each.name for each in source.iterdir() if each.name not in (index.name, *names)))
    about = about if part is None and not stripped else {}
    return _weights(source, storage, found, about, stripped, left_out, force=force)


# ---- torch


def _from_torch(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    state = _loaded(source)
    if isinstance(state, dict) and NOTE in state and part is None:
        about = state.pop(NOTE)
        try:
            info, run = _info(about["manifest"]), about["manifest"].get("run")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: its description of the state is invalid", hint="export it again") from error
        return _committed(storage, run, info, lambda manager: manager.encode(state, info), _count(state))
    return _tensors(source, storage, *_found(source, state, part), force=force)


def _tensors(
    source: Path, storage: Storage, weights: Mapping[str, Any], left_out: tuple[str, ...], *, force: bool
) -> Brought:
    named, stripped = _stripped(weights)
    kept, aliases = _distinct(source, named)
    found = {
        name: (Placed(name, tensors.element_type(each), tuple(each.shape)), tensors.memory(each))
        for name, each in kept.items()
    }
    return _weights(source, storage, found, aliases, stripped, left_out, force=force)


def _loaded(source: Path) -> Any:
    """Load ``source`` with torch without running its code; tensors stay in the file if it can be mapped."""
    import pickle

    import torch

    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source) or None)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)|Unsupported (?:class|type|global) (\S+)", str(error))
        what = f"a {named[1] or named[2]}" if named is not None else "objects"
        raise ConfigError(
            f"{source} holds {what}, which only pickle can read; that may run any code, so it is never loaded",
            hint="in the program that wrote it, save model.state_dict() by torch.save or safetensors",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise dcp.unreadable(source, error) from error


def _found(source: Path, state: Any, part: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tensors of a model by their names, and what else there is."""
    inner, left_out = state, []
    for key in part.split("/") if part is not None else _likely(state):
        left_out += [str(other) for other in inner if other != key] if isinstance(inner, dict) else []
        inner = inner.get(key) if isinstance(inner, dict) else None
    tensors_ = {k: v for k, v in inner.items() if _is_tensor(v)} if isinstance(inner, dict) else {}
    if not tensors_ or not all(isinstance(name, str) for name in tensors_):
        keys = f"it has: {', '.join(map(str, list(state)[:8]))}" if isinstance(state, dict) else "it holds no dict"
        raise ConfigError(f"no weights found in {source}", hint=f"name the key that holds them with --part; {keys}")
    return tensors_, (*left_out, *(str(name) for name in inner if name not in tensors_))


def _likely(state: Any) -> tuple[str, ...]:
    """Where the weights are: the file itself, or one of the known keys."""
    if isinstance(state, dict) and not any(map(_is_tensor, state.values())):
        return next(((key,) for key in KNOWN if isinstance(state.get(key), dict)), ())
    return ()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


def _count(value: Any) -> int:
    if isinstance(value, dict | list | tuple):
        return sum(map(_count, value.values() if isinstance(value, dict) else value))
    return int(_is_tensor(value))


def _distinct(source: Path, found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Each tensor once, and the further names of those that have several."""
    kept: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in found.items():
        problem = tensors.problem_with(tensor)
        if problem is None and tensor.is_complex():
            problem = "its numbers are complex", "split it by torch.view_as_real()"
        if problem is not None:
            raise ConfigError(f"tensor {name!r} of {source} cannot be saved: {problem[0]}", hint=problem[1])
        first = names.setdefault(tensors.identity(tensor), name) if tensor.numel() else name
        if first == name:
            kept[name] = tensors.plain(tensor)
        else:
            aliases[name] = first
    return kept, aliases


# ---- results


def _stripped(found: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Without what wrappers put into names, wherever, and into all of them; and what was removed."""
    taken = [each for each in tensors.WRAPPERS if any(each in name for name in found)]
    result = {tensors.plain_name(name): each for name, each in found.items()}
    if len(result) < len(found):
        result, taken = dict(found), []  # names of two models
    while result and all(name.startswith(PARALLEL) for name in result):
        taken.append(PARALLEL)
        result = {name.removeprefix(PARALLEL): each for name, each in result.items()}
    return result, tuple(taken)


def _weights(
    source: Path,
    storage: Storage,
    found: Mapping[str, tuple[Placed, memoryview]],
    notes: Mapping[str, str],
    stripped: tuple[str, ...],
    left_out: tuple[str, ...],
    *,
    force: bool,
) -> Brought:
    if "://" in storage.location:
        raise ConfigError(
            f"weights can only be imported into a local directory, not {storage.location}", hint="give a directory"
        )
    stem = source.resolve().name if source.is_dir() else source.stem
    goal = Path(storage.location) / f"{stem}.safetensors"
    placed = tensorfile.place([each for each, _ in found.values()])
    with replaced(goal, force=force) as temporary:
        write_tensors(temporary, placed, (found[each.name][1] for each in placed), notes)
    return Brought(str(goal), len(placed), sum(each.size for each in placed), left_out=left_out, stripped=stripped)


def _info(about: Mapping[str, Any]) -> SaveInfo:
    values = {name: about[name] for name in FIELDS if name != "run"}
    values["metrics"] = {str(name): float(value) for name, value in values["metrics"].items()}
    for name in ("step", "round", "epoch", "samples", "world_size"):
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError(f"{name} is not a number")
    return SaveInfo(**values)


def _committed(
    storage: Storage, run: Any, info: SaveInfo, image: Callable[[CheckpointManager], Image], count: int
) -> Brought:
    """Commit an additional checkpoint; removes nothing, and no job saves there meanwhile."""
    owner = Owner(run=run if isinstance(run, str) else None)
    manager = CheckpointManager(storage.location, Retention(keep_last=sys.maxsize), owner=owner, storage=storage)
    try:
        manager.check_writable()
        done = manager.commit(image(manager), manager.draft(info))
        newest = manager.newest()
    finally:
        manager.close()
    outranked = newest.name if newest is not None and newest.name != done.name else None
    return Brought(f"{storage.location}/{done.name}", count, done.size, done.name, info.step, outranked)
