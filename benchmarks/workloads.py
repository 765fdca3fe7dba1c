"""What the benchmarks compare: large standards with one difference, and the same rows in other layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from e2e_registry.dtypes import FLOAT32
from e2e_registry.series import SeriesBatch, SeriesKey
from e2e_registry.standard import StandardMetadata, write_standard

NO_TEST = StandardMetadata(test=None, platform=None, kind="run")

#: The step that the variant with a missing step lacks, in every series.
MISSING_STEP = 3
#: Points of one batch, so that one long series is written in the memory of a short one.
_CHUNK = 100_000
#: How ``write_standard`` writes; the variants differ from it in one thing each.
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["metric", "role", "dtype", "digest"],
    "column_encoding": {"step": "DELTA_BINARY_PACKED", "seq": "DELTA_BINARY_PACKED"},
}


def batches(metrics: int, steps: int, *, flip: int | None = None, is_missing: bool = False) -> Iterator[SeriesBatch]:
    """Yield float32 series of normal deviates, the same for the same sizes.

    Args:
        metrics: Number of series.
        steps: Points of each.
        flip: The series whose middle value is one ULP off.
        is_missing: Whether every series lacks its fourth step.
    """
    rng = np.random.default_rng(0)
    for number in range(metrics):
        for start in range(0, steps, _CHUNK):
            at = np.arange(start, min(start + _CHUNK, steps))
            bits = rng.standard_normal(len(at), np.float32).view(np.uint32).astype(np.uint64)
            if number == flip:
                bits[at == steps // 2] ^= np.uint64(1)
            if is_missing:
                bits, at = bits[at != MISSING_STEP], at[at != MISSING_STEP]
            yield SeriesBatch(SeriesKey(f"train/metric_{number:04d}", "main", 0), FLOAT32, at, bits, None, at.copy)


def write(path: Path, metrics: int, steps: int, *, flip: int | None = None, is_missing: bool = False) -> Path:
    """Write one standard and return its path."""
    write_standard(path, batches(metrics, steps, flip=flip, is_missing=is_missing), NO_TEST)
    return path


def rewrite_row_groups(source: Path, target: Path, rows: int) -> Path:
    """Write the rows of a standard in row groups of another size, as another program would."""
    file = pq.ParquetFile(source)
    with pq.ParquetWriter(target, file.schema_arrow, **_ENCODING) as writer:
        writer.write_table(file.read(), row_group_size=rows)
    return target


def rewrite_dictionaries(source: Path, target: Path) -> Path:
    """Write a standard whose row groups each order the dictionary of metrics in a way of their own."""
    file = pq.ParquetFile(source)
    rng = np.random.default_rng(1)
    with pq.ParquetWriter(target, file.schema_arrow, **_ENCODING) as writer:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number).unify_dictionaries().combine_chunks()
            column = table.column("metric").combine_chunks()
            names = np.array(column.dictionary.to_pylist(), object)
            order = rng.permutation(len(names))
            indices = np.argsort(order)[column.indices.to_numpy()]
            permuted = pa.DictionaryArray.from_arrays(
                pa.array(indices, pa.int32()), pa.array(names[order], pa.string())
            )
            writer.write_table(table.set_column(0, table.schema.field("metric"), permuted))
    return target


def write_json(path: Path, metrics: int, steps: int, *, flip: int | None = None) -> Path:
    """Write the same values as plain golden JSON: metric to step to value."""
    golden: dict[str, dict[str, float]] = {}
    for batch in batches(metrics, steps, flip=flip):
        values = batch.bits.astype(np.uint32).view(np.float32).astype(float)
        series = golden.setdefault(batch.key.metric, {})
        series.update(zip(map(str, batch.steps.tolist()), values.tolist(), strict=True))
    path.write_text(json.dumps(golden))
    return path
