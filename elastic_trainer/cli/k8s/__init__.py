"""``elastic-trainer k8s ACTION``: the manifests of a run on Kubernetes, and its size there.

*Runs in* the process of the command. *Owns* the folder that ``--output`` names.
*Fails by* one sentence and an exit code: 78 for values that make no sense, 1 where kubectl fails.
"""

from __future__ import annotations

import argparse

from elastic_trainer.cli.k8s import making, scaling
from elastic_trainer.cli.options import add_actions

ACTIONS = {
    "render": (making.configure, making.run, "print all manifests of one run, or write a folder of them"),
    "scale": (scaling.configure, scaling.run, "change how many pods a run has"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the actions."""
    add_actions(parser, ACTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Do it; the exit code."""
    return ACTIONS[arguments.action][1](arguments)
