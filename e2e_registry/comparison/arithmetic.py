"""Exact arithmetic on bit patterns: ULP distances, tolerances, and aggregates.

Everything is decided as exact rational arithmetic on the stored patterns would decide it. A float64 filter settles
the points for which rounding cannot change the answer, and only those at the very edge of a bound are computed with
:class:`fractions.Fraction`; so the cost stays that of NumPy, and no verdict depends on how NumPy rounds.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.dtypes import INT64, DType, Kind, decode_bits
from e2e_registry.series import decode_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from e2e_registry.series import Float64Array, UInt64Array
    from e2e_registry.tolerance import Tolerance

    BoolArray = NDArray[np.bool_]

# Each of the filter's operations has a relative error of at most 2**-53; a handful of them stays far below this.
_SLACK = 2.0**-48
_TINY = 2.0**-1072


def to_float(value: Fraction) -> float:
    """Return the nearest float64, infinite beyond its range (where ``float()`` would raise)."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def ulp_distance(dtype: DType, a: UInt64Array, b: UInt64Array) -> UInt64Array:
    """Return how many representable values lie from ``a`` to ``b``, shape ``(n,)``; +0 and -0 are one point.

    Args:
        dtype: A float dtype; neither side may be NaN.
        a: Bit patterns, shape ``(n,)``.
        b: Bit patterns, shape ``(n,)``.
    """
    sign = np.uint64(dtype.sign_bit)
    magnitude_mask = np.uint64(dtype.sign_bit - 1)
    a_magnitude, b_magnitude = a & magnitude_mask, b & magnitude_mask
    same_side = (a & sign) == (b & sign)
    apart = np.where(a_magnitude > b_magnitude, a_magnitude - b_magnitude, b_magnitude - a_magnitude)
    return np.where(same_side, apart, a_magnitude + b_magnitude)


def is_finite(dtype: DType, bits: UInt64Array) -> BoolArray:
    """Return which patterns are finite numbers, shape ``(n,)``."""
    if not dtype.is_float:
        return np.ones(len(bits), bool)
    return (bits & np.uint64(dtype.sign_bit - 1)) < np.uint64(dtype.infinity_bits)


def same_class(dtype: DType, a: UInt64Array, b: UInt64Array) -> BoolArray:
    """Return where both are finite, or both the same non-finite class (NaN or infinity) with the same sign."""
    if not dtype.is_float:
        return np.ones(len(a), bool)
    sign, infinity = np.uint64(dtype.sign_bit), np.uint64(dtype.infinity_bits)
    magnitudes = [bits & np.uint64(dtype.sign_bit - 1) for bits in (a, b)]
    a_class, b_class = ((m >= infinity).astype(np.int8) + (m > infinity).astype(np.int8) for m in magnitudes)
    is_same: BoolArray = (a_class == b_class) & ((a_class == 0) | ((a & sign) == (b & sign)))
    return is_same


def passes(tolerance: Tolerance, dtype: DType, got: UInt64Array, want: UInt64Array) -> BoolArray:
    """Return which points a pointwise tolerance accepts, shape ``(n,)``.

    Args:
        tolerance: Its bounds and side; ``reduce`` is not looked at.
        dtype: The dtype of both sides; not a digest.
        got: Bit patterns of the run, shape ``(n,)``.
        want: Bit patterns of the standard, shape ``(n,)``.
    """
    accepted = same_class(dtype, got, want)
    rest = np.flatnonzero(accepted & is_finite(dtype, got))
    if len(rest):
        accepted[rest] = _finite_passes(tolerance, dtype, got[rest], want[rest])
    return accepted


def _finite_passes(tolerance: Tolerance, dtype: DType, got: UInt64Array, want: UInt64Array) -> BoolArray:
    accepted = _within_bound(tolerance, dtype, got, want)
    if tolerance.ulp and dtype.is_float:
        accepted |= ulp_distance(dtype, got, want) <= np.uint64(tolerance.ulp)
    if tolerance.fails_on is not None:
        g, w = _native(dtype, got), _native(dtype, want)
        accepted |= (g <= w) if tolerance.fails_on == "increase" else (g >= w)
    return accepted


def _native(dtype: DType, bits: UInt64Array) -> NDArray[Any]:
    """View patterns as numbers whose order is exact: float64 for floats, the integer type itself otherwise."""
    if dtype is INT64:
        return bits.view(np.int64)
    return decode_values(dtype, bits) if dtype.is_float else bits


