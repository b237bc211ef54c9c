"""What a training Job must agree on with itself and with the package: each rule tells what is wrong, in a sentence.

Rules are functions of a :class:`Training`, so that tests can also give them Jobs that were spoiled on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from elastic_trainer import errors
from elastic_trainer.model import PreflightMode, RecoveryMode
from elastic_trainer.preflight.judge import NODE_CHECKS_S, PEERS_WAIT_S, FitLimits
from elastic_trainer.settings import RendezvousOptions, parse_endpoints, rendezvous_options
from elastic_trainer.worker.steps.options import STOP_TIMEOUT_S
from tests.support.manifests import Container, Manifest, container

IMPORT_S = 30.0
"""What Python and torch need on a busy machine before the first line of the agent."""
COMMIT_S = 30.0
"""What writing a checkpoint may take at the least, behind the agreement to stop."""
KILL_MARGIN_S = 20.0
"""From torchrun's SIGKILL to its workers until it has left itself."""
START = ["dumb-init", "--single-child", "--", "torchrun"]
"""An init that hands SIGTERM to torchrun alone, and torchrun itself: no shell between them."""
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
RETRIED = {errors.EXIT_FAILURE, errors.EXIT_UNAVAILABLE, errors.EXIT_UNFIT, errors.EXIT_CANNOT_WRITE}
"""What another try may mend, on this machine or on another: these count for the index, and no rule names them."""


def quantity(text: object) -> float:
    """The value of a Kubernetes quantity."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Training:
    """A Job with what belongs to it: the data of ConfigMaps by name, and its disruption budget."""

    job: Manifest
    settings: dict[str, dict[str, str]]
    budget: Manifest | None = None

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.job["spec"])

    @property
    def template(self) -> Manifest:
        return dict(self.spec["template"])

    @property
    def pod(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @cached_property
    def trainer(self) -> Container:
        return container(self.template, self.settings)

    @cached_property
    def torchrun(self) -> Any:
        """torchrun's own reading of the command."""
        return get_args_parser().parse_args(list(self.trainer.command[len(START) :]))

    @cached_property
    def nodes(self) -> tuple[int, int]:
        """The limits of ``--nnodes``."""
        least, _, most = self.torchrun.nnodes.partition(":")
        return int(least), int(most or least)

    @cached_property
    def options(self) -> RendezvousOptions:
        """``--rdzv-conf`` as the agent reads it."""
        return rendezvous_options(_parse_rendezvous_config(self.torchrun.rdzv_conf))

    def resource(self, name: str, kind: str = "limits") -> float:
        """A resource of the container; 0 where it is not said."""
        return quantity(self.trainer.manifest["resources"][kind].get(name, 0))

    def volume(self, name: str) -> dict[str, Any]:
        """A volume of the pod; empty if there is none."""
        return next((dict(each) for each in self.pod["volumes"] if each["name"] == name), {})


Rule = Callable[[Training], Iterator[str]]


def torchrun_is_the_process_that_gets_signals(it: Training) -> Iterator[str]:
    if it.trainer.command[: len(START)] != START:
        yield f"the command does not begin with {START}: SIGTERM would be ignored at first, or get to a shell"
    if it.trainer.unresolved:
        yield f"variables without a value before their use: {it.trainer.unresolved}"


def the_run_is_named_alike_everywhere(it: Training) -> Iterator[str]:
    if it.torchrun.rdzv_backend != "etcd3":
        yield "another rendezvous backend"
    parse_endpoints(it.torchrun.rdzv_endpoint)
    if it.options.node_id != "pod-0":
        yield "node_id is not the pod's name"
    if it.options.interface != "10.1.2.3":
        yield "interface is not the pod's address"
    labels = it.template["metadata"]["labels"]
    if labels["app.kubernetes.io/name"] != "trainer":
        yield "the pods are not labelled as trainers"
    run = labels.get("elastic-trainer/run")
    if run is not None and {run, it.torchrun.rdzv_id} != {it.torchrun.rdzv_id}:
        yield f"run {it.torchrun.rdzv_id} has pods that are labelled {run}"


