"""How single values, errors and step ranges are written in reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from e2e_registry.comparison import Divergence, StepRanges
from e2e_registry.series import Point

#: Entries of one kind that a report shows before it only counts; ``--all-metrics`` shows the rest.
MAX_SHOWN = 12

_LONGEST_DIGEST = 12
_Item = TypeVar("_Item")


def value_text(point: Point | None) -> str:
    """Write a value so that two different values of one dtype never look alike.

    Floats get the shortest digits that identify them in their own dtype, NaNs their bits, digests their beginning.
    """
    if point is None:
        return "-"
    if point.digest is not None:
        return point.digest if len(point.digest) <= _LONGEST_DIGEST else point.digest[:_LONGEST_DIGEST] + "…"
    value = point.value
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return f"nan:{point.bits:0{point.dtype.width // 4}x}"
    if point.dtype.name == "float32":
        return str(np.float32(value))
    if point.dtype.name == "float16":
        return str(np.float16(value))
    if point.dtype.name == "bfloat16":  # four significant digits tell any two neighbouring bfloat16 apart
        return f"{value:.4g}"
    return repr(value)


def pair_text(want: Point | None, got: Point | None) -> tuple[str, str]:
    """Write both sides of a divergence; with their dtypes or bits where the numbers alone would look the same."""
    texts = value_text(want), value_text(got)
    if want is None or got is None:
        return texts
    if want.dtype is not got.dtype:
        return f"{texts[0]} {want.dtype.name}", f"{texts[1]} {got.dtype.name}"
    if texts[0] == texts[1]:
        if want.digest is not None and got.digest is not None:
            return want.digest, got.digest
        return f"{texts[0]} ({want.bits:x})", f"{texts[1]} ({got.bits:x})"
    return texts


def error_text(error: float | None) -> str:
    """Write an absolute or relative error with three digits."""
    return "-" if error is None else f"{error:.3g}"


def ulp_text(divergence: Divergence) -> str:
    """Write a distance in ULPs; with three digits where nobody would count them."""
    distance = divergence.ulp_error
    if distance is None:
        return "-"
    return f"{distance:,}" if distance < 10**9 else f"{distance:.3g}"


def ranges_text(ranges: StepRanges) -> str:
    """Write steps as ``3, 7-9``, and how many more there are."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges.ranges]
    named = sum(last - first + 1 for first, last in ranges.ranges)
    rest = ranges.count - named
    return ", ".join(parts) + (f" and {rest:,} more" if rest > 0 else "")


def count_text(count: int, singular: str, plural: str | None = None) -> str:
    """Write a count with its noun."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def capped(items: Sequence[_Item], limit: int | None = MAX_SHOWN) -> tuple[Sequence[_Item], int]:
    """Return the first of the items, and how many are left out: what bounds the length of every report.

    Args:
        items: What could be shown.
        limit: How much is; None for all of it.
    """
    shown = items if limit is None else items[:limit]
    return shown, len(items) - len(shown)


def listed(names: Sequence[str], limit: int = 8, separator: str = ", ") -> str:
    """List names, the first few of many."""
    shown, num_hidden = capped(names, limit)
    text = separator.join(shown)
    return f"{text} and {num_hidden:,} more" if num_hidden else text


def capped_lines(
    lines: Sequence[str], singular: str, plural: str | None = None, *, limit: int | None = MAX_SHOWN
) -> list[str]:
    """Return lines of one kind, the first few of many, and then one that counts the rest."""
    shown, num_hidden = capped(lines, limit)
    return [*shown, *([more_text(num_hidden, singular, plural)] if num_hidden else [])]


def more_text(count: int, singular: str, plural: str | None = None) -> str:
    """Say how many of a kind are left out: ``… and 3 more failing series``."""
    return f"… and {count_text(count, f'more {singular}', plural and f'more {plural}')}"
