"""Checks what a test declares of every value: ``equals``, ``min``, ``max`` and finiteness."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from e2e_registry.comparison.arithmetic import is_finite
from e2e_registry.dtypes import decode_bits
from e2e_registry.series import BatchStream, Point, SeriesBatch, SeriesKey
from e2e_registry.tolerance import Invariant


@dataclass(frozen=True, slots=True)
class InvariantBreak:
    """How one series breaks an invariant: how often, and where first.

    Attributes:
        key: The series.
        invariant: What was declared.
        what: ``bounds`` or ``finite``: which part of it does not hold.
        count: Number of values that break it.
        step: The step of the first of them.
        point: The first of them.
    """

    key: SeriesKey
    invariant: Invariant
    what: str
    count: int
    step: int
    point: Point


def check_invariants(stream: BatchStream, invariant_of: Callable[[str], Invariant]) -> list[InvariantBreak]:
    """Return what breaks the invariants, at most one entry a series and part, in key order.

    Args:
        stream: The series of a run.
        invariant_of: Returns the invariant of a metric; digests have no values and are passed over.
    """
    found: dict[tuple[SeriesKey, str], InvariantBreak] = {}
    for batch in stream:
        if batch.dtype.is_digest:
            continue
        invariant = invariant_of(batch.key.metric)
        finite = is_finite(batch.dtype, batch.bits)
        if invariant.finite:
            _note(found, batch, invariant, "finite", ~finite)
        if invariant.has_bounds:
            _note(found, batch, invariant, "bounds", _outside(batch, invariant, finite))
    return list(found.values())


def _note(
    found: dict[tuple[SeriesKey, str], InvariantBreak],
    batch: SeriesBatch,
    invariant: Invariant,
    what: str,
    broken: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> None:
    count = int(broken.sum())
    if not count:
        return
    earlier = found.get((batch.key, what))
    if earlier is not None:
        found[batch.key, what] = InvariantBreak(
            batch.key, invariant, what, earlier.count + count, earlier.step, earlier.point
        )
        return
    at = int(broken.argmax())
    found[batch.key, what] = InvariantBreak(batch.key, invariant, what, count, int(batch.steps[at]), batch.point(at))


def _outside(
    batch: SeriesBatch, invariant: Invariant, finite: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which values lie outside the bounds, exactly; NaN satisfies no bound, infinities compare as usual."""
    unique, positions = np.unique(batch.bits, return_inverse=True)
    outside = np.fromiter((not _holds(invariant, batch, int(bits)) for bits in unique), bool, len(unique))
    return outside[positions] & (finite | (not invariant.finite))


def _holds(invariant: Invariant, batch: SeriesBatch, bits: int) -> bool:
    value = decode_bits(batch.dtype, bits)
    exact = Fraction(value) if math.isfinite(value) else value
    return (
        (invariant.equals is None or exact == invariant.equals)
        and (invariant.min is None or exact >= invariant.min)
        and (invariant.max is None or exact <= invariant.max)
    )
