"""Series in memory: batches of consecutive points, and the rules that hold for every stream of them.

A *batch stream* is the one currency between recordings, standards and the comparer: an iterator of
:class:`SeriesBatch`, sorted by :meth:`SeriesKey.sort_key`, in emission order inside a series, with non-decreasing
steps. A stream may hold twenty million points; nothing here keeps more than one batch of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from e2e_registry.dtypes import BOOL, FLOAT16, FLOAT32, FLOAT64, INT64, UINT64, DType
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
