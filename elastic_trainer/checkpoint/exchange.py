"""Exports checkpoints to other formats (safetensors, torch.save, a Hugging Face folder), and imports files of theirs.

A session resumes from a whole state: model, optimizer with the names of its parameters, random number generators,
position in the data. Only files exported from a checkpoint have all of these, and become one again. From any other file
only the weights are imported, into a file of weights. Directories of torch's distributed checkpoint (DCP) are read too:
torch itself reads their ``.metadata`` by pickle, which can run any code; the unpickler here knows only the few classes
that describe tensors and files.

*Runs in* any process; torch is imported for torch's own files only. *Owns* a temporary file or folder next to the goal,
and for an import the lock of the directory for a moment.
*Fails by* CheckpointError for a state that the format cannot hold, ConfigError for a file that cannot be read,
StorageError where the disk refuses or the directory is in use.
*Invariant*: a goal appears complete, with all its data on disk, and replaces existing files only on request. No code of
a file is run (no pickle but what ``weights_only`` allows).
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import secrets
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_trainer.checkpoint import codec, reading
from elastic_trainer.checkpoint.codec import Leaf, TensorEntry
from elastic_trainer.checkpoint.commit import Owner
from elastic_trainer.checkpoint.manager import CheckpointManager, SaveInfo
from elastic_trainer.checkpoint.manifest import (
    STATE_FILE,
    TENSORS_FILE,
    DamagedError,
    FileImage,
    Image,
    Manifest,
    from_bytes,
)
from elastic_trainer.checkpoint.reading import CheckpointSource
from elastic_trainer.checkpoint.retention import Retention
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.storage.posix import sync
from elastic_trainer.errors import CheckpointError, ConfigError, StorageError

if TYPE_CHECKING:
    import torch


# ---- exporting


NOTE = "elastic_trainer"
"""The metadata key that describes a file with a whole state, for :mod:`elastic_trainer.checkpoint.exchange`."""
FIELDS = ("run", "step", "round", "epoch", "samples", "world_size", "metrics", "best", "fields")
AVERAGE = "average"
"""The part of a state that is torch's AveragedModel, whose own names begin with ``module.``."""
_AVERAGED = "module."
SHARD = 5 * 10**9
"""Maximum bytes of a file of a Hugging Face folder, as in Hugging Face's tools."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by their exported names: ``kept`` are the stored tensors, ``aliases`` further names of these."""

    kept: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    """Names of values that are not tensors."""

    @property
    def size(self) -> int:
        return sum(each.size for each in self.kept.values())


def weights(source: CheckpointSource, part: str) -> Weights:
    """The tensors of the part ``part`` of the state, ``model`` for most."""
    skeleton = reading.read_skeleton(source.files, source.manifest)
    leaves = codec.outline(skeleton, source.where)
    stored = {each.name: each for each in _whole(source)}
    found = _of_part(leaves, part, source.where)
    if part == AVERAGE:
        found = {path: leaf for path, leaf in found.items() if path[0].startswith(_AVERAGED)}
    names = {".".join(map(str, path)): leaf for path, leaf in found.items()}
    if part == AVERAGE:
        names = {name.removeprefix(_AVERAGED): leaf for name, leaf in names.items()}
    strange = next((name for name, leaf in names.items() if leaf.mark == "complex"), None)
    if strange is not None:
        raise CheckpointError(
            f"tensor {strange!r} of {source.where} is complex, for which safetensors has no type", hint="use --to torch"
        )
    kept: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    by_stored: dict[str, str] = {}
    for name, leaf in names.items():
        if leaf.mark == "tensor" and leaf.tensor is not None:
            first = by_stored.setdefault(leaf.tensor, name)
            if first == name:
                kept[name] = stored[leaf.tensor]
            else:
                aliases[name] = first
    return Weights(kept, aliases, tuple(name for name, leaf in names.items() if leaf.mark != "tensor"))


