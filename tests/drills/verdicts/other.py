"""Faults that the rules were not written against."""

from __future__ import annotations

from typing import Final

from tests.drills.verdicts.faults import Labelled

OTHER: Final[tuple[Labelled, ...]] = ()
