"""The status page: the list of runs, and one run with its nodes, curves and incidents.

All words and rows are written here. Pages are complete without JavaScript; with it, ``static/page.js`` mounts later
updates and draws the curves. All links are relative, so the pages work below any path: the list at ``/``, a run at
``/runs/<run>``, each with ``update`` and a run with ``stream`` below it, files at ``/static/``.
"""

from __future__ import annotations

from elastic_trainer.monitor.page.files import static
from elastic_trainer.monitor.page.nodes import Choice
from elastic_trainer.monitor.page.rendering import run_page, run_update, runs_page, runs_update
from elastic_trainer.monitor.page.updates import NOTHING, Update, message

__all__ = ["NOTHING", "Choice", "Update", "message", "run_page", "run_update", "runs_page", "runs_update", "static"]
