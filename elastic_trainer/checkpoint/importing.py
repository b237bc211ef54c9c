"""Files of others into a directory of checkpoints: a whole state becomes a checkpoint, weights a file of weights.

A session resumes from a state that is whole: model, optimizer with the names of its parameters, random numbers, place
in the data. Only what was exported from a checkpoint has all of that. From any other file the weights are taken.

*Runs in* any process; torch is imported for torch's own files only. *Owns* the lock of the directory for a moment.
*Fails by* ConfigError for a file that cannot be read, StorageError where the directory is in use or full.
*Invariant*: no code of the file is run (no pickle but what ``weights_only`` allows), and nothing is overwritten.
"""

from __future__ import annotations

import json
import mmap
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic_trainer.checkpoint import codec, tensorfile, tensors
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
"""Where programs put a model's state_dict among other things."""
PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What a file became: ``checkpoint`` is its name, None for weights, which are in ``path``."""

    path: str
    tensors: int
    size: int
    checkpoint: str | None = None
    step: int | None = None
    outranked: str | None = None
    """A checkpoint there that counts as newer."""
    left_out: tuple[str, ...] = ()
    """What else the file held."""
    stripped: tuple[str, ...] = ()
    """What was taken off the names."""


def bring(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    """Import ``source``; of a file that holds more than weights, ``part`` names them."""
    if not source.is_file():
        raise ConfigError(f"there is no file {str(source)!r}", hint="give a .pt, .pth or .safetensors file")
    if source.suffix == ".safetensors":
        return _from_safetensors(source, storage, part, force=force)
    if source.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _from_torch(source, storage, part, force=force)
    raise ConfigError(f"{source} is no .pt, .pth or .safetensors file", hint="name it by what it is")


# ---- safetensors


def _from_safetensors(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    data = _mapped(source)
    placed, notes, begin = _header(source, data)
    if NOTE in notes and part is None:
        return _restored(source, storage, placed, notes[NOTE], data[begin:])
    chosen, stripped = _stripped(_chosen(source, placed, part))
    found = {
        name: (Placed(name, each.dtype, each.shape), data[begin + each.begin : begin + each.end])
        for name, each in chosen.items()
    }
    same_names = part is None and not stripped
    about = {key: str(value) for key, value in notes.items() if same_names and key not in ("format", NOTE)}
    left_out = tuple(each.name for each in placed if each not in chosen.values())
    return _weights(source, storage, found, about, stripped, left_out, force=force)


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
        raise _unreadable(source, error) from error


def _header(source: Path, data: memoryview) -> tuple[tuple[Placed, ...], Mapping[str, Any], int]:
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin > min(len(data), tensorfile.LONGEST_HEADER):
        raise ConfigError(f"{source} is no safetensors file, or is cut off", hint="fetch it again")
    head = bytes(data[:begin])
    try:
        return tensorfile.parse(head, len(data) - begin, str(source)), tensorfile.metadata(head, str(source)), begin
    except DamagedError as error:
        raise ConfigError(str(error), hint="it is damaged, or has a type that is not known here") from error


def _restored(source: Path, storage: Storage, placed: tuple[Placed, ...], note: str, data: memoryview) -> Brought:
    """A whole state, byte by byte as it was exported; no tensor library is needed."""
    try:
        about = json.loads(note)
        info, run, skeleton = _info(about["manifest"]), about["manifest"].get("run"), about["state"].encode()
        wanted = {leaf.tensor for leaf in codec.outline(skeleton, str(source)).values()} - {None}
    except (AttributeError, KeyError, TypeError, ValueError, DamagedError) as error:
        raise ConfigError(
            f"{source}: what it says of the state it holds makes no sense", hint="export again"
        ) from error
    if wanted != {each.name for each in placed}:
        raise ConfigError(f"{source} does not hold the tensors of the state it describes", hint="export it again")
    again = tensorfile.place(placed)
    where = {each.name: each for each in placed}
    body = [data[where[each.name].begin : where[each.name].end] for each in again if each.size]
    file = FileImage(TENSORS_FILE, tensorfile.header(again), sum(map(len, body)), lambda: iter(body))
    image = Image((file, from_bytes(STATE_FILE, skeleton)))
    return _committed(storage, run, info, lambda manager: image, len(placed))


# ---- torch


def _from_torch(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    state = _loaded(source)
    if isinstance(state, dict) and NOTE in state and part is None:
        about = state.pop(NOTE)
        try:
            info, run = _info(about["manifest"]), about["manifest"].get("run")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: what it says of the state makes no sense", hint="export it again") from error
        return _committed(storage, run, info, lambda manager: manager.encode(state, info), _count(state))
    weights, left_out = _found(source, state, part)
    named, stripped = _stripped(weights)
    kept, aliases = _distinct(source, named)
    found = {name: (_described(name, each), _bytes(each)) for name, each in kept.items()}
    return _weights(source, storage, found, aliases, stripped, left_out, force=force)


def _described(name: str, tensor: Any) -> Placed:
    return Placed(name, tensors.element_type(tensor), tuple(tensor.shape))


def _bytes(tensor: Any) -> memoryview:
    return tensors.memory(tensor) if tensor.numel() else memoryview(b"")


def _loaded(source: Path) -> Any:
    """What torch reads of ``source`` without running code of it; tensors stay in the file where it can be mapped."""
    import pickle

    import torch

    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source) or None)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{source} holds objects that only pickle can read, which may run any code; that is never done here",
            hint="in the program that wrote it, save model.state_dict() by torch.save or safetensors",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _unreadable(source, error) from error


def _found(source: Path, state: Any, part: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tensors of a model by their names, and what else there is."""
    inner, left_out = state, []
    for key in part.split("/") if part is not None else _likely(state):
        left_out += [str(other) for other in inner if other != key] if isinstance(inner, dict) else []
        inner = inner.get(key) if isinstance(inner, dict) else None
    tensors_ = {k: v for k, v in inner.items() if _is_tensor(v)} if isinstance(inner, dict) else {}
    if not tensors_ or not all(isinstance(name, str) for name in tensors_):
        keys = f"it has: {', '.join(map(str, list(state)[:8]))}" if isinstance(state, dict) else "it holds no dict"
        raise ConfigError(f"no weights are found in {source}", hint=f"name their place by --part; {keys}")
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
            raise ConfigError(f"tensor {name!r} of {source} cannot be kept: {problem[0]}", hint=problem[1])
        first = names.setdefault(tensors.identity(tensor), name) if tensor.numel() else name
        if first == name:
            kept[name] = tensors.plain(tensor)
        else:
            aliases[name] = first
    return kept, aliases


