"""``elastic-trainer k8s ACTION``: the manifests of a run on Kubernetes, and its size there.

The values of a run, checked; its manifests, from the templates beside this module; ``render``; ``scale``, which goes
through kubectl, since that knows the cluster and who may do what.

*Runs in* the process of the command. *Owns* the folder that ``--output`` names.
*Fails by* one sentence and an exit code: 78 for values that make no sense, 1 where kubectl fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Self

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import AfterValidator, Field, field_validator, model_validator

from elastic_trainer import jobs
from elastic_trainer.cli.main import at_least, key_values, sub_commands
from elastic_trainer.cli.run import MAX_RESTARTS, nodes, opens_session, session_directories
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.model import PreflightMode, RecoveryMode
from elastic_trainer.preflight.judge import NODE_CHECKS_S, PEERS_WAIT_S
from elastic_trainer.settings import Frozen, RendezvousOptions, parse_endpoints, validated
from elastic_trainer.wording import counted

CHECKPOINTS = "/checkpoints"
CERTIFICATES = "/etc/elastic-trainer-tls"
PASSWORD = "/etc/elastic-trainer-etcd/password"
METRICS_PORT = 9471
ALIVE = "/tmp/alive"
CONNECT_S = 120.0
"""How long a pod waits for etcd, which may have to be scheduled again first."""
GRACE_S = 30
"""From the end of --shutdown-timeout to SIGKILL."""
AGENT_LEAVES_S = 10
"""From the end of the workers to that of --shutdown-timeout."""
LEAST_SHUTDOWN_S = 60
"""Agreeing to stop, leaving the round and writing a small checkpoint."""
IMPORT_S = 30.0
"""What Python and torch need on a busy machine before the first line of the agent."""
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", 1)
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGT]|[KMGT]i)?")
_OURS = ("node_id", "interface", "metrics_address", "metrics_port", "alive_file")
_OUR_VARIABLES = ("POD_NAME", "POD_IP", "NPROC_PER_NODE")


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


_LABEL = r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
Label = Annotated[str, _matching(_LABEL, "at most 52 lower-case letters, digits and '-', a letter first")]
ObjectName = Annotated[str, _matching(_NAME, "only lower-case letters, digits, '-' and '.'")]
LabelKey = Annotated[str, _matching(_LABEL_KEY, "not the key of a label, such as topology.kubernetes.io/zone")]
ImageName = Annotated[str, _matching(r"[a-zA-Z0-9][-a-zA-Z0-9._/:@]*", "not an image, such as example.com/name:1")]
Seconds = Annotated[int, Field(ge=0, le=10**7)]


def quantity(text: str) -> float:
    """The value of a Kubernetes quantity such as 500m, 4 or 16Gi."""
    found = _QUANTITY.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ValueError("not a quantity such as 4, 500m or 16Gi")
    return float(found[1]) * _UNITS[found[2] or ""]


class MountedFile(Frozen):
    """A file that goes into the ConfigMap of the run: the user's script or job file."""

    name: str
    key: str
    text: str


