"""What stands for each image: directories of this machine that its pods see, and the environment that it sets."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import elastic_trainer
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.etcd import find_binary

UID = 10001
"""The user that the Dockerfile makes."""
HOME = "/home/trainer"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_SETTINGS = ("/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Image:
    """``trees``: what is seen where (source by target), read-only. ``unreadable``: a path that the image's user could
    not read on this machine, if there is one."""

    environment: Mapping[str, str]
    directory: str
    trees: Mapping[str, str]
    links: Mapping[str, str]
    unreadable: str


@cache
def image(reference: str) -> Image:
    """What stands for the image ``reference``: for ours this virtual environment, and this checkout's package in it."""
    name = reference.rpartition("/")[2].partition("@")[0].partition(":")[0]
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    if name == "etcd":
        binary = Path(find_binary())
        trees = _outermost(links, []) | {"/usr/local/bin": str(binary.parent)}  # where the image has it
        return Image({"PATH": "/usr/local/bin:/usr/bin:/bin"}, "/", trees, links, _unreadable([binary.parent, binary]))
    if name != "elastic-trainer":
        raise ConfigError(f"nothing on this machine stands for the image {reference!r}")
    checkout = Path(elastic_trainer.__file__).parents[1]
    places = [Path(sys.prefix), Path(sys.base_prefix), checkout]
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(checkout),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": HOME,
    }
    packages = [Path(path) for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")]
    needed = [*places, Path(sys.executable).resolve(), checkout / "elastic_trainer" / "__init__.py", *packages]
    return Image(environment, HOME, _outermost(links, places), links, _unreadable(needed))


def _outermost(links: Iterable[str], more: Iterable[Path]) -> dict[str, str]:
    """The system's directories and ``more``; where one lies in another, the outer one will do."""
    wanted = (*_SYSTEM, *_SETTINGS, "/sys", *map(str, more))
    found = [path for path in wanted if path not in links and os.path.exists(path)]
    return {
        path: path for path in found if not any(path != other and Path(path).is_relative_to(other) for other in found)
    }


def _unreadable(paths: Iterable[Path]) -> str:
    """The first of ``paths`` that not everybody may read; what lies above them does not matter."""
    for path in paths:
        mode = path.stat().st_mode
        if not mode & stat.S_IROTH or (path.is_dir() and not mode & stat.S_IXOTH):
            return str(path)
    return ""
