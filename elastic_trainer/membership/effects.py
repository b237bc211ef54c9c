"""What the protocol's core is given and what it asks for: plain values, for a thread or a simulator to perform."""

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
    """What this node knows of the run, and of its own key."""

    seen: Observation
    create_revision: int
    """Of this node's key; 0 while it is not shown."""
    senior: bool
    """Whether it was among the most senior nodes when its key was created."""
    away: bool
    """Whether the key is to be shown (again)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``effect`` was performed. ``again_in_s``: it was not, and is tried again after that time."""

    effect: Effect
    again_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Oldest:
    """The answer to AskOldest: the most senior nodes, without ghosts."""

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
class Tell:
    """Call the listeners with a round document that is new."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Return:
    """Show this node's record again, under a new incarnation."""


@dataclass(frozen=True, slots=True)
class ShowAgain:
    """Write this node's record once more: the store may hold an older one since the view was read anew."""

    reloads: int


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Write the decided round document against ``seen``."""

    decision: Decision
    seen: Observation
    went_back: bool = False
    """Whether it brings a store that was restored to where the run was."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow the nodes with the round, or the round alone."""

    nodes: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AskOldest:
    """Ask the store for the ``places`` most senior nodes, ``ghosts`` not counted."""

    places: int
    ghosts: tuple[Ghost, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask these nodes' kernels whether their agents live."""

    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class SayDelayed:
    """Log why round ``after`` has no successor yet."""

    after: int
    reason: str


Effect = Tell | Return | ShowAgain | CommitRound | Follow | AskOldest | Probe | SayDelayed


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What to do now, in this order, and the monotonic time of the next step if nothing happens before."""

    effects: tuple[Effect, ...]
    next_at: float


# ---- the steps of a write that takes several


@dataclass(frozen=True, slots=True)
class Transaction:
    """Run ``success`` if all guards hold, else ``failure``; answered by a TransactionResult or a store's error."""

    guards: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()
    limit_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait. ``shared``: others may write this node's key meanwhile."""

    seconds: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """Grant a new lease in the place of one that is lost."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class Knock:
    """Find out whether ``host`` answers that nobody listens on ``port``."""

    host: str
    port: int


Request = Transaction | Pause | Renew | Knock
Steps = Generator[Request, TransactionResult | bool | None, None]
"""Requests of one procedure; each is answered, or its error raised, before the next."""
