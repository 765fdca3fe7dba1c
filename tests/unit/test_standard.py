"""Standards on disk: exact round trips, verified content, damage named, and never a half-written file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import Row, bit_patterns, in_order, rows_of, run_rows, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e_registry.comparison import Verdict, compare
from e2e_registry.dtypes import ALL_DTYPES, DTYPES, DType, decode_bits
from e2e_registry.errors import ExitCode, StandardError, StorageError
from e2e_registry.series import BatchStream
from e2e_registry.standard import METADATA_KEY, SCHEMA, Standard, StandardMetadata, content_digest, write_standard
from e2e_registry.tolerance import OBSERVE, STRICT, Policies, Policy, Tolerance

NO_FIXTURE_CHECK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def metadata(**changes: object) -> StandardMetadata:
    fields: dict[str, object] = {"test": "tests/e2e/test_a.py", "platform": "cpu-x86_64-portable", **changes}
    return StandardMetadata(**fields)  # type: ignore[arg-type]


def write(path: Path, rows: list[Row], **changes: object) -> StandardMetadata:
    return write_standard(path, stream(rows), metadata(**changes))


def special_rows() -> list[Row]:
    """Every dtype with the patterns that round trips lose: NaN payloads, -0.0, subnormals, infinities, extremes."""
    rows = []
    for dtype in ALL_DTYPES:
        if dtype.is_digest:
            rows += [Row(dtype.name, step, 0, dtype, seq=step, digest=f"{step:02x}é") for step in range(3)]
            continue
        patterns = [0, 1, (1 << dtype.width) - 1]
        if dtype.is_float:
            infinity, sign = dtype.infinity_bits, dtype.sign_bit
            patterns += [sign, sign | 1, infinity, infinity | sign, infinity + 1, infinity | (infinity >> 1) | 5]
        elif dtype.width == 64:
            patterns += [1 << 63, (1 << 63) - 1, (1 << 53) + 1]
        steps = [-(1 << 63), 0, *range(1, len(patterns) - 2), (1 << 63) - 1]
        rows += [Row(dtype.name, steps[at], bits, dtype, seq=at) for at, bits in enumerate(patterns)]
    return in_order(rows)


def test_every_value_survives_parquet_pandas_duckdb_and_polars(tmp_path: Path) -> None:
    rows, path = special_rows(), tmp_path / "a.parquet"
    write(path, rows)
    assert rows_of(Standard(path).batches()) == rows
    tables = {
        "pandas": pd.read_parquet(path).to_dict("list"),
        "duckdb": dict(zip(SCHEMA.names, zip(*duckdb.read_parquet(str(path)).fetchall(), strict=True), strict=True)),
        "polars": pl.read_parquet(path).to_dict(as_series=False),
    }
    for reader, table in tables.items():
        assert [str(name) for name in table["metric"]] == [row.metric for row in rows], reader
        assert [str(name) for name in table["dtype"]] == [row.dtype.name for row in rows], reader
        assert [int(bits) for bits in table["bits"]] == [row.bits for row in rows], reader
        assert [int(step) for step in table["step"]] == [row.step for row in rows], reader
        for row, value, digest in zip(rows, table["value"], table["digest"], strict=True):
            if row.dtype.is_digest:
                assert digest == row.digest, reader
            else:
                np.testing.assert_equal(float(value), float(decode_bits(row.dtype, row.bits)), err_msg=reader)
    assert str(pd.read_parquet(path)["bits"].dtype) == "uint64"
    assert str(pd.read_parquet(path)["step"].dtype) == "int64"


@NO_FIXTURE_CHECK
@given(rows=run_rows(max_points=20), cuts=st.lists(st.integers(0, 80)))
def test_any_run_survives_and_its_digest_does_not_depend_on_buffers(
    tmp_path: Path, rows: list[Row], cuts: list[int]
) -> None:
    path = tmp_path / "a.parquet"
    written = write_standard(path, stream(rows, cuts), metadata())
    assert rows_of(Standard(path).batches()) == rows
    assert written.content_digest == content_digest(stream(rows))
    assert Standard(path).metadata == written
    assert Standard(path).metrics == {row.metric for row in rows}


def rewrite(path: Path, target: Path, *, row_group_size: int = 1 << 20, change: object = None) -> None:
    """Write the rows again as another program would: other row groups, dictionaries in another order."""
    table = pq.read_table(path)
    if callable(change):
        table = change(table)
    names = (
        table.column("metric").unify_dictionaries() if hasattr(table.column("metric"), "unify_dictionaries") else None
    )
    dictionary = sorted(set((names or table.column("metric")).to_pylist()), reverse=True)
    indices = [dictionary.index(name) for name in table.column("metric").to_pylist()]
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(dictionary, pa.string()))
    table = table.set_column(0, SCHEMA.field("metric"), column)
    pq.write_table(table, target, row_group_size=row_group_size, compression="snappy")


@pytest.mark.parametrize("row_group_size", [1, 3, 1 << 20])
def test_row_groups_and_dictionary_order_do_not_matter(tmp_path: Path, row_group_size: int) -> None:
    rows = special_rows()
    write(tmp_path / "a.parquet", rows)
    rewrite(tmp_path / "a.parquet", tmp_path / "b.parquet", row_group_size=row_group_size)
    a, b = Standard(tmp_path / "a.parquet"), Standard(tmp_path / "b.parquet")
    assert rows_of(b.batches()) == rows
    assert compare(b.batches(), a.batches(), policies=Policies(judge_all=True)).verdict is Verdict.MATCH


COLUMN_CHANGES = {
    "step": lambda c: pa.array([v.as_py() + (i == 1) for i, v in enumerate(c)], pa.int64()),
    "bits": lambda c: pa.array([v.as_py() ^ (i == 1) for i, v in enumerate(c)], pa.uint64()),
    "rank": lambda c: pa.array([v.as_py() + 1 for v in c], pa.int32()),
    "digest": lambda c: pa.array([f"{v.as_py()}x" if v.is_valid else None for v in c], pa.string()),
    "role": lambda c: pa.DictionaryArray.from_arrays(pa.array([0] * len(c), pa.int32()), pa.array(["x"])),
}


@pytest.mark.parametrize("column", COLUMN_CHANGES)
def test_rows_that_do_not_fit_the_content_digest_are_refused(tmp_path: Path, column: str) -> None:
    rows = [Row("a", step, step, seq=step) for step in range(3)] + [Row("d", 0, 0, DTYPES["digest"], digest="aa")]
    write(tmp_path / "a.parquet", rows)

    def change(table: pa.Table) -> pa.Table:
        at = SCHEMA.get_field_index(column)
        return table.set_column(at, SCHEMA.field(column), COLUMN_CHANGES[column](table.column(column)))

    rewrite(tmp_path / "a.parquet", tmp_path / "b.parquet", change=change)
    with pytest.raises(StandardError, match="content digest") as caught:
        rows_of(Standard(tmp_path / "b.parquet").batches())
    assert str(tmp_path / "b.parquet") in str(caught.value)
    assert caught.value.exit_code is ExitCode.STORAGE


def test_bits_beside_a_digest_are_refused_since_no_digest_covers_them(tmp_path: Path) -> None:
    rows = [Row("a", 0, 7), *(Row("d", step, 0, DTYPES["digest"], digest="aa") for step in range(3))]
    write(tmp_path / "a.parquet", rows)

    def change(table: pa.Table) -> pa.Table:
        bits = pa.array([7, 0, 0, 1], pa.uint64())
        return table.set_column(SCHEMA.get_field_index("bits"), SCHEMA.field("bits"), bits)

    rewrite(tmp_path / "a.parquet", tmp_path / "b.parquet", change=change)
    with pytest.raises(StandardError, match="row 3 holds a digest and bits"):
        rows_of(Standard(tmp_path / "b.parquet").batches())


def test_observed_values_are_not_digested(tmp_path: Path) -> None:
    rows = [Row("loss", 0, 7), Row("tps", 0, 7)]
    policies = {"loss": STRICT.to_json(), "tps": OBSERVE.to_json()}
    first = write(tmp_path / "a.parquet", rows, policies=policies)
    second = write(tmp_path / "a.parquet", [rows[0], rows[1].but(bits=8)], policies=policies)
    third = write(tmp_path / "a.parquet", [rows[0].but(bits=8), rows[1]], policies=policies)
    assert first.content_digest == second.content_digest != third.content_digest


def test_policies_survive_the_metadata(tmp_path: Path) -> None:
    policy = Policy(
        kind=Policy.from_json({"kind": "tolerance", "atol": 1, "reason": "x"}).kind,
        tolerance=Tolerance(atol=0.1, rtol=1e-300, fails_on="increase", reduce="mean", skip_first=2, reason="because"),
    )
    write(tmp_path / "a.parquet", [Row("m", 0)], policies={"m": policy.to_json()})
    assert Standard(tmp_path / "a.parquet").metadata.policy("m") == policy


# ------------------------------------------------------------------------------------------- bad files


def with_metadata(path: Path, text: bytes) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: text}), path)


def test_every_kind_of_bad_file_is_a_typed_error_that_names_it(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    write(good, special_rows())
    stored = json.loads(pq.read_schema(good).metadata[METADATA_KEY])

    def case(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    def edited(name: str, text: str | dict[str, object]) -> Path:
        path = case(name, good.read_bytes())
        with_metadata(path, (text if isinstance(text, str) else json.dumps(text)).encode())
        return path

    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), foreign)
    no_metadata = case("bare.parquet", good.read_bytes())
    pq.write_table(pq.read_table(good).replace_schema_metadata(None), no_metadata)
    bad = {
        tmp_path / "absent.parquet": "no such file",
        case("empty.parquet", b""): "not a readable Parquet file",
        case("text.parquet", b"hello\n" * 100): "not a readable Parquet file",
        case("short.parquet", good.read_bytes()[:-9]): "not a readable Parquet file",
        foreign: "columns are x",
        no_metadata: "no e2e_registry metadata",
        edited("json.parquet", "{"): "not JSON",
        edited("deep.parquet", "[" * 100_000): "nested too deeply",
        edited("list.parquet", "[]"): "not an object",
        edited("future.parquet", {**stored, "format": 2}): "format 2",
        edited("fields.parquet", {**stored, "policies": None}): "'policies'",
        edited("policy.parquet", {**stored, "policies": {"m": {"kind": "maybe"}}}): "policies cannot be read",
    }
    for path, message in bad.items():
        with pytest.raises(StandardError, match=message) as caught:
            Standard(path)
        assert caught.value.where == str(path)


def test_a_bit_flipped_anywhere_is_named_or_changes_nothing_judged(tmp_path: Path) -> None:
    rows = [Row("a", step, random.Random(step).getrandbits(31), seq=step) for step in range(50)]
    rows += [Row("d", step, 0, DTYPES["digest"], digest=f"{step:064x}") for step in range(5)]
    path = tmp_path / "a.parquet"
    write(path, rows)
    whole, rng = path.read_bytes(), random.Random(1)
    judged = [row.but(seq=0) for row in rows]
    outcomes = {"named": 0, "unchanged": 0}
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = [row.but(seq=0) for row in rows_of(Standard(path).batches())]
        except StorageError:
            outcomes["named"] += 1
        else:
            assert found == judged
            outcomes["unchanged"] += 1
    assert outcomes["named"] > 100


# ------------------------------------------------------------------------------------------- writing


def failing_stream(rows: list[Row]) -> BatchStream:
    yield from stream(rows)
    raise KeyboardInterrupt


def test_a_write_that_fails_leaves_the_old_standard_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [Row("m", 0, 1)])
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_standard(path, failing_stream([Row("m", 0, 2)]), metadata())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.parquet"]
    with pytest.raises(StorageError, match="cannot write"):
        write(tmp_path / "a.parquet" / "b.parquet", [Row("m", 0)])


# The kernel refuses to let the file grow, as a full disk would, in the middle of a large write.
FULL_DISK = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from builders import Row, stream
from e2e_registry.errors import StorageError
from e2e_registry.standard import StandardMetadata, write_standard
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
rows = [Row("m", step, step * 2654435761 % 2**32) for step in range(20_000)]
try:
    write_standard(Path(sys.argv[1]), stream(rows), StandardMetadata(test=None, platform=None))
except StorageError as error:
    print(error)
    sys.exit(int(error.exit_code))
"""


