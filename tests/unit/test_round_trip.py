"""From a recipe's scalars to other people's readers: what was logged is what pandas, DuckDB and Polars read."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from e2e_registry import MetricRecorder
from e2e_registry.recording import read_run
from e2e_registry.standard import StandardMetadata, write_standard

#: Raw patterns that naive formats lose: NaN payloads, both zeros, subnormals, infinities, the ends of the range.
PATTERNS = {
    torch.float64: (torch.int64, [0, 1, -(2**63), 0x7FF0000000000001, 0x7FF8000000000123, 0x7FEFFFFFFFFFFFFF, -1]),
    torch.float32: (torch.int32, [0, 1, -(2**31), 0x7F800001, 0x7FC00123, 0x7F7FFFFF, 0x7F800000, -1]),
    torch.float16: (torch.int16, [0, 1, -(2**15), 0x7C01, 0x7E05, 0x7BFF, 0x7C00, -1]),
    torch.bfloat16: (torch.int16, [0, 1, -(2**15), 0x7F81, 0x7FC5, 0x7F7F, 0x7F80, -1]),
    torch.int64: (torch.int64, [0, -(2**63), 2**63 - 1, 2**53 + 1]),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, int, str, int]]]:
    """Log the patterns as torch scalars, and return the standard with the rows that it must hold."""
    run, expected = tmp_path_factory.mktemp("run"), []
    with MetricRecorder(run_dir=run) as recorder:
        for dtype, (carrier, patterns) in PATTERNS.items():
            name = str(dtype).removeprefix("torch.")
            mask = (1 << torch.empty(0, dtype=carrier).element_size() * 8) - 1
            for step, pattern in enumerate(patterns):
                recorder.log({name: torch.tensor(pattern, dtype=carrier).view(dtype)}, step=step)
                expected.append((name, step, name, pattern & mask))
        for step, number in enumerate([0, 2**64 - 1, 2**63]):
            recorder.log({"uint64": np.uint64(number)}, step=step)
            expected.append(("uint64", step, "uint64", number))
        for step, flag in enumerate([False, True]):
            recorder.log({"bool": flag}, step=step)
            expected.append(("bool", step, "bool", int(flag)))
    path = run / "standard.parquet"
    write_standard(path, read_run(run).batches(), StandardMetadata(test=None, platform=None))
    return path, sorted(expected)


def test_pandas_duckdb_and_polars_read_every_bit_that_was_logged(
    rows: tuple[Path, list[tuple[str, int, str, int]]],
) -> None:
    path, expected = rows
    columns = ["metric", "step", "dtype", "bits"]
    frame = pd.read_parquet(path)
    assert [tuple(row) for row in frame[columns].itertuples(index=False)] == expected
    assert (str(frame["bits"].dtype), str(frame["step"].dtype)) == ("uint64", "int64")
    found = duckdb.sql(f"SELECT {', '.join(columns)} FROM '{path}'").fetchall()
    assert found == expected
    assert pl.read_parquet(path).select(columns).cast({"metric": pl.String, "dtype": pl.String}).rows() == expected