def _of_part(leaves: Mapping[tuple[Any, ...], Leaf], part: str, where: str) -> dict[tuple[Any, ...], Leaf]:
    """The leaves of ``part``, by their paths in it; CheckpointError if none is a tensor."""
    trail = tuple(part.split("/"))
    found = {path[len(trail) :]: leaf for path, leaf in leaves.items() if path[: len(trail)] == trail and path != trail}
    if not any(leaf.tensor is not None for leaf in found.values()):
        parts = ", ".join(dict.fromkeys(str(path[0]) for path in leaves if path))
        raise CheckpointError(f"{where} has no tensors under {part!r}", hint=f"its parts are: {parts}")
    return found


def _whole(source: CheckpointSource) -> tuple[TensorEntry, ...]:
    return reading.whole_tensors(reading.read_headers(source.files, source.manifest), source.manifest)


def to_safetensors(source: CheckpointSource, found: Weights, goal: Path, *, force: bool) -> None:
    """One file of weights; its metadata holds further names of tensors, as with ``safetensors.torch.save_model``."""
    with replaced(goal, force=force) as temporary:
        _write_weights(source, found.kept, temporary, _notes(source, found.aliases))


def whole_to_safetensors(source: CheckpointSource, goal: Path, *, force: bool) -> None:
    """One file with all tensors of the state, and the rest of it in the metadata."""
    skeleton = reading.read_skeleton(source.files, source.manifest).decode()
    note = json.dumps({"manifest": summary(source.manifest), "state": skeleton})
    with replaced(goal, force=force) as temporary:
        _write_weights(
            source, {each.name: each for each in _whole(source)}, temporary, {**_notes(source, {}), NOTE: note}
        )


def to_torch(source: CheckpointSource, part: str | None, goal: Path, *, force: bool) -> None:
    """A file for ``torch.load(..., weights_only=True)``: a part of the state, or with None all of it."""
    import torch

    state = _part(source, part)
    if part is None:
        state[NOTE] = {"manifest": summary(source.manifest)}
    with replaced(goal, force=force) as temporary, temporary.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own complaint about what it wrote hides that of the disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def to_huggingface(
    source: CheckpointSource, found: Weights, goal: Path, config: bytes, *, force: bool, shard: int
) -> list[str]:
    """A folder for ``from_pretrained``; returns the names of its files. ``config`` is empty if there is none."""
    groups = _groups(found.kept, shard)
    names = [
        "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    extra: dict[str, bytes] = {"config.json": config} if config else {}
    if len(groups) > 1:
        files = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": found.size}, "weight_map": files}
        extra["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    with replaced(goal, force=force, folder=True) as temporary:
        for name, group in zip(names, groups, strict=True):
            aliases = {alias: kept for alias, kept in found.aliases.items() if kept in group}
            _write_weights(source, group, temporary / name, _notes(source, aliases))
        for name, content in extra.items():
            (temporary / name).write_bytes(content)
    return [*names, *extra]


def summary(manifest: Manifest) -> dict[str, Any]:
    """The metadata of a state, as JSON."""
    return {name: value for name, value in manifest.model_dump(mode="json").items() if name in FIELDS}


def _notes(source: CheckpointSource, aliases: Mapping[str, str]) -> dict[str, str]:
    return {**aliases, "step": str(source.manifest.step), "checkpoint": source.manifest.name}


def _groups(kept: Mapping[str, TensorEntry], most: int) -> list[dict[str, TensorEntry]]:
    groups: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, each in kept.items():
        if groups[-1] and size + each.size > most:
            groups.append({})
            size = 0
        groups[-1][name] = each
        size += each.size
    return groups


def _write_weights(
    source: CheckpointSource, kept: Mapping[str, TensorEntry], path: Path, notes: Mapping[str, str]
) -> None:
    placed = codec.lay_out([TensorEntry(name, each.dtype, each.shape) for name, each in kept.items()])
    arrays = reading.read_in_turn(source.files, source.manifest, [kept[each.name] for each in placed])
    write_tensors(path, placed, (data for _, data in arrays), notes)


def write_tensors(path: Path, placed: Sequence[TensorEntry], data: Iterable[Any], notes: Mapping[str, str]) -> None:
    """Write a safetensors file of ``placed``, whose bytes ``data`` yields in order."""
    with path.open("wb") as file:
        file.write(codec.file_header(placed, notes))
        for each in data:
            file.write(memoryview(each))


class _Partly(dict[str, Any]):
    """Tensors of which only some were read; the placeholders of the others are discarded."""

    def __missing__(self, name: str) -> Any:
        import torch

        return torch.empty(0, 2)


def _part(source: CheckpointSource, part: str | None) -> Any:
    """The decoded state, or its part ``part``; tensors of other parts are not read."""
    skeleton = reading.read_skeleton(source.files, source.manifest)
    trail = () if part is None else tuple(part.split("/"))
    leaves = codec.outline(skeleton, source.where)
    wanted = leaves if part is None else _of_part(leaves, part, source.where)
    names = {leaf.tensor for leaf in wanted.values() if leaf.tensor is not None}
    loaded = codec.build(*reading.read_tensors(source.files, source.manifest, names))
    state: Any = codec.decode(skeleton, _Partly(loaded), source.where)
    for key in trail:
        state = state[key]
    if part == AVERAGE:
        state = {key.removeprefix(_AVERAGED): each for key, each in state.items() if key.startswith(_AVERAGED)}
    return state


@contextmanager
def replaced(goal: Path, *, force: bool, folder: bool = False) -> Iterator[Path]:
    """A temporary file or folder that becomes ``goal`` if the block succeeds; ConfigError if ``goal`` exists."""
    if os.path.lexists(goal) and not force:
        raise ConfigError(f"{goal} exists", hint="choose another name, or replace it with --force")
    if os.path.lexists(goal) and goal.is_dir() != folder:
        raise ConfigError(f"{goal} is {'no' if folder else 'a'} directory", hint="choose another name")
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        temporary = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}")
        try:
            if folder:
                temporary.mkdir()
            yield temporary
            _appear(temporary, goal, force=force, folder=folder)
        finally:
            if folder:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{goal} cannot be written: {error.strerror or error}",
            hint="free some space there, or choose another place",
        ) from error


