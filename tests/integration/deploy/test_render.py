"""`elastic-trainer k8s render`: valid for every API server, in one piece with the folders of k8s/, and strict."""

from __future__ import annotations

import copy
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elastic_trainer.cli import k8s
from elastic_trainer.cli.k8s import KubernetesRun, MountedFile, values
from elastic_trainer.cli.main import main, whole_parser
from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from tests.support.agreement import Training, disagreements
from tests.support.deployment import ROOT
from tests.support.jobfolders import COMMANDS, command
from tests.support.manifests import Manifest, combined, named, of_kind, pods, rendered, settings_of
from tests.support.podsecurity import violations

VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
GIVEN = ["--name", "gpt", "--nodes", "2:8", "--image", "elastic-trainer:latest"]
SCRIPT = "elastic_trainer/jobs/scripts/session_script.py"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def asked(*words: str) -> KubernetesRun:
    parser, _ = whole_parser(["k8s"])
    return values(parser.parse_args(["k8s", "render", *words]))


def objects_of(run: KubernetesRun) -> list[Manifest]:
    return list(yaml.safe_load_all(k8s.stream(run)))


def by_name(objects: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_folders_of_jobs_are_what_render_makes(name: str) -> None:
    """File by file; after a change of the templates `python -m tests.support.jobfolders` writes them anew. `kubectl
    apply -k` of the folder and `kubectl apply -f -` of the stream do the same, the ConfigMap included."""
    run = asked(*command(name)[2:])
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "k8s/jobs" / name).iterdir()}
    assert files == k8s.folder(run)
    assert by_name(objects_of(run)) == by_name(rendered(f"jobs/{name}"))


def test_the_overlay_of_production_is_what_options_make() -> None:
    """Its four components and their options change the same things in the same way."""
    replaced = {"--cpu", "--memory", "--shm", "--image"}
    pairs = itertools.pairwise(["", *command("gpt")[2:]])
    words = [word for before, word in pairs if before not in replaced and word not in replaced]
    own = ["--image", "registry.example.com/elastic-trainer:0.1.0-cuda", "--namespace", "elastic-trainer"]
    own += ["--gpus", "8", "--tls-secret", "etcd-client-tls"]
    own += ["--user-secret", "etcd-user-gpt", "--network-policy"]
    made, overlay = by_name(objects_of(asked(*own, *words))), by_name(rendered("overlays/production-gpt"))
    assert sorted(made) == sorted(overlay)
    for objects in (made, overlay):  # lists whose order means nothing
        pod = objects["Job", "gpt"]["spec"]["template"]["spec"]
        pod["volumes"].sort(key=lambda each: str(each["name"]))
        pod["containers"][0]["volumeMounts"].sort(key=lambda each: str(each["name"]))
        pod["containers"][0]["env"].sort(key=lambda each: str(each["name"]))
    assert made == overlay


def test_the_component_for_kueue_is_what_an_option_makes(tmp_path: Path) -> None:
    """Queue, least number of pods from the budget as a text, and both numbers set together."""
    (job,) = of_kind(combined(tmp_path, ["jobs/gpt"], ["components/kueue"]), "Job")
    words = command("gpt")[2:]
    (made,) = of_kind(objects_of(asked("--queue", "training", *words)), "Job")
    assert job == made
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
WORDS = st.one_of(TEXTS, st.sampled_from(["--lr=1e-3", "yes", "1", "null", "a: b", "it's", '"', "#", "- x", "{a}"]))


