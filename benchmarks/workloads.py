"""What the benchmarks compare: large standards with one difference, and the same in other layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from e2e_registry.dtypes import FLOAT32
from e2e_registry.series import SeriesBatch, SeriesKey
from e2e_registry.standard import StandardMetadata, write_standard

NO_TEST = StandardMetadata(test=None, platform=None, kind="run")


def batches(metrics: int, steps: int, *, flip: int | None = None, drop: int | None = None) -> Iterator[SeriesBatch]:
    """Yield float32 series of random values.

    Args:
        metrics: Number of series.
        steps: Points of each.
        flip: The series whose middle value is one ULP off.
        drop: The series that lacks its fourth step.
    """
    rng = np.random.default_rng(0)
    for number in range(metrics):
        bits = rng.standard_normal(steps).astype(np.float32).view(np.uint32).astype(np.uint64)
        at = np.arange(steps)
        if number == flip:
            bits[steps // 2] ^= np.uint64(1)
        if number == drop:
            bits, at = np.delete(bits, 3), np.delete(at, 3)
        key = SeriesKey(f"train/metric_{number:04d}", "main", 0)
        yield SeriesBatch(key, FLOAT32, at, bits, None, lambda at=at: at)  # type: ignore[misc]


def write(path: Path, metrics: int, steps: int, *, flip: int | None = None, drop: int | None = None) -> Path:
    """Write one standard and return its path."""
    write_standard(path, batches(metrics, steps, flip=flip, drop=drop), NO_TEST)
    return path


def rewrite_row_groups(source: Path, target: Path, rows: int) -> Path:
    """Write the rows of a standard in row groups of another size, as another program would."""
    pq.write_table(pq.read_table(source), target, row_group_size=rows)
    return target


def rewrite_dictionaries(source: Path, target: Path) -> Path:
    """Write a standard whose row groups each order the dictionary of metrics in a way of their own."""
    file = pq.ParquetFile(source)
    rng = np.random.default_rng(1)
    with pq.ParquetWriter(target, file.schema_arrow) as writer:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
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
    golden = {}
    for batch in batches(metrics, steps, flip=flip):
        values = batch.bits.astype(np.uint32).view(np.float32).astype(float)
        golden[batch.key.metric] = dict(zip(map(str, batch.steps.tolist()), values.tolist(), strict=True))
    path.write_text(json.dumps(golden))
    return path