# ---- results


def _stripped(found: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Without the prefixes that all names have, and which these are."""
    result, taken = dict(found), []
    while result and (prefix := next((p for p in PREFIXES if all(n.startswith(p) for n in result)), None)):
        taken.append(prefix)
        result = {name.removeprefix(prefix): each for name, each in result.items()}
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
        raise ConfigError(f"weights alone cannot be brought to {storage.location}", hint="give a directory")
    goal = Path(storage.location) / f"{source.stem}.safetensors"
    placed = tensorfile.place([each for each, _ in found.values()])
    with replaced(goal, force=force) as temporary:
        write_tensors(temporary, placed, (found[each.name][1] for each in placed), notes)
    return Brought(str(goal), len(placed), sum(each.size for each in placed), left_out=left_out, stripped=stripped)


def _info(about: Mapping[str, Any]) -> SaveInfo:
    values = {name: about[name] for name in FIELDS if name != "run"}
    values["metrics"] = {str(name): float(value) for name, value in values["metrics"].items()}
    for name in ("step", "round", "epoch", "samples", "world_size"):
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError(f"{name} is no number")
    return SaveInfo(**values)


def _committed(
    storage: Storage, run: Any, info: SaveInfo, image: Callable[[CheckpointManager], Image], count: int
) -> Brought:
    """Commit beside what is there; nothing else goes, and no job saves there meanwhile."""
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


def _unreadable(source: Path, error: Exception) -> ConfigError:
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].partition(". ")[0].strip()
    return ConfigError(f"{source} cannot be read: {reason or type(error).__name__}", hint="fetch it again")
