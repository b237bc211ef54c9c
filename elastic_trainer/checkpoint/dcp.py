"""Reads directories of torch's distributed checkpoint (DCP) without executing any of their code.

torch itself reads the ``.metadata`` file by pickle, which can run arbitrary code. Here the unpickler knows only the few
classes that describe tensors and files. torch's own reader reads the tensors, with ``weights_only``.

*Runs in* any process, without a process group. *Fails by* ConfigError for what cannot be read.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

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
            _put(state, (metadata.planner_data or {}).get(name, (name,)), tensor)
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


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def unreadable(source: Path, error: BaseException) -> ConfigError:
    """``error`` in a sentence."""
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].partition(". ")[0].strip()
    return ConfigError(f"{source} cannot be read: {reason or type(error).__name__}", hint="fetch it again")
