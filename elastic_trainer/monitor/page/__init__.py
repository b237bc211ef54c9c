"""The status page: the list of runs, and one run with its nodes, curves and incidents.

Both pages are complete without JavaScript. With it, ``static/`` draws the same from the same JSON as it arrives, and
adds the curves. The pages refer to everything relatively, so they work below any path: the list at ``/``, a run at
``/runs/<run>``, files at ``/static/<name>``, JSON at ``/api/``.
"""

from __future__ import annotations

from elastic_trainer.monitor.page.files import static
from elastic_trainer.monitor.page.rendering import run_page, runs_page

__all__ = ["run_page", "runs_page", "static"]
