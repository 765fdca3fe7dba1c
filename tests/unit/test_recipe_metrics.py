"""What the recipes' tests register: nothing that cannot move without a reason, and a sensor for each thing that can.

Both are read from the committed standards, and explained in ``docs/recipes.md``.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e_registry.config import load_settings
from e2e_registry.registration import Registration, read_registration
from e2e_registry.standard import Standard

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "recipes.md"
TESTS = sorted((ROOT / "tests/e2e/short").glob("test_*.py"))


class Committed(NamedTuple):
    """A test with the metrics of its standard: each metric's values, as bits or digests, by rank."""

    registration: Registration
    series: dict[str, list[set[object]]]


@pytest.fixture(scope="module")
def committed() -> list[Committed]:
    found = []
    for test in TESTS:
        registration = read_registration(test, load_settings(test))
        (path,) = (ROOT / "tests/ci/fixtures/e2e_standards").glob(f"{test.stem}.*-portable.parquet")
        values: dict[tuple[str, str, int], set[object]] = defaultdict(set)
        for batch in Standard(path).batches():
            key = (batch.key.metric, batch.key.role, batch.key.rank)
            values[key].update(batch.bits.tolist() if batch.digests is None else batch.digests)
        series: dict[str, list[set[object]]] = defaultdict(list)
        for (metric, _, _), seen in values.items():
            series[metric].append(seen)
        found.append(Committed(registration, series))
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
    for registration, series in committed:
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
            for registration, series in committed:
                if recipe_of(registration) == in_code(recipe)[0]:
                    for sensor in sensors:
                        assert fnmatch.filter(series, sensor), f"{registration.test_id} has no {sensor}"


def test_the_gradient_groups_are_those_of_the_whole_model(committed: list[Committed]) -> None:
    for registration, series in committed:
        groups = [metric for metric in series if metric.startswith("train/grad_norm/")]
        assert len(groups) > 3, f"{registration.test_id} registers {groups}"
