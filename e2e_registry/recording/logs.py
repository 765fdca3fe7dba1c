"""One writer's file, parsed: a recorder's, or plain lines."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from e2e_registry.dtypes import ALL_DTYPES, BOOL, DTYPES, FLOAT64, INT64, INT64_MAX, INT64_MIN, DType
from e2e_registry.errors import InvalidRunError
from e2e_registry.recording.columns import (
    PACK,
    Column,
    ColumnFault,
    LineArrays,
    NonFiniteToken,
    RawBits,
    Segment,
    merge,
)
from e2e_registry.recording.layout import BITS, FORMAT, METRICS_FILE, RANK_MAX, ROLE, name_fault

if TYPE_CHECKING:
    from e2e_registry.series import Int64Array

_TOKENS = {token: NonFiniteToken(token) for token in ("NaN", "Infinity", "-Infinity")}
_HEX = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class WriterLog:
    """What one writer logged.

    Attributes:
        path: Its file.
        role: The writer's role.
        rank: The writer's rank.
        first_line: Number, in the file, of the line with index 0: behind the header, if there is one.
        steps: int64, shape ``(lines,)``.
        times: int64, shape ``(lines,)``, nanoseconds since the epoch as logged; zeros in plain files.
        series: The points of each metric in emission order.
        tear: Why the end of the file is missing, or None.
    """

    path: Path
    role: str
    rank: int
    first_line: int
    steps: Int64Array
    times: Int64Array
    series: dict[str, list[Segment]]
    tear: str | None

    def place(self, index: int) -> str:
        """Return ``file:line`` of the line with this index."""
        return f"{self.path}:{self.first_line + index}"


class _DuplicateKeyError(ValueError):
    """Two equal keys in one JSON object: readers would disagree on which counts."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKeyError(f"key {twice!r} stands twice in one object")
    return entries


def _refuse_token(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON; the recorder writes such values as bits")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_token)
_LENIENT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_TOKENS.__getitem__)


class _Lines:
    """The JSON objects of a file, one a line; a torn last line ends them."""

    def __init__(self, path: Path, file: BinaryIO, decoder: json.JSONDecoder) -> None:
        self._path = path
        self._file = file
        self._decoder = decoder
        self.tear: str | None = None

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        decode = self._decoder.decode
        for number, raw in enumerate(self._file, 1):
            is_torn = not raw.endswith(b"\n")
            if is_torn:
                self.tear = f"{self._path}:{number}: the last line is torn: it has no line end"
            try:
                entry = decode(raw.decode())
                if type(entry) is not dict:
                    raise ValueError("it is not an object")
            except (ValueError, RecursionError) as error:
                if is_torn:  # no prefix of a line is a whole object, so nothing whole is dropped
                    return
                raise InvalidRunError(
                    f"the line is not a JSON object: {error}",
                    where=f"{self._path}:{number}",
                    hint="a line was damaged, or something else wrote into the file; run again",
                ) from None
            yield number, entry


class _Table:
    """The columns of one dtype, by metric."""

    def __init__(self, dtype: DType, path: Path) -> None:
        self.dtype = dtype
        self.columns: dict[str, Column] = {}
        self._path = path

    def add(self, name: str, number: int) -> Column:
        """Add the column of a metric, first seen in line ``number``."""
        fault = name_fault(name)
        if fault is not None:
            raise InvalidRunError(fault, where=f"{self._path}:{number}")
        column = self.columns[name] = Column(name, self.dtype)
        return column


