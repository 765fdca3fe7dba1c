"""Series in memory: batches of consecutive points, and the rules that hold for every stream of them.

A *batch stream* is the one currency between recordings, standards and the comparer: an iterator of
:class:`SeriesBatch`, sorted by :meth:`SeriesKey.sort_key`, in emission order inside a series, with non-decreasing
steps. A stream may hold twenty million points; nothing here keeps more than one batch of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from e2e_registry.dtypes import BOOL, FLOAT16, FLOAT32, FLOAT64, INT64, UINT64, DType, Scalar, decode_bits
from e2e_registry.errors import InvalidRunError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]
    UInt64Array = NDArray[np.uint64]
    Float64Array = NDArray[np.float64]


class SeriesKey(NamedTuple):
    """Which series a value belongs to: one metric from one writer."""

    metric: str
    role: str
    rank: int

    def sort_key(self) -> tuple[bytes, bytes, int]:
        """Return the total order of series: UTF-8 bytes of metric and role, then rank."""
        return self.metric.encode(), self.role.encode(), self.rank

    def __str__(self) -> str:
        """Name the series as reports do: the metric alone for the usual single writer."""
        if (self.role, self.rank) == ("main", 0):
            return self.metric
        return f"{self.metric} [{self.role} rank {self.rank}]"


@dataclass(frozen=True, slots=True)
class Point:
    """One observed value: its native type and bit pattern, or its digest."""

    dtype: DType
    bits: int
    digest: str | None = None

    @property
    def value(self) -> Scalar | str:
        """The number that the bits stand for, exactly, or the digest."""
        return self.digest if self.digest is not None else decode_bits(self.dtype, self.bits)

    @property
    def is_finite_number(self) -> bool:
        """Whether arithmetic on the value makes sense."""
        return not self.dtype.is_digest and math.isfinite(decode_bits(self.dtype, self.bits))

    def exact(self) -> Fraction:
        """Return a finite number as a rational."""
        return Fraction(decode_bits(self.dtype, self.bits))

    def to_json(self) -> dict[str, Any]:
        """Return the value as strict JSON: the number where JSON has one, and always the bits."""
        if self.digest is not None:
            return {"dtype": self.dtype.name, "digest": self.digest}
        value = decode_bits(self.dtype, self.bits)
        shown = value if self.is_finite_number else str(value)
        return {"dtype": self.dtype.name, "value": shown, "bits": f"{self.bits:0{max(self.dtype.width // 4, 1)}x}"}


@dataclass(frozen=True, slots=True)
class SeriesBatch:
    """Consecutive points of one series, all of one dtype, in emission order.

    Attributes:
        key: The series.
        dtype: The native type of every point of the batch.
        steps: int64, shape ``(n,)``, non-decreasing.
        bits: uint64, shape ``(n,)``, raw patterns at the native width; zeros for digests.
        digests: ``n`` strings for a digest series, else None.
        load_seq: Returns the int64 emission positions, shape ``(n,)``. A callable, because only a divergence
            needs them, and a matching comparison of a large standard need not decode that column.
    """

    key: SeriesKey
    dtype: DType
    steps: Int64Array
    bits: UInt64Array
    digests: Sequence[str] | None
    load_seq: Callable[[], Int64Array]

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.steps)

    def slice(self, start: int, stop: int) -> SeriesBatch:
        """Return points ``start:stop`` without copying arrays."""
        load_seq = self.load_seq
        return SeriesBatch(
            self.key,
            self.dtype,
            self.steps[start:stop],
            self.bits[start:stop],
            None if self.digests is None else self.digests[start:stop],
            lambda: load_seq()[start:stop],
        )

    def point(self, at: int) -> Point:
        """Return one point's value."""
        return Point(self.dtype, int(self.bits[at]), None if self.digests is None else self.digests[at])


BatchStream = Iterable[SeriesBatch]


