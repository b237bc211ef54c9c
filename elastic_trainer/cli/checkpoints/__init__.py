"""``elastic-trainer checkpoints ACTION``: look at checkpoints, compare, remove and exchange them, and ask for one.

*Runs in* the process of the command; torch is imported only to write or read torch's own files.
*Fails by* one sentence and an exit code: 78 for a wrong command line, 73 for a directory that cannot be written, 1 for
damage.
"""

from __future__ import annotations

import argparse

from elastic_trainer.cli.checkpoints import comparing, exchanging, looking, pruning, saving
from elastic_trainer.cli.options import add_actions

ACTIONS = {
    "list": (looking.configure_list, looking.run_list, "the checkpoints of a directory, newest first"),
    "show": (looking.configure_show, looking.run_show, "show what one checkpoint holds"),
    "verify": (looking.configure_verify, looking.run_verify, "read every byte and compare it with its checksum"),
    "diff": (comparing.configure, comparing.run, "show how two checkpoints differ"),
    "prune": (pruning.configure, pruning.run, "remove those that no rule keeps"),
    "export": (exchanging.configure_export, exchanging.run_export, "write one for other programs"),
    "import": (exchanging.configure_import, exchanging.run_import, "import a file of another program"),
    "save": (saving.configure, saving.run, "ask a run that trains for a checkpoint now"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the actions."""
    add_actions(parser, ACTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Do it; the exit code."""
    return ACTIONS[arguments.action][1](arguments)
