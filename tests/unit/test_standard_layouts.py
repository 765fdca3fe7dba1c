"""Standards as other writers lay them out: what is read does not depend on row groups, statistics or read buffers."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import Row, rows_of, run_rows, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_registry import standard
from e2e_registry.dtypes import DTYPES
from e2e_registry.errors import StandardError
from e2e_registry.standard import SCHEMA, Standard, StandardMetadata, write_standard

NAMES = ["metric", "role", "dtype"]


def write(path: Path, rows: list[Row]) -> None:
    write_standard(path, stream(rows), StandardMetadata(test="tests/e2e/test_a.py", platform="cpu"))


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of three rows, so that files of a few rows are decoded ahead, in a thread."""
    monkeypatch.setattr(standard, "_READ_ROWS", 3)


@pytest.mark.usefixtures("small_buffers")
def test_rows_and_their_positions_do_not_depend_on_the_layout() -> None:
    @settings(max_examples=150)
    @given(
        rows=run_rows(max_points=12),
        row_group_size=st.integers(1, 20),
        statistics=st.sets(st.sampled_from(SCHEMA.names)),
        dictionaries=st.sets(st.sampled_from(NAMES)),
    )
    def check(rows: list[Row], row_group_size: int, statistics: set[str], dictionaries: set[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.parquet"
            write(path, rows)
            pq.write_table(
                pq.read_table(path),
                path,
                row_group_size=row_group_size,
                write_statistics=sorted(statistics) or False,
                use_dictionary=sorted(dictionaries) or False,
            )
            assert rows_of(Standard(path).batches()) == rows
            assert Standard(path).metrics == {row.metric for row in rows}

    check()


def test_small_row_groups_do_not_cut_a_series_into_small_batches(tmp_path: Path) -> None:
    """Or a standard cut into many small row groups would take many times as long to compare."""
    rows = [Row(metric, step) for metric in ("train/loss", "train/norm") for step in range(20)]
    write(tmp_path / "a.parquet", rows)
    pq.write_table(pq.read_table(tmp_path / "a.parquet"), tmp_path / "b.parquet", row_group_size=4)
    batches = list(Standard(tmp_path / "b.parquet").batches())
    assert [len(batch) for batch in batches] == [20, 20]


@pytest.mark.parametrize("with_statistics", [True, False])
def test_a_digest_series_without_digests_is_refused(tmp_path: Path, with_statistics: bool) -> None:
    path = tmp_path / "a.parquet"
    write(path, [Row("d", step, 0, DTYPES["digest"], digest="aa") for step in range(3)])
    table = pq.read_table(path)
    column = pa.array(["aa", None, None] if not with_statistics else [None] * 3, pa.string())
    pq.write_table(table.set_column(8, SCHEMA.field("digest"), column), path, write_statistics=with_statistics)
    with pytest.raises(StandardError, match="row 0 has no digest" if with_statistics else "row 1 has no digest"):
        rows_of(Standard(path).batches())


@pytest.mark.usefixtures("small_buffers")
def test_damage_met_while_decoding_ahead_is_named(tmp_path: Path) -> None:
    rows = [Row("a", step, random.Random(step).getrandbits(31), seq=step) for step in range(60)]
    path = tmp_path / "a.parquet"
    write(path, rows)
    pq.write_table(pq.read_table(path), path, row_group_size=20, compression="zstd")
    whole, rng, named = path.read_bytes(), random.Random(1), 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert [row.but(seq=0) for row in rows_of(Standard(path).batches())] == [row.but(seq=0) for row in rows]
        except StandardError:
            named += 1
    assert named > 20


@pytest.mark.usefixtures("small_buffers")
def test_no_thread_outlives_its_stream(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [Row("a", step) for step in range(30)])
    before = set(threading.enumerate())
    batches: Iterator[object] = Standard(tmp_path / "a.parquet").batches()
    next(batches)
    assert len(set(threading.enumerate()) - before) == 1
    batches.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - before