def _within_bound(tolerance: Tolerance, dtype: DType, got: UInt64Array, want: UInt64Array) -> BoolArray:
    """Decide |got - want| <= atol + rtol * |want| exactly, for finite values."""
    distance, magnitude, is_exact = _distance(dtype, got, want)
    with np.errstate(over="ignore", under="ignore"):
        bound = tolerance.atol + tolerance.rtol * magnitude
        accepted: BoolArray = distance < bound * (1 - _SLACK) - _TINY
        rejected = distance > bound * (1 + _SLACK) + _TINY
    accepted |= distance == 0
    edge = ~(accepted | rejected)
    if tolerance.rtol == 0:  # the bound is atol itself, so a distance that is exact decides as it is
        accepted |= edge & is_exact & (distance <= tolerance.atol)
        edge &= ~is_exact
    exact_bounds = Fraction(tolerance.atol), Fraction(tolerance.rtol)
    for at in np.flatnonzero(edge):
        g, w = (Fraction(decode_bits(dtype, int(bits[at]))) for bits in (got, want))
        accepted[at] = abs(g - w) <= exact_bounds[0] + exact_bounds[1] * abs(w)
    return accepted


def _distance(dtype: DType, got: UInt64Array, want: UInt64Array) -> tuple[Float64Array, Float64Array, BoolArray]:
    """Return float64 |got - want| and |want|, and where that distance is exact.

    An overflow to infinity, or an infinite bound beside it, is neither accepted nor rejected by the filter.
    """
    if dtype.is_float:
        g, w = decode_values(dtype, got), decode_values(dtype, want)
        with np.errstate(over="ignore", invalid="ignore"):
            difference = g - w
            # Knuth's TwoSum of g + (-w): the rounding error of the difference, itself exact unless it overflows.
            virtual = difference - g
            residue = (g - (difference - virtual)) + (-w - virtual)
        is_exact = (residue == 0) & np.isfinite(difference)
        distance = np.abs(difference)
        return np.where(np.isfinite(distance), distance, np.nan), np.abs(w), is_exact
    exact = _integer_distance(dtype, got, want)
    distance = exact.astype(np.float64)
    magnitude = np.abs(decode_values(dtype, want))
    return distance, magnitude, exact < np.uint64(1 << 53)


def _integer_distance(dtype: DType, got: UInt64Array, want: UInt64Array) -> UInt64Array:
    """Return |got - want| of integers: two's complement subtraction modulo 2**64 is exact for any pair."""
    g, w = _native(dtype, got), _native(dtype, want)
    distance: UInt64Array = np.where(g >= w, got - want, want - got)
    return distance


# ------------------------------------------------------------------------------------------- aggregates


def reduce_exactly(reduction: str, dtype: DType, bits: UInt64Array) -> Fraction:
    """Return the aggregate of finite values as a rational; ``bits`` has at least one element."""
    if reduction == "last":
        return Fraction(decode_bits(dtype, int(bits[-1])))
    if reduction == "mean":
        return _exact_sum(dtype, bits) / len(bits)
    count = len(bits)
    middle = np.partition(_native(dtype, bits), [(count - 1) // 2, count // 2])
    low, high = (Fraction(middle[at].item()) for at in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def _exact_sum(dtype: DType, bits: UInt64Array) -> Fraction:
    """Sum as integers over one common power of two, which is exact and needs no gcd a term."""
    values = _native(dtype, bits)
    if not dtype.is_float:
        return Fraction(sum(values.tolist()))
    mantissas, exponents = np.frexp(values)
    scaled = np.ldexp(mantissas, 53).astype(np.int64)  # exact: a float64 mantissa has 53 bits
    lowest = int(exponents.min()) - 53
    shifts = (exponents.astype(np.int64) - 53 - lowest).tolist()
    total = sum(mantissa << shift for mantissa, shift in zip(scaled.tolist(), shifts, strict=True))
    return Fraction(total) * (Fraction(2) ** lowest)


def aggregate_passes(tolerance: Tolerance, got: Fraction, want: Fraction) -> bool:
    """Decide the bound for two aggregates, exactly; ``ulp`` is the caller's (it needs the bit patterns)."""
    if tolerance.fails_on == "increase" and got <= want:
        return True
    if tolerance.fails_on == "decrease" and got >= want:
        return True
    return abs(got - want) <= Fraction(tolerance.atol) + Fraction(tolerance.rtol) * abs(want)


def is_numeric(dtype: DType) -> bool:
    """Whether a tolerance can be applied to this dtype at all."""
    return dtype.kind is not Kind.DIGEST