def it_may_shrink_and_grow(it: Training) -> Iterator[str]:
    least, most = it.nodes
    wanted = it.spec.get("parallelism", least)
    if it.spec["completionMode"] != "Indexed" or it.spec.get("completions", wanted) != wanted:
        yield "only an Indexed Job with as many completions as pods can be scaled"
    if not least <= wanted <= most:
        yield f"{wanted} pods are not within --nnodes {least}:{most}"
    if it.pod["restartPolicy"] != "Never":
        yield "restartPolicy is not Never"
    if it.spec["podReplacementPolicy"] != "Failed":
        yield "podReplacementPolicy is not Failed"
    spared = wanted - least
    if "kueue.x-k8s.io/queue-name" in it.job["metadata"].get("labels", {}):
        spared = min(spared, least)  # Kueue may set completions to the least number, which it must not exceed
    if it.spec["maxFailedIndexes"] != spared:
        yield f"maxFailedIndexes is not {spared}, the number of pods that the run can do without"
    if it.spec["backoffLimitPerIndex"] < 1 or "backoffLimit" in it.spec:
        yield "no retries for each index"


def one_pod_that_is_done_says_it_for_all(it: Training) -> Iterator[str]:
    if it.spec.get("successPolicy") != {"rules": [{"succeededCount": 1}]}:
        yield "the Job is not complete with the first pod that exits with 0"


