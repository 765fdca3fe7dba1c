"""`read_run`: a run's recording as series, checked as a whole."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from e2e_registry.dtypes import DType
from e2e_registry.errors import InvalidRunError, StorageError, UsageError
from e2e_registry.recording.columns import Segment
from e2e_registry.recording.layout import METRICS_FILE, PLAIN_FILE, RUN_FILE, STATE_FILE
from e2e_registry.recording.logs import WriterLog, is_header, read_plain_log, read_recorder_log
from e2e_registry.series import SeriesBatch, SeriesKey
from e2e_registry.storage import parse_json

if TYPE_CHECKING:
    from e2e_registry.series import Int64Array

Writer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Series:
    segments: Sequence[Segment]
    steps: Int64Array
    seq: Int64Array


@dataclass(frozen=True, slots=True)
class RunRecording:
    """What one run recorded: its series, and what is known about the run and its writers.

    Attributes:
        path: The run directory, or the one file that was read.
        keys: The series, sorted by :meth:`~e2e_registry.series.SeriesKey.sort_key`.
        run: ``run.json``, or None without one.
        writer_states: The determinism state that each writer, by role and rank, left behind; None if unknown, and
            always so for a single file.
        unknown_states: Why a writer's state is unknown.
        incomplete_reasons: Why the recording does not hold the whole run; empty if it does.
        warnings: What may be wrong with the series, though nothing in the files contradicts itself.
    """

    path: Path
    keys: tuple[SeriesKey, ...]
    run: dict[str, Any] | None
    writer_states: Mapping[Writer, dict[str, Any] | None]
    unknown_states: Mapping[Writer, str]
    incomplete_reasons: tuple[str, ...]
    _series: Mapping[SeriesKey, _Series] = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the run ended and every writer's file is whole."""
        return not self.incomplete_reasons

    @property
    def has_series(self) -> bool:
        """Whether anything was logged."""
        return bool(self.keys)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the logged metrics, sorted by their UTF-8 bytes."""
        return tuple(dict.fromkeys(key.metric for key in self.keys))

    @property
    def dtypes(self) -> dict[SeriesKey, tuple[DType, ...]]:
        """The dtypes of each series, in the order in which they first occur; one, usually."""
        return {key: tuple(dict.fromkeys(s.dtype for s in series.segments)) for key, series in self._series.items()}

    def batches(self) -> Iterator[SeriesBatch]:
        """Return all points as a batch stream: series in order, points in emission order; any number of times.

        ``seq`` numbers the log calls of the whole run, over all writers, in the order of their times.
        """
        for key in self.keys:
            series = self._series[key]
            for part in series.segments:
                seq = partial(_take, series.seq, part.lines)
                yield SeriesBatch(key, part.dtype, series.steps[part.lines], part.bits, part.digests, seq)


def _take(values: Int64Array, at: Int64Array) -> Int64Array:
    return values[at]


def read_run(path: str | Path) -> RunRecording:
    """Read a run's recording.

    All whole lines of a killed run are read, and the recording says that it is incomplete: a last line is torn, or
    ``run.json`` is missing or has no outcome. A single file has no outcome to miss.

    Args:
        path: A run directory, or one ``.jsonl`` file: a recorder's, or plain lines.

    Raises:
        InvalidRunError: A file is damaged elsewhere than at its torn end, or the recording contradicts itself: steps
            that go backwards inside a series, a metric logged by two roles, ranks of one role that disagree on the
            metrics, a recorder's and plain lines in one run. Names the place.
        StorageError: A file cannot be read.
        UsageError: There is no such path.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _read_directory(path)
        if not path.exists():
            raise UsageError("there is no such run", where=path, hint="give a run directory or a .jsonl file")
        return _read_file(path)
    except OSError as error:
        raise StorageError(f"cannot read the run: {error.strerror}", where=error.filename or path) from error


def _read_file(path: Path) -> RunRecording:
    with path.open("rb") as file:
        first = file.readline()
    if not first:
        raise InvalidRunError("the file is empty", where=path, hint="nothing was recorded; run again")
    try:
        has_header = is_header(json.loads(first))
    except (ValueError, RecursionError):
        has_header = False
    is_recorders = has_header or METRICS_FILE.fullmatch(path.name)
    log = read_recorder_log(path) if is_recorders else read_plain_log(path)
    writer = (log.role, log.rank)
    unknown = {writer: "a single file has no state beside it"}
    reasons = () if log.tear is None else (log.tear,)
    series = _series_of([log])
    warnings = () if is_recorders else _warnings([log])
    return RunRecording(path, tuple(series), None, {writer: None}, unknown, reasons, series, warnings)


