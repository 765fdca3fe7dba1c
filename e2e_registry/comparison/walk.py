"""Walks two batch streams together and judges them. Pure: it opens nothing, prints nothing, holds no whole file.

Inside a series, points are paired by step and occurrence within the step. Windows in which both sides agree on the
steps (nearly all of them, nearly always) are compared as they lie in the read buffers; only a window that disagrees
is joined. A ``reduce`` tolerance holds one series at a time, since a median needs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from e2e_registry.comparison.arithmetic import (
    aggregate_passes,
    is_finite,
    passes,
    reduce_exactly,
    same_class,
    to_float,
    ulp_distance,
)
from e2e_registry.comparison.result import Aggregate, Comparison, Divergence, Presence, SeriesResult
from e2e_registry.dtypes import DType
from e2e_registry.errors import RegistrationError
from e2e_registry.series import BatchStream, Point, SeriesBatch, SeriesKey, decode_values, iter_series
from e2e_registry.tolerance import Policies, Tolerance

if TYPE_CHECKING:
    from e2e_registry.comparison.arithmetic import BoolArray
    from e2e_registry.series import Float64Array, Int64Array


def compare(got: BatchStream, want: BatchStream, *, policies: Policies) -> Comparison:
    """Judge a run against a standard.

    Args:
        got: The run's series.
        want: The standard's series.
        policies: How each metric is judged.

    Raises:
        RegistrationError: A tolerance does not fit its metric's dtype (``ulp`` on integers, anything on digests), or
            its ``skip_first`` leaves no step of the standard.
        InvalidRunError: A stream is out of order.
    """
    results: list[SeriesResult] = []
    emitted: set[str] = set()
    for key, got_batches, want_batches in _merge(got, want):
        if got_batches is not None:
            emitted.add(key.metric)
        result = SeriesResult(key, policies.policy(key.metric))
        _SeriesWalk(result, got_batches, want_batches).run()
        results.append(result)
    already_named = {result.key.metric for result in results if result.presence is Presence.ONLY_WANT}
    never = [name for name in policies.never_emitted(frozenset(emitted)) if name not in already_named]
    return Comparison(tuple(results), tuple(never))


_SidedSeries = tuple[SeriesKey, Iterator[SeriesBatch] | None, Iterator[SeriesBatch] | None]


def _merge(got: BatchStream, want: BatchStream) -> Iterator[_SidedSeries]:
    """Pair the series of two sorted streams by key; None for a side that lacks one."""
    got_series, want_series = iter_series(got), iter_series(want)
    g, w = next(got_series, None), next(want_series, None)
    while g is not None and w is not None:
        if g[0] == w[0]:
            yield g[0], g[1], w[1]
            g, w = next(got_series, None), next(want_series, None)
        elif g[0].sort_key() < w[0].sort_key():
            yield g[0], g[1], None
            g = next(got_series, None)
        else:
            yield w[0], None, w[1]
            w = next(want_series, None)
    while g is not None:
        yield g[0], g[1], None
        g = next(got_series, None)
    while w is not None:
        yield w[0], None, w[1]
        w = next(want_series, None)


class _Window(NamedTuple):
    """Points taken from one side together, with the occurrence number that the first of them has in its step."""

    batch: SeriesBatch
    first_occurrence: int

    def occurrence(self, at: int) -> int:
        steps = self.batch.steps
        start = int(np.searchsorted(steps, steps[at]))
        return at - start + (self.first_occurrence if start == 0 else 0)

    def occurrences(self) -> Int64Array:
        """Number all points within their steps, shape ``(n,)``."""
        steps = self.batch.steps
        starts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
        lengths = np.diff(np.append(starts, len(steps)))
        numbers = np.arange(len(steps), dtype=np.int64) - np.repeat(starts, lengths)
        numbers[: lengths[0]] += self.first_occurrence
        return numbers

    def point(self, at: int) -> Point:
        return self.batch.point(at)

    def seq(self, at: int) -> int:
        return int(self.batch.load_seq()[at])


class _Cursor:
    """The unread rest of one side of a series, one read buffer at a time."""

    def __init__(self, batches: Iterator[SeriesBatch] | None) -> None:
        self._batches: Iterator[SeriesBatch] = iter(()) if batches is None else batches
        self._last_step: int | None = None
        self._last_count = 0
        self.batch = next(self._batches, None)

    @property
    def window(self) -> _Window:
        """All that is buffered; only while ``batch`` is not None."""
        if self.batch is None:
            raise IndexError("the series has ended")
        return _Window(self.batch, self._last_count if self._last_step == int(self.batch.steps[0]) else 0)

    def take(self, count: int) -> _Window:
        """Consume the first ``count`` buffered points, at least one."""
        batch, first_occurrence = self.window
        taken = _Window(batch.slice(0, count), first_occurrence)
        self._last_step = int(batch.steps[count - 1])
        self._last_count = taken.occurrence(count - 1) + 1
        self.batch = batch.slice(count, len(batch)) if count < len(batch) else next(self._batches, None)
        return taken


class _SeriesWalk:
    """Walks both sides of one series and fills in its result."""

    def __init__(
        self, result: SeriesResult, got: Iterator[SeriesBatch] | None, want: Iterator[SeriesBatch] | None
    ) -> None:
        self._result = result
        self._tolerance = result.policy.tolerance
        self._got, self._want = _Cursor(got), _Cursor(want)
        self._to_reduce: list[tuple[_Window, _Window]] = []
        self._worst_rank = (False, -1.0)
        if got is None:
            result.presence = Presence.ONLY_WANT
        elif want is None:
            result.presence = Presence.ONLY_GOT

    def run(self) -> None:
        got, want = self._got, self._want
        while got.batch is not None and want.batch is not None:
            count = min(len(got.batch), len(want.batch))
            is_aligned = got.window.first_occurrence == want.window.first_occurrence and np.array_equal(
                got.batch.steps[:count], want.batch.steps[:count]
            )
            if is_aligned:
                self._judge(got.take(count), want.take(count))
            else:
                self._join()
        while got.batch is not None:
            self._note_unpaired(got.take(len(got.batch)), None, is_extra=True)
        while want.batch is not None:
            self._note_unpaired(want.take(len(want.batch)), None, is_extra=False)
        if self._tolerance is not None and self._tolerance.reduce is not None:
            self._judge_aggregate(self._tolerance)

    # -- pairing

    def _join(self) -> None:
        """Pair the buffered points up to the smaller of both last keys; what lies beyond may still find a partner."""
        sides = [cursor.window for cursor in (self._got, self._want)]
        numbers = [window.occurrences() for window in sides]
        bound = min(
            (int(window.batch.steps[-1]), int(number[-1])) for window, number in zip(sides, numbers, strict=True)
        )
        counts = [
            _count_up_to(window.batch.steps, number, bound) for window, number in zip(sides, numbers, strict=True)
        ]
        got = self._got.take(counts[0]) if counts[0] else None
        want = self._want.take(counts[1]) if counts[1] else None
        if got is None or want is None:
            if got is not None:
                self._note_unpaired(got, None, is_extra=True)
            if want is not None:
                self._note_unpaired(want, None, is_extra=False)
            return
        got_keys, want_keys = _pairing_keys(got, want, numbers[0][: counts[0]], numbers[1][: counts[1]])
        position = np.searchsorted(want_keys, got_keys)
        inside = np.minimum(position, len(want_keys) - 1)
        is_paired = want_keys[inside] == got_keys
        want_is_paired = np.zeros(len(want_keys), bool)
        want_is_paired[inside[is_paired]] = True
        self._note_unpaired(got, ~is_paired, is_extra=True)
        self._note_unpaired(want, ~want_is_paired, is_extra=False)
        if is_paired.any():
            self._judge_picked(got, want, np.flatnonzero(is_paired), np.flatnonzero(want_is_paired))

    def _note_unpaired(self, window: _Window, selected: BoolArray | None, *, is_extra: bool) -> None:
        steps = window.batch.steps if selected is None else window.batch.steps[selected]
        if not len(steps):
            return
        (self._result.extra if is_extra else self._result.missing).add(steps)
        at = 0 if selected is None else int(selected.argmax())
        got, want = (window, None) if is_extra else (None, window)
        self._note_first(got, at, want, at)

    def _judge_picked(self, got: _Window, want: _Window, got_at: Int64Array, want_at: Int64Array) -> None:
        """Judge pairs that do not lie side by side, run by run of those that do."""
        cuts = np.flatnonzero((np.diff(got_at) != 1) | (np.diff(want_at) != 1)) + 1
        for g, w in zip(np.split(got_at, cuts), np.split(want_at, cuts), strict=True):
            self._judge(_part(got, int(g[0]), int(g[-1]) + 1), _part(want, int(w[0]), int(w[-1]) + 1))

    # -- judging

    def _judge(self, got: _Window, want: _Window) -> None:
        """Judge two windows of equal length whose points are paired one to one."""
        result, tolerance = self._result, self._tolerance
        result.num_common += len(got.batch)
        if got.batch.dtype is not want.batch.dtype:
            everything = np.ones(len(got.batch), bool)
            result.num_dtype += len(got.batch)
            self._note_values(got, want, differing=everything, failing=everything)
            return
        if tolerance is not None:
            _check_fits(tolerance, result.key, got.batch.dtype)
        if tolerance is not None and tolerance.reduce is not None:
            self._to_reduce.append((got, want))
        if got.batch.digests is not None and want.batch.digests is not None:
            if got.batch.digests != want.batch.digests:
                pairs = zip(got.batch.digests, want.batch.digests, strict=True)
                differing = np.fromiter((g != w for g, w in pairs), bool, len(got.batch))
                self._note_values(got, want, differing=differing, failing=differing)
            return
        if np.array_equal(got.batch.bits, want.batch.bits):
            return
        differing = got.batch.bits != want.batch.bits
        failing = differing
        if tolerance is not None:
            failing = np.zeros(len(differing), bool)
            if tolerance.reduce is None:
                at = np.flatnonzero(differing)
                failing[at] = ~passes(tolerance, got.batch.dtype, got.batch.bits[at], want.batch.bits[at])
        self._note_values(got, want, differing=differing, failing=failing)

    def _note_values(self, got: _Window, want: _Window, *, differing: BoolArray, failing: BoolArray) -> None:
        result = self._result
        result.num_differing += int(differing.sum())
        num_failing = int(failing.sum())
        result.num_failing += num_failing
        if num_failing:
            at = int(failing.argmax())
            self._note_first(got, at, want, at)
        self._note_worst(got, want, failing if num_failing else differing, is_failing=num_failing > 0)

    def _note_first(self, got: _Window | None, got_at: int, want: _Window | None, want_at: int) -> None:
        """Keep the failing place with the smallest step and occurrence; later windows cannot come before it."""
        shown, at = (want, want_at) if want is not None else (got, got_at)
        if shown is None:
            return
        step, occurrence = int(shown.batch.steps[at]), shown.occurrence(at)
        first = self._result.first
        if first is not None and (first.step, first.occurrence) <= (step, occurrence):
            return
        self._result.first = self._divergence(got, got_at, want, want_at)

    def _note_worst(self, got: _Window, want: _Window, among: BoolArray, *, is_failing: bool) -> None:
        if got.batch.dtype.is_digest or want.batch.dtype.is_digest:
            return
        at = np.flatnonzero(among)
        errors = _approximate_errors(got.batch, want.batch, at)
        index = int(errors.argmax())
        self._result.largest_rel = max(self._result.largest_rel, _largest_relative(errors, want.batch, at))
        rank = (is_failing, float(errors[index]))
        if rank > self._worst_rank:
            self._worst_rank = rank
            self._result.worst = self._divergence(got, int(at[index]), want, int(at[index]))

    def _divergence(self, got: _Window | None, got_at: int, want: _Window | None, want_at: int) -> Divergence:
        shown, at = (want, want_at) if want is not None else (got, got_at)
        if shown is None:
            raise ValueError("a divergence has at least one side")
        want_point = None if want is None else want.point(want_at)
        return Divergence(
            key=self._result.key,
            step=int(shown.batch.steps[at]),
            occurrence=shown.occurrence(at),
            seq=shown.seq(at),
            want=want_point,
            got=None if got is None else got.point(got_at),
            allowance=_allowance(self._tolerance, want_point),
        )

    # -- aggregates

    def _judge_aggregate(self, tolerance: Tolerance) -> None:
        """Judge the aggregate over the common points after the skipped steps; non-finite points pair by class."""
        result, reduction = self._result, tolerance.reduce or ""
        pairs = list(_unskipped(self._to_reduce, tolerance.skip_first))
        if not pairs:
            if result.missing:  # of the standard's steps the run lacks some, perhaps all that were to be judged
                result.aggregate = Aggregate(reduction, None, None, None, passes=False)
            elif self._to_reduce:
                raise RegistrationError(
                    f"{result.key}: skip_first={tolerance.skip_first} leaves no step to judge",
                    hint="lower skip_first, or run more steps",
                )
            return
        dtype = pairs[0][0].batch.dtype
        if any(got.batch.dtype is not dtype for got, _ in pairs):
            raise RegistrationError(f"{result.key}: its dtype changes inside the series, so it has no {reduction}")
        self._note_class_changes(pairs)
        got = np.concatenate([window.batch.bits for window, _ in pairs])
        want = np.concatenate([window.batch.bits for _, window in pairs])
        got, want = got[is_finite(dtype, got)], want[is_finite(dtype, want)]
        if not len(got) or not len(want):
            result.aggregate = Aggregate(reduction, None, None, None, passes=len(got) == len(want))
            return
        exact_got, exact_want = (reduce_exactly(reduction, dtype, bits) for bits in (got, want))
        is_close = aggregate_passes(tolerance, exact_got, exact_want)
        if not is_close and tolerance.ulp:
            is_close = bool(ulp_distance(dtype, got[-1:], want[-1:])[0] <= tolerance.ulp)
        bound = tolerance.atol + tolerance.rtol * abs(to_float(exact_want))
        result.aggregate = Aggregate(reduction, exact_want, exact_got, bound, passes=is_close)
        if not is_close and result.first is None:
            self._note_first_differing(pairs)

    def _note_class_changes(self, pairs: list[tuple[_Window, _Window]]) -> None:
        for got, want in pairs:
            failing = ~same_class(got.batch.dtype, got.batch.bits, want.batch.bits)
            if failing.any():
                self._result.num_failing += int(failing.sum())
                at = int(failing.argmax())
                self._note_first(got, at, want, at)

    def _note_first_differing(self, pairs: list[tuple[_Window, _Window]]) -> None:
        """An aggregate has no step; what is shown is where the points that it is made of part."""
        for got, want in pairs:
            differing = got.batch.bits != want.batch.bits
            if differing.any():
                at = int(differing.argmax())
                self._note_first(got, at, want, at)
                return


def _part(window: _Window, start: int, stop: int) -> _Window:
    return _Window(window.batch.slice(start, stop), window.occurrence(start))


def _count_up_to(steps: Int64Array, occurrences: Int64Array, bound: tuple[int, int]) -> int:
    """Return how many (step, occurrence) keys are at most ``bound``."""
    start, stop = (int(np.searchsorted(steps, bound[0], side)) for side in ("left", "right"))
    return start + int(np.searchsorted(occurrences[start:stop], bound[1], "right"))


def _pairing_keys(
    got: _Window, want: _Window, got_numbers: Int64Array, want_numbers: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return strictly increasing integers for both sides that are equal exactly where step and occurrence are."""
    got_steps, want_steps = got.batch.steps, want.batch.steps
    most = int(max(got_numbers.max(), want_numbers.max()))
    if most == 0:
        return got_steps, want_steps
    # Steps may span all of int64, so they are first replaced by their rank among the steps that occur.
    occurring = np.union1d(got_steps, want_steps)
    keys = [
        np.searchsorted(occurring, steps).astype(np.int64) * (most + 1) + numbers
        for steps, numbers in ((got_steps, got_numbers), (want_steps, want_numbers))
    ]
    return keys[0], keys[1]