class _Builder:
    """Gathers one file's lines into a :class:`WriterLog`."""

    def __init__(self, path: Path, first_line: int) -> None:
        self.path = path
        self.first_line = first_line
        self.steps: list[int] = []
        self.times: list[int] = []
        self.tables = {dtype.name: _Table(dtype, path) for dtype in ALL_DTYPES}

    def pack(self, at_least: int) -> None:
        """Pack every column that has as many points pending."""
        shared = LineArrays()
        for table in self.tables.values():
            for column in table.columns.values():
                if len(column.values) >= at_least:
                    column.pack(shared)

    def finish(self, role: str, rank: int, tear: str | None) -> WriterLog:
        """Return the log, its series checked."""
        columns: defaultdict[str, list[Column]] = defaultdict(list)
        for table in self.tables.values():
            for name, column in table.columns.items():
                columns[name].append(column)
        steps, times = np.array(self.steps, np.int64), np.array(self.times, np.int64)
        try:
            self.pack(at_least=1)
            series = {name: merge(name, columns[name]) for name in columns}
            if (steps[1:] < steps[:-1]).any():
                for name, segments in series.items():
                    self._check_steps(name, segments, steps)
        except ColumnFault as fault:
            raise self.fault(fault.line, fault.message) from None
        return WriterLog(self.path, role, rank, self.first_line, steps, times, series, tear)

    def fault(self, index: int, message: str, hint: str | None = None) -> InvalidRunError:
        """Return the error for the line with this index."""
        return InvalidRunError(message, where=f"{self.path}:{self.first_line + index}", hint=hint)

    def _check_steps(self, name: str, segments: list[Segment], steps: Int64Array) -> None:
        lines = np.concatenate([segment.lines for segment in segments])
        backwards = np.flatnonzero(steps[lines[1:]] < steps[lines[:-1]])
        if len(backwards):
            before, after = (int(line) for line in lines[backwards[0] : backwards[0] + 2])
            raise self.fault(
                after,
                f"{name}: step {steps[after]} comes after step {steps[before]} (line {self.first_line + before})",
                hint="steps may not go backwards inside a series; a resumed run needs a run directory of its own",
            )


# --- a recorder's file ------------------------------------------------------------------------------------------------


def is_header(entry: object) -> bool:
    """Whether a file's first line says that a recorder wrote it."""
    return (
        isinstance(entry, dict)
        and entry.keys() >= {"format", "role", "rank"}
        and entry.keys().isdisjoint({"step", "step_key"})
    )