def _appear(temporary: Path, goal: Path, *, force: bool, folder: bool) -> None:
    for path in (*(temporary.iterdir() if folder else ()), temporary):
        sync(path)
    if folder and force and goal.exists():  # no call replaces a folder that is not empty: the old one steps aside first
        aside = Path(tempfile.mkdtemp(dir=goal.parent, prefix=f".{goal.name}.old."))
        goal.rename(aside / goal.name)
        temporary.rename(goal)
        shutil.rmtree(aside)
    elif folder or force:
        temporary.rename(goal)
    else:
        _link(temporary, goal)
    sync(goal.parent)


def _link(temporary: Path, goal: Path) -> None:
    """Link instead of rename, which would replace a file created meanwhile; some file systems have no links."""
    try:
        os.link(temporary, goal)
    except FileExistsError:
        raise ConfigError(f"{goal} exists", hint="another process made it meanwhile") from None
    except OSError:
        temporary.rename(goal)


# ---- importing


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


def _from_safetensors(
    source: Path, storage: Storage, part: str | None, *, force: bool, folder: Path | None = None
) -> Brought:
    """``folder`` is called as the weights are to be, if it is not the file."""
    held, notes = _mapped(source)
    if NOTE in notes and part is None:
        return _restored(source, storage, held, notes[NOTE])
    found, stripped = _stripped(_chosen(source, held, part))
    about = _kept_notes(notes) if part is None and not stripped else {}
    left_out = tuple(name for name in held if part is not None and not name.startswith(f"{part}/"))
    return _weights(folder or source, storage, found, about, stripped, left_out, force=force)


