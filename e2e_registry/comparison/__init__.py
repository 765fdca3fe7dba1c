"""Judges runs against standards: pure functions over batch streams."""

from e2e_registry.comparison.invariants import InvariantBreak, check_invariants
from e2e_registry.comparison.result import (
    Aggregate,
    Comparison,
    Divergence,
    Point,
    Presence,
    SeriesResult,
    StepRanges,
    Verdict,
)
from e2e_registry.comparison.walk import compare

__all__ = [
    "Aggregate",
    "Comparison",
    "Divergence",
    "InvariantBreak",
    "Point",
    "Presence",
    "SeriesResult",
    "StepRanges",
    "Verdict",
    "check_invariants",
    "compare",
]
