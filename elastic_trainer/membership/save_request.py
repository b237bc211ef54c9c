"""What ``elastic-trainer checkpoints save`` asks a run for, and the answer: one key of the run. Pure."""

from __future__ import annotations

from elastic_trainer.membership.documents import Document


class SaveRequest(Document):
    """A save that somebody asked for; only one that has its answer is replaced by another."""

    id: str
    wall: float
    """When it was asked for (Unix time of the machine of the command; to be shown alone)."""
    name: str = ""
    """The checkpoint that was written."""
    problem: str = ""
    """Why none was."""
    code: int = 0
    """The exit code that fits ``problem``."""

    @property
    def answered(self) -> bool:
        return bool(self.name or self.problem)
