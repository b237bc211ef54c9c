"""``python -m elastic_trainer``: the ``elastic-trainer`` command, where its script is not in PATH."""

import sys

from elastic_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