def _read_directory(path: Path) -> RunRecording:
    logs = _read_logs(path)
    run = _read_object(path / RUN_FILE)
    states, unknown = _read_states(path, logs)
    reasons = [log.tear for log in logs if log.tear is not None]
    if run is None:
        reasons.append(f"{path / RUN_FILE} is missing: no launcher saw the run end")
    elif run.get("outcome") is None:
        reasons.append(f"{path / RUN_FILE} has no outcome: the run was killed, or still runs")
    if not logs:
        reasons += [f"{path} holds no writer's file"] if run is None else []
    _check_roles(logs)
    reasons += _check_ranks(logs, is_cut=bool(reasons))
    series = _series_of(logs)
    warnings = _warnings([log for log in logs if log.path.name == PLAIN_FILE])
    return RunRecording(path, tuple(series), run, states, unknown, tuple(reasons), series, warnings)


def _read_logs(path: Path) -> list[WriterLog]:
    """Read every writer's file, sorted by role and rank."""
    files = sorted(file for file in path.iterdir() if file.name.startswith("metrics.") and file.suffix == ".jsonl")
    recorders = [file for file in files if METRICS_FILE.fullmatch(file.name)]
    for file in files:
        if file not in recorders and file.name != PLAIN_FILE:
            hint = "writers' files are named metrics.<role>.rank<r>.jsonl; move others out of the run directory"
            raise InvalidRunError("the name says neither role nor rank", where=file, hint=hint)
    plain = path / PLAIN_FILE
    if plain not in files or plain.stat().st_size == 0:
        return sorted(map(read_recorder_log, recorders), key=lambda log: (log.role.encode(), log.rank))
    if recorders:
        raise InvalidRunError(
            f"the run holds plain lines and a recorder's ({recorders[0].name})",
            where=plain,
            hint="write to $E2E_METRICS_JSONL or use MetricRecorder, not both",
        )
    return [read_plain_log(plain)]


def _warnings(plain_logs: Sequence[WriterLog]) -> tuple[str, ...]:
    """Say which metrics plain lines hold more than once in a step.

    A recorder's file has one writer, so there it means what it says. Plain lines name no writer: two ranks that append
    to one file look like one that logs twice a step, in an order that the next run need not repeat.
    """
    return tuple(
        f"{log.path.name} holds more than one value a step of {_shown_names(repeats)}: if several processes write it, "
        "nothing tells their values apart; let each log through a MetricRecorder of its own rank"
        for log in plain_logs
        if (repeats := [f"{name} ({_place(log, at)})" for name, at in _repeated(log)])
    )


