"""Facts of a run that came from elsewhere: whatever stands in them, a reader ends with a documented exit code."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repositories import Repository

TEST = "tests/e2e/test_stub.py"
RUN, STATE, RESULTS = "run.json", "env.main.rank0.json", "results.json"

#: Facts of runs on a cluster with GPUs, which no test machine has.
_CLUSTER = {
    "ray": {"node": "node-1", "attempt": 2},
    "outcome": {
        "status": "exited",
        "exit_code": 0,
        "explanation": "exited with code 0",
        "left_behind": [{"pid": 12, "command": "sleep 100", "has_survived": False}],
    },
}
_GPUS = [
    {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 1, "driver": "570.1"}
    for _ in range(2)
]

_NUMBERS: list[Any] = [0, -1, 1, 3, 2**63, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf")]
_TEXTS = ["", "x", "\ud800", "\x1b[31m", "a\0b", "x" * 5000, "../../..", "/", "\n", TEST, "cuda", "[bold]"]
_SCALARS = [None, True, *_NUMBERS, *_TEXTS]
_DEEP = {f"@{depth}@": "[" * depth + "]" * depth for depth in (50, 70, 400, 2000)}
_REPLACEMENTS = st.one_of(
    st.sampled_from([*_SCALARS, *_DEEP]),
    st.sampled_from([[], {}, [[]], [{}], [None], [1], ["x"], {"": 1}, {"a": {"b": [1]}}, {"by_writer": {"main 0": 1}}]),
    st.recursive(
        st.sampled_from(_SCALARS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with a standard, and beside it what CI brought of a later check."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "E2E_REGISTRY_PLATFORM_TAG"):
            environment.delenv(name, raising=False)
        root = tmp_path_factory.mktemp("hostile") / "repository"
        root.mkdir()
        repository = Repository(root)
        repository.record()
        shutil.rmtree(root / ".e2e_runs")
        repository.write_recipe("SCALE = 1.5")
        assert repository.cli("check", "--all").code == 1
        shutil.move(root / ".e2e_runs", root.with_name("artifact"))
        shutil.copytree(repository.standards, root.with_name("standards"))
        yield repository


class _Spoiled:
    """An artifact whose files are spoiled, and the checkout as it was."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.artifact = repository.root / ".e2e_runs"
        for folder, source in ((self.artifact, "artifact"), (repository.standards, "standards")):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(repository.root.with_name(source), folder)
        self.run = next(self.artifact.glob("*/*/run.json")).parent

    def path(self, file: str) -> Path:
        return self.artifact / file if file == RESULTS else self.run / file

    def write(self, file: str, document: Any) -> None:
        text = json.dumps(document)
        for name, nested in _DEEP.items():
            text = text.replace(json.dumps(name), nested)
        self.path(file).write_text(text)

    def always(self, file: str) -> Iterator[tuple[str | Path, ...]]:
        yield ("accept", self.artifact, "--yes", "--allow-other-source", "--allow-unknown-state")
        if file == RESULTS:
            yield ("merge", self.artifact)
        else:
            yield ("compare", self.run, "--test", TEST, "--all-metrics")
            yield ("list",)

    def sometimes(self, file: str) -> Iterator[tuple[str | Path, ...]]:
        yield ("accept", self.artifact, "--yes", "--json", "--test", TEST)
        if file == RESULTS:
            yield ("merge", self.artifact, "--json")
            return
        yield ("compare", self.run, "--against", self.repository.standard, "--json")
        yield ("doctor", self.run)
        yield ("adopt", "--test", TEST, "--run", self.run, "--allow-unknown-state", "--reason", "past")
        yield ("show", self.repository.standard, "--json")

    def read(self, *command: str | Path) -> None:
        result = self.repository.cli(*command)
        shown = result.out + result.err
        assert result.code in range(7), (command, shown)
        assert "Traceback" not in shown, (command, shown)
        if "--json" in command and result.out:
            json.loads(result.out, parse_constant=pytest.fail)


