"""Input and output of the protocol's core, as plain values: a thread or a simulator performs the effects."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Ghost, RoundDocument
from elastic_trainer.membership.rules import Decision
from elastic_trainer.membership.view import Observation
from elastic_trainer.store.api import Compare, Operation, TransactionResult

# ---- events


@dataclass(frozen=True, slots=True)
class Looked:
    """What this node knows about the run, and about its own key."""

    seen: Observation
    create_revision: int
    """Create-revision of this node's key; 0 while the key does not exist."""
    senior: bool
    """Whether it was among the most senior nodes when its key was created."""
    away: bool
    """Whether the key must be written (again): its lease has ended, or no write is known to have succeeded."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``effect`` was performed. With ``again_in_s`` it was not, and is tried again after that time."""

    effect: Effect
    again_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Oldest:
    """The answer to AskOldest: the most senior nodes, ghosts excluded."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of ``node``, whose key was at ``mod_revision``, has ended."""

    node: str
    mod_revision: int
    dead: bool


Event = Looked | Ended | Oldest | Probed

# ---- effects


@dataclass(frozen=True, slots=True)
class Notify:
    """Call the listeners with a new round document."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Return:
    """Write this node's record again under a new incarnation."""


@dataclass(frozen=True, slots=True)
class PublishAgain:
    """Write this node's record once more: the view was reloaded, so the store may hold an older record."""

    reloads: int


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Write the decided round document, guarded by ``seen``."""

    decision: Decision
    seen: Observation
    rolled_back: bool = False
    """Whether it brings a restored store forward to where the run was."""


@dataclass(frozen=True, slots=True)
class ChangeWatch:
    """Watch the nodes and the round, or the round alone."""

    nodes: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AskOldest:
    """Ask the store for the ``places`` most senior nodes, excluding ``ghosts``."""

    places: int
    ghosts: tuple[Ghost, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Connect to these nodes' agents: a kernel that refuses the connection proves its agent dead."""

    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class LogDelay:
    """Log why round ``after`` has no successor yet."""

    after: int
    reason: str


Effect = Notify | Return | PublishAgain | CommitRound | ChangeWatch | AskOldest | Probe | LogDelay


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What to do now, in this order, and the monotonic time of the next step if no event comes before."""

    effects: tuple[Effect, ...]
    next_at: float


# ---- the steps of a write that takes several requests


@dataclass(frozen=True, slots=True)
class Transaction:
    """Run ``success`` if all guards hold, else ``failure``; answered by a TransactionResult or a store error."""

    guards: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()
    limit_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait. ``shared``: another thread may write this node's key meanwhile."""

    seconds: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """Grant a new lease to replace a lost one."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class ProbePort:
    """Find out whether ``host`` refuses connections to ``port``."""

    host: str
    port: int


Request = Transaction | Pause | Renew | ProbePort
Steps = Generator[Request, TransactionResult | bool | None, None]
"""The requests of one procedure; each gets its answer, or its error is raised, before the next."""
