"""Standards on disk: one Parquet file a test and platform, streamed in and out, verified by content.

The schema and the metadata are those of ``docs/architecture.md`` (format 1). The content digest never covers file
bytes, since Parquet bytes change with the writer's version; it covers the judged series themselves:

    SHA-256 over the (metric, role, rank, dtype) groups in name order, for each
        the JSON array [metric, role, rank, dtype, count] and a newline,
        the SHA-256 of its steps (int64, little-endian),
        the SHA-256 of its bits (uint64, little-endian), or of its digest strings, each ended by a newline.

The inner hashes are what lets a series longer than memory be verified in the one pass that also compares it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from e2e_registry.dtypes import DIGEST, DTYPES, DType
from e2e_registry.errors import StandardError, UsageError
from e2e_registry.series import BatchStream, SeriesBatch, SeriesKey, decode_values, iter_series
from e2e_registry.storage import parse_json, replacing
from e2e_registry.tolerance import Policy, PolicyKind

if TYPE_CHECKING:
    from e2e_registry.series import Int64Array

FORMAT = 1
METADATA_KEY = b"e2e_registry"
KINDS = ("e2e", "assertion", "run")

_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("metric", _NAME, nullable=False),
        pa.field("role", _NAME, nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("dtype", _NAME, nullable=False),
        pa.field("bits", pa.uint64(), nullable=False),
        pa.field("value", pa.float64()),
        pa.field("digest", pa.string()),
    ]
)
_NAME_COLUMNS = ["metric", "role", "dtype"]
#: What says which series a row is of.
_KEY_COLUMNS = ["metric", "role", "rank", "dtype"]
#: What else a comparison decodes: ``digest`` where there are any, ``seq`` where something differs, ``value`` never.
_POINT_COLUMNS = ["step", "bits"]
_ROW_GROUP_ROWS = 1 << 18
_READ_ROWS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardMetadata:
    """What a standard says about itself, beside its rows.

    Attributes:
        test: Id of the test, or None for a recording of no test.
        platform: Slug of the platform that the bits are comparable on.
        kind: ``e2e``, ``assertion`` (kept by an ordinary test) or ``run`` (a candidate, not yet a standard).
        policies: Metric name to policy, in the JSON form of :meth:`Policy.to_json`: the pinned expansion of the
            registration's globs.
        environment: Facts recorded with the run, by group.
        recorded: When, from what commit and source tree, by what command, how many runs agreed, and why.
        content_digest: SHA-256 of the judged series; empty until written.
    """

    test: str | None
    platform: str | None
    kind: str = "e2e"
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    content_digest: str = ""

    @property
    def observed(self) -> frozenset[str]:
        """The metrics that are kept and shown, never judged, and so not digested."""
        return frozenset(
            name for name, policy in self.policies.items() if policy.get("kind") == PolicyKind.OBSERVE.value
        )

    @property
    def judged(self) -> frozenset[str]:
        """The metrics that the standard pins to be judged."""
        return frozenset(self.policies) - self.observed

    def policy(self, metric: str) -> Policy | None:
        """Return the policy the standard was recorded under, or None for a metric it does not pin."""
        return Policy.from_json(self.policies[metric]) if metric in self.policies else None

    def to_json(self) -> dict[str, Any]:
        """Return the object stored under the metadata key."""
        return {
            "format": FORMAT,
            "test": self.test,
            "platform": self.platform,
            "kind": self.kind,
            "policies": dict(self.policies),
            "environment": dict(self.environment),
            "content_digest": self.content_digest,
            "recorded": dict(self.recorded),
        }

    @staticmethod
    def from_json(data: object, path: Path) -> StandardMetadata:
        """Read what :meth:`to_json` wrote.

        Raises:
            StandardError: Another format version, or fields that are missing or of the wrong type.
        """
        if not isinstance(data, dict) or "format" not in data:
            raise StandardError("its e2e_registry metadata is not an object with a format", where=path)
        if data["format"] != FORMAT:
            raise StandardError(
                f"it is of format {data['format']!r}; this version reads format {FORMAT}",
                where=path,
                hint="use the e2e-registry version that wrote it, or record it again",
            )
        types: dict[str, tuple[type, ...]] = {
            "test": (str, type(None)),
            "platform": (str, type(None)),
            "kind": (str,),
            "policies": (dict,),
            "environment": (dict,),
            "content_digest": (str,),
            "recorded": (dict,),
        }
        for name, allowed in types.items():
            if not isinstance(data.get(name, ...), allowed):
                raise StandardError(f"its metadata field {name!r} is missing or of the wrong type", where=path)
        metadata = StandardMetadata(**{name: data[name] for name in types})
        try:
            for metric in metadata.policies:
                metadata.policy(metric)
        except (UsageError, AttributeError) as error:
            raise StandardError(f"its policies cannot be read: {error}", where=path) from error
        return metadata


class ContentDigest:
    """Computes the content digest of a batch stream, batch by batch."""

    def __init__(self, observed: frozenset[str] = frozenset()) -> None:
        self._observed = observed
        self._total = hashlib.sha256()
        self._key: SeriesKey | None = None
        self._groups: dict[str, _GroupDigest] = {}

    def update(self, batch: SeriesBatch) -> None:
        """Add the next batch of a sorted stream."""
        if batch.key != self._key:
            self._finish_series()
            self._key = batch.key
        if batch.key.metric in self._observed:
            return
        self._groups.setdefault(batch.dtype.name, _GroupDigest()).update(batch)

    def hexdigest(self) -> str:
        """Return the digest of all batches added."""
        self._finish_series()
        self._key = None
        return self._total.hexdigest()

    def _finish_series(self) -> None:
        for dtype_name, group in sorted(self._groups.items()):
            head = json.dumps([*(self._key or ()), dtype_name, group.count], ensure_ascii=False, separators=(",", ":"))
            self._total.update(head.encode() + b"\n" + group.steps.digest() + group.values.digest())
        self._groups = {}


class _GroupDigest:
    def __init__(self) -> None:
        self.count = 0
        self.steps = hashlib.sha256()
        self.values = hashlib.sha256()

    def update(self, batch: SeriesBatch) -> None:
        self.count += len(batch)
        self.steps.update(np.ascontiguousarray(batch.steps, "<i8").data)
        if batch.digests is None:
            self.values.update(np.ascontiguousarray(batch.bits, "<u8").data)
        else:
            self.values.update("".join(f"{digest}\n" for digest in batch.digests).encode())


def content_digest(stream: BatchStream, observed: frozenset[str] = frozenset()) -> str:
    """Return the content digest of a whole stream."""
    digest = ContentDigest(observed)
    for batch in stream:
        digest.update(batch)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- writing


def write_standard(path: Path, stream: BatchStream, metadata: StandardMetadata) -> StandardMetadata:
    """Write a standard atomically and return its metadata with the content digest filled in.

    Args:
        path: Where the standard goes; its folder is made if missing.
        stream: The series to store, in the order of :mod:`e2e_registry.series`.
        metadata: What it says about itself; ``content_digest`` is computed here.

    Raises:
        StorageError: The file cannot be written; whatever was there is unchanged.
        InvalidRunError: The stream is out of order.
    """
    batches = list(stream)
    written = StandardMetadata(
        **{name: getattr(metadata, name) for name in metadata.__slots__ if name != "content_digest"},
        content_digest=content_digest(batches, metadata.observed),
    )
    # The schema's metadata, and not only the file's, since that is what pyarrow and pandas hand on to their users;
    # it has to be known before the first row is written, which is why the batches are gathered first.
    text = json.dumps(written.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False)
    schema = SCHEMA.with_metadata({METADATA_KEY: text.encode(errors="backslashreplace")})  # JSON's escape too
    with replacing(path) as temporary, temporary.open("wb") as file, _parquet_writer(file, schema) as writer:
        for table in _tables(batches, schema):
            writer.write_table(table)
    return written


def _parquet_writer(file: BinaryIO, schema: pa.Schema) -> Any:
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=[*_NAME_COLUMNS, "digest"],
        column_encoding=dict.fromkeys(["step", "seq", "bits"], "DELTA_BINARY_PACKED"),
    )


def _tables(stream: BatchStream, schema: pa.Schema) -> Iterator[pa.Table]:
    """Gather batches into row groups, so that a standard of short series is one row group and not hundreds."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for _, batches in iter_series(stream):
        for batch in batches:
            pending.append(_record_batch(batch, schema))
            rows += len(batch)
            if rows >= _ROW_GROUP_ROWS:
                yield pa.Table.from_batches(pending, schema).unify_dictionaries()
                pending, rows = [], 0
    yield pa.Table.from_batches(pending, schema).unify_dictionaries()