def _kept_notes(notes: Mapping[str, Any]) -> dict[str, str]:
    """What still holds as long as the names are the same: further names of tensors."""
    return {key: str(value) for key, value in notes.items() if key not in ("format", NOTE)}


def _chosen(source: Path, held: Mapping[str, Value], part: str | None) -> dict[str, Value]:
    """The tensors by their names as weights. Those of a whole state have the path of each in the state."""
    prefix = f"{part}/" if part is not None else ""
    found = {name.removeprefix(prefix): each for name, each in held.items() if name.startswith(prefix)}
    if part is not None and not found:
        raise ConfigError(f"{source} has no tensors under {part!r}", hint="leave --part out")
    return found


def _mapped(source: Path) -> tuple[dict[str, tuple[TensorEntry, memoryview]], Mapping[str, Any]]:
    """The tensors of a safetensors file, whose bytes are read when they are needed, and its notes."""
    try:
        with source.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise unreadable(source, error) from error
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin > min(len(data), codec.LONGEST_HEADER):
        raise ConfigError(f"{source} is not a safetensors file, or is cut off", hint="fetch it again")
    try:
        placed, notes = codec.parse_header(data[:begin].tobytes(), len(data) - begin, str(source))
    except DamagedError as error:
        raise ConfigError(
            str(error), hint="the file is damaged, or has a dtype that this torch does not know"
        ) from error
    return {each.name: (each, data[begin + each.begin : begin + each.end]) for each in placed}, notes


def _restored(source: Path, storage: Storage, held: Mapping[str, tuple[TensorEntry, memoryview]], note: str) -> Brought:
    """A whole state, byte by byte as it was exported; no tensor library is needed."""
    try:
        about = json.loads(note)
        info, run, skeleton = _info(about["manifest"]), about["manifest"].get("run"), about["state"].encode()
        wanted = {leaf.tensor for leaf in codec.outline(skeleton, str(source)).values()} - {None}
    except (AttributeError, KeyError, TypeError, ValueError, DamagedError) as error:
        raise ConfigError(f"{source}: its description of the state is invalid", hint="export again") from error
    if wanted != held.keys():
        raise ConfigError(f"{source} does not hold the tensors of the state it describes", hint="export it again")
    placed = codec.lay_out([each for each, _ in held.values()])
    body = [held[each.name][1] for each in placed if each.size]
    file = FileImage(TENSORS_FILE, codec.file_header(placed), sum(map(len, body)), lambda: iter(body))
    image = Image((file, from_bytes(STATE_FILE, skeleton)))
    return _committed(storage, run, info, lambda manager: image, len(placed))


def _from_folder(source: Path, storage: Storage, part: str | None, *, force: bool) -> Brought:
    if (source / METADATA).is_file():
        folder = open_folder(source)
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
        raise unreadable(index, error) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{index} is not a valid index of weights", hint="fetch it again") from error
    held: dict[str, tuple[TensorEntry, memoryview]] = {}
    about: dict[str, str] = {}
    for name in names:
        tensors, notes = _mapped(source / name)
        about |= _kept_notes(notes)
        held |= {tensor: each for tensor, each in tensors.items() if where.get(tensor) == name}
    missing = next((tensor for tensor in where if tensor not in held), None)
    if missing is not None:
        raise ConfigError(
            f"{source / where[missing]} does not hold {missing!r}, as the index says", hint="fetch it again"
        )
    found, stripped = _stripped(_chosen(source, held, part))
    left_out = tuple(sorted(each.name for each in source.iterdir() if each.name not in (index.name, *names)))
    about = about if part is None and not stripped else {}
    return _weights(source, storage, found, about, stripped, left_out, force=force)


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
        name: (TensorEntry(name, codec.element_type(each), tuple(each.shape)), codec.memory(each))
        for name, each in kept.items()
    }
    return _weights(source, storage, found, aliases, stripped, left_out, force=force)