def _repeated(log: WriterLog) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each metric with a second value in one step, and the first two lines where that is so."""
    for name, segments in log.series.items():
        lines = np.concatenate([segment.lines for segment in segments])
        repeats = np.flatnonzero(log.steps[lines[1:]] == log.steps[lines[:-1]])
        if len(repeats):
            yield name, (int(lines[repeats[0]]), int(lines[repeats[0] + 1]))


def _place(log: WriterLog, lines: tuple[int, int]) -> str:
    first, second = (log.first_line + line for line in lines)
    return f"step {log.steps[lines[0]]}, lines {first} and {second}"


def _read_states(
    path: Path, logs: Sequence[WriterLog]
) -> tuple[dict[Writer, dict[str, Any] | None], dict[Writer, str]]:
    """Read the states that writers left behind, and say why one is unknown."""
    states: dict[Writer, dict[str, Any] | None] = {(log.role, log.rank): None for log in logs}
    unknown = dict.fromkeys(states, "it left no state file")
    for writer, file in state_files(path):
        state = read_state_file(file)
        if state is None:
            continue
        if state.keys() == {"error"}:
            states[writer], unknown[writer] = None, f"reading it failed: {state['error']}"
        else:
            states[writer] = state
            unknown.pop(writer, None)
    return states, unknown


def state_files(path: Path) -> Iterator[tuple[Writer, Path]]:
    """Yield the state files of a run directory, by name, with the writers that left them."""
    for file in sorted(path.iterdir()):
        match = STATE_FILE.fullmatch(file.name)
        if match is not None:
            yield (match["role"], int(match["rank"])), file


def read_state_file(file: Path) -> dict[str, Any] | None:
    """Return the determinism state that a writer left, ``{"error": ...}`` if it could not read it; None if it is gone.

    Raises:
        InvalidRunError: The file holds no JSON object.
    """
    return _read_object(file)


def _read_object(path: Path) -> dict[str, Any] | None:
    """Read a file that holds one JSON object; None if there is no such file."""
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidRunError(f"the file is not JSON: {error}", where=path) from None
    if not isinstance(data, dict):
        raise InvalidRunError("the file is not a JSON object", where=path)
    return data


def _series_of(logs: Sequence[WriterLog]) -> dict[SeriesKey, _Series]:
    """Return the series of all writers in order, with their lines numbered over the whole run."""
    found = {}
    for log, seq in zip(logs, _emission_order(logs), strict=True):
        for metric, segments in log.series.items():
            found[SeriesKey(metric, log.role, log.rank)] = _Series(segments, log.steps, seq)
    return {key: found[key] for key in sorted(found, key=SeriesKey.sort_key)}


def _emission_order(logs: Sequence[WriterLog]) -> list[Int64Array]:
    """Return, for each writer's lines, their positions in the run: by time, then role, rank and line.

    A clock that was set back would contradict the order of the lines, which is certain; so a line's time counts as
    no earlier than those before it.
    """
    if not logs:
        return []
    times = np.concatenate([np.maximum.accumulate(log.times) for log in logs])
    seq = np.empty(len(times), np.int64)
    seq[np.argsort(times, kind="stable")] = np.arange(len(times))
    return np.split(seq, np.cumsum([len(log.times) for log in logs])[:-1])


def _check_roles(logs: Sequence[WriterLog]) -> None:
    owners: dict[str, WriterLog] = {}
    for log in logs:
        for metric in log.series:
            owner = owners.setdefault(metric, log)
            if owner.role != log.role:
                raise InvalidRunError(
                    f"{metric} is logged by two roles: {log.role!r} and {owner.role!r} ({_first_place(owner, metric)})",
                    where=_first_place(log, metric),
                    hint="a metric belongs to one role; name them apart, such as actor/... and rollout/...",
                )


def _first_place(log: WriterLog, metric: str) -> str:
    return log.place(_first_index(log, metric))


def _first_index(log: WriterLog, metric: str) -> int:
    return int(log.series[metric][0].lines[0])


def _check_ranks(logs: Sequence[WriterLog], *, is_cut: bool) -> list[str]:
    """Check that the ranks of a role log the same metrics, or all of them nothing; return why they need not, if so.

    In a run that was cut off a rank may not have come to a metric yet: its lines then end before the line in which
    the other ranks first logged it. That is one more reason to call the run incomplete, not a contradiction.
    """
    reasons = []
    roles: defaultdict[str, list[WriterLog]] = defaultdict(list)
    for log in logs:
        roles[log.role].append(log)
    for role, ranks in roles.items():
        partial_metrics = _metrics_of_some(ranks)
        for metric in partial_metrics:
            having = [log for log in ranks if metric in log.series]
            lacking = [log for log in ranks if metric not in log.series]
            first = min(_first_index(log, metric) for log in having)
            if not is_cut or any(len(log.steps) > first for log in lacking):
                raise InvalidRunError(
                    f"{metric} is logged by {_ranks(having)} of role {role!r} and not by {_ranks(lacking)}",
                    where=_first_place(having[0], metric),
                    hint="ranks of one role log the same metrics; give a rank that differs a role of its own, and one "
                    "that logs nothing no recorder",
                )
        if partial_metrics:
            reasons.append(f"not every rank of role {role!r} came to log {_shown_names(partial_metrics)}")
    return reasons


def _metrics_of_some(ranks: Sequence[WriterLog]) -> list[str]:
    """Return the metrics that some of the ranks log and others do not, in order of first occurrence."""
    everything = dict.fromkeys(metric for log in ranks for metric in log.series)
    return [metric for metric in everything if any(metric not in log.series for log in ranks)]


def _shown_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _ranks(logs: Sequence[WriterLog]) -> str:
    shown = ", ".join(str(log.rank) for log in logs[:8])
    more = f" and {len(logs) - 8} more" if len(logs) > 8 else ""
    return f"rank {shown}" if len(logs) == 1 else f"ranks {shown}{more}"
