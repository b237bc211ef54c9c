"""Scripts to start from: a session, and a DDP script as people have them, and the same with a session."""

from __future__ import annotations
