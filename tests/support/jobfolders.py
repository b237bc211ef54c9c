"""``python -m tests.support.jobfolders``: writes ``k8s/jobs`` and the templates of ``k8s/chart`` anew."""

from __future__ import annotations

import os

from elastic_trainer.cli.main import main
from tests.support import helmchart
from tests.support.deployment import ROOT

_SMALL = "--cpu 500m:1 --memory 768Mi:2Gi --retries 5 --checkpoint-size 1Gi"
COMMANDS = {
    "mnist": f"--nodes 1:4 --pods 2 {_SMALL} -- k8s/jobs/mnist/mnist.yaml",
    "gpt": "--nodes 2:8 --pods 4 --cpu 4 --memory 8Gi:16Gi --shm 4Gi --data-claim data --shutdown-timeout 300 "
    "--rdzv-conf join_timeout=14400,preflight=refuse,preflight_dir=/checkpoints -- k8s/jobs/gpt/gpt.yaml",
    "script": f"--nodes 1:4 --pods 2 {_SMALL} -- k8s/jobs/script/train.py --directory=/checkpoints/script",
}
"""The options of each folder, beside its name."""


def command(name: str) -> list[str]:
    """The words of ``elastic-trainer`` that show the objects of the folder ``name``."""
    return ["k8s", "render", "--name", name, "--image", "elastic-trainer:latest", *COMMANDS[name].split()]


def write() -> None:
    os.chdir(ROOT)
    for name in COMMANDS:
        words = command(name)
        assert main([*words[:2], "--output", f"k8s/jobs/{name}", *words[2:]]) == 0
    helmchart.write()


if __name__ == "__main__":
    write()
