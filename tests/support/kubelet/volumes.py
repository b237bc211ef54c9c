"""The volumes of a pod as directories of this machine, with the owners and modes that the kubelet gives them.

*Runs in* the node's thread. *Owns* the directories below the one that it is given.
*Fails by* ConfigError for a ConfigMap, Secret or claim that does not exist.
*Invariant*: a claim's directory outlives pods; it belongs to root, and to a pod's fsGroup if the pod names one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.environment import Facts, secret_values
from tests.support.kubelet.pod_spec import Item, PodSpec, Volume, quantity


@dataclass(frozen=True, slots=True)
class Mounted:
    """One mount of the container; without ``source`` it is memory, with these options."""

    target: str
    source: str | None
    read_only: bool = False
    options: str = ""


class Volumes:
    """Volumes of one node: claims by name, everything else by pod."""

    def __init__(self, directory: Path, claims: Mapping[str, Path]) -> None:
        self._directory, self._claims = directory, claims

    def mounts(self, spec: PodSpec, facts: Facts, own_claims: Mapping[str, str]) -> list[Mounted]:
        """What the container of this pod mounts. ``own_claims``: claims from templates, by name of the volume."""
        volumes = {volume.name: volume for volume in spec.volumes}
        found = []
        for mount in sorted(spec.container.volume_mounts, key=lambda each: each.mount_path):
            if mount.name in own_claims:
                made = Mounted(mount.mount_path, self._claim(own_claims[mount.name], spec), mount.read_only)
            elif mount.name in volumes:
                made = self._mounted(volumes[mount.name], mount.mount_path, mount.read_only, spec, facts)
            else:
                raise ConfigError(f"container {spec.container.name} mounts {mount.name!r}, which is no volume")
            found.append(made)
        return found

    def _mounted(self, volume: Volume, target: str, read_only: bool, spec: PodSpec, facts: Facts) -> Mounted:
        place = self._directory / volume.name
        group = spec.security_context.fs_group or 0
        if volume.persistent_volume_claim is not None:
            claim = volume.persistent_volume_claim
            return Mounted(target, self._claim(claim.claim_name, spec), read_only or claim.read_only)
        if volume.empty_dir is not None:
            if volume.empty_dir.medium == "Memory":
                limit = volume.empty_dir.size_limit
                size = f",size={quantity(limit)}" if limit is not None else ""
                return Mounted(target, None, options=f"mode=1777,gid={group}{size}")
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, 0, group)
            place.chmod(0o2777 if group else 0o777)
            return Mounted(target, str(place), read_only)
        files, modes, default = _content(volume, facts)
        _write(place, files, modes, default, group)
        return Mounted(target, str(place), read_only=True)

    def _claim(self, name: str, spec: PodSpec) -> str:
        if name not in self._claims:
            raise ConfigError(f"there is no PersistentVolumeClaim {name!r}: the pod would wait for it for ever")
        place, group = self._claims[name], spec.security_context.fs_group
        place.mkdir(parents=True, exist_ok=True)
        if group is not None and place.stat().st_gid != group:
            os.chown(place, 0, group)
            place.chmod(0o2775)
        return str(place)


def _content(volume: Volume, facts: Facts) -> tuple[dict[str, bytes], dict[str, int], int]:
    """The files of a ConfigMap or Secret: contents by path, modes that differ, and the mode of the others."""
    if volume.config_map is not None:
        source = volume.config_map
        config = facts.configs.get(source.name)
        if config is None and not source.optional:
            raise ConfigError(f"there is no ConfigMap {source.name!r}: the pod would wait for it for ever")
        data = {key: text.encode() for key, text in config.data.items()} if config is not None else {}
        return *_chosen(data, source.items), source.default_mode
    if volume.secret is None:
        raise ConfigError(f"volume {volume.name} has no source")
    secret = facts.secrets.get(volume.secret.secret_name)
    if secret is None and not volume.secret.optional:
        raise ConfigError(f"there is no Secret {volume.secret.secret_name!r}: the pod would wait for it for ever")
    data = secret_values(secret) if secret is not None else {}
    return *_chosen(data, volume.secret.items), volume.secret.default_mode


def _chosen(data: Mapping[str, bytes], items: Sequence[Item] | None) -> tuple[dict[str, bytes], dict[str, int]]:
    if items is None:
        return dict(data), {}
    for item in items:
        if item.key not in data:
            raise ConfigError(f"a volume asks for the key {item.key!r}, which is not there")
    modes = {item.path: item.mode for item in items if item.mode is not None}
    return {item.path: data[item.key] for item in items}, modes


def _write(place: Path, files: Mapping[str, bytes], modes: Mapping[str, int], default: int, group: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    for path, data in files.items():
        file = place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        os.chown(file, 0, group)
        mode = modes.get(path, default)
        # The kubelet lets the pod's group read what the owner may, or a user that is not root could not.
        file.chmod(mode | (0o040 if group else 0))
