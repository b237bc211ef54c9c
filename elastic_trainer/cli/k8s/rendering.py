"""The manifests of one run as text, from the templates beside this module. Pure but for reading these."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic_trainer.cli.k8s.values import KubernetesRun

SOURCE_DIRECTORY: Final = "/etc/elastic-trainer"
OUR_FILES: Final = frozenset(
    f"{name}.yaml" for name in ("job", "checkpoints", "disruption", "network", "kustomization")
)
"""What a folder may hold beside the user's file."""
_PLAIN = re.compile(r"[A-Za-z0-9_./=$()+:-]+")
_NUMBER = re.compile(r"[-+.]*[0-9]")
_YES_OR_NO = frozenset("yYnN")


def stream(run: KubernetesRun) -> str:
    """All objects in one text, as ``kubectl apply -f -`` takes it."""
    documents = [*_documents(run, run.namespace).values()]
    if run.source is not None:
        documents.insert(0, _config_map(run))
    return "---\n".join(documents)


def folder(run: KubernetesRun) -> dict[str, str]:
    """The files of a folder for ``kubectl apply -k``, by name."""
    documents = _documents(run, None)
    files = {**documents, "kustomization.yaml": _rendered("kustomization", run, None, files=list(documents))}
    if run.source is not None:
        files[run.source.name] = run.source.text
    return files


def _documents(run: KubernetesRun, namespace: str | None) -> dict[str, str]:
    wanted = {
        "job": True,
        "checkpoints": run.checkpoint_claim is not None and run.checkpoint_size is not None,
        "disruption": run.budget,
        "network": run.network_policy,
    }
    return {f"{name}.yaml": _rendered(name, run, namespace) for name, there in wanted.items() if there}


def _rendered(name: str, run: KubernetesRun, namespace: str | None, **more: Any) -> str:
    gpus = f', nvidia.com/gpu: "{run.gpus}"' if run.gpus else ""
    template = _environment().get_template(f"{name}.yaml")
    return template.render(run=run, namespace=namespace, gpus=gpus, source_directory=SOURCE_DIRECTORY, **more)


def _config_map(run: KubernetesRun) -> str:
    assert run.source is not None
    metadata = {"name": run.name, "labels": {"app.kubernetes.io/part-of": "elastic-trainer"}}
    if run.namespace is not None:
        metadata["namespace"] = run.namespace
    data = {run.source.key: run.source.text}
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


@cache
def _environment() -> Environment:
    loader = PackageLoader("elastic_trainer.cli.k8s")
    made = Environment(loader=loader, undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    made.filters |= {"plain": _plain, "quoted": _quoted, "quantity": _quantity}
    return made


def _plain(text: str) -> str:
    """``text`` as YAML, without quotes where it stays a text without them: for kubectl too, which reads more as numbers
    (``1e-3``, ``0o17``) and as yes or no (``y``) than PyYAML does.
    """
    stays = _PLAIN.fullmatch(text) and not _NUMBER.match(text) and yaml.safe_load(f"- {text}") == [text]
    return text if stays and text not in _YES_OR_NO else _quoted(text)


def _quantity(text: str) -> str:
    """``500m`` and ``16Gi`` as they are, ``4`` in quotes."""
    return _quoted(text) if text[-1].isdigit() else text


def _quoted(text: str) -> str:
    return yaml.dump(text, default_style='"', width=10**9).removesuffix("\n")