def _places(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield at
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from _places(value, (*at, key))


def _base(spoiled: _Spoiled, file: str, *, is_cluster: bool) -> Any:
    document = json.loads(spoiled.path(file).read_bytes())
    if is_cluster and file == RUN:
        document |= copy.deepcopy(_CLUSTER) | {"profile": "cuda", "num_gpus": 2}
    if is_cluster and file == STATE:
        document["observed"] = {"is_root": True, "command": ["python", "train.py"], "is_data_worker": False}
        document["gpus"] = copy.deepcopy(_GPUS)
        run = json.loads(spoiled.path(RUN).read_bytes())
        spoiled.write(RUN, run | _CLUSTER | {"profile": "cuda"})
    return document


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_run_says_of_itself_is_read_or_refused(made: Repository, data: st.DataObject) -> None:
    spoiled = _Spoiled(made)
    file = data.draw(st.sampled_from([RUN, STATE, RESULTS]))
    document = _base(spoiled, file, is_cluster=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from([place for place in _places(document) if place] or [("",)]))
        holder = document
        for key in parents:
            holder = holder[key]
        if last == "":
            break
        if isinstance(holder, dict) and data.draw(st.integers(0, 3)) == 0:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(data.draw(_REPLACEMENTS))
    spoiled.write(file, document)
    for command in (*spoiled.always(file), data.draw(st.sampled_from(list(spoiled.sometimes(file))))):
        spoiled.read(*command)


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        (STATE, {"gpus": [{"name": ["x"]}]}, "gpus[0].name is a list"),
        (STATE, {"gpus": [{"name": 3}]}, "gpus[0].name is a number"),
        (STATE, {"gpus": [{"capability": "9.0"}]}, "gpus[0] has no name"),
        (STATE, {"gpus": [{"name": "a", "capability": [9, 0]}]}, "gpus[0].capability is a list"),
        (STATE, {"gpus": [{"name": f"model {'x' * 30} {at}"} for at in range(40)]}, None),
        (RUN, {"outcome": {"status": "exited", "exit_code": 0, "left_behind": [{}]}}, "left_behind[0] has no pid"),
        (RUN, {"ray": "x"}, "ray is a string"),
        (RUN, {"ray": [1]}, "ray is a list"),
        (RUN, {"command": 3}, "command is a number"),
        (RUN, {"num_gpus": True}, "num_gpus is true or false"),
        (RUN, {"started_ns": 10**400}, "a number in it has more than 64 bits"),
        (RUN, {"source": {"x": float("nan")}}, "nan is no number"),
        (RUN, {"profile": "@70@"}, "it is nested too deeply"),
    ],
)
def test_one_spoiled_run_costs_no_other(made: Repository, file: str, change: dict[str, Any], fault: str | None) -> None:
    """A fact of another shape is named and its run refused; the other runs of the artifact are offered."""
    spoiled = _Spoiled(made)
    other = spoiled.artifact / "test_other" / "1-2"
    shutil.copytree(spoiled.run, other)
    document = _base(spoiled, file, is_cluster="gpus" in change)
    spoiled.write(file, document | change)
    if (spoiled.artifact / RESULTS).exists():
        (spoiled.artifact / RESULTS).unlink()
    made.write_test("test_other")
    run = json.loads((other / RUN).read_text())
    run["recipe"]["test"] = "tests/e2e/test_other.py"
    (other / RUN).write_text(json.dumps(run))
    try:
        result = made.cli("accept", spoiled.artifact, "--yes", "--json", "--allow-other-source")
        assert result.code in (2, 4), result.err
        spoilt, whole = sorted(result.json["tests"], key=lambda test: test["decision"], reverse=True)
        assert (whole["subject"], whole["decision"]) == ("tests/e2e/test_other.py", "accepted")
        assert spoilt["decision"] == "refused"
        assert fault is None or fault in spoilt["error"]
    finally:
        (made.root / "tests/e2e/test_other.py").unlink()


def test_a_run_that_does_not_say_when_it_ended_is_listed_without_a_time(made: Repository) -> None:
    spoiled = _Spoiled(made)
    document = _base(spoiled, RUN, is_cluster=False)
    del document["ended_ns"]
    spoiled.write(RUN, document)
    listed = made.cli("list", "--json")
    assert (listed.code, listed.json["tests"][0]["measured"]) == (0, None)
