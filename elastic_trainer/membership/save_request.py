"""The request of ``elastic-trainer checkpoints save`` to a run, and its answer: one key of the run. Pure."""

from __future__ import annotations

from elastic_trainer.membership.documents import Document


class SaveRequest(Document):
    """A requested save; another request may replace it only once it is answered."""

    id: str
    wall: float
    """When it was requested (Unix time of the command's machine; for display only)."""
    name: str = ""
    """The checkpoint written for it."""
    problem: str = ""
    """Why no checkpoint was written."""
    code: int = 0
    """The command's exit code for ``problem``."""
    before: SaveRequest | None = None
    """The answered request that it replaced, for a command that still waits for that answer."""

    @property
    def answered(self) -> bool:
        return bool(self.name or self.problem)
