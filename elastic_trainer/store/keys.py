"""The names of a run's keys: ``<prefix>/<run_id>/...``."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.model import checked_name, is_name

_EVENT_DIGITS = 12  # so that keys sort by number
_INCIDENT_DIGITS = 16
_MEETING = "_meeting/"  # no node can have this name


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of run ``run_id`` below ``prefix``. Raises ConfigError for an invalid name."""

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
        """The last progress that rank 0's agent reported."""
        return f"{self.root}progress"

    @property
    def departure(self) -> str:
        """How the last node left; exists only while no node is present."""
        return f"{self.root}departure"

    @property
    def nodes(self) -> str:
        """The prefix of all node keys."""
        return f"{self.root}nodes/"

    def node(self, node_id: str) -> str:
        """The leased key of one node."""
        return self.nodes + checked_name(node_id, "node id")

    def node_id(self, key: str) -> str | None:
        """The node that ``key`` belongs to; None if it is not a node key of this run, or has an invalid node name."""
        name = key.removeprefix(self.nodes)
        return name if key.startswith(self.nodes) and is_name(name) else None

    @property
    def health(self) -> str:
        """The prefix of the nodes' health documents."""
        return f"{self.root}health/"

    def node_health(self, node_id: str) -> str:
        """One node's health document; it outlives the node, since it holds counters."""
        return self.health + checked_name(node_id, "node id")

    def eviction(self, node_id: str) -> str:
        """The key that asks a node to leave."""
        return f"{self.root}evictions/{checked_name(node_id, 'node id')}"

    @property
    def save(self) -> str:
        """The newest requested save."""
        return f"{self.root}save"

    @property
    def incidents(self) -> str:
        """The prefix of the incidents."""
        return f"{self.root}incidents/"

    @property
    def open_incident(self) -> str:
        """The incident that ended the newest round, while no other round has followed."""
        return f"{self.incidents}open"

    def incident(self, number: int) -> str:
        """The key of an incident by its time (milliseconds since 1970); these keys sort by time."""
        if not 0 <= number < 10**_INCIDENT_DIGITS:
            raise ValueError(f"incident {number} is out of range")
        return f"{self.incidents}{number:0{_INCIDENT_DIGITS}d}"

    @property
    def preflight(self) -> str:
        """The prefix of the nodes' preflight reports."""
        return f"{self.root}preflight/"

    def preflight_node(self, node_id: str) -> str:
        """One node's preflight report."""
        return self.preflight + checked_name(node_id, "node id")

    @property
    def preflight_meeting(self) -> str:
        """The prefix of the nodes that measure their network together."""
        return self.preflight + _MEETING

    def is_preflight_meeting(self, key: str) -> bool:
        """Whether ``key`` is a meeting's key rather than a node's report."""
        return key.startswith(self.preflight_meeting)

    @property
    def events(self) -> str:
        """The prefix of the journal."""
        return f"{self.root}events/"

    def event(self, number: int) -> str:
        """The key of journal entry ``number``; these keys sort by number."""
        if not 0 <= number < 10**_EVENT_DIGITS:
            raise ValueError(f"journal entry {number} is out of range")
        return f"{self.events}{number:0{_EVENT_DIGITS}d}"
