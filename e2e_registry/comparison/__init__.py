"""Judges runs against standards: pure functions over batch streams."""

from e2e_registry.comparison.assessment import Assessment, TestVerdict
from e2e_registry.comparison.change import Action, StandardChange
from e2e_registry.comparison.invariants import InvariantBreak, check_invariants
from e2e_registry.comparison.result import (
    Aggregate,
    Comparison,
    Divergence,
    Presence,
    SeriesResult,
    StepRanges,
    Verdict,
)
from e2e_registry.comparison.walk import compare

__all__ = [
    "Action",
    "Aggregate",
    "Assessment",
    "Comparison",
    "Divergence",
    "InvariantBreak",
    "Presence",
    "SeriesResult",
    "StandardChange",
    "StepRanges",
    "TestVerdict",
    "Verdict",
    "check_invariants",
    "compare",
]
