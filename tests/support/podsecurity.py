"""The Pod Security Standard *restricted* in the form that all pods of this project have, and what it adds to that."""

from __future__ import annotations

import json
from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
_NEVER = ("hostNetwork", "hostPID", "hostIPC", "hostProcess", "hostPort", "privileged", "procMount", "sysctls")
_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "readOnlyRootFilesystem": True,  # from here on this project's own
}
_POD = {
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,  # names of services become variables, which etcd takes for its own
}


def violations(spec: dict[str, Any]) -> list[str]:
    """What the admission of the API server would refuse in a pod, and what this project forbids beyond it."""
    wrong = [f"{word} is set" for word in _NEVER if f'"{word}"' in json.dumps(spec)]
    wrong += [f"{name} is not {value}" for name, value in _POD.items() if spec.get(name) is not value]
    for volume in spec.get("volumes", ()):
        wrong += [f"volume {volume['name']} is a {kind}" for kind in set(volume) - {"name"} - VOLUMES]
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            context = spec.get("securityContext", {}) | container.get("securityContext", {})
            wrong += [f"{container['name']}: {key}" for key, value in _CONTAINER.items() if context.get(key) != value]
            if not context.get("runAsUser"):
                wrong.append(f"{container['name']}: it runs as root, or as whom the image says")
    return wrong