def iter_series(stream: BatchStream) -> Iterator[tuple[SeriesKey, Iterator[SeriesBatch]]]:
    """Group a batch stream by series, as ``itertools.groupby`` does, and check that it is sorted.

    Raises:
        InvalidRunError: A series comes after one that sorts behind it, or steps go backwards inside a series.
    """
    previous: tuple[bytes, bytes, int] | None = None
    batches = iter(stream)
    head = next(batches, None)

    def same_series(key: SeriesKey) -> Iterator[SeriesBatch]:
        nonlocal head
        last_step: int | None = None
        while head is not None and head.key == key:
            batch = head
            if len(batch):
                _check_steps(batch, last_step)
                last_step = int(batch.steps[-1])
                yield batch
            head = next(batches, None)

    while head is not None:
        key = head.key
        order = key.sort_key()
        if previous is not None and order <= previous:
            raise InvalidRunError(f"series {key} is out of order", hint="rows must be sorted by metric, role and rank")
        previous = order
        group = same_series(key)
        yield key, group
        for _ in group:  # a consumer may leave early; the next series starts where this one ends
            pass


def _check_steps(batch: SeriesBatch, last_step: int | None) -> None:
    steps = batch.steps
    if last_step is not None and steps[0] < last_step:
        raise InvalidRunError(
            f"{batch.key}: step {int(steps[0])} comes after step {last_step}; steps may not go backwards"
        )
    if (steps[1:] < steps[:-1]).any():
        at = int(np.flatnonzero(steps[1:] < steps[:-1])[0])
        raise InvalidRunError(
            f"{batch.key}: step {int(steps[at + 1])} comes after step {int(steps[at])}; steps may not go backwards"
        )


@dataclass(frozen=True, slots=True)
class SeriesExtent:
    """A series in brief: its dtypes, its extent in steps, its first and last value."""

    key: SeriesKey
    dtypes: tuple[str, ...]
    num_points: int
    first_step: int
    last_step: int
    first: Point
    last: Point

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the series."""
        return {
            "metric": self.key.metric,
            "role": self.key.role,
            "rank": self.key.rank,
            "dtypes": list(self.dtypes),
            "points": self.num_points,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "first": self.first.to_json(),
            "last": self.last.to_json(),
        }


def extents(stream: BatchStream) -> list[SeriesExtent]:
    """Return every series of a stream in brief, in key order."""
    found = []
    for key, batches in iter_series(stream):
        dtypes: dict[str, None] = {}
        count = 0
        ends: list[tuple[int, Point]] = []
        for batch in batches:
            dtypes[batch.dtype.name] = None
            count += len(batch)
            ends = [*ends[:1], (int(batch.steps[-1]), batch.point(len(batch) - 1))]
            if len(ends) == 1:
                ends.insert(0, (int(batch.steps[0]), batch.point(0)))
        if ends:
            (first_step, first), (last_step, last) = ends
            found.append(SeriesExtent(key, tuple(dtypes), count, first_step, last_step, first, last))
    return found


def decode_values(dtype: DType, bits: UInt64Array) -> Float64Array:
    """Return the numeric view of bit patterns as float64, shape ``(n,)``; NaN for digests.

    Exact for floats and for integers up to 2**53 in magnitude; larger integers round, which is why tolerances
    on integers are decided from ``bits`` (:mod:`e2e_registry.comparison`).
    """
    if dtype is FLOAT64:
        return bits.view(np.float64)
    if dtype.is_float:
        if dtype is FLOAT32:
            native = bits.astype(np.uint32).view(np.float32)
        elif dtype is FLOAT16:
            native = bits.astype(np.uint16).view(np.float16)
        else:
            native = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(invalid="ignore"):  # widening a signalling NaN is legal, and raises a flag
            return native.astype(np.float64)
    if dtype is INT64:
        return bits.view(np.int64).astype(np.float64)
    if dtype is UINT64 or dtype is BOOL:
        return bits.astype(np.float64)
    return np.full(len(bits), np.nan)