@st.composite
def runs(draw: st.DrawFn) -> KubernetesRun:
    """Runs of all sizes and kinds that the command line can describe."""
    least = draw(st.integers(1, 64))
    most = draw(st.integers(least, 64))
    gpus = draw(st.sampled_from([0, 0, 1, 4, 8]))
    workers = gpus or draw(st.integers(1, 8))
    name = draw(NAMES)
    words = tuple(draw(st.lists(WORDS.filter(lambda word: "$(" not in word), max_size=3)))
    options: dict[str, Any] = {
        "endpoint": "etcd-0.etcd:2379,etcd-1.etcd:2379",
        "tls_secret": draw(NAMES),
        "user_secret": draw(NAMES),
        "queue": draw(NAMES),
        "namespace": draw(NAMES),
        "priority_class": draw(NAMES),
        "ttl": draw(st.integers(0, 10**6)),
        "network_policy": True,
        "data_claim": draw(NAMES),
        "storage_class": draw(NAMES),
        "checkpoint_claim": draw(NAMES),
        "rdzv_conf": {"preflight": "refuse", "join_timeout": "86400"},
        "spread": ("kubernetes.io/hostname", "topology.kubernetes.io/zone"),
        "source": MountedFile(name="train.py", key="train.py", text=draw(TEXTS) + "\n" + draw(TEXTS)),
        "env": draw(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}X", fullmatch=True), WORDS, max_size=2)),
        "shutdown_timeout": draw(st.integers(60, 3600)),
        "recovery": "restart",
    }
    chosen = draw(st.sets(st.sampled_from(sorted(options))))
    return KubernetesRun(
        name=name,
        image="registry.example.com:5000/a/b:1",
        least=least,
        most=most,
        pods=draw(st.integers(least, most)),
        gpus=gpus,
        workers=workers,
        cpu=(str(workers), str(2 * workers)),
        memory=("2Gi", f"{4 * workers}Gi"),
        shm="1Gi",
        words=("/app/train.py", *words),
        **{key: value for key, value in options.items() if key in chosen},
    )


@settings(max_examples=60, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), version=st.sampled_from(VERSIONS))
def test_whatever_is_rendered_is_accepted(run: KubernetesRun, version: str) -> None:
    """1 to 64 pods, with and without GPUs, TLS, users and queues: Kubernetes' schemas, Pod Security *restricted*, and
    all rules about what a Job must agree on."""
    objects = objects_of(run)
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
        assert each["metadata"].get("namespace") == run.namespace
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "elastic-trainer"
    ((_, pod),) = pods(objects)
    assert violations(pod["spec"]) == []
    (job,) = of_kind(objects, "Job")
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert bool(budgets) is (run.pods > run.least)
    known = settings_of(objects)
    assert disagreements(Training(job, known, budgets[0] if budgets else None)) == []
    command_ = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert tuple(command_[-len(run.words) :]) == run.words
    if run.source is not None:
        assert named(objects, "ConfigMap", run.name)["data"] == {"train.py": run.source.text}


def test_kubectl_reads_texts_as_texts() -> None:
    """Its YAML takes more for numbers, yes and no than PyYAML: ``1e-3`` would be refused as a word of a command."""
    run = asked(
        "--name", "yes", "--nodes", "1:2", "--image", "a", "--service-account", "1e3", "--", SCRIPT, "1e-3", "y"
    )
    text = k8s.stream(run)
    for line in ("name: 'yes'", 'name: "yes"', 'serviceAccountName: "1e3"', '- "1e-3"\n', '- "y"\n'):
        assert line in text
    assert ": yes\n" not in text


