"""Exports a checkpoint, or its weights, to other formats: safetensors, torch.save, a Hugging Face folder.

*Runs in* any process; torch is imported only for torch's own files. *Owns* a temporary file or folder next to the goal.
*Fails by* CheckpointError for a state that the format cannot hold, StorageError for a disk that refuses.
*Invariant*: the goal appears complete, with all its data on disk, and replaces existing files only on request.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import codec, reading, tensorfile, tensors
from elastic_trainer.checkpoint.codec import Leaf
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.storage.posix_io import beside, sync
from elastic_trainer.checkpoint.tensorfile import Placed
from elastic_trainer.errors import CheckpointError, ConfigError, StorageError

NOTE = "elastic_trainer"
"""The metadata key that describes a file with a whole state, for :mod:`elastic_trainer.checkpoint.importing`."""
FIELDS = ("run", "step", "round", "epoch", "samples", "world_size", "metrics", "best", "fields")
AVERAGE = "average"
"""The part of a state that is torch's AveragedModel, whose own names begin with ``module.``."""
_AVERAGED = "module."
SHARD = 5 * 10**9
"""Maximum bytes of a file of a Hugging Face folder, as in Hugging Face's tools."""


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint to be exported."""

    storage: Storage
    manifest: Manifest

    @property
    def where(self) -> str:
        return f"checkpoint {self.manifest.name}"


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by their exported names: ``kept`` are the stored tensors, ``aliases`` further names of these."""

    kept: Mapping[str, Placed]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    """Names of values that are not tensors."""

    @property
    def size(self) -> int:
        return sum(each.size for each in self.kept.values())


def weights(source: CheckpointSource, part: str) -> Weights:
    """The tensors of the part ``part`` of the state, ``model`` for most."""
    skeleton = reading.read_skeleton(source.storage, source.manifest)
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
    kept: dict[str, Placed] = {}
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


def _whole(source: CheckpointSource) -> tuple[Placed, ...]:
    return reading.whole_tensors(reading.read_headers(source.storage, source.manifest), source.manifest)


# ---- targets


def to_safetensors(source: CheckpointSource, found: Weights, goal: Path, *, force: bool) -> None:
    """One file of weights; its metadata holds further names of tensors, as with ``safetensors.torch.save_model``."""
    with replaced(goal, force=force) as temporary:
        _write(source, found.kept, temporary, _notes(source, found.aliases))


def whole_to_safetensors(source: CheckpointSource, goal: Path, *, force: bool) -> None:
    """One file with all tensors of the state, and the rest of it in the metadata."""
    skeleton = reading.read_skeleton(source.storage, source.manifest).decode()
    note = json.dumps({"manifest": summary(source.manifest), "state": skeleton})
    with replaced(goal, force=force) as temporary:
        _write(source, {each.name: each for each in _whole(source)}, temporary, {**_notes(source, {}), NOTE: note})


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
        places = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": found.size}, "weight_map": places}
        extra["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    with replaced(goal, force=force, folder=True) as temporary:
        for name, group in zip(names, groups, strict=True):
            aliases = {alias: kept for alias, kept in found.aliases.items() if kept in group}
            _write(source, group, temporary / name, _notes(source, aliases))
        for name, content in extra.items():
            (temporary / name).write_bytes(content)
    return [*names, *extra]


def summary(manifest: Manifest) -> dict[str, Any]:
    """The metadata of a state, as JSON."""
    return {name: value for name, value in manifest.model_dump(mode="json").items() if name in FIELDS}


def _notes(source: CheckpointSource, aliases: Mapping[str, str]) -> dict[str, str]:
    return {**aliases, "step": str(source.manifest.step), "checkpoint": source.manifest.name}


def _groups(kept: Mapping[str, Placed], most: int) -> list[dict[str, Placed]]:
    groups: list[dict[str, Placed]] = [{}]
    size = 0
    for name, each in kept.items():
        if groups[-1] and size + each.size > most:
            groups.append({})
            size = 0
        groups[-1][name] = each
        size += each.size
    return groups


def _write(source: CheckpointSource, kept: Mapping[str, Placed], path: Path, notes: Mapping[str, str]) -> None:
    placed = tensorfile.place([Placed(name, each.dtype, each.shape) for name, each in kept.items()])
    arrays = reading.read_in_turn(source.storage, source.manifest, [kept[each.name] for each in placed])
    write_tensors(path, placed, (data for _, data in arrays), notes)


def write_tensors(path: Path, placed: Sequence[Placed], data: Iterable[Any], notes: Mapping[str, str]) -> None:
    """Write a safetensors file of ``placed``, whose bytes ``data`` yields in order."""
    with path.open("wb") as file:
        file.write(tensorfile.header(placed, notes))
        for each in data:
            file.write(memoryview(each))


class _Partly(dict[str, Any]):
    """Tensors of which only some were read; the placeholders of the others are discarded."""

    def __missing__(self, name: str) -> Any:
        import torch

        return torch.empty(0, 2)


def _part(source: CheckpointSource, part: str | None) -> Any:
    """The decoded state, or its part ``part``; tensors of other parts are not read."""
    skeleton = reading.read_skeleton(source.storage, source.manifest)
    trail = () if part is None else tuple(part.split("/"))
    leaves = codec.outline(skeleton, source.where)
    wanted = leaves if part is None else _of_part(leaves, part, source.where)
    names = {leaf.tensor for leaf in wanted.values()}
    loaded = tensors.build(*reading.read_tensors(source.storage, source.manifest, names.__contains__))
    state: Any = codec.decode(skeleton, _Partly(loaded), source.where)
    for key in trail:
        state = state[key]
    if part == AVERAGE:
        state = {key.removeprefix(_AVERAGED): each for key, each in state.items() if key.startswith(_AVERAGED)}
    return state


# ---- the goal


@contextmanager
def replaced(goal: Path, *, force: bool, folder: bool = False) -> Iterator[Path]:
    """A temporary file or folder that becomes ``goal`` if the block succeeds; ConfigError if ``goal`` exists."""
    if os.path.lexists(goal) and not force:
        raise ConfigError(f"{goal} exists", hint="choose another name, or replace it with --force")
    if os.path.lexists(goal) and goal.is_dir() != folder:
        raise ConfigError(f"{goal} is {'no' if folder else 'a'} directory", hint="choose another name")
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        temporary = beside(goal, folder=folder)
        try:
            yield temporary
            _appear(temporary, goal, force=force, folder=folder)
        finally:
            _vanish(temporary)
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


def _vanish(temporary: Path) -> None:
    if temporary.is_dir():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        temporary.unlink(missing_ok=True)