def _check_fits(tolerance: Tolerance, key: SeriesKey, dtype: DType) -> None:
    if dtype.is_digest:
        raise RegistrationError(
            f"{key.metric} is a digest, so no tolerance can apply to it",
            hint="leave digests strict: remove the tolerance",
        )
    if tolerance.ulp and not dtype.is_float:
        raise RegistrationError(
            f"{key.metric} is {dtype.name}, and ulp={tolerance.ulp} has a meaning for floats only",
            hint="use atol for whole numbers",
        )


def _approximate_errors(got: SeriesBatch, want: SeriesBatch, at: Int64Array) -> Float64Array:
    """Return |got - want| in float64 for choosing what to show; infinite where a side is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        errors: Float64Array = np.abs(decode_values(got.dtype, got.bits[at]) - decode_values(want.dtype, want.bits[at]))
    return np.where(np.isfinite(errors), errors, np.inf)


def _largest_relative(errors: Float64Array, want: SeriesBatch, at: Int64Array) -> float:
    """Return the largest error in units of the standard's value; infinite where that is 0 and the run's is not."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        relative = errors / np.abs(decode_values(want.dtype, want.bits[at]))
    return float(np.where(errors == 0, 0.0, np.where(np.isfinite(errors), relative, np.inf)).max())


def _allowance(tolerance: Tolerance | None, want: Point | None) -> float | None:
    if tolerance is None or want is None or not want.is_finite_number:
        return None
    return tolerance.atol + tolerance.rtol * abs(to_float(want.exact()))


def _unskipped(pairs: list[tuple[_Window, _Window]], skip_first: int) -> Iterator[tuple[_Window, _Window]]:
    """Yield the pairs without the points of the first ``skip_first`` distinct steps."""
    skipped: set[int] = set()
    for got, want in pairs:
        steps = got.batch.steps
        start = 0
        while start < len(steps) and (int(steps[start]) in skipped or len(skipped) < skip_first):
            skipped.add(int(steps[start]))
            start = int(np.searchsorted(steps, steps[start], "right"))
        if start < len(steps):
            yield _part(got, start, len(steps)), _part(want, start, len(steps))