def test_what_the_user_gives_takes_the_place_of_the_pods_own(tmp_path: Path) -> None:
    """Two variables of one name are refused by ``kubectl apply --server-side``. A job file called job.yaml is not the
    manifest in its folder. A token that a Secret mounts is not asked for on the machine that renders."""
    (job,) = of_kind(objects_of(asked(*GIVEN, "--env", "OMP_NUM_THREADS=4", "--", SCRIPT)), "Job")
    env = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [each["value"] for each in env if "OMP" in each["name"]] == ["4"]
    mine = tmp_path / "job.yaml"
    mine.write_text((ROOT / "elastic_trainer/jobs/mnist.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    files = k8s.folder(asked(*GIVEN, "--", str(mine), "checkpoint.directory=/checkpoints/gpt"))
    assert yaml.safe_load(files["job.yaml"])["kind"] == "Job"
    assert yaml.safe_load(files["kustomization.yaml"])["configMapGenerator"][0]["files"] == ["job.yaml=source.yaml"]
    assert files["source.yaml"] == mine.read_text(encoding="utf-8")
    run = asked(*GIVEN, "--rdzv-conf", "metrics_token_file=/etc/token", "--", "mnist")
    assert "metrics_token_file=/etc/token" in run.rendezvous


def test_a_script_decides_how_it_recovers_and_a_bucket_needs_no_volume() -> None:
    """In place for one with a Session; a task's checkpoints go where the pods see them."""
    assert asked(*GIVEN, "--", SCRIPT).recovery == "in_place"
    assert asked(*GIVEN, "--", "tests/support/plainjob.py").recovery == "restart"
    assert asked(*GIVEN, "--", "mnist").words[2:] == ("mnist", "checkpoint.directory=/checkpoints/gpt")
    run = asked(*GIVEN, "--checkpoint-dir", "s3://bucket/runs", "--", "mnist")
    assert run.words[-1] == "checkpoint.directory=s3://bucket/runs/gpt"
    assert not of_kind(objects_of(run), "PersistentVolumeClaim")
    assert asked(*GIVEN, "--checkpoint-claim", "mine", "--", "mnist").checkpoint_size is None


WRONG: dict[str, tuple[list[str], str]] = {
    "no job": ([], "nothing to run was given"),
    "no file": (["--", "nowhere.py"], "'nowhere.py' cannot be read: No such file"),
    "no task": (["--", "mnst"], "mnst"),
    "a name of a label": (["--name", "GPT_2", "--", "mnist"], "--name is 'GPT_2': at most 52 lower-case letters"),
    "too many pods": (["--pods", "9", "--", "mnist"], "9 pods are not within --nodes 2:8"),
    "nodes": (["--nodes", "8:2", "--", "mnist"], "--nodes '8:2' is not MIN:MAX"),
    "memory": (["--memory", "4 GB", "--", "mnist"], "--memory is '4 GB': not a quantity"),
    "a request": (["--cpu", "4:2", "--", "mnist"], "--cpu is '4:2': the request is larger than the limit"),
    "shm": (["--shm", "8Gi", "--", "mnist"], "--shm 8Gi is more than half of the memory, 4Gi"),
    "fewer than no GPUs": (["--gpus", "-1", "--", "mnist"], "--gpus -1 is below 0"),
    "no workers": (["--nproc-per-node", "0", "--", "mnist"], "--nproc-per-node 0 is below 1"),
    "workers": (["--gpus", "8", "--nproc-per-node", "4", "--", "mnist"], "4 workers for 8 GPUs"),
    "conf": (["--rdzv-conf", "tll=3", "--", "mnist"], "unknown key 'tll'"),
    "ours": (["--rdzv-conf", "node_id=a", "--", "mnist"], "node_id cannot be given"),
    "shutdown": (["--shutdown-timeout", "5", "--", "mnist"], "--shutdown-timeout is 5: input should be"),
    "startup": (["--startup-timeout", "20", "--", "mnist"], "--startup-timeout 20 is below what a start takes, 270"),
    "a bucket": (["--checkpoint-dir", "/nfs", "--", "mnist"], "is not a URL of a bucket"),
    "both": (["--checkpoint-dir", "s3://b", "--checkpoint-claim", "c", "--", "mnist"], "which needs no claim"),
    "lost": (["--", "mnist", "checkpoint.directory=/data/x"], "would go with the pod"),
    "a variable": (["--env", "A", "--", "mnist"], "--env 'A' is not NAME=VALUE"),
    "a variable of the pod": (["--env", "POD_IP=1", "--", "mnist"], "--env is {'POD_IP': '1'}: 'POD_IP' cannot be"),
    "a name of a file": (["--", "my train.py"], "'my train.py' is not a name for a file in a pod"),
    "injection": (["--queue", "a\n  b: c", "--", "mnist"], "--queue is 'a\\n  b: c': only lower-case"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed to standard output, which may be a pipe into kubectl."""
    words, sentence = WRONG[case]
    assert main(["k8s", "render", *GIVEN, *words]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ('checkpoint_dir="checkpoints", seed=1', True),
        ('"/tmp/a"', True),
        ('"/checkpoints/gpt"', False),
        ('"s3://bucket/gpt"', False),
        ("checkpoint_dir=arguments.directory", False),
    ],
)
def test_a_script_does_not_save_where_the_pod_cannot_write(given: str, refused: bool, tmp_path: Path) -> None:
    """Its own file system is read-only, and ends with it; only what is written out is judged."""
    script = tmp_path / "train.py"
    script.write_text(f"from elastic_trainer import Session\nwith Session({given}) as session: ...\n")
    with pytest.raises(ConfigError, match="of its Session would go with the pod") if refused else nullcontext():
        assert asked(*GIVEN, "--", str(script)).source is not None
    script.write_text("#" * 1_000_001)
    with pytest.raises(ConfigError, match="too large for a ConfigMap"):
        asked(*GIVEN, "--", str(script))


def test_scaling_changes_what_depends_on_the_size_within_the_limits() -> None:
    """`maxFailedIndexes` is what the run can do without, and never above `completions`, which the API refuses. A size
    outside of --nodes, a Job of something else, and a Job whose size is Kueue's are refused."""
    (job,) = of_kind(objects_of(asked(*GIVEN, "--pods", "4", "--", "mnist")), "Job")
    for size, spared in ((8, 6), (3, 1), (2, 0)):
        decided = k8s.decide(job, size)["spec"]
        assert (decided["parallelism"], decided["maxFailedIndexes"]) == (size, spared)
        job["spec"].update(decided)
        assert disagreements(Training(job, settings_of([]))) == []
    (queued,) = of_kind(objects_of(asked(*GIVEN, "--queue", "q", "--", "mnist")), "Job")
    other = copy.deepcopy(job)
    other["spec"]["template"]["spec"]["containers"][0]["command"] = ["sleep"]
    for wrong, size, sentence in ((job, 1, "2:8"), (job, 9, "2:8"), (queued, 4, "Kueue"), (other, 4, "no torchrun")):
        with pytest.raises(ConfigError, match=sentence):
            k8s.decide(wrong, size)


KUBECTL = """#!/bin/sh
echo "$@" >> {directory}/calls
case "$*" in
*missing*) echo 'Error from server (NotFound): jobs.batch "missing" not found' >&2; exit 1 ;;
*"get job"*) cat {directory}/job.json ;;
esac
"""


def test_scale_patches_through_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One look, one patch in the right namespace; a dry run changes nothing; kubectl's own words are passed on."""
    tool = tmp_path / "kubectl"
    tool.write_text(KUBECTL.format(directory=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (job,) = of_kind(objects_of(asked(*GIVEN, "--pods", "4", "--", "mnist")), "Job")
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert main(["k8s", "scale", "gpt", "6", "--namespace", "ml", "--dry-run"]) == 0
    patch = '{"spec":{"parallelism":6,"completions":6,"maxFailedIndexes":4}}'
    assert capsys.readouterr().out == f"kubectl --namespace=ml patch job gpt --type=merge -p '{patch}'\n"
    assert main(["k8s", "scale", "gpt", "6", "--namespace", "ml"]) == 0
    get = "--namespace=ml get job gpt --output=json"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [get, get, f"--namespace=ml patch job gpt --type=merge -p {patch}"]
    assert "4 -> 6 pods" in capsys.readouterr().err
    assert main(["k8s", "scale", "missing", "6"]) == 1
    assert "not found" in capsys.readouterr().err
