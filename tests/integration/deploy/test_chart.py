"""The Helm chart makes what `elastic-trainer k8s render` makes, and refuses what it refuses; judged by helm itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from elastic_trainer.cli.k8s import KubernetesRun
from tests.integration.deploy.test_render import GIVEN, asked, by_name, objects_of, runs
from tests.support.helmchart import CHART, chart_files, chart_values, helm
from tests.support.manifests import Manifest

LEAST = {"image": "elastic-trainer:latest", "args": ["/app/train.py"], "minNodes": 1, "maxNodes": 2}
"""What a user has to say."""


def made(values: dict[str, Any], directory: Path, namespace: str = "team") -> list[Manifest]:
    (directory / "values.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    done = helm("template", "gpt", CHART, "--namespace", namespace, "--values", directory / "values.json")
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def unordered(objects: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """The objects by kind and name, with lists in one order where it means nothing: helm sorts maps."""
    found = by_name(objects)
    for (kind, _), each in found.items():
        if kind == "PersistentVolumeClaim":
            each["metadata"].pop("annotations", None)
        if kind == "Job":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            container["env"].sort(key=lambda variable: str(variable["name"]))
            words = container["command"]
            (place,) = [number for number, word in enumerate(words) if word.startswith("--rdzv-conf=")]
            words[place] = sorted(words[place].removeprefix("--rdzv-conf=").split(","))
    return found


def test_the_chart_is_what_the_generator_makes() -> None:
    """After a change of render's values or templates `python -m tests.support.jobfolders` writes it anew."""
    files = chart_files()
    assert {name: (CHART / name).read_text(encoding="utf-8") for name in files} == files


@settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(run=runs())
def test_chart_and_render_make_the_same_objects(tmp_path: Path, run: KubernetesRun) -> None:
    """Runs of all sizes and kinds; render's objects are judged by Kubernetes' schemas and Pod Security elsewhere."""
    run = run.model_copy(update={"namespace": run.namespace or "team"})
    release = made(chart_values(run), tmp_path, str(run.namespace))
    assert unordered(release) == unordered(objects_of(run))


@pytest.mark.parametrize("more", [[], ["--gpus", "8"], ["--nproc-per-node", "3"], ["--memory", "4Gi"], ["--cpu", "4"]])
def test_what_is_not_said_is_what_render_takes(more: list[str], tmp_path: Path) -> None:
    """Workers, CPUs, memory and shared memory follow from the GPUs or workers."""
    names = {"--gpus": ("gpus", int), "--nproc-per-node": ("workers", int)}
    values: dict[str, Any] = {**LEAST, "minNodes": 2, "maxNodes": 8}
    for option, text in zip(more[::2], more[1::2], strict=True):
        name, kind = names.get(option, ("", str))
        values |= {name: kind(text)} if name else {option.strip("-"): {"request": text}}
    run = asked(*GIVEN, "--namespace", "team", *more, "--", "/app/train.py")
    assert unordered(made(values, tmp_path)) == unordered(objects_of(run))


@pytest.mark.parametrize(
    ("text", "session"),
    [
        ("from elastic_trainer import RunLog, Session\n", True),
        ("from elastic_trainer import (\n    RunLog,\n    Session,\n)\n", True),
        ("import torch, elastic_trainer\nwith elastic_trainer.Session() as session: ...\n", True),
        ("if True:\n    from elastic_trainer.jobs.trainer import Trainer\n", True),
        ("import torch  # from elastic_trainer import Session\n", False),
        ("import elastic_trainer.watch\nclass Trainer: ...\n", False),
        ("from lightning import Trainer\n", False),
    ],
)
def test_the_recovery_that_is_not_said_follows_from_the_script(text: str, session: bool, tmp_path: Path) -> None:
    """In place for a script with a Session, in restart mode, which any script can use, for all others; as render."""
    (tmp_path / "train.py").write_text(text)
    run = asked(*GIVEN, "--namespace", "team", "--", str(tmp_path / "train.py"))
    args = ["/etc/elastic-trainer/train.py"]
    values = {**LEAST, "minNodes": 2, "maxNodes": 8, "args": args, "source": {"key": "train.py", "text": text}}
    release = unordered(made(values, tmp_path))
    assert release == unordered(objects_of(run))
    assert ("recovery=in_place" in json.dumps([*release.values()])) is session


@pytest.mark.parametrize("given", [(), ("--set", "image=x,minNodes=1,maxNodes=2", "--set", "args={/app/train.py}")])
def test_helm_finds_nothing_wrong(given: tuple[str, ...]) -> None:
    """Lint, strict: warnings count. Also with its defaults, as a catalogue lints it."""
    done = helm("lint", "--strict", CHART, *given)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_task_is_recovered_in_place_and_its_checkpoints_outlive_the_release(tmp_path: Path) -> None:
    """Of this package's own training it is known that it has a Session. `helm uninstall` deletes all objects but those
    with this annotation."""
    args = ["-m", "elastic_trainer.training", "mnist", "checkpoint.directory=/checkpoints/mnist"]
    objects = made({**LEAST, "args": args}, tmp_path)
    assert "recovery=in_place" in json.dumps(objects)
    (claim,) = [each for each in objects if each["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"image": None}, "image: the image of the pods"),
        ({"minNodes": None}, "minNodes: the fewest pods"),
        ({"args": []}, "args: what torchrun runs in the pod"),
        ({"pods": 9}, "9 pods are not within minNodes 1 and maxNodes 2; change pods"),
        ({"gpus": 4, "workers": 2}, "2 workers for 4 GPUs; give one worker to each"),
        ({"shm": "3Gi"}, "shm 3Gi is more than half of the memory, 4Gi, of which it is a part"),
        ({"cpu": {"request": 2, "limit": "500m"}}, "cpu: the request, 2, is larger than the limit, 500m"),
        ({"rdzvConf": {"metrics_port": 1}}, "metrics_port cannot be given: it is the pod's own"),
        ({"env": {"POD_IP": "x"}}, "POD_IP cannot be given: it is the pod's own"),
        ({"startupTimeout": 10}, "startupTimeout 10 is below what a start takes, 270"),
        ({"name": "Gpt"}, "at most 52 lower-case letters"),
        ({"gpu": 8}, "Additional property gpu is not allowed"),
        ({"recovery": "none"}, "recovery: recovery must be one of the following"),
    ],
)
def test_a_mistake_is_one_sentence(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Before anything is installed."""
    (tmp_path / "values.json").write_text(json.dumps(LEAST | values), encoding="utf-8")
    done = helm("template", "gpt", CHART, "--values", tmp_path / "values.json")
    assert done.returncode != 0
    assert sentence in done.stderr
