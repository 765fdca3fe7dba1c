"""What the recipes' tests register: nothing that cannot move without a reason, and a sensor for each thing that can.

Both are read from the committed standards, and explained in ``docs/recipes.md``.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e_registry.config import load_settings
from e2e_registry.registration import Registration, read_registration
from e2e_registry.series import SeriesKey, decode_values
from e2e_registry.standard import Standard

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "recipes.md"
TESTS = sorted((ROOT / "tests/e2e/short").glob("test_*.py"))


class Committed(NamedTuple):
    """A test with its standard.

    Attributes:
        registration: The test's.
        series: Each metric's values, as bits or digests, by rank.
        values: Each metric's values as numbers, by rank, in order; digests have none.
    """

    registration: Registration
    series: dict[str, list[set[object]]]
    values: dict[str, list[list[float]]]


@pytest.fixture(scope="module")
def committed() -> list[Committed]:
    found = []
    for test in TESTS:
        registration = read_registration(test, load_settings(test))
        (path,) = (ROOT / "tests/ci/fixtures/e2e_standards").glob(f"{test.stem}.*-portable.parquet")
        bits: dict[SeriesKey, set[object]] = defaultdict(set)
        numbers: dict[SeriesKey, list[float]] = defaultdict(list)
        for batch in Standard(path).batches():
            bits[batch.key].update(batch.bits.tolist() if batch.digests is None else batch.digests)
            if batch.digests is None:
                numbers[batch.key] += decode_values(batch.dtype, batch.bits).tolist()
        series, values = defaultdict(list), defaultdict(list)
        for key, seen in bits.items():
            series[key.metric].append(seen)
            values[key.metric].append(numbers[key])
        found.append(Committed(registration, series, values))
    return found


def table(heading: str) -> tuple[list[str], list[list[str]]]:
    """The first table below a heading of the document: its header and its rows."""
    section = DOCUMENT.read_text().split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines() if row.startswith("|")]
    return rows[0], rows[2:]


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def recipe_of(registration: Registration) -> str:
    """The name of a script without `run_` and `.py`."""
    assert registration.script is not None
    return Path(registration.script).stem.removeprefix("run_")


def test_every_metric_that_is_constant_over_a_run_has_a_reason(committed: list[Committed]) -> None:
    """An invariant says that a metric is meant to be constant; for any other, the document says why it is."""
    _, rows = table("## Metrics that are constant over a run")
    explained = {(metric, recipe): why for metrics, recipe, why in rows for metric in in_code(metrics)}
    assert all(why for why in explained.values())
    unexplained, used = [], set()
    for registration, series, _ in committed:
        for metric, by_rank in series.items():
            if all(len(seen) > 1 for seen in by_rank) or registration.invariant(metric).equals is not None:
                continue
            key = (metric, recipe_of(registration))
            used.add(key)
            if key not in explained:
                unexplained.append(f"{registration.test_id}: {metric}")
    assert unexplained == []
    assert set(explained) - used == set(), "these metrics are not constant, or not registered"


def test_every_recipe_has_a_sensor_for_each_thing_that_can_go_wrong(committed: list[Committed]) -> None:
    (_, *recipes), rows = table("## What sees what")
    assert {in_code(recipe)[0] for recipe in recipes} == {recipe_of(test.registration) for test in committed}
    for what, *cells in rows:
        for recipe, cell in zip(recipes, cells, strict=True):
            sensors = in_code(cell)
            assert sensors or cell.startswith("none: "), f"{what} of {recipe}"
            for registration, series, _ in committed:
                if recipe_of(registration) == in_code(recipe)[0]:
                    for sensor in sensors:
                        assert fnmatch.filter(series, sensor), f"{registration.test_id} has no {sensor}"


def test_the_gradient_groups_are_those_of_the_whole_model(committed: list[Committed]) -> None:
    for registration, series, _ in committed:
        groups = [metric for metric in series if metric.startswith("train/grad_norm/")]
        assert len(groups) > 3, f"{registration.test_id} registers {groups}"


#: A quotation: the metric, the smallest and the largest value.
QUOTED = re.compile(r"`([a-z_/]+)`\s+(\d[\d.e-]*\d) to (\d[\d.e-]*\d)")


def quotations() -> dict[str, list[tuple[str, str, str]]]:
    """The ranges that the document quotes of standards, by test: in a paragraph or row of a table that names one.

    What says "seeds" was measured over runs that no standard holds.
    """
    blocks = re.split(r"\n\n|\n(?=\|)", DOCUMENT.read_text())
    found: dict[str, list[tuple[str, str, str]]] = {}
    for block in blocks:
        tests = re.findall(r"`(test_\w+)\.py`", block)
        if (ranges := QUOTED.findall(block)) and "seeds" not in block:
            assert len(tests) == 1, f"of which standard are {ranges}?"
            found.setdefault(tests[0], []).extend(ranges)
    return found


def significant(number: str) -> int:
    return len(number.split("e")[0].replace(".", "").lstrip("0"))


def test_the_ranges_that_the_document_quotes_are_those_of_the_committed_standards(committed: list[Committed]) -> None:
    """Of the values that are not 0: a metric that is 0 before anything differed says so beside its range."""
    values_of = {Path(test.registration.test_id).stem: test.values for test in committed}
    quoted = quotations()
    assert set(quoted) == {"test_flow_grpo_digits_mixed_dtype_2xCPU", "test_diffusion_nft_digits_async_2xCPU"}
    for test, ranges in quoted.items():
        for metric, *ends in ranges:
            values = [value for rank in values_of[test][metric] for value in rank if value != 0.0]
            for end, value in zip(ends, (min(values), max(values)), strict=True):
                assert float(f"{value:.{significant(end)}g}") == float(end), f"{metric} of {test}: {values}"


def test_the_overflows_that_the_document_tells_of_are_those_of_the_committed_standard(
    committed: list[Committed],
) -> None:
    (values,) = [test.values for test in committed if "sft_digits_fp16" in test.registration.test_id]
    words = {3: "three", 4: "four"}
    for norms in values["train/grad_norm"]:
        is_nan, is_infinite = map(math.isnan, norms), [math.isinf(norm) for norm in norms]
        nans = list(is_nan).index(False)
        again = max(step for step, infinite in enumerate(is_infinite) if infinite)
        finite = is_infinite.index(False, nans)
        told = (
            f"NaN for {words[nans]} steps and infinite for {words[finite - nans]}, while the scale is halved each time;"
            f" finite from step {finite} on; and infinite once more at step {again}, after the scale had doubled twice"
        )
        assert told in " ".join(DOCUMENT.read_text().split())
        assert sum(is_infinite) == finite - nans + 1
