"""Declarations: what is read from source, that executing agrees with it, and every refusal with its place."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import itertools
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e_registry.config import Settings, load_settings
from e2e_registry.errors import ExitCode, RegistrationError, UsageError
from e2e_registry.registration import (
    Quarantine,
    Registration,
    check_digest_policies,
    check_ulp_policies,
    discover,
    find_test,
    is_discovered,
    main,
    read_registration,
)
from e2e_registry.registration.coverage import can_share_a_name
from e2e_registry.registration.place import id_below
from e2e_registry.tolerance import Invariant, PolicyKind, Tolerance

IMPORT = "from e2e_registry import Tolerance, main, register_e2e_ci\n"
PLAIN = {
    "est_time": "60",
    "suite": '"short-cpu"',
    "script": '"scripts/run.py"',
    "metrics": '["train/loss", "train/log_*"]',
}
VALID = f"{IMPORT}register_e2e_ci({', '.join(f'{name}={value}' for name, value in PLAIN.items())})\n"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repo(tmp_path_factory.mktemp("repo"))


def make_repo(root: Path) -> Path:
    (root / "scripts").mkdir(parents=True)
    (root / "scripts/run.py").touch()
    (root / "tests/e2e").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[tool.e2e_registry]\nsuites = ["short-cpu", "long"]\nlabels = ["gpu-ci"]\n')
    return root


def put(repo: Path, source: str | bytes, name: str = "tests/e2e/test_a.py") -> Path:
    file = repo / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(source if isinstance(source, bytes) else source.encode())
    return file


def read(repo: Path, source: str | bytes, name: str = "tests/e2e/test_a.py") -> Registration:
    return read_registration(put(repo, source, name), load_settings(repo, environ={}))


def execute(file: Path) -> Registration:
    """Run a test file that assigns its registration to ``TEST``, as an import does."""
    namespace: dict[str, Any] = {"__name__": "test_file", "__file__": str(file)}
    exec(compile(file.read_bytes(), str(file), "exec"), namespace)
    return namespace["TEST"]


def call(changes: dict[str, str | None], before: str = "") -> str:
    """Return a test file with one keyword a line; a change of None leaves that keyword out."""
    keywords = {name: value for name, value in {**PLAIN, **changes}.items() if value is not None}
    lines = "".join(f"    {name}={value},\n" for name, value in keywords.items())
    return f"{IMPORT}{before}TEST = register_e2e_ci(\n{lines})\n"


def line_of(source: str, text: str) -> int:
    return source[: source.index(text)].count("\n") + 1


def refusal(repo: Path, source: str | bytes) -> RegistrationError:
    with pytest.raises(RegistrationError) as caught:
        read(repo, source)
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value


# --- What a registration says


def test_every_keyword(repo: Path) -> None:
    source = f"""{IMPORT}
ARGS = ["--num-rollout", "2"]
register_e2e_ci(
    est_time=30, suite="short-cpu", profile="cuda", script="./scripts/run.py", args=ARGS + ["--deterministic-mode"],
    env={{"HF_HOME": "${{CACHE}}/hf"}}, metrics=("rollout/reward/raw_mean", "train/*"),
    tolerances={{"train/kl": Tolerance(atol=1e-7, reason="why")}}, observe=["perf/*"],
    invariants={{"train/diff": {{"equals": -0.5}}, "train/*": {{"min": 0, "max": 2.5, "finite": False}}}},
    labels=["gpu-ci"], nightly=True, disabled="until it fits", timeout=7.5, num_cpus=2, num_gpus=4,
    platforms=["cuda-*"], seed=3, quarantine={{"reason": "flaky driver", "until": "2030-01-31"}},
)
"""
    test = read(repo, source)

    assert (test.test_id, test.stem, test.line) == ("tests/e2e/test_a.py", "test_a", 4)
    assert test.file == repo / "tests/e2e/test_a.py"
    assert (test.est_time, test.suite, test.profile, test.timeout) == (30.0, "short-cpu", "cuda", 7.5)
    assert (test.script, test.command) == ("scripts/run.py", None)
    assert test.args == ("--num-rollout", "2", "--deterministic-mode")
    assert test.env == {"HF_HOME": "${CACHE}/hf"}
    assert test.metrics == ("rollout/reward/raw_mean", "train/*")
    assert test.tolerances == {"train/kl": Tolerance(atol=1e-7, reason="why")}
    assert test.observe == ("perf/*",)
    assert test.invariant("train/diff") == Invariant(equals=-0.5)
    assert test.invariant("train/loss") == Invariant(min=0, max=2.5, finite=False)
    assert test.invariant("rollout/reward/raw_mean") == Invariant()
    assert (test.labels, test.nightly, test.disabled) == (("gpu-ci",), True, "until it fits")
    assert (test.num_cpus, test.num_gpus, test.seed) == (2, 4, 3)
    assert test.requires_verdict("cuda-nvidia-h200")
    assert not test.requires_verdict("cpu-x86_64-portable")
    assert test.quarantine == Quarantine("flaky driver", datetime.date(2030, 1, 31))
    assert not test.quarantine.blocks_on(datetime.date(2030, 1, 30))
    assert test.quarantine.blocks_on(datetime.date(2030, 1, 31))
    assert [str(test.policies().policy(m)) for m in ("train/kl", "train/loss", "perf/s", "x")] == [
        "atol=1e-07",
        "strict",
        "observe",
        "unregistered",
    ]
    assert test.policies(frozenset({"x"})).policy("x").kind is PolicyKind.STRICT


def test_defaults(repo: Path) -> None:
    test = read(repo, VALID)
    assert (test.profile, test.timeout, test.num_cpus, test.num_gpus) == ("cpu-portable", 180.0, 1, 0)
    assert (test.seed, test.disabled, test.quarantine, test.nightly) == (None, None, None, False)
    assert test.requires_verdict("anything")
    assert read(repo, VALID.replace("est_time=60", "est_time=5")).timeout == 60.0
    assert read(repo, VALID.replace("est_time=60", "est_time=60, num_gpus=1")).profile == "cuda"


@pytest.mark.parametrize(
    "source",
    [
        VALID.replace(IMPORT, "from e2e_registry import register_e2e_ci as reg\n").replace("register_e2e_ci(", "reg("),
        VALID.replace(IMPORT, "import e2e_registry as e2e\n").replace("register_e2e_ci(", "e2e.register_e2e_ci("),
        VALID.replace(IMPORT, "import e2e_registry.registration\n").replace(
            "register_e2e_ci(", "e2e_registry.registration.register_e2e_ci("
        ),
        VALID.replace(IMPORT, "from e2e_registry import registration\n").replace(
            "register_e2e_ci(", "registration.register_e2e_ci("
        ),
        VALID.replace("register_e2e_ci(", "TEST: object = register_e2e_ci("),
        "\ufeff" + VALID,
        VALID.replace("\n", "\r\n"),
        "# -*- coding: latin-1 -*-\n# \xe9\n".encode("latin-1") + VALID.encode("latin-1"),
        "if True:\n    EXTRA = 1\n" + VALID + "\nif __name__ == '__main__':\n    main(__file__)\n",
    ],
)
def test_ways_to_write_the_call(repo: Path, source: str | bytes) -> None:
    assert read(repo, source).metrics == ("train/loss", "train/log_*")


def test_tolerances_under_another_name_and_as_constants(repo: Path) -> None:
    source = """import e2e_registry as e2e
