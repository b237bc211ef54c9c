"""``elastic-trainer drill``: options in, report out; the work is drills/run's.

*Fails by* ConfigError for options that cannot be meant and drills that cannot be played here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from elastic_trainer.cli.options import at_least, console, seconds
from elastic_trainer.errors import EXIT_FAILURE

_EXAMPLE = "example: elastic-trainer drill worker-kill --repeats 5"


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    from elastic_trainer.drills.table import DRILLS

    width = max(map(len, DRILLS))
    listed = "\n".join(f"  {drill.name:<{width}}  {drill.summary}" for drill in DRILLS.values())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"drills:\n{listed}\n\n{_EXAMPLE}"
    add = parser.add_argument
    add("name", metavar="NAME", help="which drill, see below")
    add("--repeats", type=int, default=1, metavar="N", help="number of faults (default: 1)")
    add("--seconds", type=float, default=60.0, metavar="S", help="length of an outage or a load (default: 60)")
    add("--slack", type=float, default=0.0, metavar="S", help="seconds allowed beyond a drill's limit (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--run-dir", type=Path, metavar="DIR", help="where logs and ledger go; they are kept then")
    add("--keep", action="store_true", help="keep the run directory of a success too")


def run(arguments: argparse.Namespace) -> int:
    """Play the drill and report; 0 only if all went as it must."""
    from elastic_trainer.drills.report import show
    from elastic_trainer.drills.run import DrillOptions, run_drill
    from elastic_trainer.local import agents

    options = DrillOptions(
        name=arguments.name,
        repeats=at_least(1, arguments.repeats, "--repeats"),
        seconds=seconds(arguments.seconds, "--seconds"),
        slack_s=seconds(arguments.slack, "--slack"),
        directory=arguments.run_dir,
        keep=arguments.keep,
    )
    agents.preload()  # its nodes share one import of torch
    report = run_drill(options, say=lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(report.as_json()))
        if not report.ok:
            print(f"kept {report.directory}", file=sys.stderr)
    else:
        show(report, console())
    return 0 if report.ok else EXIT_FAILURE
