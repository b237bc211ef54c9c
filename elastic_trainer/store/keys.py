"""Where a run keeps its keys: ``<prefix>/<run_id>/...``."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.model import checked_name

_EVENT_DIGITS = 12  # so that keys sort as their numbers do


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of run ``run_id`` below ``prefix``. Raises ConfigError for a name that cannot be part of a key."""

    prefix: str
    run_id: str

    def __post_init__(self) -> None:
        checked_name(self.run_id, "run id")

    @property
    def root(self) -> str:
        """The prefix of everything that belongs to the run."""
        return f"{self.prefix}/{self.run_id}/"

    @property
    def spec(self) -> str:
        """What all nodes of the run must agree on."""
        return f"{self.root}spec"

    @property
    def round(self) -> str:
        """The one round document."""
        return f"{self.root}round"

    @property
    def progress(self) -> str:
        """What rank 0's agent last reported."""
        return f"{self.root}progress"

    @property
    def nodes(self) -> str:
        """The prefix of all node keys."""
        return f"{self.root}nodes/"

    def node(self, node_id: str) -> str:
        """The leased key of one node."""
        return self.nodes + checked_name(node_id, "node id")

    def node_id(self, key: str) -> str | None:
        """The node that ``key`` belongs to; None when it is not a node key of this run."""
        return key.removeprefix(self.nodes) if key.startswith(self.nodes) and key != self.nodes else None

    @property
    def events(self) -> str:
        """The prefix of the journal."""
        return f"{self.root}events/"

    def event(self, number: int) -> str:
        """The key of journal entry ``number``; such keys sort as their numbers do."""
        if not 0 <= number < 10**_EVENT_DIGITS:
            raise ValueError(f"journal entry {number} is out of range")
        return f"{self.events}{number:0{_EVENT_DIGITS}d}"
