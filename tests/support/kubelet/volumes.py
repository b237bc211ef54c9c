"""The volumes of a pod as directories of this machine, with the owners and modes that the kubelet gives them.

*Runs in* the node's thread. *Owns* the directories below the one that it is given.
*Fails by* ConfigError for a ConfigMap or claim that does not exist.
*Invariant*: a claim's directory outlives pods; it belongs to root and to a pod's fsGroup.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.objects import ConfigMap, PodSpec, Volume, quantity


@dataclass(frozen=True, slots=True)
class Mounted:
    """One mount of the container; without ``source`` it is memory, with these options."""

    target: str
    source: str | None
    read_only: bool = False
    options: str = ""


@dataclass(frozen=True, slots=True)
class Volumes:
    """Volumes of one pod. ``claims`` are directories by name, ``own_claims`` those from templates by volume."""

    directory: Path
    claims: Mapping[str, Path]
    own_claims: Mapping[str, str]
    configs: Mapping[str, ConfigMap]

    def mounts(self, spec: PodSpec) -> list[Mounted]:
        """What the container of this pod mounts."""
        volumes = {volume.name: volume for volume in spec.volumes}
        found = []
        for mount in sorted(spec.container.volume_mounts, key=lambda each: each.mount_path):
            group = spec.security_context.fs_group
            if mount.name in self.own_claims:
                made = Mounted(mount.mount_path, self._claim(self.own_claims[mount.name], group), mount.read_only)
            elif mount.name in volumes:
                made = self._mounted(volumes[mount.name], mount.mount_path, mount.read_only, group)
            else:
                raise ConfigError(f"container {spec.container.name} mounts {mount.name!r}, which is not a volume")
            found.append(made)
        return found

    def _mounted(self, volume: Volume, target: str, read_only: bool, group: int) -> Mounted:
        if volume.persistent_volume_claim is not None:
            return Mounted(target, self._claim(volume.persistent_volume_claim.claim_name, group), read_only)
        place = self.directory / volume.name
        if volume.empty_dir is not None:
            if volume.empty_dir.medium == "Memory":
                size = quantity(volume.empty_dir.size_limit)
                return Mounted(target, None, options=f"mode=1777,gid={group},size={size}")
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, 0, group)
            place.chmod(0o2777)
            return Mounted(target, str(place), read_only)
        if volume.config_map is None:
            raise ConfigError(f"volume {volume.name} has no source")
        config = self.configs.get(volume.config_map.name)
        if config is None:
            raise ConfigError(f"there is no ConfigMap {volume.config_map.name!r}: the pod would wait for it for ever")
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
        for path, text in config.data.items():
            (place / path).write_text(text, encoding="utf-8")
            os.chown(place / path, 0, group)
            (place / path).chmod(0o644)
        return Mounted(target, str(place), read_only=True)

    def _claim(self, name: str, group: int) -> str:
        if name not in self.claims:
            raise ConfigError(f"there is no PersistentVolumeClaim {name!r}: the pod would wait for it for ever")
        place = self.claims[name]
        place.mkdir(parents=True, exist_ok=True)
        if place.stat().st_gid != group:
            os.chown(place, 0, group)
            place.chmod(0o2775)
        return str(place)
