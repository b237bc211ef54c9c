"""``elastic-trainer k8s render``: options in, manifests out.

*Runs in* the process of the command; reads the script or job file. *Owns* the files below ``--output``.
*Fails by* ConfigError.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer import tasks
from elastic_trainer.cli.k8s.rendering import OUR_FILES, SOURCE_DIRECTORY, folder, stream
from elastic_trainer.cli.k8s.values import CHECKPOINTS, KubernetesRun, MountedFile
from elastic_trainer.cli.local import nodes
from elastic_trainer.cli.options import at_least, key_values
from elastic_trainer.cli.run import MAX_RESTARTS, opens_session, session_directories
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import validated
from elastic_trainer.wording import counted

LARGEST_SOURCE = 1_000_000
"""Bytes: a ConfigMap holds 1 MiB at most, its other fields included."""
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_EXAMPLE = """example: elastic-trainer k8s render --name gpt --nodes 2:8 --gpus 8 \\
             --image registry.example.com/elastic-trainer:0.1.0-cuda -- train.py | kubectl apply -f -"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--name", required=True, metavar="RUN", help="of the run, its Job, labels, budget and ConfigMap")
    add("--image", required=True, help="with this package, and `dumb-init`")
    add("--nodes", required=True, metavar="MIN:MAX", help="fewest and most pods that the run trains with")
    add("--pods", type=int, metavar="N", help="pods to ask for (default: MAX)")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each pod, one worker each (default: 0)")
    add("--nproc-per-node", type=int, metavar="P", help="workers of each pod (default: one for each GPU, else 1)")
    add("--cpu", metavar="Q[:Q]", help="of each pod; request and limit (default: 8 for each GPU, else 1 a worker)")
    add("--memory", metavar="Q[:Q]", help="the same (default: 32Gi:64Gi for each GPU, else 2Gi:4Gi a worker)")
    add("--shm", metavar="Q", help="shared memory, part of the memory (default: 8Gi for each GPU, else 1Gi)")
    add("--namespace", metavar="NAME", help="of all objects (default: that of kubectl)")
    add("--recovery", choices=[str(mode) for mode in RecoveryMode], help="default: in_place with a Session")
    add("--rdzv-conf", default="", metavar="K=V,...", help="more options of the rendezvous")
    add("--max-restarts", type=int, metavar="N", help=f"worker failures of a pod (default: {MAX_RESTARTS})")
    add("--retries", type=int, metavar="N", help="failures of each pod until its index is given up (default: 10)")
    add("--shutdown-timeout", type=int, metavar="S", help="time to leave and save; pods get 30 s more (default: 60)")
    add("--startup-timeout", type=int, metavar="S", help="time until a pod has an endpoint (default: what checks take)")
    add("--ttl", type=int, metavar="S", help="seconds from the end of the Job to its removal (default: never)")
    add("--priority-class", metavar="NAME", help="priorityClassName of the pods")
    add("--spread", action="append", metavar="KEY", help="spread pods over this label of machines; may be repeated")
    add("--queue", metavar="NAME", help="a LocalQueue of Kueue, which may start fewer pods, down to MIN")
    add("--endpoint", metavar="HOST:PORT,...", help="etcd (default: the ConfigMap of k8s/base says it)")
    add("--tls-secret", metavar="NAME", help="Secret with ca.crt, tls.crt and tls.key for etcd")
    add("--user-secret", metavar="NAME", help="Secret with username and password for etcd")
    add("--network-policy", action="store_true", help="let the pods talk to each other, where a namespace forbids it")
    add("--checkpoint-claim", metavar="NAME", help="a volume claim that exists (default: make `checkpoints`)")
    add("--checkpoint-size", metavar="Q", help="of the claim that is made (default: 100Gi)")
    add("--storage-class", metavar="NAME", help="of the claim that is made (default: the cluster's)")
    add("--checkpoint-dir", metavar="URL", help="a bucket, such as s3://BUCKET/PREFIX, and no claim")
    add("--data-claim", metavar="NAME", help="a volume claim to mount at /data, read-only")
    add("--service-account", metavar="NAME", help="default: elastic-trainer, which k8s/base has")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the pods; may be repeated")
    add("--output", type=Path, metavar="DIR", help="write a folder for `kubectl apply -k`, and print nothing")
    what = "a script.py or job.yaml (both go into a ConfigMap), -m module, a ready-made task, or a path in the image"
    add("words", nargs=argparse.REMAINDER, metavar="-- WHAT [ARGS]", help=what)


def run(arguments: argparse.Namespace) -> int:
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
    given = vars(arguments)
    least, most = nodes(arguments.nodes)
    words, source, session = _job(arguments)
    at_least(0, arguments.gpus, "--gpus")
    asked = arguments.nproc_per_node
    workers = arguments.gpus or 1 if asked is None else at_least(1, asked, "--nproc-per-node")
    units = arguments.gpus or workers
    each = ("8", "32Gi:64Gi", 8) if arguments.gpus else ("1", "2Gi:4Gi", 1)
    options: dict[str, Any] = {
        "words": words,
        "source": source,
        "least": least,
        "most": most,
        "pods": most if arguments.pods is None else arguments.pods,
        "workers": workers,
        "cpu": _span(arguments.cpu or _times(each[0], units)),
        "memory": _span(arguments.memory or _times(each[1], units)),
        "shm": arguments.shm or f"{each[2] * (units if arguments.gpus else 1)}Gi",
        "recovery": arguments.recovery or ("in_place" if session else "restart"),
        "conf": key_values(arguments.rdzv_conf),
        "environment": dict(_variable(text) for text in arguments.env),
        **_checkpoints(arguments),
    }
    same = ["name", "image", "namespace", "gpus", "max_restarts", "retries", "priority_class", "spread", "queue"]
    same += ["endpoint", "tls_secret", "user_secret", "network_policy", "data_claim", "service_account"]
    options |= {name: given[name] for name in same if given[name] is not None}
    renamed = {"shutdown_s": "shutdown_timeout", "startup_s": "startup_timeout", "ttl_s": "ttl"}
    options |= {name: given[option] for name, option in renamed.items() if given[option] is not None}
    try:
        return validated(KubernetesRun, options, "")
    except ConfigError as error:
        raise ConfigError(
            _in_options(error.message, renamed | {"environment": "env", "conf": "rdzv-conf"}), hint=error.hint
        ) from error


def _in_options(sentence: str, renamed: Mapping[str, str]) -> str:
    """A sentence about a field, about its option."""
    found = re.match(r": '([a-z_]+)[^']*' is ", sentence)
    if found is None:
        return sentence.removeprefix(": ")
    option = renamed.get(found[1], found[1]).replace("_", "-")
    rest = re.sub(r"^\('([^']*)', '(?:\1|([^']*))'\)", _as_given, sentence[found.end() :])
    return f"--{option} is {rest}"


def _as_given(span: re.Match[str]) -> str:
    """A request and its limit, as an option says them."""
    return f"'{span[1]}'" if span[2] is None else f"'{span[1]}:{span[2]}'"


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
    script = tasks.script(what)
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
    from elastic_trainer.drills.user_job.job import places_checkpoints
    from elastic_trainer.training.loading import load_job

    arguments_ = list(rest)
    if not places_checkpoints(what, arguments_):
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
            f"{str(path)!r} is too large for a ConfigMap, which holds 1 MiB",
            hint="build it into the image",
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