class KubernetesRun(Frozen):
    """One run: the values of ``k8s render`` and of the Helm chart, with their limits, defaults and descriptions.

    A field is the option of its name (``--max-restarts``) and the chart's value (``maxRestarts``), but ``least`` and
    ``most`` are --nodes (minNodes, maxNodes), ``words`` the words behind -- (args), ``workers`` --nproc-per-node.
    """

    name: Label = Field(description="of the run, its Job, labels, budget and ConfigMap")
    image: ImageName = Field(description="with this package, and `dumb-init`")
    words: tuple[str, ...] = Field(min_length=1, description="what torchrun runs in the pod, with its arguments")
    source: MountedFile | None = Field(
        None, description="a script or job file, which pods find at /etc/elastic-trainer"
    )
    namespace: Label | None = Field(None, description="of all objects (default: that of kubectl)")
    least: int = Field(ge=1, description="fewest pods that the run trains with")
    most: int = Field(le=10_000, description="most pods that the run trains with")
    pods: int = Field(ge=1, description="pods to ask for (default: the most); with the fewest, no disruption budget")
    gpus: int = Field(default=0, ge=0, le=64, description="GPUs of each pod, one worker each")
    workers: int = Field(ge=1, le=256, description="workers of each pod (default: one for each GPU, else 1)")
    cpu: tuple[str, str] = Field(
        description="of each pod; request and limit (default: 8 for each GPU, else 1 a worker)"
    )
    memory: tuple[str, str] = Field(description="the same (default: 32Gi:64Gi for each GPU, else 2Gi:4Gi a worker)")
    shm: str = Field(description="shared memory, part of the memory (default: 8Gi for each GPU, else 1Gi)")
    recovery: RecoveryMode = Field(RecoveryMode.IN_PLACE, description="default: in_place with a Session, else restart")
    rdzv_conf: Mapping[str, str] = Field(default_factory=dict, description="more options of the rendezvous")
    max_restarts: int = Field(default=MAX_RESTARTS, ge=0, description="worker failures of a pod")
    retries: int = Field(default=10, ge=1, description="failures of each pod until its index is given up")
    shutdown_timeout: int = Field(
        default=LEAST_SHUTDOWN_S,
        ge=LEAST_SHUTDOWN_S,
        le=10**6,
        description="time to leave and save; pods get 30 s more",
    )
    startup_timeout: int | None = Field(
        None, ge=1, le=10**6, description="time until a pod has an endpoint (default: what checks take)"
    )
    ttl: Seconds | None = Field(None, description="seconds from the end of the Job to its removal (default: never)")
    priority_class: ObjectName | None = Field(None, description="priorityClassName of the pods")
    spread: tuple[LabelKey, ...] = Field(
        default=("kubernetes.io/hostname",), min_length=1, description="spread pods over this label of machines"
    )
    queue: ObjectName | None = Field(
        None, description="a LocalQueue of Kueue, which may start fewer pods, down to the fewest"
    )
    endpoint: str | None = Field(None, description="etcd (default: the ConfigMap of k8s/base says it)")
    tls_secret: ObjectName | None = Field(None, description="Secret with ca.crt, tls.crt and tls.key for etcd")
    user_secret: ObjectName | None = Field(None, description="Secret with username and password for etcd")
    network_policy: bool = Field(False, description="let the pods talk to each other, where a namespace forbids it")
    checkpoint_claim: ObjectName | None = Field("checkpoints", description="a volume claim, mounted at /checkpoints")
    checkpoint_size: str | None = Field("100Gi", description="of the claim that is made")
    storage_class: ObjectName | None = Field(None, description="of the claim that is made (default: the cluster's)")
    access_mode: str = Field(
        default="ReadWriteMany", pattern="^ReadWrite(Many|Once)$", description="of the claim that is made"
    )
    data_claim: ObjectName | None = Field(None, description="a volume claim to mount at /data, read-only")
    service_account: ObjectName = Field("elastic-trainer", description="of the pods; k8s/base has it")
    env: Mapping[str, str] = Field(default_factory=dict, description="variables of the pods")

    @field_validator("cpu", "memory")
    @classmethod
    def _spans(cls, value: tuple[str, str]) -> tuple[str, str]:
        if quantity(value[0]) > quantity(value[1]):
            raise ValueError("the request is larger than the limit")
        return value

    @field_validator("shm", "checkpoint_size")
    @classmethod
    def _quantities(cls, value: str | None) -> str | None:
        if value is not None:
            quantity(value)
        return value

    @field_validator("env")
    @classmethod
    def _variables(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        wrong = [name for name in value if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a name of a variable")
        ours = [name for name in _OUR_VARIABLES if name in value]
        if ours:
            raise ValueError(f"{ours[0]!r} cannot be given: it is the pod's own")
        return value

    @field_validator("rdzv_conf")
    @classmethod
    def _conf(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        ours = [name for name in _OURS if name in value]
        if ours:
            raise ValueError(f"{ours[0]} cannot be given: it is the pod's own")
        _options(value)
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        if not self.least <= self.pods <= self.most:
            raise ValueError(f"{self.pods} pods are not within --nodes {self.least}:{self.most}")
        if self.gpus and self.workers != self.gpus:
            raise ValueError(f"{self.workers} workers for {self.gpus} GPUs; give one worker to each")
        if 2 * quantity(self.shm) > quantity(self.memory[1]):
            raise ValueError(
                f"--shm {self.shm} is more than half of the memory, {self.memory[1]}, of which it is a part"
            )
        if self.startup_timeout and self.startup_timeout < self.least_startup_s:
            raise ValueError(
                f"--startup-timeout {self.startup_timeout} is below what a start takes, {self.least_startup_s:g}"
            )
        if self.endpoint is not None:
            parse_endpoints(self.endpoint)
        return self

    @property
    def options(self) -> dict[str, str]:
        """``--rdzv-conf``: the pod's own, then the user's."""
        ours = ("$(POD_NAME)", "$(POD_IP)", "0.0.0.0", str(METRICS_PORT), ALIVE)
        return {
            "recovery": str(self.recovery),
            **dict(zip(_OURS, ours, strict=True)),
            "connect_timeout": f"{CONNECT_S:g}",
            **self.rdzv_conf,
        }

    @property
    def rendezvous(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.options.items())

    @property
    def least_startup_s(self) -> float:
        """Import, two waits for etcd, and the checks of the machine where they are asked for."""
        options = _options({"connect_timeout": f"{CONNECT_S:g}", **self.rdzv_conf})
        checks = NODE_CHECKS_S + PEERS_WAIT_S + options.connect_timeout
        return IMPORT_S + 2 * options.connect_timeout + (checks if options.preflight is not PreflightMode.OFF else 0.0)

    @property
    def startup_limit_s(self) -> int:
        """A whole number of minutes, unless one was given."""
        return self.startup_timeout or 60 * math.ceil(self.least_startup_s / 60)

    @property
    def grace_s(self) -> int:
        return self.shutdown_timeout + GRACE_S

    @property
    def leave_within_s(self) -> int:
        """Of ``shutdown_timeout`` the workers' part; in the rest the agent leaves the round."""
        return self.shutdown_timeout - AGENT_LEAVES_S

    @property
    def may_fail(self) -> int:
        """``maxFailedIndexes``. With a queue that may start fewer pods it must not be more than the fewest pods."""
        return min(may_fail(self.pods, self.least), self.least if self.queue is not None else self.pods)

    @property
    def threads(self) -> int:
        """Of torch, for each worker."""
        return max(1, int(quantity(self.cpu[1])) // self.workers)

    @property
    def variables(self) -> dict[str, str]:
        """Where etcd is, if the ConfigMap of the platform does not say it, and the user's own."""
        known: dict[str, str] = {}
        if self.endpoint is not None:
            known["ELASTIC_TRAINER_ENDPOINT"] = self.endpoint
            if self.tls_secret is not None:
                files = {"CA_CERT": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
                known |= {f"ELASTIC_TRAINER_{name}": f"{CERTIFICATES}/{file}" for name, file in files.items()}
            if self.user_secret is not None:
                known["ELASTIC_TRAINER_PASSWORD_FILE"] = PASSWORD
        return known | dict(self.env)


def _options(conf: Mapping[str, str]) -> RendezvousOptions:
    """``--rdzv-conf`` checked, but for the files that it names: those are in the pod."""
    return validated(RendezvousOptions, conf, "--rdzv-conf")


def may_fail(pods: int, least: int) -> int:
    """``maxFailedIndexes``: how many indexes may be given up until the run has fewer pods than it can train with."""
    return max(0, pods - least)


# ---- manifests from templates

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
        "disruption": run.pods > run.least,  # else no machine could be drained
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


def _block_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _block_text)


@cache
def _environment() -> Environment:
    loader = PackageLoader("elastic_trainer.cli")
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


# ---- render

LARGEST_SOURCE = 1_000_000
"""Bytes: a ConfigMap holds 1 MiB at most, its other fields included."""
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_METAVARS = {
    "name": "RUN", "image": "IMAGE", "namespace": "NAME", "pods": "N", "gpus": "N", "workers": "P", "cpu": "Q[:Q]",
    "memory": "Q[:Q]", "shm": "Q", "recovery": "", "rdzv_conf": "K=V,...", "max_restarts": "N", "retries": "N",
    "shutdown_timeout": "S", "startup_timeout": "S", "ttl": "S", "priority_class": "NAME", "spread": "KEY",
    "queue": "NAME", "endpoint": "HOST:PORT,...", "tls_secret": "NAME", "user_secret": "NAME", "network_policy": None,
    "checkpoint_size": "Q", "storage_class": "NAME", "data_claim": "NAME", "service_account": "NAME",
    "env": "NAME=VALUE",
}  # fmt: skip
"""The fields that have an option; N, P and S are numbers."""
_EXAMPLE = """example: elastic-trainer k8s render --name gpt --nodes 2:8 --gpus 8 \\
             --image registry.example.com/elastic-trainer:0.1.0-cuda -- train.py | kubectl apply -f -"""


def run_render(arguments: argparse.Namespace) -> int:
    """Print the manifests, or write them."""
    wanted = values(arguments)
    if arguments.output is None:
        print(stream(wanted), end="")
    else:
        _write(arguments.output, folder(wanted))
    if wanted.pods == wanted.least:
        _say("no disruption budget: with no more pods than MIN no machine could be drained; give a larger --pods")
    return 0


def values(arguments: argparse.Namespace) -> KubernetesRun:
    """The run that the options describe."""
    least, most = nodes(arguments.nodes)
    words, source, session = _job(arguments)
    gpus = at_least(0, arguments.gpus or 0, "--gpus")
    asked = arguments.nproc_per_node
    workers = gpus or 1 if asked is None else at_least(1, asked, "--nproc-per-node")
    units = gpus or workers
    each = ("8", "32Gi:64Gi", 8) if gpus else ("1", "2Gi:4Gi", 1)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    options: dict[str, Any] = {
        **{name: given[name] for name in _METAVARS if name in given},
        "words": words,
        "source": source,
        "least": least,
        "most": most,
        "pods": given.get("pods", most),
        "workers": workers,
        "cpu": _span(arguments.cpu or _times(each[0], units)),
        "memory": _span(arguments.memory or _times(each[1], units)),
        "shm": arguments.shm or f"{each[2] * (units if gpus else 1)}Gi",
        "recovery": arguments.recovery or ("in_place" if session else "restart"),
        "rdzv_conf": key_values(arguments.rdzv_conf or ""),
        "env": dict(_variable(text) for text in arguments.env or ()),
        **_checkpoints(arguments),
    }
    try:
        return validated(KubernetesRun, options, "")
    except ConfigError as error:
        raise ConfigError(_in_options(error.message), hint=error.hint) from error


def _in_options(sentence: str) -> str:
    """A sentence about a field, about its option."""
    found = re.match(r": '([a-z_]+)[^']*' is ", sentence)
    if found is None:
        return sentence.removeprefix(": ")
    # A request and its limit, as an option says them:
    rest = re.sub(r"^\('([^']*)', '\1'\)", r"'\1'", sentence[found.end() :])
    rest = re.sub(r"^\('([^']*)', '([^']*)'\)", r"'\1:\2'", rest)
    return f"--{found[1].replace('_', '-')} is {rest}"


def _checkpoints(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Where checkpoints lie: in a bucket, in a claim that is there, or in one that is made."""
    claim, size, kind = arguments.checkpoint_claim, arguments.checkpoint_size, arguments.storage_class
    if arguments.checkpoint_dir is not None:
        if claim or size or kind:
            raise ConfigError("--checkpoint-dir is a bucket, which needs no claim", hint="give one of the two")
        if "://" not in arguments.checkpoint_dir:
            raise ConfigError(
                f"--checkpoint-dir {arguments.checkpoint_dir!r} is not a URL of a bucket",
                hint="s3://BUCKET/PREFIX, or a volume by --checkpoint-claim",
            )
        return {"checkpoint_claim": None}
    if claim is not None:
        if size or kind:
            raise ConfigError("--checkpoint-claim names a volume claim that exists", hint="leave size and class out")
        return {"checkpoint_claim": claim, "checkpoint_size": None}
    return {"storage_class": kind} | ({"checkpoint_size": size} if size is not None else {})


def _job(arguments: argparse.Namespace) -> tuple[tuple[str, ...], MountedFile | None, bool]:
    """What torchrun runs in the pod, the file that has to be brought there, and whether it has a Session."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words or words == ["-m"]:
        raise ConfigError("nothing to run was given", hint="end with: -- SCRIPT.py, JOB.yaml, -m MODULE or TASK")
    what, rest = words[0], words[1:]
    if what == "-m":
        return tuple(words), None, opens_session(words)
    script = jobs.script(what)
    if script is not None:
        what, rest = str(script), [f"--directory={_directory(arguments)}", *rest]
    if what.endswith(".py"):
        if script is None and what.startswith("/") and not Path(what).exists():
            return tuple(words), None, False  # a path in the image, which nobody can look into here
        name = Path(what).name
        if not _KEY.fullmatch(name):
            rule = "only letters, digits, '-', '_' and '.' can be in the key of a ConfigMap"
            raise ConfigError(f"{name!r} is not a name for a file in a pod: {rule}", hint="rename it")
        source = MountedFile(name=name, key=name, text=_text(Path(what)))
        for directory in session_directories(source.text):
            if "://" not in directory and not f"{directory}/".startswith(f"{CHECKPOINTS}/"):
                raise ConfigError(
                    f"{what}: checkpoint_dir {directory!r} of its Session would go with the pod",
                    hint=f"a directory below {CHECKPOINTS}, or the URL of a bucket",
                )
        return (f"{SOURCE_DIRECTORY}/{source.key}", *rest), source, opens_session([what])
    return _ready_made(arguments, what, rest)


def _ready_made(
    arguments: argparse.Namespace, what: str, rest: Sequence[str]
) -> tuple[tuple[str, ...], MountedFile | None, bool]:
    """A task of this package, or a job file; its checkpoints lie where all pods see them."""
    from elastic_trainer.drills.local_run import stores_checkpoints
    from elastic_trainer.jobs.config import load_job

    arguments_ = list(rest)
    if not stores_checkpoints(what, arguments_):
        arguments_.insert(0, f"checkpoint.directory={_directory(arguments)}")
    directory = load_job(what, arguments_).checkpoint.directory
    if arguments.checkpoint_dir is None and not f"{directory}/".startswith(f"{CHECKPOINTS}/"):
        raise ConfigError(
            f"{what}: checkpoint.directory {str(directory)!r} would go with the pod",
            hint=f"a directory below {CHECKPOINTS}, or --checkpoint-dir for a bucket",
        )
    source = None
    if what.endswith((".yaml", ".yml")):
        ours = Path(what).name in OUR_FILES or not _KEY.fullmatch(Path(what).name)
        source = MountedFile(name="source.yaml" if ours else Path(what).name, key="job.yaml", text=_text(Path(what)))
        what = f"{SOURCE_DIRECTORY}/{source.key}"
    return ("-m", "elastic_trainer.training", what, *arguments_), source, True


def _directory(arguments: argparse.Namespace) -> str:
    return f"{(arguments.checkpoint_dir or CHECKPOINTS).rstrip('/')}/{arguments.name}"


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{str(path)!r} cannot be read: {cause}", hint="a file here, or its path in the image"
        ) from error
    if len(text.encode()) > LARGEST_SOURCE:
        raise ConfigError(
            f"{str(path)!r} is too large for a ConfigMap, which holds 1 MiB", hint="build it into the image"
        )
    return text


def _span(text: str) -> tuple[str, str]:
    request, _, limit = text.partition(":")
    return request, limit or request


def _times(text: str, units: int) -> str:
    """Each number of ``text``, which is for one GPU or worker, times their number."""
    parts = [part.removesuffix("Gi") for part in text.split(":")]
    unit = "Gi" if "Gi" in text else ""
    return ":".join(f"{int(part) * units}{unit}" for part in parts)


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--env {text!r} is not NAME=VALUE", hint="such as --env NCCL_DEBUG=WARN")
    return name, value


def _write(directory: Path, files: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise ConfigError(f"--output {str(directory)!r} cannot be written: {cause}", hint="check it") from error
    _say(f"{counted(len(files), 'file is', 'files are')} in {directory}: kubectl apply -k {directory}")


def _say(sentence: str) -> None:
    """To standard error: standard output is for manifests."""
    print(f"elastic-trainer: {sentence}", file=sys.stderr)


# ---- scale

LIMIT_S = 60.0
_QUEUE = "kueue.x-k8s.io/queue-name"


def run_scale(arguments: argparse.Namespace) -> int:
    """Look at the Job, and patch it."""
    where = [] if arguments.namespace is None else [f"--namespace={arguments.namespace}"]
    name = arguments.run
    job = json.loads(_kubectl([*where, "get", "job", name, "--output=json"]))
    patch = json.dumps(decide(job, arguments.pods), separators=(",", ":"))
    command = [*where, "patch", "job", name, "--type=merge", "-p", patch]
    if arguments.dry_run:
        print(f"kubectl {shlex.join(command)}")
        return 0
    _kubectl(command)
    print(f"run {name}: {job['spec']['parallelism']} -> {arguments.pods} pods", file=sys.stderr)
    return 0


def decide(job: dict[str, Any], pods: int) -> dict[str, dict[str, int]]:
    """The merge patch for another number of pods; the Job's command says the limits.

    One number alone would be refused: only Jobs with as many completions as pods scale.
    """
    words = [word for each in job["spec"]["template"]["spec"]["containers"] for word in each.get("command", ())]
    limits = [word.partition("=")[2] for word in words if word.startswith("--nnodes=")]
    name = job["metadata"]["name"]
    if not limits:
        raise ConfigError(f"job {name} runs no torchrun with --nnodes=MIN:MAX", hint="is this the right name?")
    least, most = nodes(limits[0])
    if not least <= pods <= most:
        raise ConfigError(f"{pods} pods are not within the limits of run {name}, {least}:{most}", hint="see --nnodes")
    if _QUEUE in job["metadata"].get("labels", {}):
        raise ConfigError(
            f"run {name} waits in a queue of Kueue, which sets its size", hint="render it again with another --pods"
        )
    return {"spec": {"parallelism": pods, "completions": pods, "maxFailedIndexes": may_fail(pods, least)}}


def _kubectl(words: list[str]) -> str:
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError("there is no kubectl on PATH", hint="install it, or patch the Job as k8s/README.md says")
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ElasticTrainerError(f"kubectl did not answer within {LIMIT_S:g} s", hint="is it there?") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise ElasticTrainerError(f"kubectl: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


# ---- all actions


def configure_k8s(parser: argparse.ArgumentParser) -> None:
    """Describe the actions and their options."""
    action = sub_commands(parser)
    parser = action("render", run_render, "print all manifests of one run, or write a folder of them")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--nodes", required=True, metavar="MIN:MAX", help="fewest and most pods that the run trains with")
    for field, metavar in _METAVARS.items():
        described = KubernetesRun.model_fields[field]
        more: dict[str, Any] = {"action": "store_true"} if metavar is None else {"metavar": metavar}
        if metavar in ("N", "P", "S"):
            more["type"] = int
        elif field == "recovery":
            more = {"choices": [str(mode) for mode in RecoveryMode]}
        elif field in ("spread", "env"):
            more["action"] = "append"
        known = isinstance(described.default, int | str) and described.default and field != "recovery"
        default = f" (default: {described.default})" * bool(known)
        also = "; may be repeated" * (more.get("action") == "append")
        option = "--nproc-per-node" if field == "workers" else f"--{field.replace('_', '-')}"
        add(option, required=field in ("name", "image"), help=f"{described.description}{default}{also}", **more)
    add(
        "--checkpoint-claim",
        metavar="NAME",
        help="a volume claim that exists; by default one named checkpoints is made",
    )
    add(
        "--checkpoint-dir",
        metavar="URL",
        help=(
            "a bucket, such as s3://BUCKET/PREFIX, and no claim; a script of your own gets its directory "
            "by its own arguments"
        ),
    )
    add("--output", type=Path, metavar="DIR", help="write a folder for `kubectl apply -k`, and print nothing")
    what = "a script.py or job.yaml (both go into a ConfigMap), -m module, a ready-made task, or a path in the image"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)
    scale = action("scale", run_scale, "change how many pods a run has")
    scale.epilog = "example: elastic-trainer k8s scale gpt 6"
    scale.add_argument("run", help="the name of the run and of its Job")
    scale.add_argument("pods", type=int, metavar="N", help="new number of pods, within its --nodes")
    scale.add_argument("--namespace", metavar="NAME", help="where it runs (default: that of kubectl)")
    scale.add_argument("--dry-run", action="store_true", help="print kubectl's command and change nothing")


def run_k8s(arguments: argparse.Namespace) -> int:
    """Do it; the exit code."""
    return int(arguments.act(arguments))