def _loaded(source: Path) -> Any:
    """Load ``source`` with torch without running its code; tensors stay in the file if it can be mapped."""
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
        raise unreadable(source, error) from error


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
        problem = codec.problem_with(tensor)
        if problem is None and tensor.is_complex():
            problem = "its numbers are complex", "split it by torch.view_as_real()"
        if problem is not None:
            raise ConfigError(f"tensor {name!r} of {source} cannot be saved: {problem[0]}", hint=problem[1])
        first = names.setdefault(codec.identity(tensor), name) if tensor.numel() else name
        if first == name:
            kept[name] = codec.plain(tensor)
        else:
            aliases[name] = first
    return kept, aliases


def _stripped(found: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Without what wrappers put into names, wherever, and into all of them; and what was removed."""
    taken = [each for each in codec.WRAPPERS if any(each in name for name in found)]
    result = {codec.plain_name(name): each for name, each in found.items()}
    if len(result) < len(found):
        result, taken = dict(found), []  # names of two models
    while result and all(name.startswith(PARALLEL) for name in result):
        taken.append(PARALLEL)
        result = {name.removeprefix(PARALLEL): each for name, each in result.items()}
    return result, tuple(taken)


def _weights(
    source: Path,
    storage: Storage,
    found: Mapping[str, tuple[TensorEntry, memoryview]],
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
    placed = codec.lay_out([TensorEntry(name, each.dtype, each.shape) for name, (each, _) in found.items()])
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


# ---- torch's distributed checkpoints


METADATA = ".metadata"
_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_DESCRIPTIONS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_DESCRIPTIONS, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
    (_DESCRIPTIONS, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
"""What only makes a value."""
_MALFORMED = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """``state`` as saved, with tensors on the meta device and None for other values; ``names`` in the files."""

    path: Path
    metadata: Any
    state: dict[Any, Any]
    names: dict[int, str]
    """By the id of each meta tensor."""

    def read(self, wanted: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Read the tensors for the meta tensors ``wanted``, in their order."""
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        metadata = self.metadata

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata

        try:
            found = {self.names[id(each)]: torch.empty(each.shape, dtype=each.dtype) for each in wanted}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* load in a single process")  # as it should
                load(found, storage_reader=Reader(self.path), no_dist=True)
        except CheckpointException as error:  # no Exception, and it lists those of all ranks
            raise unreadable(self.path, next(iter(error.failures.values()))[0]) from error
        except _MALFORMED as error:
            raise unreadable(self.path, error) from error
        return [found[self.names[id(each)]] for each in wanted]


def open_folder(path: Path) -> DcpFolder:
    """Read the description of ``path`` without its tensors."""
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        with (path / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError("its .metadata is of another type")
        state: dict[Any, Any] = {}
        names: dict[int, str] = {}
        for name, each in metadata.state_dict_metadata.items():
            tensor = None
            if isinstance(each, TensorStorageMetadata):
                tensor = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                names[id(tensor)] = name
            *outer, last = (metadata.planner_data or {}).get(name, (name,))
            inner = state
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = tensor
        for stored in metadata.storage_data.values():
            if not (path / stored.relative_path).resolve().is_relative_to(path.resolve()):
                raise ValueError(f"it names the file {stored.relative_path}, which is outside of the checkpoint")
    except _ForbiddenError as error:
        raise ConfigError(
            f"{path} holds objects that only pickle can read, which may run any code: they are never loaded: {error}",
            hint="in the program that wrote it, save model.state_dict() by torch.save or safetensors",
        ) from error
    except _MALFORMED as error:
        raise unreadable(path, error) from error
    return DcpFolder(path, metadata, state, names)


class _ForbiddenError(Exception):
    """The pickle names a class that is more than a value."""


class _Unpickler(pickle.Unpickler):
    """Creates only descriptions of tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _ForbiddenError(f"{module}.{name}")


def unreadable(source: Path, error: BaseException) -> ConfigError:
    """``error`` in a sentence."""
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].partition(". ")[0].strip()
    return ConfigError(f"{source} cannot be read: {reason or type(error).__name__}", hint="fetch it again")