def exit_codes_mean_what_the_package_says(it: Training) -> Iterator[str]:
    known = {getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_")}
    never_of_a_node = {errors.EXIT_RESTARTED}
    undecided = known - RETRIED - {errors.EXIT_CONFIG, errors.EXIT_LEFT} - never_of_a_node
    if undecided:
        yield f"nobody has decided what a pod's exit code {sorted(undecided)} means"
    rules = it.spec["podFailurePolicy"]["rules"]
    if rules[0] != {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}:
        yield 'evictions are not ignored first (DisruptionTarget, with the status "True" in quotes)'
    said = {
        (rule["action"], code)
        for rule in rules
        if (codes := rule.get("onExitCodes"))
        and codes["operator"] == "In"
        and codes["containerName"] == it.trainer.name
        for code in codes["values"]
    }
    if said != {("Ignore", errors.EXIT_LEFT), ("FailJob", errors.EXIT_CONFIG)} or len(rules) != 3:
        yield f"exit codes are not handled as the package means them: {sorted(said)}"


def there_is_time_to_leave(it: Training) -> Iterator[str]:
    shutdown_s, grace_s = it.torchrun.shutdown_timeout or 0, it.pod["terminationGracePeriodSeconds"]
    needed_s = STOP_TIMEOUT_S + it.options.stop_grace + COMMIT_S
    if shutdown_s < needed_s:
        yield f"--shutdown-timeout {shutdown_s} is shorter than agreeing and saving may take, {needed_s:g} s"
    if grace_s < shutdown_s + KILL_MARGIN_S:
        yield f"terminationGracePeriodSeconds {grace_s} is less than {KILL_MARGIN_S:g} s above --shutdown-timeout"


def there_is_time_to_start(it: Training) -> Iterator[str]:
    options = it.options
    needed_s = IMPORT_S + 2 * options.connect_timeout
    if options.preflight is not PreflightMode.OFF:
        needed_s += NODE_CHECKS_S + PEERS_WAIT_S + options.connect_timeout
    if it.trainer.patience_s("startupProbe") < needed_s:
        yield f"the startup probe gives up before the node has an endpoint, which may take {needed_s:g} s"
    if options.connect_timeout < 60:
        yield "connect_timeout is shorter than an etcd takes to be scheduled again"


def probes_ask_what_they_mean(it: Training) -> Iterator[str]:
    if it.options.metrics_address != "0.0.0.0":
        yield "the node's endpoint is not reached from outside of the pod"
    if it.trainer.probe("readinessProbe") != ("/readyz", it.options.metrics_port):
        yield f"readinessProbe asks {it.trainer.probe('readinessProbe')}, not /readyz at {it.options.metrics_port}"
    for name in ("startupProbe", "livenessProbe"):
        if it.trainer.asks_file(name) != str(it.options.alive_file):
            yield f"{name} looks at {it.trainer.asks_file(name)}, and the agent touches {it.options.alive_file}"
    if it.trainer.ports != {"metrics": it.options.metrics_port}:
        yield "the port that Prometheus looks for is not that of metrics_port"
    if it.trainer.patience_s("livenessProbe") < max(10 * it.options.ttl, it.options.hang_timeout):
        yield "the liveness probe is quicker than the lease and the watchdog, which know better"
    if it.trainer.patience_s("readinessProbe") > it.trainer.patience_s("livenessProbe"):
        yield "a node is ended before it is said not to be ready"


def workers_and_threads_fit_the_machine(it: Training) -> Iterator[str]:
    workers = int(it.torchrun.nproc_per_node)
    gpus = it.resource("nvidia.com/gpu")
    if gpus and (gpus != workers or it.resource("nvidia.com/gpu", "requests") != gpus):
        yield f"{workers} workers for {gpus:g} GPUs"
    if int(it.trainer.environment["OMP_NUM_THREADS"]) * workers > it.resource("cpu"):
        yield "more threads than CPUs"
    if it.options.recovery is RecoveryMode.IN_PLACE and it.torchrun.max_restarts < 1:
        yield "in place, a crash of a worker needs --max-restarts"
    shm = it.volume("shm").get("emptyDir", {})
    size = quantity(shm.get("sizeLimit", 0))
    if shm.get("medium") != "Memory" or size < FitLimits().shm_bytes:
        yield f"less shared memory than the checks of a machine ask for, {FitLimits().shm_bytes} bytes"
    if size > it.resource("memory") / 2:
        yield "shared memory counts as memory, and would take more than half of it"


def what_is_written_can_be_written(it: Training) -> Iterator[str]:
    mounts = {mount["mountPath"]: mount for mount in it.trainer.manifest["volumeMounts"]}
    unknown = {mount["name"] for mount in mounts.values()} - {volume["name"] for volume in it.pod["volumes"]}
    if unknown:
        yield f"mounts of volumes that are not there: {unknown}"
    bucket = any("://" in word for word in it.torchrun.training_script_args)
    for path in ("/tmp", "/dev/shm") if bucket else ("/checkpoints", "/tmp", "/dev/shm"):
        if path not in mounts or mounts[path].get("readOnly"):
            yield f"{path} cannot be written"
    if "persistentVolumeClaim" not in it.volume("checkpoints") and not bucket:
        yield "checkpoints go with the pod"
    if not it.trainer.environment["XDG_CACHE_HOME"].startswith("/tmp/"):
        yield "the cache would lie on the read-only root"


def variables_name_files_that_are_mounted(it: Training) -> Iterator[str]:
    """Only where a Job is rendered with the ConfigMap of its cluster."""
    mounts = [mount["mountPath"] for mount in it.trainer.manifest["volumeMounts"]]
    for name, value in it.trainer.environment.items():
        if name.startswith("ELASTIC_TRAINER_") and value.startswith("/") and value.rpartition("/")[0] not in mounts:
            yield f"{name} is {value}, where nothing is mounted"


def pods_are_spread(it: Training) -> Iterator[str]:
    labels = it.template["metadata"]["labels"]
    spread = it.pod.get("topologySpreadConstraints", ())
    if "kubernetes.io/hostname" not in [each["topologyKey"] for each in spread]:
        yield "pods are not spread over machines"
    for each in spread:
        if not each["labelSelector"]["matchLabels"].items() <= labels.items():
            yield "the pods that are spread are not these"


def drains_leave_the_minimum(it: Training) -> Iterator[str]:
    if it.budget is None:
        return
    spec, least = it.budget["spec"], it.nodes[0]
    if spec.get("minAvailable") != least or isinstance(spec.get("minAvailable"), str) or "maxUnavailable" in spec:
        yield f"minAvailable is not the whole number {least}"
    if spec["selector"]["matchLabels"] != {
        "elastic-trainer/run": it.template["metadata"]["labels"]["elastic-trainer/run"]
    }:
        yield "the budget is not about this run's pods"
    if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
        yield "pods that take part in nothing hold up a drain"
    if it.spec["parallelism"] <= least:
        yield "with no pod more than the minimum no machine can ever be drained"


RULES: tuple[Rule, ...] = (
    torchrun_is_the_process_that_gets_signals,
    the_run_is_named_alike_everywhere,
    it_may_shrink_and_grow,
    one_pod_that_is_done_says_it_for_all,
    exit_codes_mean_what_the_package_says,
    there_is_time_to_leave,
    there_is_time_to_start,
    probes_ask_what_they_mean,
    workers_and_threads_fit_the_machine,
    what_is_written_can_be_written,
    variables_name_files_that_are_mounted,
    pods_are_spread,
    drains_leave_the_minimum,
)


def disagreements(it: Training) -> list[str]:
    """What all rules say, each with the name of its rule."""
    return [f"{rule.__name__}: {problem}" for rule in RULES for problem in rule(it)]
