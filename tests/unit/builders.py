"""Runs in memory for tests: plain rows in, batch streams out, cut into buffers wherever the test likes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from e2e_registry.dtypes import ALL_DTYPES, BOOL, DIGEST, DTYPES, DType
from e2e_registry.series import SeriesBatch, SeriesKey


@dataclass(frozen=True)
class Row:
    metric: str
    step: int
    bits: int = 0
    dtype: DType = DTYPES["float32"]
    role: str = "main"
    rank: int = 0
    seq: int = 0
    digest: str | None = None

    @property
    def key(self) -> SeriesKey:
        return SeriesKey(self.metric, self.role, self.rank)

    @property
    def content(self) -> tuple[str, int, str | None]:
        """What strict comparison sees of the value."""
        return self.dtype.name, self.bits, self.digest

    def but(self, **changes: object) -> Row:
        return replace(self, **changes)  # type: ignore[arg-type]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sort by series, keeping emission order inside."""
    return sorted(rows, key=lambda row: row.key.sort_key())


def stream(rows: Iterable[Row], cuts: Sequence[int] = ()) -> Iterator[SeriesBatch]:
    """Turn rows into a batch stream, cut at series, at dtype changes, and at the given row numbers."""
    ordered = in_order(rows)
    start = 0
    for stop in range(1, len(ordered) + 1):
        head = ordered[start]
        if stop < len(ordered) and stop not in cuts:
            following = ordered[stop]
            if (following.key, following.dtype) == (head.key, head.dtype):
                continue
        yield _batch(ordered[start:stop])
        start = stop


def _batch(rows: list[Row]) -> SeriesBatch:
    seq = np.array([row.seq for row in rows], np.int64)
    return SeriesBatch(
        rows[0].key,
        rows[0].dtype,
        np.array([row.step for row in rows], np.int64),
        np.array([row.bits for row in rows], np.uint64),
        [row.digest or "" for row in rows] if rows[0].dtype is DIGEST else None,
        lambda: seq,
    )


def rows_of(batches: Iterable[SeriesBatch]) -> list[Row]:
    """Turn a batch stream back into rows."""
    rows = []
    for batch in batches:
        seq = batch.load_seq()
        for at in range(len(batch)):
            digest = None if batch.digests is None else batch.digests[at]
            rows.append(
                Row(
                    batch.key.metric,
                    int(batch.steps[at]),
                    int(batch.bits[at]),
                    batch.dtype,
                    batch.key.role,
                    batch.key.rank,
                    int(seq[at]),
                    digest,
                )
            )
    return rows


def bit_patterns(dtype: DType) -> st.SearchStrategy[int]:
    """Patterns of a dtype, with the special ones likely."""
    if dtype is BOOL:
        return st.integers(0, 1)
    top = (1 << dtype.width) - 1
    anywhere = st.integers(0, top)
    if not dtype.is_float:
        return st.sampled_from([0, 1, top, top >> 1, (top >> 1) + 1]) | anywhere
    infinity = dtype.infinity_bits
    special = [0, 1, infinity - 1, infinity, infinity + 1, infinity | (infinity >> 1), 1 << (dtype.mantissa)]
    return st.sampled_from(special + [bits | dtype.sign_bit for bits in special]) | anywhere


@st.composite
def run_rows(draw: st.DrawFn, *, max_series: int = 4, max_points: int = 8) -> list[Row]:
    """A valid run: a few series of any dtype, steps that repeat and skip, from several writers."""
    names = draw(st.lists(st.sampled_from(["a", "b", "train/loss", "z"]), min_size=1, max_size=max_series, unique=True))
    rows: list[Row] = []
    for name in names:
        role = draw(st.sampled_from(["main", "actor"]))
        for rank in range(draw(st.integers(1, 2))):
            dtype = draw(st.sampled_from(ALL_DTYPES))
            steps = sorted(draw(st.lists(st.integers(0, 6), min_size=1, max_size=max_points)))
            for step in steps:
                if dtype is DIGEST:
                    value = {"digest": draw(st.sampled_from(["aa", "bb", "cc"]))}
                    rows.append(Row(name, step, 0, dtype, role, rank, len(rows), **value))
                else:
                    rows.append(Row(name, step, draw(bit_patterns(dtype)), dtype, role, rank, len(rows)))
    return in_order(rows)