def read_recorder_log(path: Path) -> WriterLog:
    """Read a file of :class:`~e2e_registry.recording.MetricRecorder`.

    Raises:
        InvalidRunError: It is damaged other than by a torn last line.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        lines = _Lines(path, file, _STRICT)
        numbered = iter(lines)
        header = next(numbered, None)
        builder = _Builder(path, first_line=2)
        if header is None:  # the process was killed between creating the file and its first write
            role, rank = _writer_of_name(path)
            return builder.finish(
                role, rank, lines.tear or f"{path}: the file is empty: not even its header was written"
            )
        role, rank = _writer_of_header(path, header[1])
        for number, entry in numbered:
            _take_recorder_line(builder, number, entry)
        return builder.finish(role, rank, lines.tear)


def _writer_of_name(path: Path) -> tuple[str, int]:
    match = METRICS_FILE.fullmatch(path.name)
    return (match["role"], int(match["rank"])) if match else ("main", 0)


def _writer_of_header(path: Path, header: dict[str, Any]) -> tuple[str, int]:
    where = f"{path}:1"
    if not is_header(header):
        raise InvalidRunError("the header line is missing: format, role, rank and pid", where=where)
    if header["format"] != FORMAT or type(header["format"]) is not int:
        hint = f"this version reads format {FORMAT}; read the run with the version that wrote it"
        raise InvalidRunError(f"recording format {header['format']!r} is unknown", where=where, hint=hint)
    role, rank = header["role"], header["rank"]
    if not isinstance(role, str) or not ROLE.fullmatch(role) or type(rank) is not int or not 0 <= rank <= RANK_MAX:
        raise InvalidRunError(f"role {role!r} and rank {rank!r} name no writer", where=where)
    if METRICS_FILE.fullmatch(path.name) and _writer_of_name(path) != (role, rank):
        raise InvalidRunError(f"the header is of role {role!r}, rank {rank}: the file was renamed", where=where)
    return role, rank


def _take_recorder_line(builder: _Builder, number: int, entry: dict[str, Any]) -> None:
    index = len(builder.steps)
    step, time_ns = entry.pop("step", None), entry.pop("time_ns", None)
    if type(step) is not int or not INT64_MIN <= step <= INT64_MAX:
        raise builder.fault(index, f"step {step!r} is not an int64" if step is not None else "the line has no step")
    if type(time_ns) is not int or not 0 <= time_ns <= INT64_MAX:
        raise builder.fault(index, f"time_ns {time_ns!r} is not a time")
    builder.steps.append(step)
    builder.times.append(time_ns)
    raw = entry.pop(BITS, None)
    for group, values in entry.items():
        table = builder.tables.get(group)
        if table is None:
            raise builder.fault(index, f"key {group!r} is neither a dtype nor one of step, time_ns, bits")
        if type(values) is not dict:
            raise builder.fault(index, f"{group} is not an object of names and values")
        columns = table.columns
        for name, value in values.items():
            column = columns.get(name) or table.add(name, number)
            column.values.append(value)
            column.lines.append(index)
    if raw is not None:  # last, so that a metric that also stands in its dtype's group is seen
        _take_bits(builder, number, raw)
    if index % PACK == PACK - 1:
        _pack(builder)


def _take_bits(builder: _Builder, number: int, raw: object) -> None:
    index = len(builder.steps) - 1
    if not isinstance(raw, dict):
        raise builder.fault(index, f"{BITS} is not an object of names and patterns")
    for name, pair in raw.items():
        dtype, pattern = _checked_pattern(builder, index, name, pair)
        table = builder.tables[dtype.name]
        column = table.columns.get(name) or table.add(name, number)
        if column.lines and column.lines[-1] == index:
            raise builder.fault(index, f"{name} stands twice in one line, as {dtype.name} and as bits")
        column.values.append(pattern)
        column.lines.append(index)


def _checked_pattern(builder: _Builder, index: int, name: str, pair: object) -> tuple[DType, RawBits]:
    if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
        dtype = DTYPES.get(pair[0])
        if dtype is not None and dtype.is_float and len(pair[1]) == dtype.width // 4 and _HEX.fullmatch(pair[1]):
            return dtype, RawBits(pair[1], 16)
    raise builder.fault(index, f"{name}: {pair!r} is not a float dtype and its hex pattern")


def _pack(builder: _Builder) -> None:
    try:
        builder.pack(at_least=PACK // 2)
    except ColumnFault as fault:
        raise builder.fault(fault.line, fault.message) from None


# --- plain lines ------------------------------------------------------------------------------------------------------


def read_plain_log(path: Path) -> WriterLog:
    """Read plain lines: flat objects with ``step``, or with ``step_key`` naming the step's key.

    Raises:
        InvalidRunError: A line is damaged (a torn last one is not), has no step, or holds what is no number.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        lines = _Lines(path, file, _LENIENT)
        builder = _Builder(path, first_line=1)
        tables = {float: builder.tables[FLOAT64.name], int: builder.tables[INT64.name], bool: builder.tables[BOOL.name]}
        tables[NonFiniteToken] = tables[float]
        for number, entry in lines:
            index = len(builder.steps)
            builder.steps.append(_pop_step(builder, index, entry))
            for name, value in entry.items():
                table = tables.get(type(value))
                if table is None:
                    hint = "plain lines hold numbers and true or false; leave the key out of the line"
                    raise builder.fault(index, f"{name}: {_kind_of(value)} is not a number", hint)
                column = table.columns.get(name) or table.add(name, number)
                column.values.append(value)
                column.lines.append(index)
            if index % PACK == PACK - 1:
                _pack(builder)
        builder.times = [0] * len(builder.steps)
        return builder.finish("main", 0, lines.tear)


def _pop_step(builder: _Builder, index: int, entry: dict[str, Any]) -> int:
    key = entry.pop("step_key", "step")
    if not isinstance(key, str):
        raise builder.fault(index, f"step_key {key!r} is not a string")
    if key not in entry:
        hint = 'write {"step": 3, ...}, or {"step_key": "train/step", "train/step": 3, ...}'
        raise builder.fault(index, f"the line has no step: no key {key!r}", hint)
    step = entry.pop(key)
    is_whole = type(step) is int or (type(step) is float and step.is_integer())
    if not is_whole or not INT64_MIN <= step <= INT64_MAX:
        raise builder.fault(index, f"step {key!r} is {step!r}, which is not an int64")
    return int(step)


def _kind_of(value: object) -> str:
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), repr(value))
