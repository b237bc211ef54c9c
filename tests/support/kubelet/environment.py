"""The environment and the words of a container's command, made as the kubelet makes them. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.objects import ConfigMap, Secret, Service
from tests.support.kubelet.pod_spec import Container, ValueFrom, VariablesFrom

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pod's variables may be taken from."""

    name: str
    namespace: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, ConfigMap] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    """Variables about Services."""

    def field(self, path: str) -> str:
        """The value of the downward API's ``path``."""
        keyed = _KEYED.fullmatch(path)
        if keyed is not None:
            source = self.labels if keyed[1] == "labels" else self.annotations
            return source.get(keyed[2], "")
        values = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "status.podIP": self.address,
            "spec.nodeName": "node",
        }
        if path not in values:
            raise ConfigError(f"the stand-in knows no field {path!r} of a pod")
        return values[path]


def secret_values(secret: Secret) -> dict[str, bytes]:
    """All that a Secret holds."""
    plain = {key: base64.b64decode(value, validate=True) for key, value in secret.data.items()}
    return plain | {key: value.encode() for key, value in secret.string_data.items()}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with ``$(NAME)`` replaced where NAME is known, and ``$$`` by ``$``; all else stays as it is."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[2] is None else variables.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def variables(container: Container, facts: Facts) -> dict[str, str]:
    """All variables that the pod's specification gives the container; later ones may refer to earlier ones."""
    result = dict(facts.links)
    for source in container.env_from:
        result |= {source.prefix + key: value for key, value in _all_of(source, facts).items()}
    for variable in container.env:
        if variable.value_from is None:
            result[variable.name] = expanded(variable.value, result)
        elif (value := _value(variable.value_from, facts)) is not None:
            result[variable.name] = value
    return result


def _all_of(source: VariablesFrom, facts: Facts) -> dict[str, str]:
    if (config := source.config_map_ref) is not None:
        found = facts.configs.get(config.name)
        return dict(found.data) if found is not None else _absent("ConfigMap", config.name, config.optional)
    if (secret := source.secret_ref) is None:
        raise ConfigError("an entry of envFrom is empty")
    stored = facts.secrets.get(secret.name)
    if stored is None:
        return _absent("Secret", secret.name, secret.optional)
    return {key: value.decode() for key, value in secret_values(stored).items()}


def _absent(kind: str, name: str, optional: bool) -> dict[str, str]:
    if not optional:
        raise ConfigError(f"there is no {kind} {name!r}: the pod would wait for it for ever")
    return {}


def _value(source: ValueFrom, facts: Facts) -> str | None:
    if source.field_ref is not None:
        return facts.field(source.field_ref.field_path)
    if (key := source.config_map_key_ref) is not None:
        config = facts.configs.get(key.name)
        data = dict(config.data) if config is not None else {}
        kind = "ConfigMap"
    elif (key := source.secret_key_ref) is not None:
        secret = facts.secrets.get(key.name)
        data = {name: value.decode() for name, value in secret_values(secret).items()} if secret is not None else {}
        kind = "Secret"
    else:
        raise ConfigError("a variable's valueFrom is empty")
    if key.key not in data and not key.optional:
        raise ConfigError(f"{kind} {key.name!r} has no key {key.key!r}: the pod would wait for it for ever")
    return data.get(key.key)


def words(container: Container, values: Mapping[str, str]) -> list[str]:
    """Command and arguments of the container."""
    if not container.command:
        raise ConfigError(f"container {container.name}: give the command too: images' own are not known here")
    return [expanded(word, values) for word in [*container.command, *container.args]]


def service_links(services: Sequence[tuple[Service, str]]) -> dict[str, str]:
    """The variables that a pod gets about Services with an address of their own, unless it turns them off."""
    result: dict[str, str] = {}
    for service, address in services:
        if service.headless or not service.spec.ports:
            continue
        name, port = service.metadata.name.upper().replace("-", "_"), service.spec.ports[0].port
        result |= {
            f"{name}_SERVICE_HOST": address,
            f"{name}_SERVICE_PORT": str(port),
            f"{name}_PORT": f"tcp://{address}:{port}",
        }
    return result
