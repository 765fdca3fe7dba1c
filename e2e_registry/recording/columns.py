"""Columns of values on their way from JSON to bit patterns.

Values gather in Python lists, which is what parsing makes of them, and are packed into arrays every few thousand
points: so each is checked by whole-array operations, and a run of millions of lines costs sixteen bytes a value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.dtypes import ALL_DTYPES, FLOAT16, FLOAT32, FLOAT64, INT64, DType, Kind

if TYPE_CHECKING:
    from e2e_registry.series import Float64Array, Int64Array, UInt64Array

#: Points that a column gathers before it is packed, and so the size of most batches.
PACK = 1 << 14

_DIGEST = re.compile(r"[0-9a-f]{64}")


class RawBits(int):
    """A bit pattern among a column's numbers: a value that the recorder could not write as a JSON number."""


class NonFiniteToken(float):
    """``NaN``, ``Infinity`` or ``-Infinity`` as written, apart from a number too large for float64."""


class ColumnFault(Exception):  # noqa: N818 - becomes an InvalidRunError once the file and line are known
    """A value that is not of its column's dtype.

    Attributes:
        line: Index of its line among the writer's lines.
        message: What is wrong.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive points of one series, all of one dtype.

    Attributes:
        dtype: Their native type.
        lines: int64, shape ``(n,)``: index of each point's line among the writer's lines, increasing.
        bits: uint64, shape ``(n,)``.
        digests: ``n`` strings for digests, else None.
    """

    dtype: DType
    lines: Int64Array
    bits: UInt64Array
    digests: list[str] | None


class Column:
    """The values of one metric and dtype from one writer, as they are read.

    Attributes:
        values: Pending values, as parsed.
        lines: The line index of each pending value.
        segments: What is packed.
    """

    __slots__ = ("dtype", "lines", "name", "segments", "values")

    def __init__(self, name: str, dtype: DType) -> None:
        self.name = name
        self.dtype = dtype
        self.values: list[Any] = []
        self.lines: list[int] = []
        self.segments: list[Segment] = []

    def pack(self, shared: LineArrays) -> None:
        """Turn the pending values into a segment.

        Raises:
            ColumnFault: A value is not of the dtype, or not exact in it.
        """
        if not self.values:
            return
        try:
            bits = _patterns(self.dtype, self.values)
        except _BadValue as fault:
            value = self.values[fault.at]
            message = f"{self.name}: {_shown(value)} {fault.reason} {self.dtype.name}"
            raise ColumnFault(self.lines[fault.at], message) from None
        digests = self.values if self.dtype.is_digest else None
        self.segments.append(Segment(self.dtype, shared.array(self.lines), bits, digests))
        self.values, self.lines = [], []


class LineArrays:
    """Makes one array for columns whose lines are the same, as those of one ``log()`` call usually are."""

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._array: Int64Array = np.empty(0, np.int64)

    def array(self, lines: list[int]) -> Int64Array:
        """Return ``lines`` as int64; neither the list nor the array may be changed afterwards."""
        if lines != self._lines:
            self._lines = lines
            self._array = np.array(lines, np.int64)
        return self._array


def merge(name: str, columns: Sequence[Column]) -> list[Segment]:
    """Return one metric's packed values in emission order, from its columns of different dtypes.

    Raises:
        ColumnFault: One line holds the metric under two dtypes.
    """
    if len(columns) == 1:
        return columns[0].segments
    parts = [segment for column in columns for segment in column.segments]
    lines = np.concatenate([part.lines for part in parts])
    order = np.argsort(lines, kind="stable")
    lines = lines[order]
    bits = np.concatenate([part.bits for part in parts])[order]
    codes = np.repeat([part.dtype.code for part in parts], [len(part.lines) for part in parts])[order]
    digests = np.concatenate([np.array(part.digests or [""] * len(part.lines), object) for part in parts])[order]
    twice = np.flatnonzero(lines[1:] == lines[:-1])
    if len(twice):
        at = int(twice[0])
        first, second = (ALL_DTYPES[code].name for code in codes[at : at + 2])
        raise ColumnFault(int(lines[at]), f"{name} stands twice in one line, as {first} and as {second}")
    edges = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(lines)]
    merged = []
    for start, stop in itertools.pairwise(edges):
        dtype = ALL_DTYPES[codes[start]]
        shown = digests[start:stop].tolist() if dtype.is_digest else None
        merged.append(Segment(dtype, lines[start:stop], bits[start:stop], shown))
    return merged


class _BadValue(Exception):  # noqa: N818 - internal to this module
    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at
        self.reason = reason


def _patterns(dtype: DType, values: list[Any]) -> UInt64Array:
    """Return the bit patterns of parsed JSON values."""
    match dtype.kind:
        case Kind.FLOAT:
            return _float_patterns(dtype, values)
        case Kind.INTEGER:
            _check_types(values, {int})
            return _integer_patterns(dtype, values)
        case Kind.BOOL:
            _check_types(values, {bool})
            return np.array(values, np.uint64)
        case Kind.DIGEST:
            _check_types(values, {str})
            for at, value in enumerate(values):
                if not _DIGEST.fullmatch(value):
                    raise _BadValue(at, "is not the 64 lower-case hex digits of a")
            return np.zeros(len(values), np.uint64)


def _check_types(values: list[Any], allowed: set[type]) -> None:
    if not set(map(type, values)) <= allowed:
        at = next(at for at, value in enumerate(values) if type(value) not in allowed)
        raise _BadValue(at, "is not of dtype")


def _integer_patterns(dtype: DType, values: list[int]) -> UInt64Array:
    native = np.int64 if dtype is INT64 else np.uint64
    try:
        return np.array(values, native).view(np.uint64)
    except OverflowError:
        limits = np.iinfo(native)
        at = next(at for at, value in enumerate(values) if not int(limits.min) <= value <= int(limits.max))
        raise _BadValue(at, "is out of the range of") from None


def _float_patterns(dtype: DType, values: list[Any]) -> UInt64Array:
    _check_types(values, {float, RawBits, NonFiniteToken})
    raw = [at for at, value in enumerate(values) if type(value) is RawBits]
    numbers = np.array(values, np.float64)
    numbers[raw] = 0.0
    for at in np.flatnonzero(~np.isfinite(numbers)).tolist():
        if type(values[at]) is float:
            raise _BadValue(at, "(a number too large for float64) is out of the range of")
    bits, is_exact = _narrow(dtype, numbers)
    if not is_exact.all():
        raise _BadValue(int(np.flatnonzero(~is_exact)[0]), "is not exact in")
    bits[raw] = np.array([int(values[at]) for at in raw], np.uint64)
    return bits


def _narrow(dtype: DType, numbers: Float64Array) -> tuple[UInt64Array, Any]:
    """Return the patterns of float64 numbers in a float dtype, and which of them are exact in it."""
    if dtype is FLOAT64:
        return numbers.view(np.uint64), np.ones(len(numbers), np.bool_)
    with np.errstate(over="ignore", under="ignore"):
        if dtype is FLOAT16:
            half = numbers.astype(np.float16)
            return half.view(np.uint16).astype(np.uint64), half.astype(np.float64) == numbers
        single = numbers.astype(np.float32)
    is_exact = single.astype(np.float64) == numbers
    bits = single.view(np.uint32).astype(np.uint64)
    if dtype is FLOAT32:
        return bits, is_exact
    return bits >> np.uint64(16), is_exact & (bits & np.uint64(0xFFFF) == 0)  # bfloat16: the upper half of a float32


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
