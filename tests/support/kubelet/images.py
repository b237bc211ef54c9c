"""What stands for each image: directories of this machine that its pods see, and the environment that it sets.

*Fails by* ConfigError for an image that nothing stands for, and where there is no etcd.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import elastic_trainer
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.etcd_binary import find_binary

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
    directory: str = "/"
    trees: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""


def image(reference: str) -> Image:
    """What stands for the image ``reference``."""
    name = reference.rpartition("/")[2].partition("@")[0].partition(":")[0]
    if name == "elastic-trainer":
        return _trainer()
    if name == "etcd":
        return _etcd()
    raise ConfigError(f"nothing on this machine stands for the image {reference!r}")


@cache
def _trainer() -> Image:
    """This virtual environment in the place of the image's, and this checkout's package in it."""
    checkout = Path(elastic_trainer.__file__).parents[1]
    places = [Path(sys.prefix), Path(sys.base_prefix), checkout]
    trees, links = _system(places)
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(checkout),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": HOME,
    }
    return Image(environment, HOME, trees, links, _unreadable([*places, *_inside(checkout)]))


def _inside(checkout: Path) -> Iterable[Path]:
    """Some files without which nothing runs."""
    packages = [Path(path) for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")]
    return [Path(sys.executable).resolve(), checkout / "elastic_trainer" / "__init__.py", *packages]


@cache
def _etcd() -> Image:
    trees, links = _system([])
    binary = Path(find_binary())
    # The image has it there; here it may be anywhere.
    trees["/usr/local/bin"] = str(binary.parent)
    return Image({"PATH": "/usr/local/bin:/usr/bin:/bin"}, "/", trees, links, _unreadable([binary.parent, binary]))


def _system(more: Iterable[Path]) -> tuple[dict[str, str], dict[str, str]]:
    """The system's directories and ``more``; where one lies in another, the outer one will do."""
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    found = [path for path in (*_SYSTEM, *_SETTINGS, *map(str, more)) if path not in links and os.path.exists(path)]
    outer = [path for path in found if not any(path != other and Path(path).is_relative_to(other) for other in found)]
    return {path: path for path in outer} | {"/sys": "/sys"}, links


def _unreadable(paths: Iterable[Path]) -> str:
    """The first of ``paths`` that not everybody may read; what lies above them does not matter."""
    for path in paths:
        mode = path.stat().st_mode
        if not mode & stat.S_IROTH or (path.is_dir() and not mode & stat.S_IXOTH):
            return str(path)
    return ""


def machine_files(user: int, group: int) -> dict[str, str]:
    """Files in /etc that each image has."""
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\ntrainer:x:{user}:{group}::{HOME}:/usr/sbin/nologin\n",
        "/etc/group": f"root:x:0:\ntrainer:x:{group}:\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "/etc/host.conf": "multi on\n",
        "/etc/resolv.conf": "",
    }