def test_a_full_disk_leaves_the_old_standard(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [Row("m", 0, 1)])
    before = path.read_bytes()
    command = [sys.executable, "-c", FULL_DISK, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6, done.stderr
    assert "cannot write" in done.stdout
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_temporaries_of_killed_writers_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    abandoned = tmp_path / f".a.parquet.{dead.pid}.00000000.tmp"
    living = tmp_path / f".a.parquet.{os.getppid()}.00000000.tmp"
    for path in (abandoned, living):
        path.write_bytes(b"half")
    write(tmp_path / "a.parquet", [Row("m", 0)])
    assert sorted(os.listdir(tmp_path)) == [living.name, "a.parquet"]


COMPARE_AND_REWRITE = """
import sys
from pathlib import Path
from e2e_registry.comparison import compare
from e2e_registry.standard import Standard, write_standard
from e2e_registry.tolerance import Policies
path = Path(sys.argv[1])
comparison = compare(Standard(path).batches(), Standard(path).batches(), policies=Policies(judge_all=True))
write_standard(path, list(Standard(path).batches()), Standard(path).metadata)
print(comparison.verdict.value, "pandas" in sys.modules)
"""


def test_reading_and_comparing_standards_imports_no_pandas(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", special_rows())
    command = [sys.executable, "-c", COMPARE_AND_REWRITE, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["match", "False"]


@settings(max_examples=300)
@given(st.data(), st.sampled_from([d for d in ALL_DTYPES if not d.is_digest]))
def test_the_value_column_is_the_number_that_the_bits_stand_for(data: st.DataObject, dtype: DType) -> None:
    from e2e_registry.series import decode_values

    bits = data.draw(bit_patterns(dtype))
    vectorised = float(decode_values(dtype, np.array([bits], np.uint64))[0])
    np.testing.assert_equal(vectorised, float(decode_bits(dtype, bits)))
