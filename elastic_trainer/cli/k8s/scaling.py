"""``elastic-trainer k8s scale``: change a Job's number of pods, with all that depends on it.

*Runs in* the process of the command; asks and patches through kubectl, which knows the cluster and who may do what.
*Owns* nothing. *Fails by* ConfigError for a size outside of the run's limits, ElasticTrainerError where kubectl fails.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from elastic_trainer.cli.k8s.values import may_fail
from elastic_trainer.cli.local import nodes
from elastic_trainer.errors import ConfigError, ElasticTrainerError

LIMIT_S = 60.0
_QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, slots=True)
class Size:
    """What a Job is patched with."""

    pods: int
    may_fail: int

    @property
    def patch(self) -> str:
        """A merge patch. One number alone would be refused: only Jobs with as many completions as pods scale."""
        return json.dumps(
            {"spec": {"parallelism": self.pods, "completions": self.pods, "maxFailedIndexes": self.may_fail}},
            separators=(",", ":"),
        )


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "example: elastic-trainer k8s scale gpt 6"
    add = parser.add_argument
    add("run", help="the name of the run and of its Job")
    add("pods", type=int, metavar="N", help="new number of pods, within its --nodes")
    add("--namespace", metavar="NAME", help="where it runs (default: that of kubectl)")
    add("--dry-run", action="store_true", help="print kubectl's command and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Look at the Job, and patch it."""
    where = [] if arguments.namespace is None else [f"--namespace={arguments.namespace}"]
    name = arguments.run
    job = json.loads(_kubectl([*where, "get", "job", name, "--output=json"]))
    size = decide(job, arguments.pods)
    command = [*where, "patch", "job", name, "--type=merge", "-p", size.patch]
    if arguments.dry_run:
        print(f"kubectl {shlex.join(command)}")
        return 0
    _kubectl(command)
    print(f"run {name}: {job['spec']['parallelism']} -> {size.pods} pods", file=sys.stderr)
    return 0


def decide(job: dict[str, Any], pods: int) -> Size:
    """The Job with another number of pods; its command says the limits."""
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
    return Size(pods, may_fail(pods, least))


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