from e2e_registry import Tolerance as Tol
from e2e_registry.tolerance import Tolerance
LOOSE = Tol(rtol=+1e-3, reason="cuDNN " "picks")
TOLERANCES = {"train/a": LOOSE, "train/b": e2e.Tolerance(ulp=4, reason="r"), "train/c": Tolerance(atol=1, reason="r")}
METRICS: list = ["train/" + "a", *("train/b", "train/c")]
e2e.register_e2e_ci(est_time=1, suite="long", script="scripts/run.py", metrics=METRICS, tolerances=TOLERANCES)
"""
    test = read(repo, source)
    assert test.metrics == ("train/a", "train/b", "train/c")
    assert test.tolerances == {
        "train/a": Tolerance(rtol=1e-3, reason="cuDNN picks"),
        "train/b": Tolerance(ulp=4, reason="r"),
        "train/c": Tolerance(atol=1, reason="r"),
    }


def test_reading_never_runs_the_file(repo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    read(repo, f"open({str(trace)!r}, 'w')\nimport no_such_module\n{VALID}raise SystemExit(9)\n")
    assert not trace.exists()


# --- The command line


def test_argv_and_what_is_recorded_of_it(repo: Path) -> None:
    test = read(
        repo,
        call(
            {
                "args": '["--out={run_dir}/x", "${DATA}/a", "{seed}{other}", "$DATA", "{{run_dir}}", "${seed}"]',
                "seed": "3",
            }
        ),
    )
    environ = {"DATA": "/d/{run_dir}", "seed": "from a variable"}

    assert test.argv(run_dir=Path("/r"), python="py", environ=environ) == [
        *("py", "scripts/run.py", "--out=/r/x", "/d/{run_dir}/a", "3{other}", "$DATA", "{/r}", "from a variable")
    ]
    assert test.argv(run_dir="/r", seed=4, environ=environ)[4] == "4{other}"
    assert test.argv(run_dir="/r", environ=environ)[0] == sys.executable
    assert test.recorded_argv == (
        *("python", "scripts/run.py", "--out={run_dir}/x", "${DATA}/a", "3{other}", "$DATA", "{{run_dir}}", "${seed}"),
    )
    assert test.with_seed(4).recorded_argv[4] == "4{other}"


def test_a_seed_that_nothing_places_is_appended(repo: Path) -> None:
    script = read(repo, call({"args": '["-v"]', "seed": "0"}))
    assert script.argv(run_dir="r", python="py") == ["py", "scripts/run.py", "-v", "--seed", "0"]
    assert script.recorded_argv == ("python", "scripts/run.py", "-v", "--seed", "0")
    assert script.argv(run_dir="r", python="py", seed=7)[-2:] == ["--seed", "7"]

    command = read(repo, call({"script": None, "command": '["torchrun", "train.py"]', "args": '["-v"]'}))
    assert command.argv(run_dir="r") == ["torchrun", "train.py", "-v"]
    assert command.argv(run_dir="r", seed=7) == ["torchrun", "train.py", "-v", "--seed", "7"]
    assert command.recorded_argv == ("torchrun", "train.py", "-v")

    placed = read(repo, call({"script": None, "command": '["a", "--seed", "{seed}", "--seed={seed}"]', "seed": "5"}))
    assert placed.argv(run_dir="r") == ["a", "--seed", "5", "--seed=5"]


def test_variables_of_the_recipe(repo: Path) -> None:
    test = read(repo, call({"env": '{"A": "${HOME}/{run_dir}/{seed}", "B": "{}"}', "seed": "5"}))
    assert test.launch_env(run_dir="r", environ={"HOME": "/h"}) == {"A": "/h/r/5", "B": "{}"}
    assert test.recorded_env == {"A": "${HOME}/{run_dir}/5", "B": "{}"}
    assert "--seed" not in test.recorded_argv


def test_a_variable_that_is_not_set_is_named_with_its_place(repo: Path) -> None:
    source = call({"args": '["-v",\n        "${DATA}/a"]', "env": '{"A": "${CACHE}"}'})
    test = read(repo, source)
    with pytest.raises(RegistrationError) as caught:
        test.argv(run_dir="r", environ={})
    assert caught.value.where == f"tests/e2e/test_a.py:{line_of(source, '${DATA}')}:args[1]"
    assert caught.value.message == "variable DATA is not set"
    with pytest.raises(RegistrationError, match=r":env\['A'\]: variable CACHE is not set"):
        test.launch_env(run_dir="r", environ={})


def test_a_seed_cannot_override_one_that_is_written_out(repo: Path) -> None:
    test = read(repo, call({"args": '["--seed=1"]'}))
    assert test.argv(run_dir="r", python="py") == ["py", "scripts/run.py", "--seed=1"]
    with pytest.raises(RegistrationError, match=r":args\[0\]: '--seed=1' and seed= both set the seed"):
        test.argv(run_dir="r", seed=2)
    with pytest.raises(UsageError, match="seed=True must be a whole number"):
        read(repo, VALID).with_seed(True)


TEXTS = st.lists(st.sampled_from(["{run_dir}", "{seed}", "{", "}", "{}", "a", "é", '{"k": 1}', " "]), max_size=5).map(
    "".join
)


@given(args=st.lists(TEXTS, max_size=3))
def test_placeholders_are_replaced_as_by_str_replace(repo: Path, args: list[str]) -> None:
    test = read(repo, call({"args": repr(args), "seed": "12"}))
    expected = [text.replace("{run_dir}", "/run").replace("{seed}", "12") for text in args]
    appended = [] if any("{seed}" in text for text in args) else ["--seed", "12"]
    assert test.argv(run_dir="/run", python="py", environ={}) == ["py", "scripts/run.py", *expected, *appended]


# --- Executing and reading agree

NAMES = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="*?["), min_size=1, max_size=6)
REASONS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8).filter(
    lambda text: "{seed}" not in text and not text.startswith("--seed")
)
BOUNDS = st.floats(min_value=0, max_value=1e300, exclude_min=True)


def tolerances() -> st.SearchStrategy[Tolerance]:
    one_point = st.builds(
        Tolerance,
        atol=st.one_of(BOUNDS, st.integers(1, 10**20)),
        rtol=BOUNDS,
        ulp=st.integers(0, 2**70),
        fails_on=st.sampled_from([None, "increase", "decrease"]),
        reason=REASONS,
    )
    reduced = st.builds(
        Tolerance,
        rtol=BOUNDS,
        reduce=st.sampled_from(["median", "mean", "last"]),
        skip_first=st.integers(0, 9),
        reason=REASONS,
    )
    return one_point | reduced


@st.composite
def registrations(draw: st.DrawFn) -> dict[str, object]:
    metrics = [f"train/{name}" for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))]
    metrics += draw(st.sampled_from([[], ["train/*"], ["rollout/[ab]?"]]))
    observe = [f"perf/{name}" for name in draw(st.lists(NAMES, max_size=2, unique=True))]
    number = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
    invariant = st.fixed_dictionaries({"equals": number}, optional={"finite": st.booleans()})
    optional = {
        "args": st.lists(VALUES | st.sampled_from(["{run_dir}", "${HOME}", "-1"]), max_size=4),
        "env": st.dictionaries(st.from_regex(r"[A-D_][A-Za-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=3),
        "profile": st.sampled_from(["cpu-portable", "cpu-native", "cuda"]),
        "tolerances": st.dictionaries(st.sampled_from(metrics), tolerances(), max_size=3),
        "invariants": st.dictionaries(st.sampled_from(metrics + observe), invariant, max_size=3),
        "labels": st.sampled_from([[], ["gpu-ci"], ("gpu-ci",)]),
        "nightly": st.booleans(),
        "disabled": st.none() | REASONS,
        "timeout": st.none() | st.integers(1, 10**7) | st.floats(1e-3, 1e7),
        "num_cpus": st.integers(1, 512),
        "num_gpus": st.integers(0, 64),
        "platforms": st.sampled_from([["cpu-*"], ["cuda-[!b]*", "cpu-x86_64-portable"]]),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "quarantine": st.none()
        | st.builds(lambda reason, until: {"reason": reason, "until": until.isoformat()}, REASONS, st.dates()),
    }
    program = draw(st.sampled_from([{"script": "scripts/run.py"}, {"command": ["bash", "-c", "echo"], "script": None}]))
    required = {
        "est_time": draw(st.integers(1, 10**7) | st.floats(1e-3, 1e7)),
        "suite": draw(st.sampled_from(["short-cpu", "long"])),
        "metrics": draw(st.sampled_from([list, tuple]))(metrics),
        "observe": observe,
    }
    return {**required, **program, **draw(st.fixed_dictionaries({}, optional=optional))}


@given(keywords=registrations(), data=st.data())
def test_reading_equals_executing(repo: Path, keywords: dict[str, object], data: st.DataObject) -> None:
    order = data.draw(st.permutations(list(keywords)))
    hoisted = data.draw(st.sets(st.sampled_from(order)))
    constants = "".join(f"{name.upper()} = {keywords[name]!r}\n" for name in hoisted)
    arguments = ",\n  ".join(f"{name}={name.upper() if name in hoisted else repr(keywords[name])}" for name in order)
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    source = f"{IMPORT}{constants}TEST = register_e2e_ci({arguments})\n".replace("\n", newline)

    test = read(repo, data.draw(st.sampled_from(["", "\ufeff"])) + source)

    assert test == execute(test.file)
    assert set(keywords) <= set(test.argument_lines)
    for name in order:
        assert test.argument_lines[name] == line_of(source, f"{name.upper()} = " if name in hoisted else f"{name}=")


# --- Refusals of what the keywords say, with file, line and argument

#: Changed keywords, the text whose line is named, the argument that is named, and a part of the message. Executing
#: the same call must say the same, with the line of the call.
REFUSED: list[tuple[dict[str, str | None], str, str, str]] = [
    ({"metrics": None}, "register", "metrics", "metrics is missing"),
    ({"est_time": None}, "register", "est_time", "est_time is missing"),
    ({"suite": None}, "register", "suite", "suite is missing"),
    ({"script": None}, "register", "script", "nothing to run"),
    ({"metrics": "[]"}, "metrics=", "metrics", "no metrics"),
    ({"tolerance": "{}"}, "tolerance=", "tolerance", "unknown keyword\n  did you mean 'tolerances'?"),
    ({"metrics": '"train/loss"'}, "metrics=", "metrics", "must be a list of strings, not 'train/loss'"),
    ({"metrics": '["a",\n 1]'}, " 1]", "metrics[1]", "must be a string, not 1"),
    ({"metrics": '["a", " "]'}, "metrics=", "metrics[1]", "is an empty name"),
    ({"metrics": '["a", "b\\n"]'}, "metrics=", "metrics[1]", "has spaces around it"),
    ({"metrics": '["a", " b"]'}, "metrics=", "metrics[1]", "' b' has spaces around it"),
    ({"metrics": '["a", "\\ud800"]'}, "metrics=", "metrics[1]", "characters that cannot be printed"),
    ({"metrics": '["a", "b",\n "a"]'}, ' "a"]', "metrics[2]", "'a' is listed twice\n  remove it here or at metrics[0]"),
    ({"est_time": "True"}, "est_time=", "est_time", "must be a number of seconds, not True"),
    ({"est_time": '"60"'}, "est_time=", "est_time", "must be a number of seconds, not '60'"),
    ({"est_time": "None"}, "est_time=", "est_time", "must be a number of seconds, not None"),
    ({"est_time": "0"}, "est_time=", "est_time", "must be above 0"),
    ({"est_time": "1e999"}, "est_time=", "est_time", "at most a year of seconds, not inf"),
    ({"est_time": "1" + "0" * 400}, "est_time=", "est_time", "at most a year of seconds"),
    ({"timeout": "-5"}, "timeout=", "timeout", "must be above 0"),
    ({"timeout": "True"}, "timeout=", "timeout", "must be a number of seconds, not True"),
    ({"suite": '"short"'}, "suite=", "suite", "unknown suite 'short'\n  did you mean 'short-cpu'?"),
    ({"suite": '"x"'}, "suite=", "suite", "known: long, short-cpu (suites are listed in /"),
    ({"suite": '""'}, "suite=", "suite", "is an empty name"),
    ({"suite": "3"}, "suite=", "suite", "must be a string, not 3"),
    ({"labels": '["gpu"]'}, "labels=", "labels[0]", "unknown label 'gpu'"),
    ({"nightly": "1"}, "nightly=", "nightly", "must be True or False, not 1"),
    ({"disabled": "True"}, "disabled=", "disabled", "must be the reason, as a string, not True"),
    ({"disabled": '" "'}, "disabled=", "disabled", "must be the reason, as a string, not ' '"),
    ({"num_cpus": "0"}, "num_cpus=", "num_cpus", "must be a whole number from 1 on, not 0"),
    ({"num_cpus": "1.0"}, "num_cpus=", "num_cpus", "must be a whole number from 1 on, not 1.0"),
    ({"num_gpus": "True"}, "num_gpus=", "num_gpus", "must be a whole number from 0 on, not True"),
    ({"num_gpus": "-1"}, "num_gpus=", "num_gpus", "must be a whole number from 0 on, not -1"),
    ({"seed": "-1"}, "seed=", "seed", "must be a whole number from 0 to 2**64 - 1, not -1"),
    ({"seed": "True"}, "seed=", "seed", "must be a whole number from 0 to 2**64 - 1, not True"),
    ({"seed": str(2**64)}, "seed=", "seed", "must be a whole number from 0 to 2**64 - 1, not 18446744073709551616"),
    ({"seed": '"3"'}, "seed=", "seed", "must be a whole number from 0 to 2**64 - 1, not '3'"),
    ({"seed": f"1{'0' * 20}"}, "seed=", "seed", "must be a whole number from 0 to 2**64 - 1, not 1000"),
    ({"est_time": f"0x{'f' * 5000}"}, "est_time=", "est_time", "not an integer of thousands of digits"),
    ({"profile": '"cpu"'}, "profile=", "profile", "unknown profile 'cpu'\n  "),
    ({"script": '"scripts/none.py"'}, "script=", "script", "'scripts/none.py' does not exist"),
    ({"script": '"scripts"'}, "script=", "script", "'scripts' is a folder"),
    ({"script": '"../run.py"'}, "script=", "script", "'../run.py' leaves the root through '..'"),
    ({"script": '"/bin/sh"'}, "script=", "script", "'/bin/sh' is not relative"),
    ({"script": '"scripts/outside.py"'}, "script=", "script", "is a link that leaves the root"),
    ({"script": '""'}, "script=", "script", "is an empty name"),
    ({"command": '["a"]'}, "command=", "command", "script and command exclude each other"),
    ({"script": None, "command": "[]"}, "command=", "command", "names no program"),
    ({"script": None, "command": '["", "x"]'}, "command=", "command", "names no program"),
    ({"script": None, "command": '["a", "--seed=1"]', "seed": "1"}, "command=", "command[1]", "both set the seed"),
    ({"script": None, "command": '"bash x"'}, "command=", "command", "must be a list of strings, not 'bash x'"),
    ({"script": None, "command": '["a", 2]'}, "command=", "command[1]", "must be a string, not 2\n  write '2'"),
    ({"args": '["a",\n 0.5]'}, " 0.5", "args[1]", "must be a string, not 0.5\n  write '0.5'"),
    ({"args": "None"}, "args=", "args", "must be a list of strings, not None"),
    ({"args": '["a\\0"]'}, "args=", "args[0]", "holds a NUL"),
    ({"args": '["\\ud800"]'}, "args=", "args[0]", "half of a surrogate pair"),
    ({"args": '["{seed}"]'}, "args=", "args[0]", "{seed} is used, but no seed is registered"),
    ({"env": '{"A": "{seed}"}'}, "env=", "env['A']", "{seed} is used, but no seed is registered"),
    ({"args": '["-v", "--seed", "1"]', "seed": "1"}, "args=", "args[1]", "'--seed' and seed= both set the seed"),
    ({"env": '["A=1"]'}, "env=", "env", "must be a dict"),
    ({"env": '{"A": 1}'}, "env=", "env['A']", "must be a string, not 1\n  write '1'"),
    ({"env": '{"A=B": "1"}'}, "env=", "env['A=B']", "'A=B' is not the name of a variable"),
    ({"env": '{"E2E_REGISTRY_RUN_DIR": "x"}'}, "env=", "env['E2E_REGISTRY_RUN_DIR']", "belongs to the launcher"),
    ({"env": '{"E2E_METRICS_JSONL": "x"}'}, "env=", "env['E2E_METRICS_JSONL']", "belongs to the launcher"),
    (
        {"tolerances": '{"train/loss": 1e-7}'},
        "tolerances=",
        "tolerances['train/loss']",
        "must be a Tolerance, not 1e-07",
    ),
    (
        {"tolerances": '{\n  "train/los": Tolerance(ulp=1, reason="r")}'},
        '"train/los":',
        "tolerances['train/los']",
        "tolerance for an unregistered metric 'train/los'\n  did you mean 'train/loss'?",
    ),
    (
        {"tolerances": '{"trian/*": Tolerance(ulp=1, reason="r")}'},
        "tolerances=",
        "tolerances['trian/*']",
        "unregistered metric 'trian/*'",
    ),
    (
        {"tolerances": '{"train/log_p": Tolerance(ulp=1, reason="r")}', "observe": '["train/log_p"]'},
        "tolerances=",
        "tolerances['train/log_p']",
        "is observed, never judged",
    ),
    ({"observe": '["a",\n "train/loss"]'}, ' "train/loss"]', "observe[1]", "'train/loss' is also in metrics"),
    ({"observe": '["train/*"]', "metrics": '["train/loss"]'}, "observe=", "observe", "the test would judge nothing"),
    ({"observe": '["a", ""]'}, "observe=", "observe[1]", "is an empty name"),
    ({"invariants": '{"x": {"min": 0}}'}, "invariants=", "invariants['x']", "neither registered nor observed: 'x'"),
    ({"invariants": '{"train/loss": {}}'}, "invariants=", "invariants['train/loss']", "must be a dict with some of"),
    ({"invariants": '{"train/loss": 3}'}, "invariants=", "invariants['train/loss']", "must be a dict with some of"),
    (
        {"invariants": '{"train/loss": {"mim": 0}}'},
        "invariants=",
        "invariants['train/loss']['mim']",
        "unknown key 'mim'\n  did you mean 'min'?",
    ),
    (
        {"invariants": '{"train/loss": {"min": 2,\n "max": 1}}'},
        "invariants=",
        "invariants['train/loss']",
        "min=2 is above max=1",
    ),
    ({"invariants": '{"train/loss": {"min": True}}'}, "invariants=", "invariants['train/loss']", "must be a number"),
    (
        {"invariants": f'{{"train/loss": {{"min": 1{"0" * 400}}}}}'},
        "invariants=",
        "invariants['train/loss']",
        "a number is too large for a float64",
    ),
    ({"platforms": "[]"}, "platforms=", "platforms", "no verdict would ever be required"),
    ({"platforms": '["cpu /"]'}, "platforms=", "platforms[0]", "can match no platform slug"),
    ({"quarantine": '{"reason": "r"}'}, "quarantine=", "quarantine", "must be a dict"),
    ({"quarantine": '{"reason": "r", "until": "31.01.2030"}'}, "quarantine=", "quarantine['until']", "is not a date"),
    ({"quarantine": '{"reason": "r", "until": "20300131"}'}, "quarantine=", "quarantine['until']", "is not a date"),
    ({"quarantine": '{"reason": "r", "until": "2030-02-30"}'}, "quarantine=", "quarantine['until']", "is not a date"),
    ({"quarantine": '{"reason": "", "until": "2030-01-31"}'}, "quarantine=", "quarantine['reason']", "not empty"),
]


@pytest.mark.parametrize(("changes", "marked", "argument", "says"), REFUSED)
def test_refused_keywords(repo: Path, changes: dict[str, str | None], marked: str, argument: str, says: str) -> None:
    outside, link = repo.parent / "outside.py", repo / "scripts/outside.py"
    outside.touch()
    if not link.is_symlink():
        link.symlink_to(outside)
    source = call(changes)
    place = "register_e2e_ci(\n" if marked == "register" else f" {marked.strip()}"

    error = refusal(repo, source)

    assert error.where == f"tests/e2e/test_a.py:{line_of(source, place)}:{argument}"
    assert says in str(error)
    with pytest.raises(RegistrationError) as executed:
        execute(repo / "tests/e2e/test_a.py")
    assert executed.value.where == f"tests/e2e/test_a.py:{line_of(source, 'TEST =')}:{argument}"
    assert (executed.value.message, executed.value.hint) == (error.message, error.hint)


# --- Refusals of how it is written


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("os.environ['X']", "`os.environ['X']`"),
        ("['a', f'{X}']", "`f'{X}'`"),
        ("['a' * 3]", "`'a' * 3`"),
        ("[name for name in X]", "`[name for name in X]`"),
        ("{'a', 'b'}", "`{'a', 'b'}`"),
        ("[b'a']", "`b'a'`"),
        ("list(X)", "`list(X)`"),
        ("X if 1 else X", "`X if 1 else X`"),
        ("X[0:1]", "`X[0:1]`"),
        ("['a'] + ('b',)", "`['a'] + ('b',)` concatenates no two"),
        ("60 + 2", "`60 + 2` concatenates no two"),
        (f"60 + 0x{'f' * 5000}", "`BinOp` concatenates no two"),
        ("['a', *'bc']", "`*'bc'` unpacks no list"),
        ("[...]", "`...`"),
        ("Tolerance(atol=1, reason='r').reason", "`Tolerance(atol=1, reason='r').reason`"),
        ("-True", "`-True`"),
    ],
)
def test_expressions_that_would_have_to_run(repo: Path, expression: str, named: str) -> None:
    source = call({"metrics": expression}, before="X = ['a']\n")
    error = refusal(repo, source)
    place = (
        "metrics[1]"
        if expression.startswith(("['a', ", "['a', *"))
        else "metrics[0]"
        if expression[0] == "["
        else "metrics"
    )
    if expression.startswith(("[name", "['a'] +")):
        place = "metrics"
    assert error.where == f"tests/e2e/test_a.py:{line_of(source, 'metrics=')}:{place}"
    assert error.message.startswith(named)
    assert "the file is read, not run; allowed are strings, numbers" in str(error.hint)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("", "", "`X` is not a module-level constant"),
        ("X = ['a']\nX = ['b']\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("X = ['a']\n", "X = ['b']\n", "`X` is assigned more than once, on lines 2 and 9"),
        ("X = ['a']\nX += ['b']\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("X = ['a']\ndel X\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("X = ['a']\nfor X in 'ab': pass\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("X = ['a']\nwith open('f') as X: pass\n", "", "`X` is assigned more than once"),
        ("X = ['a']\nprint([X := y for y in 'ab'])\n", "", "`X` is assigned more than once"),
        ("X = ['a']\nmatch 3:\n    case X: pass\n", "", "`X` is assigned more than once, on lines 2 and 4"),
        ("X = ['a']\ndef f():\n    global X\n    X = 3\n", "", "`X` is assigned more than once, on lines 2 and 4"),
        ("X = ['a']\ndef f(a=(X := 3)): pass\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("X = ['a']\ntry: pass\nexcept OSError as X: pass\n", "", "`X` is assigned more than once, on lines 2 and 4"),
        ("X = Y = ['a']\n", "", "`X` is assigned other than by a statement `NAME = literal` of its own on line 2"),
        ("X = ['a']\nimport os as X\n", "", "`X` is assigned more than once, on lines 2 and 3"),
        ("import os as X\n", "", "`X` is imported on line 2: no constant"),
        ("def X(): pass\n", "", "`X` is a class or function on line 2: no constant"),
        ("X, Y = ['a'], 3\n", "", "`X` is assigned other than by a statement `NAME = literal` of its own on line 2"),
        (
            "if 1:\n    X = ['a']\n",
            "",
            "`X` is assigned other than by a statement `NAME = literal` of its own on line 3",
        ),
        ("", "X = ['a']\n", "`X` is assigned on line 8, after its use"),
        ("X = Y\nY = ['a']\n", "", "`Y` is assigned on line 3, after its use"),
        ("X = X\n", "", "`X` is assigned on line 2, after its use"),
        ("X = ['a']\nX.append('b')\n", "", "`X` is changed on line 3, by `X.append`"),
        ("X = ['a']\nX[0] = 'b'\n", "", "`X` is changed on line 3, by `X[0]`"),
        ("X = ['a']\ndel X[:]\n", "", "`X` is changed on line 3, by `X[:]`"),
        ("X: list\n", "", "`X` is not a module-level constant"),
    ],
)
def test_constants_that_are_none(repo: Path, before: str, after: str, says: str) -> None:
    source = call({"metrics": "X"}, before) + after
    error = refusal(repo, source)
    assert error.where is not None
    assert error.where.startswith("tests/e2e/test_a.py:")
    assert error.where.endswith(":metrics")
    assert error.message.startswith(says)


def test_names_that_only_look_like_the_constant(repo: Path) -> None:
    before = "X = ['a']\ndef f(X):\n    Y = X = 3\n    return [X for X in X]\nZ = [X for X in 'ab']\nW = lambda X: X\n"
    assert read(repo, call({"metrics": "X"}, before)).metrics == ("a",)


@pytest.mark.parametrize(
    ("argument", "value", "where", "says"),
    [
        ("tolerances", "{'train/loss': Tolerance(1e-7)}", "tolerances['train/loss']", "`1e-07` has no keyword"),
        ("tolerances", "{'train/loss': Tolerance(**X)}", "tolerances['train/loss']", "`**X` cannot be read"),
        (
            "tolerances",
            "{'train/loss': Tolerance(atl=1)}",
            "tolerances['train/loss'].atl",
            "unknown keyword of Tolerance",
        ),
        ("tolerances", "{'train/loss': Tolerance(atol=f())}", "tolerances['train/loss'].atol", "`f()` cannot be read"),
        ("tolerances", "{'train/loss': Tolerance()}", "tolerances['train/loss']", "all bounds are zero"),
        (
            "tolerances",
            "{'train/loss': Tolerance(atol=0, rtol=0.0)}",
            "tolerances['train/loss']",
            "all bounds are zero",
        ),
        ("tolerances", "{'train/loss': Tolerance(atol=1)}", "tolerances['train/loss']", "a tolerance needs a reason"),
        ("tolerances", "{'train/loss': Tolerance(atol=1, reason=' ')}", "tolerances['train/loss']", "needs a reason"),
        (
            "tolerances",
            "{'train/loss': Tolerance(rtol=-1, reason='r')}",
            "tolerances['train/loss']",
            "rtol=-1 is negative",
        ),
        (
            "tolerances",
            "{'train/loss': Tolerance(atol=1e999, reason='r')}",
            "tolerances['train/loss']",
            "must be finite",
        ),
        (
            "tolerances",
            f"{{'train/loss': Tolerance(atol=1{'0' * 400}, reason='r')}}",
            "tolerances['train/loss']",
            "too large",
        ),
        (
            "tolerances",
            "{'train/loss': Tolerance(atol=True, reason='r')}",
            "tolerances['train/loss']",
            "must be a number",
        ),
        ("tolerances", "{'train/loss': atol(1)}", "tolerances['train/loss']", "`atol(1)` cannot be read from source"),
        ("tolerances", "{**X}", "tolerances", "`**X` cannot be read from source"),
        ("env", "{'A': '1', 'A': '2'}", "env['A']", "'A' is listed twice"),
        ("env", "{1: '2'}", "env[1]", "key `1` must be a string"),
    ],
)
def test_what_is_wrong_in_a_dict_is_named_to_the_key(
    repo: Path, argument: str, value: str, where: str, says: str
) -> None:
    source = call({argument: value})
    error = refusal(repo, source)
    assert error.where == f"tests/e2e/test_a.py:{line_of(source, f'{argument}=')}:{where}"
    assert says in str(error)


@pytest.mark.parametrize(
    ("source", "where", "says"),
    [
        ("x = 1\n", ":1", "declares no test"),
        ("print(1)\n", ":1", "declares no test"),
        (VALID.replace(IMPORT, "from . import register_e2e_ci\n"), ":2", "is called, but is not"),
        (b"# coding: latin-1\nx = '\xe9' )\n", ":2", "unmatched ')'\n    x = '\u00e9' )\n            ^"),
        (VALID.replace(IMPORT, ""), ":1", "`register_e2e_ci` is called, but is not, or not only, imported"),
        (VALID.replace(IMPORT, "from .e2e_registry import register_e2e_ci\n"), ":2", "is called, but is not"),
        (
            VALID.replace("register_e2e_ci(", "def register_e2e_ci(): pass\nregister_e2e_ci("),
            ":3",
            "is called, but is not",
        ),
        (VALID + VALID, ":4", "calls register_e2e_ci twice, on lines 2 and 4"),
        (VALID + "if 0:\n    register_e2e_ci()\n", ":4", "calls register_e2e_ci twice, on lines 2 and 4"),
        (
            VALID.replace("register_e2e_ci(", "if 1: register_e2e_ci("),
            ":2",
            "must be a statement of its own at module level",
        ),
        (VALID.replace("register_e2e_ci(", "x = y = lambda: register_e2e_ci("), ":2", "must be a statement of its own"),
        (VALID.replace("register_e2e_ci(", "register_e2e_ci(3, "), ":2:arguments", "`3` has no keyword"),
        (VALID.replace("register_e2e_ci(", "register_e2e_ci(**X, "), ":2:arguments", "`**X` cannot be read"),
        ("from e2e_registry import *\n" + VALID, ":1", "`import *` hides which names it binds"),
        ("x = 1\nregister(\n", ":2", "'(' was never closed\n    register(\n            ^"),
        ("\tx = 1\n", ":1", "unexpected indent"),
        ("f(a=1,\n\ta=2)", ":2", "keyword argument repeated: a\n    \ta=2)\n    \t^"),
        (f"x = ({'1, ' * 50_000}", ":1", "was never closed"),
        (b"x = 1\n\xff = 2\n", ":2", "'utf-8' codec can't decode byte 0xff"),
        (b"x = 1\ny\0 = 2\n", ":2", "holds a NUL byte"),
        (b"# coding: no-such-codec\n", ":1", "unknown encoding: no-such-codec"),
        (f"x = {'-' * 20_000}1", "", "is nested too deeply to be read"),
        (VALID.replace('"short-cpu"', " + ".join(["'a'"] * 800)), "", "is nested too deeply to be read"),
    ],
)
def test_files_that_declare_no_test(repo: Path, source: str | bytes, where: str, says: str) -> None:
    error = refusal(repo, source)
    assert error.where == f"tests/e2e/test_a.py{where}"
    assert says in str(error)
    assert len(str(error)) < 600


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
@given(data=st.data())
def test_whatever_a_file_holds_the_error_is_typed(repo: Path, data: st.DataObject) -> None:
    whole = call({"tolerances": '{"train/loss": Tolerance(atol=1e-7, reason="r")}', "args": "X + ['b']"}, "X = ['a']\n")
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 12)))
    pieces = [
        "",
        "(",
        "]",
        "*X, ",
        "X",
        "None",
        "-1",
        "'",
        "\\",
        "lambda: ",
        "{}",
        "\0",
        "\n",
        "=",
        "**",
        "1j",
        "f''",
        ":=",
    ]
    source = whole[:start] + data.draw(st.sampled_from(pieces)) + whole[stop:]
    try:
        test = read(repo, source)
    except RegistrationError as error:
        place = error.where
    else:
        place = test.test_id
        with contextlib.suppress(NameError, ImportError, KeyError):  # what breaks elsewhere in the file
            assert test == execute(test.file)
    assert str(place).startswith("tests/e2e/test_a.py")


# --- Policies that need to know the dtype


def test_digests_have_no_tolerance(repo: Path) -> None:
    source = call(
        {
            "metrics": '["data/ids", "data/hash", "train/*"]',
            "tolerances": '{\n  "data/*": Tolerance(atol=1, reason="r"),\n  "data/ids": Tolerance(ulp=1, reason="r")}',
            "invariants": '{"train/x": {"min": 0}, "train/*": {"finite": False}}',
        }
    )
    test = read(repo, source)

    check_digest_policies(test, ["train/ids", "unregistered"])
    for metric, key in {"data/hash": "data/*", "data/ids": "data/ids"}.items():
        with pytest.raises(RegistrationError, match=f"metric '{metric}' is a digest") as caught:
            check_digest_policies(test, ["train/ids", metric])
        line = line_of(source, f'  "{key}": ')
        assert caught.value.where == f"tests/e2e/test_a.py:{line}:tolerances['{key}']"
    with pytest.raises(RegistrationError, match=r":invariants\['train/x'\]: metric 'train/x' is a digest"):
        check_digest_policies(test, ["train/x"])


def test_integers_have_no_ulps(repo: Path) -> None:
    exact, loose = 'Tolerance(atol=1, reason="r")', 'Tolerance(atol=1, ulp=2, reason="r")'
    test = read(repo, call({"tolerances": f'{{"train/loss": {loose}, "train/*": {exact}}}'}))
    check_ulp_policies(test, ["train/log_n", "other"])
    with pytest.raises(RegistrationError, match=r":tolerances\['train/loss'\]: metric 'train/loss' holds integers"):
        check_ulp_policies(test, ["train/loss"])


def test_two_globs_are_apart_only_if_no_name_answers_to_both() -> None:
    names = ["".join(letters) for size in range(7) for letters in itertools.product("abc", repeat=size)]
    plain = ["".join(tokens) for size in (1, 2, 3) for tokens in itertools.product("ab*?", repeat=size)]
    classes = ["".join(tokens) for tokens in itertools.product(["[ab]", "[!a]", "a", "*", "?"], repeat=2)]
    answering = {pattern: {n for n in names if fnmatch.fnmatchcase(n, pattern)} for pattern in {*plain, *classes}}
    for first, second in itertools.product(answering, repeat=2):
        if "[" in first and "[" in second:
            assert can_share_a_name(first, second) or not answering[first] & answering[second]
        else:
            assert can_share_a_name(first, second) == bool(answering[first] & answering[second]), (first, second)


@pytest.mark.parametrize("unclosed", ["a[", "a[]", "a[!]", "a[!"])
def test_a_bracket_that_opens_no_class_is_a_character(unclosed: str) -> None:
    assert can_share_a_name(unclosed, "a*")
    assert can_share_a_name(f"{unclosed}*", f"?{unclosed[1:]}")
    assert not can_share_a_name(f"{unclosed}*", "b*")
    assert not can_share_a_name(f"{unclosed}?", "ab*")


# --- Finding tests


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return make_repo(tmp_path / "fresh")


def load(root: Path) -> Settings:
    return load_settings(root, environ={})


def test_discovery_is_sorted_by_id_and_passes_by_what_is_no_test(fresh: Path) -> None:
    for name in ["short/test_b.py", "short/deep/test_c.py", "test_z.py", "short/test_B2.py", "a/test_y.py"]:
        put(fresh, VALID, f"tests/e2e/{name}")
    for name in [
        "conftest.py",
        "test_data.json",
        ".hidden/test_h.py",
        "__pycache__/test_p.py",
        "helper.py",
        "mytest_x.py",
    ]:
        put(fresh, "not Python (", f"tests/e2e/{name}")
    put(fresh, VALID, "tests/unit/test_unit.py")
    with (fresh / "pyproject.toml").open("a") as file:
        file.write('run_folder = "tests/e2e/runs"\n')
    put(fresh, VALID, "tests/e2e/runs/1/test_z.py")

    ids = [test.test_id for test in discover(load(fresh))]

    assert ids == [
        *("tests/e2e/a/test_y.py", "tests/e2e/short/deep/test_c.py", "tests/e2e/short/test_B2.py"),
        *("tests/e2e/short/test_b.py", "tests/e2e/test_z.py"),
    ]
    assert ids == [test.test_id for test in discover(load(fresh / "tests/e2e/short"))]


def test_overlapping_folders_find_a_test_once(fresh: Path) -> None:
    put(fresh, VALID, "tests/e2e/short/test_b.py")
    (fresh / "pyproject.toml").write_text('[tool.e2e_registry]\ntest_folders = ["tests/e2e/short", "tests"]\n')
    assert [test.test_id for test in discover(load(fresh))] == ["tests/e2e/short/test_b.py"]


def test_discovery_names_every_file_that_cannot_be_accepted(fresh: Path) -> None:
    put(fresh, VALID, "tests/e2e/test_ok.py")
    put(fresh, "x = 1\n", "tests/e2e/test_none.py")
    with pytest.raises(RegistrationError) as one:
        discover(load(fresh))
    assert one.value.where == "tests/e2e/test_none.py:1"

    put(fresh, "x = (\n", "tests/e2e/test_broken.py")
    with pytest.raises(RegistrationError) as two:
        discover(load(fresh))
    assert two.value.message.startswith(
        "2 test files cannot be accepted:\ntests/e2e/test_broken.py:1: is not valid Python"
    )
    assert "\ntests/e2e/test_none.py:1: declares no test" in two.value.message


@pytest.mark.parametrize("other", ["test_a.py", "test_A.py"])
def test_two_tests_with_one_stem_are_refused(fresh: Path, other: str) -> None:
    first, second = put(fresh, VALID, "tests/e2e/one/test_a.py"), put(fresh, VALID, f"tests/e2e/two/{other}")
    for attempt in (
        lambda: discover(load(fresh)),
        lambda: find_test(load(fresh), first),
        lambda: find_test(load(fresh), second),
    ):
        with pytest.raises(RegistrationError, match=r"has the stem of tests/e2e/one/test_a\.py") as caught:
            attempt()
        assert caught.value.where == f"tests/e2e/two/{other}"


def test_a_file_name_that_would_make_standards_ambiguous(fresh: Path) -> None:
    put(fresh, VALID, "tests/e2e/test_a.b.py")
    with pytest.raises(RegistrationError, match=r"^tests/e2e/test_a\.b\.py: the name of a test file may hold no dot"):
        discover(load(fresh))


def test_a_missing_test_folder_is_an_error_only_if_it_was_asked_for(tmp_path: Path) -> None:
    assert discover(Settings(root=tmp_path)) == []
    (tmp_path / "pyproject.toml").write_text('[tool.e2e_registry]\ntest_folders = ["tests/e2", "tests"]\n')
    with pytest.raises(UsageError, match=r"tests/e2 does not exist"):
        discover(load(tmp_path))


def test_find_test_takes_a_path_or_an_id(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(fresh, VALID, "tests/e2e/short/test_b.py")
    outside = put(fresh, VALID, "elsewhere/declared.py")
    settings_ = load(fresh)
    monkeypatch.chdir(fresh / "tests")

    by = [
        find_test(settings_, given) for given in ("e2e/short/test_b.py", "tests/e2e/short/test_b.py", file, str(file))
    ]

    assert {test.test_id for test in by} == {"tests/e2e/short/test_b.py"}
    assert is_discovered(by[0], settings_)
    assert not is_discovered(find_test(settings_, outside), settings_)


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (
            "tests/e2e/short/test_bb.py",
            "there is no test tests/e2e/short/test_bb.py\n  did you mean 'tests/e2e/short/test_b.py'?",
        ),
        ("tests/e2e", "tests/e2e is a folder, not a test\n  name one file, or select with --suite or --all"),
    ],
)
def test_find_test_says_what_is_there_instead(fresh: Path, given_: str, says: str) -> None:
    put(fresh, VALID, "tests/e2e/short/test_b.py")
    with pytest.raises(UsageError) as caught:
        find_test(load(fresh), given_)
    assert str(caught.value) == says


def test_files_outside_the_root_have_no_id(fresh: Path, tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="lies outside the root"):
        find_test(load(fresh), put(tmp_path, VALID, "test_out.py"))
    with pytest.raises(RegistrationError, match=r"tests/e2e/test_gone\.py: does not exist"):
        read_registration(fresh / "tests/e2e/test_gone.py", load(fresh))
    with pytest.raises(RegistrationError, match=r"tests/e2e: cannot be read: Is a directory"):
        read_registration(fresh / "tests/e2e", load(fresh))


def test_a_link_to_a_test_is_a_test_of_its_own_name(fresh: Path) -> None:
    target = put(fresh, VALID, "shared/declared.py")
    (fresh / "tests/e2e/test_link.py").symlink_to(target)
    assert [test.test_id for test in discover(load(fresh))] == ["tests/e2e/test_link.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_path_that_is_no_text_is_refused(fresh: Path) -> None:
    Path(os.fsdecode(os.fsencode(fresh / "tests/e2e") + b"/test_\xff.py")).write_text(VALID)
    with pytest.raises(RegistrationError, match="must be printable UTF-8"):
        discover(load(fresh))


def test_ids_have_slashes_on_every_system() -> None:
    assert (
        id_below(PureWindowsPath(r"C:\repo"), PureWindowsPath(r"C:\repo\tests\e2e\test_a.py")) == "tests/e2e/test_a.py"
    )
    assert id_below(PurePosixPath("/repo"), PurePosixPath("/repo/tests/e2e/test_a.py")) == "tests/e2e/test_a.py"
    assert id_below(PurePosixPath("/repo"), PurePosixPath("/repository/test_a.py")) is None


# --- Executing


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Stand in for the command line, which is floors above."""
    seen: list[list[str]] = []
    app = types.ModuleType("e2e_registry.cli.app")
    app.main = lambda argv: seen.append(argv) or 3  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "e2e_registry.cli.app", app)
    return seen


