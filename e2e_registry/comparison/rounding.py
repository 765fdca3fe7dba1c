"""Finds series that were rounded before they were logged: a small regression below the last place would not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from e2e_registry.dtypes import FLOAT32, FLOAT64
from e2e_registry.series import BatchStream, SeriesBatch, SeriesKey, decode_values, iter_series

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from e2e_registry.series import Int64Array

#: Decimal places up to which a value is taken for rounded.
MAX_PLACES = 5
#: Different values below which nothing can be said of a series.
MIN_DISTINCT = 8

_SCALE = 10**MAX_PLACES
#: Where numbers of a type lie so far apart, few of them are decimals by chance. Coarser ones show nothing.
_MAX_SPACING = 1 / (16 * _SCALE)
#: Decimals with fewer significant digits are chosen by people, or are shares of a hundred: learning rates, accuracies.
_MIN_NUMERATOR = 100
_NATIVE = {FLOAT64: np.float64, FLOAT32: np.float32}


@dataclass(frozen=True, slots=True)
class RoundedSeries:
    """A series all of whose values are short decimals.

    Attributes:
        key: The series.
        places: How many decimal places they have at most.
        num_distinct: How many different values there are.
    """

    key: SeriesKey
    places: int
    num_distinct: int

    def __str__(self) -> str:
        """Render as a warning."""
        return (
            f"{self.key}: each of its {self.num_distinct} different values is a decimal of at most {self.places} "
            "places, as if rounded, which hides small regressions: log the number itself"
        )


def rounded_series(stream: BatchStream, is_judged: Callable[[str], bool]) -> list[RoundedSeries]:
    """Return the judged float series whose values were rounded to a few decimal places, in key order.

    Such a series holds at least :data:`MIN_DISTINCT` different values, each the float nearest to a decimal of at most
    :data:`MAX_PLACES` places, and their least common denominator is a power of ten from 100 on. So fractions of a
    count, such as k/64 or k/80, are none: theirs has other factors, or too few. At least half of the values have three
    significant digits or more, which shares of a hundred and learning rates have not. What remains ambiguous is a mean
    over exactly 100 or 1,000 items.

    Args:
        stream: The series of a run.
        is_judged: Whether a difference in a metric can fail the test.
    """
    found = []
    for key, batches in iter_series(stream):
        numerators = _distinct_numerators(batches) if is_judged(key.metric) else None
        places = None if numerators is None else _places(numerators)
        if numerators is not None and places is not None:
            found.append(RoundedSeries(key, places, len(numerators)))
    return found


def _distinct_numerators(batches: Iterable[SeriesBatch]) -> Int64Array | None:
    """Return the different values of a series as numerators over ``10**MAX_PLACES``; None if they are no decimals."""
    numerators: Int64Array = np.empty(0, np.int64)
    for batch in batches:
        more = _numerators(batch)
        if more is None:
            return None
        numerators = np.union1d(numerators, more)
    return numerators


def _numerators(batch: SeriesBatch) -> Int64Array | None:
    native = _NATIVE.get(batch.dtype)
    if native is None:
        return None
    values: NDArray[np.float64] = decode_values(batch.dtype, np.unique(batch.bits))
    if not np.isfinite(values).all() or (np.spacing(np.abs(values).astype(native)) > _MAX_SPACING).any():
        return None
    numerators: NDArray[np.float64] = np.rint(values * _SCALE)
    # A division of whole numbers rounds once, so it gives what float("0.12345") gives.
    if not np.array_equal((numerators / _SCALE).astype(native), values.astype(native)):
        return None
    whole: Int64Array = numerators.astype(np.int64)
    return whole


def _places(numerators: Int64Array) -> int | None:
    """Return how many places the decimals have; None if nothing says that they were rounded."""
    if len(numerators) < MIN_DISTINCT:
        return None
    divisor = int(np.gcd.reduce(np.append(numerators, _SCALE)))
    for places in range(2, MAX_PLACES + 1):
        if _SCALE // divisor == 10**places:
            is_long = np.abs(numerators) // divisor >= _MIN_NUMERATOR
            return places if is_long.mean() >= 0.5 else None
    return None
