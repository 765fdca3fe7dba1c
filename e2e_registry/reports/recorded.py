"""Reads comparisons back from the JSON that reports for machines hold, for reports that are made on another machine.

The JSON may come from an artifact, so any part of it may have any type: what is not as expected reads as absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from e2e_registry.dtypes import ALL_DTYPES
from e2e_registry.reports.values import pair_text
from e2e_registry.series import Point

_DTYPES = {dtype.name: dtype for dtype in ALL_DTYPES}


def first_divergence(result: Mapping[str, Any]) -> str:
    """Name the first divergence of a test's result, with both values and the errors; empty if there is none."""
    first = mapping(mapping(result.get("comparison")).get("first_divergence"))
    if not first:
        return ""
    want, got = pair(first)
    errors = [f"{name} {number(first.get(name))}" for name in ("abs", "rel") if first.get(name) is not None]
    errors += [f"{number(first.get('ulp'))} ULP"] if first.get("ulp") is not None else []
    shown = f" ({', '.join(errors)})" if errors else ""
    return f"{series_name(first)}, step {first.get('step')}: want {want}, got {got}{shown}"


def first_reason(result: Mapping[str, Any]) -> str:
    """Return the first reason that a result gives for its verdict; empty if it gives none."""
    reasons = [*listing(result.get("reasons")), *listing([result.get("error")] if result.get("error") else [])]
    for broken in map(mapping, listing(result.get("broken_invariants"))):
        reasons.append(f"{broken.get('metric')} breaks {broken.get('invariant')} at step {broken.get('step')}")
    return str(reasons[0]) if reasons else ""


def series_name(entry: Mapping[str, Any]) -> str:
    """Name a series as :class:`~e2e_registry.series.SeriesKey` does."""
    role, rank = entry.get("role"), entry.get("rank")
    return f"{entry.get('metric')}" + ("" if (role, rank) == ("main", 0) else f" [{role} rank {rank}]")


def pair(place: Mapping[str, Any]) -> tuple[str, str]:
    """Write both sides of a divergence as the console does, so that two different values never look alike."""
    return pair_text(_point(place.get("want")), _point(place.get("got")))


def _point(value: object) -> Point | None:
    point = mapping(value)
    dtype, bits, digest = _DTYPES.get(str(point.get("dtype"))), point.get("bits", "0"), point.get("digest")
    if dtype is None or not isinstance(bits, str) or not re.fullmatch(r"[0-9a-f]{1,16}", bits):
        return None
    if dtype.is_digest:
        return Point(dtype, 0, str(digest))
    return Point(dtype, int(bits, 16) & ((1 << dtype.width) - 1))


def number(value: object) -> str:
    """Write an error, an aggregate or a distance in ULPs with three digits, whole numbers in full."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:24]


def series_of(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the series of a comparison."""
    return [mapping(series) for series in listing(comparison.get("series"))]


def largest_first(series: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort series as :func:`e2e_registry.comparison.result.largest_first` does; equal ones stay in their order."""
    return sorted(series, key=size_of, reverse=True)


def size_of(series: Mapping[str, Any]) -> tuple[float, float]:
    """Return how large a series' difference is, as :attr:`~e2e_registry.comparison.SeriesResult.magnitude` says it."""
    error = mapping(series.get("worst")).get("abs")
    return _size(series.get("largest_rel"), absent=0.0), _size(error, absent=math.inf)


def _size(value: object, *, absent: float) -> float:
    if value == "inf":
        return math.inf
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else absent


def mapping(value: object) -> Mapping[str, Any]:
    """Return an object of the JSON; empty if it is something else."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> list[Any]:
    """Return a list of the JSON; empty if it is something else."""
    return value if isinstance(value, list) else []


def whole_number(value: object) -> int:
    """Return a whole number of the JSON; 0 if it is something else."""
    return value if isinstance(value, int) else 0
