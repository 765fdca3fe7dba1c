"""`gather`: values in memory as a recording."""

from __future__ import annotations

import operator
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from e2e_registry.errors import RecordingError, UsageError
from e2e_registry.recording.reader import RunRecording, read_run
from e2e_registry.recording.recorder import MetricRecorder


def gather(series: Mapping[str, Any] | MetricRecorder) -> RunRecording:
    """Return series as a recording.

    Values pass through a :class:`MetricRecorder`, so that what a recipe may log is what a test may assert, with the
    same bits and the same errors.

    Raises:
        RecordingError: A name or value cannot be recorded, or nothing is there.
        StorageError: A file cannot be written or read.
    """
    if isinstance(series, MetricRecorder):
        recording = _read(series)
    elif isinstance(series, Mapping):
        with tempfile.TemporaryDirectory(prefix="e2e-registry-") as folder:
            with MetricRecorder(run_dir=folder) as recorder:
                for step, values in _by_step(series):
                    recorder.log(values, step=step)
            recording = _read(recorder)
    else:
        raise UsageError(
            f"assert_matches_standard() takes a mapping of metric names to values, not a {type(series).__name__}",
            hint='assert_matches_standard({"train/loss": losses}, "sgd"), or give the fixture metric_recorder',
        )
    if not recording.has_series:
        raise RecordingError("there is nothing to compare: no series holds a value")
    return recording


def _read(recorder: MetricRecorder) -> RunRecording:
    if recorder.path is None:
        raise RecordingError("the recorder records nothing: it has no run directory", hint="use metric_recorder")
    return read_run(recorder.path)


def _by_step(series: Mapping[str, Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield the values in the order of their steps, as one training loop would have logged them.

    So that the first divergence of all metrics is the one at the earliest step.
    """
    calls: defaultdict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for metric, values in series.items():
        last, occurrence = None, 0
        for step, value in _points(metric, values):
            if last is not None and step < last:
                raise RecordingError(
                    f"step {step} comes after step {last}; steps may not go backwards", where=_where(metric)
                )
            occurrence = occurrence + 1 if step == last else 0
            last = step
            calls[step, occurrence][metric] = value
        if last is None:
            raise RecordingError("the series is empty", where=_where(metric))
    for step, occurrence in sorted(calls):
        yield step, calls[step, occurrence]


def _points(metric: str, values: Any) -> Iterable[tuple[int, Any]]:
    if isinstance(values, list | tuple):
        are_pairs = [isinstance(value, tuple) and len(value) == 2 for value in values]
        if any(are_pairs):
            if not all(are_pairs):
                raise RecordingError(
                    "some of the values are (step, value) pairs, and some are not", where=_where(metric)
                )
            return [(_step(metric, step), value) for step, value in values]
        return enumerate(values)
    num_dimensions = getattr(values, "ndim", 0)
    if num_dimensions > 1:
        raise RecordingError(
            f"an array of shape {tuple(values.shape)} is no series",
            where=_where(metric),
            hint="give an array of shape (n,), one metric a column, or log_digest() to a metric_recorder",
        )
    return enumerate(values) if num_dimensions == 1 else [(0, values)]


def _step(metric: str, step: Any) -> int:
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise RecordingError(f"step {step!r} is not an integer", where=_where(metric))


def _where(metric: str) -> str:
    return f"metric {metric!r}"