def test_main_checks_that_one_test(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["test_a.py", "--json", "--jobs", "2"])
    with pytest.raises(SystemExit) as caught:
        main("tests/e2e/test_a.py")
    assert caught.value.code == 3
    assert commands == [["check", "--test", "tests/e2e/test_a.py", "--json", "--jobs", "2"]]


def test_a_script_that_is_refused_exits_as_the_command_does(repo: Path) -> None:
    file = put(repo, call({"suite": '"nightly"'}))
    ran = subprocess.run([sys.executable, "test_a.py"], cwd=file.parent, capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.USAGE
    assert ran.stderr.startswith("tests/e2e/test_a.py:2:suite: unknown suite 'nightly'")
    assert "Traceback" not in ran.stderr


def test_a_tolerance_that_is_refused_ends_a_test_file_as_the_command_does_and_no_other_program(repo: Path) -> None:
    bad = call({"tolerances": "{'train/loss': Tolerance(atol=-1, reason='r')}"})
    file = put(repo, bad)
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.USAGE
    line = line_of(bad, "Tolerance(atol=-1")
    assert ran.stderr == f"{file}:{line}:tolerances: atol=-1 is negative\n"
    program = (
        "from e2e_registry import RegistryError, Tolerance\ntry: Tolerance()\nexcept RegistryError: print('caught')"
    )
    (repo / "program.py").write_text(program)
    other = subprocess.run([sys.executable, repo / "program.py"], capture_output=True, text=True, check=False)
    assert (other.returncode, other.stdout) == (0, "caught\n")


def test_a_script_that_is_accepted_says_nothing(repo: Path) -> None:
    file = put(repo, VALID)
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_script_may_have_changed_its_folder(repo: Path) -> None:
    file = put(repo, f"import os\nos.chdir('/')\n{VALID}")
    ran = subprocess.run([sys.executable, file.name], cwd=file.parent, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["no_file", "__main__"])
def test_a_call_without_a_file_is_refused(name: str) -> None:
    with pytest.raises(RegistrationError, match="must be called from a file"):
        exec(VALID, {"__name__": name})


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"metrics": "{'train/loss'}"}, "metrics", "must be a list of strings, not {'train/loss'}"),
        ({"metrics": "iter(['a'])"}, "metrics", "must be a list of strings"),
        ({"env": "{1: 'x'}"}, "env[1]", "1 is not the name of a variable"),
        ({"tolerances": "{1: Tolerance(ulp=1, reason='r')}"}, "tolerances[1]", "must be a string, not 1"),
        ({"timeout": "float('nan')"}, "timeout", "must be above 0"),
        ({"invariants": "{'train/loss': {'min': float('nan')}}"}, "invariants['train/loss']", "must be a number"),
    ],
)
def test_values_that_only_running_code_can_pass(
    repo: Path, changes: dict[str, str | None], where: str, says: str
) -> None:
    file = put(repo, call(changes))
    with pytest.raises(RegistrationError, match=re.escape(says)) as caught:
        execute(file)
    assert caught.value.where == f"tests/e2e/test_a.py:2:{where}"


def test_listing_tests_imports_nothing_heavy(repo: Path) -> None:
    put(repo, VALID)
    code = (
        "import sys; from pathlib import Path; from e2e_registry.config import load_settings;"
        "from e2e_registry.registration import discover; assert discover(load_settings(Path.cwd()));"
        "print(sorted({'numpy', 'torch', 'ray', 'pandas', 'pyarrow', 'typer', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