# Arrays are built from buffers throughout: pa.array(), pa.table() and .to_numpy() import pandas on first use, which
# would triple the time of a small compare.


def _primitive(values: np.ndarray[Any, Any], arrow_type: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _strings(values: Iterable[str]) -> pa.Array:
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def _constant(value: str, count: int) -> pa.Array:
    indices = pa.py_buffer(np.zeros(count, np.int32))
    return pa.DictionaryArray.from_buffers(_NAME, count, [None, indices], _strings([value]))


def _record_batch(batch: SeriesBatch, schema: pa.Schema) -> pa.RecordBatch:
    count = len(batch)
    arrays = [
        _constant(batch.key.metric, count),
        _constant(batch.key.role, count),
        _primitive(np.full(count, batch.key.rank, np.int32), pa.int32()),
        _primitive(batch.load_seq(), pa.int64()),
        _primitive(batch.steps, pa.int64()),
        _constant(batch.dtype.name, count),
        _primitive(batch.bits, pa.uint64()),
        pa.nulls(count, pa.float64())
        if batch.dtype.is_digest
        else _primitive(decode_values(batch.dtype, batch.bits), pa.float64()),
        pa.nulls(count, pa.string()) if batch.digests is None else _strings(batch.digests),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# ---------------------------------------------------------------------------------------------- reading


class Standard:
    """A standard on disk, opened: its metadata is read, its rows are streamed on demand.

    Args:
        path: The Parquet file.

    Raises:
        StandardError: The file is missing, not Parquet, truncated, not a standard, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_parquet(path)
        self._reading = threading.Lock()
        self._check_schema()
        raw = (self._file.schema_arrow.metadata or {}).get(METADATA_KEY)
        if raw is None:
            raise StandardError(
                "it is a Parquet file, but not a standard: it has no e2e_registry metadata",
                where=path,
                hint="standards are written by `e2e-registry record` and `adopt`",
            )
        try:
            data = parse_json(raw)
        except ValueError as error:
            raise StandardError(f"its e2e_registry metadata is not JSON: {error}", where=path) from error
        self.metadata = StandardMetadata.from_json(data, path)

    @property
    def num_points(self) -> int:
        """Number of values stored."""
        return int(self._file.metadata.num_rows)

    @cached_property
    def metrics(self) -> frozenset[str]:
        """The names of all metrics that have rows."""
        names: set[str] = set()
        for batch in self._record_batches(["metric"]):
            names.update(_Names(batch.column(0), "metric", self.path).used())
        return frozenset(names)

    def batches(self) -> Iterator[SeriesBatch]:
        """Stream the series, verifying the content digest on the way.

        Memory does not grow with the number of points: a few decoded read buffers are held at most. From a file of
        more than one, a thread decodes the next; it ends with the stream.

        Raises:
            StandardError: Nulls, unknown dtypes, rows out of order, or a digest that does not fit the rows; the last
                only once the stream is exhausted.
        """
        digest = ContentDigest(self.metadata.observed)
        for batch in self._series_batches():
            digest.update(batch)
            yield batch
        found = digest.hexdigest()
        if found != self.metadata.content_digest:
            raise StandardError(
                f"its rows do not fit its content digest ({found[:12]} against {self.metadata.content_digest[:12]})",
                where=self.path,
                hint="the file was edited or damaged: restore it from git, or delete it and record it again",
            )

    def _check_schema(self) -> None:
        found = self._file.schema_arrow
        for column in SCHEMA:
            have = found.field(column.name).type
            want = column.type
            if pa.types.is_dictionary(have):
                have = have.value_type
            if pa.types.is_dictionary(want):
                want = want.value_type
            if have != want and not (pa.types.is_large_string(have) and pa.types.is_string(want)):
                raise StandardError(f"its column {column.name!r} is {have}, not {want}", where=self.path)

    def _record_batches(self, columns: list[str], row_groups: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        groups = range(self._file.num_row_groups) if row_groups is None else row_groups
        try:
            batches = self._file.iter_batches(_READ_ROWS, list(groups), columns)
            while True:
                with self._reading:  # another thread may be decoding ahead
                    record_batch = next(batches, None)
                if record_batch is None:
                    return
                yield record_batch
        except _UNREADABLE as error:
            raise StandardError(f"it is damaged: {_first_line(error)}", where=self.path) from error

    def _series_batches(self) -> Iterator[SeriesBatch]:
        """Cut the decoded points where metric, role, rank or dtype changes."""
        runs = self._runs()
        # Known first, since decoding `digest` takes long even where it is all null; a file that would need more
        # memory for it than a read buffer is read as if it held digests.
        first_runs = list(itertools.islice(runs, _READ_ROWS))
        has_digests = len(first_runs) == _READ_ROWS or any(run.dtype == DIGEST.name for run in first_runs)
        runs = itertools.chain(first_runs, runs)
        row = run_end = 0
        for record_batch in self._points(has_digests=has_digests):
            steps = self._numbers(record_batch.column(0), "step", np.int64)
            bits = self._numbers(record_batch.column(1), "bits", np.uint64)
            first_row = row
            while row < first_row + len(steps):
                if row == run_end:
                    run = next(runs, None) or self._refuse_counts()
                    dtype = self._dtype(run, row)
                    run_end += run.num_rows
                start, stop = row - first_row, min(run_end - first_row, len(steps))
                digests = self._digests(record_batch, bits, start, stop, row) if dtype.is_digest else None
                load_seq = self._seq_loader(row, stop - start)
                yield SeriesBatch(run.key, dtype, steps[start:stop], bits[start:stop], digests, load_seq)
                row = first_row + stop

    def _refuse_counts(self) -> NoReturn:
        raise StandardError("it is damaged: its row groups do not hold the rows that they claim", where=self.path)

    def _points(self, *, has_digests: bool) -> Iterator[pa.RecordBatch]:
        batches = self._record_batches([*_POINT_COLUMNS, "digest"] if has_digests else _POINT_COLUMNS)
        return batches if self.num_points <= _READ_ROWS else _one_ahead(batches)

    def _runs(self) -> Iterator[_Run]:
        """Say of all rows, in order, which series they are of.

        Read apart from the points, since dictionary columns come in a batch a row group, however small these are.
        The statistics of the file would say the same without decoding, but pyarrow ends the process where they are
        damaged.
        """
        for (key, dtype), parts in itertools.groupby(self._decoded_runs(), lambda run: (run.key, run.dtype)):
            yield _Run(key.metric, key.role, key.rank, dtype, sum(part.num_rows for part in parts))

    def _decoded_runs(self) -> Iterator[_Run]:
        for record_batch in self._record_batches(_KEY_COLUMNS):
            column = dict(zip(_KEY_COLUMNS, record_batch.columns, strict=True))
            metric, role, dtype = (_Names(column[name], name, self.path) for name in _NAME_COLUMNS)
            rank = self._numbers(column["rank"], "rank", np.int32)
            changed = np.zeros(max(len(rank) - 1, 0), bool)
            for codes in (metric.codes, role.codes, rank, dtype.codes):
                changed |= codes[1:] != codes[:-1]
            edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(rank)] if len(rank) else []
            for start, stop in itertools.pairwise(edges):
                names = metric.name_at(start), role.name_at(start), int(rank[start]), dtype.name_at(start)
                yield _Run(*names, stop - start)

    def _dtype(self, run: _Run, row: int) -> DType:
        if run.dtype not in DTYPES:
            raise StandardError(f"row {row} has the unknown dtype {run.dtype!r}", where=self.path)
        return DTYPES[run.dtype]

    def _digests(
        self, record_batch: pa.RecordBatch, bits: npt.NDArray[np.uint64], start: int, stop: int, row: int
    ) -> list[str]:
        digests = _texts(record_batch.column(len(_POINT_COLUMNS)).slice(start, stop - start), "digest", self.path)
        if None in digests:
            raise StandardError(f"row {row + digests.index(None)} has no digest", where=self.path)
        if bits[start:stop].any():  # they are in no content digest, so damage there would go unseen
            at = row + int(np.flatnonzero(bits[start:stop])[0])
            raise StandardError(f"row {at} holds a digest and bits, which are 0 beside a digest", where=self.path)
        return digests

    def _numbers(self, column: pa.Array, name: str, dtype: type[Any]) -> Any:
        if column.null_count:
            raise StandardError(f"its column {name!r} holds nulls", where=self.path)
        return _numpy(column, dtype)

    def _seq_loader(self, row: int, count: int) -> Callable[[], Int64Array]:
        return lambda: self._read_seq(row, count)

    def _read_seq(self, row: int, count: int) -> Int64Array:
        """Decode ``seq`` of ``count`` rows from ``row`` on: the row groups they lie in, and no others."""
        ends = self._row_group_ends
        first, last = (int(np.searchsorted(ends, at, "right")) for at in (row, row + count - 1))
        start = int(ends[first - 1]) if first else 0
        parts = [np.zeros(0, np.int64)]
        for batch in self._record_batches(["seq"], range(first, last + 1)):
            parts.append(self._numbers(batch.column(0), "seq", np.int64)[max(row - start, 0) : row + count - start])
            start += batch.num_rows
            if start >= row + count:
                break
        found: Int64Array = np.concatenate(parts)
        if len(found) != count:
            self._refuse_counts()
        return found

    @cached_property
    def _row_group_ends(self) -> Int64Array:
        meta = self._file.metadata
        return np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)], dtype=np.int64)


class _Run(NamedTuple):
    """Rows side by side that are of one series and have one dtype."""

    metric: str
    role: str
    rank: int
    dtype: str
    num_rows: int

    @property
    def key(self) -> SeriesKey:
        return SeriesKey(self.metric, self.role, self.rank)


class _Names:
    """A dictionary column of one record batch, as integer codes and the names they stand for."""

    def __init__(self, column: pa.Array, name: str, path: Path) -> None:
        if column.null_count:
            raise StandardError(f"its column {name!r} holds nulls", where=path)
        self.codes = _numpy(column.indices, np.int32)
        self.named: list[str] = _texts(column.dictionary, name, path)
        if len(self.codes) and self.codes.view(np.uint32).max() >= len(self.named):  # a negative one is huge as uint32
            raise StandardError(f"its column {name!r} is damaged: it names values that do not exist", where=path)

    def name_at(self, row: int) -> str:
        name: str = self.named[self.codes[row]]
        return name

    def used(self) -> set[str]:
        return {self.named[code] for code in np.unique(self.codes)}


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield ``batches`` while a thread decodes the next one, which releases the interpreter lock."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        decoded = thread.submit(next, batches, None)
        while (batch := decoded.result()) is not None:
            decoded = thread.submit(next, batches, None)
            yield batch


def _texts(column: pa.Array, name: str, path: Path) -> list[Any]:
    """Return the strings of an Arrow array, None for nulls."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise StandardError(f"its column {name!r} holds text that is not UTF-8", where=path) from error


def _numpy(column: pa.Array, dtype: type[Any]) -> Any:
    """View an Arrow array without nulls as NumPy, shape ``(n,)``; no copy."""
    whole = np.frombuffer(column.buffers()[1], dtype)
    return whole[column.offset : column.offset + len(column)]


_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        file = pa.OSFile(os.fsencode(path))  # as bytes: Arrow takes no other path that is no Unicode
        footer = pq.read_metadata(file)
        _check_columns(footer.schema.names, path)
        return pq.ParquetFile(
            file, metadata=footer, read_dictionary=_NAME_COLUMNS, pre_buffer=False, buffer_size=1 << 20
        )
    except FileNotFoundError as error:
        raise StandardError("there is no such file", where=path) from error
    except _UNREADABLE as error:
        raise StandardError(
            f"it is not a readable Parquet file: {_first_line(error)}",
            where=path,
            hint="the file is truncated or foreign: restore it from git, or delete it and record it again",
        ) from error


def _check_columns(names: list[str], path: Path) -> None:
    if names != SCHEMA.names:
        raise StandardError(
            f"it is not a standard: its columns are {', '.join(names[:12])}",
            where=path,
            hint=f"a standard has the columns {', '.join(SCHEMA.names)}",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
