"""``doctor`` through the command line: the shell, tests, kept runs, and programs that know nothing of the registry."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from repositories import Repository, assert_golden

from e2e_registry.determinism.profiles import PROFILES

TEST = "tests/e2e/test_stub.py"
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out what the machine that runs the tests may set."""
    for profile in PROFILES.values():
        for variable in profile.settings:
            monkeypatch.delenv(variable.name, raising=False)


def script(repository: Repository, body: str, name: str = "train.py") -> tuple[str, str, str]:
    return "--", sys.executable, str(repository.write_recipe(body=body, name=name))


def findings(data: Any, process: int = 0) -> dict[str, str]:
    return {finding["subject"]: finding["code"] for finding in data["judged"][process]["findings"]}


def judged(repository: Repository, *arguments: str) -> dict[str, str]:
    result = repository.cli("doctor", "--json", *arguments)
    assert result.out, result.err
    assert result.json["exit_code"] == result.code
    return findings(result.json)


# ------------------------------------------------------------------------------------------------ commands


def test_the_workspace_unset_set_late_and_set_right_are_three_answers(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = script(repository, f"import os; os.environ['{CUBLAS}'] = ':4096:8'", "late.py")
    plain = script(repository, "print('trains')")
    assert judged(repository, "--profile", "cuda", *plain)[CUBLAS] == "variable-missing"
    assert judged(repository, "--profile", "cuda", *late)[CUBLAS] == "variable-late"
    shown = repository.cli("doctor", "--profile", "cuda", *late)
    assert shown.code == 1
    assert_golden("doctor_late", shown.out.replace(sys.executable, "python"), repository.root)
    monkeypatch.setenv(CUBLAS, ":4096:8")
    assert judged(repository, "--profile", "cuda", *plain)[CUBLAS] == "variable-ok"
    assert repository.cli("doctor", "--profile", "cuda", *plain).code == 1, "other pins are missing"


def test_a_command_runs_as_the_shell_would_run_it_unless_pins_are_asked_for(repository: Repository) -> None:
    command = script(repository, "import os; open('seen', 'w').write(str(os.environ.get('MKL_CBWR')))")
    bare = repository.cli("doctor", *command)
    assert bare.code == 1
    assert (repository.root / "seen").read_text() == "None"
    pinned = repository.cli("doctor", "--pinned", *command)
    assert pinned.code == 0, pinned.out
    assert (repository.root / "seen").read_text() == "COMPATIBLE"
    assert pinned.out.startswith("holds")


SELF_PORTRAIT = """
import json, os, sys, threading
facts = {
    "path": sys.path, "customized": os.environ.get("CUSTOMIZED"), "threads": threading.active_count(),
    "modules": sorted(name for name in sys.modules if name.startswith("e2e_registry")), "argv": sys.argv[1:],
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
}
open(sys.argv[1], "w").write(json.dumps(facts))
print("out"); print("err", file=sys.stderr)
{end}
"""

ENDS = {
    "returns": ("", 0),
    "exits": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError", 1),
    "leaves at once": ("sys.stdout.flush(); os._exit(5)", 5),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_is_observed_finds_all_as_it_was(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    own = repository.root / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['CUSTOMIZED'] = 'yes'\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    body, code = ENDS[end]
    command = script(repository, SELF_PORTRAIT.replace("{end}", body))
    runs = {
        "alone": repository.cli("run", *command, "alone.json"),
        "observed": repository.cli("doctor", "--pinned", "--json", *command, "observed.json"),
    }
    portraits = [json.loads((repository.root / f"{name}.json").read_text()) for name in runs]
    assert [portrait.pop("argv") for portrait in portraits] == [["alone.json"], ["observed.json"]]
    assert portraits[0] == portraits[1]
    assert portraits[0]["customized"] == "yes"
    outcomes = [json.loads((run / "run.json").read_text())["outcome"] for run in repository.runs]
    assert [outcome["exit_code"] for outcome in outcomes] == [code, code]
    logs = [(run / "output.log").read_text().replace("observed", "alone") for run in repository.runs]
    assert logs[0] == logs[1]
    data = runs["observed"].json
    assert findings(data)["PYTHONHASHSEED"] == "variable-ok", "the state was read at this end too"
    assert runs["observed"].code == (0 if code == 0 else 4)


def test_what_cannot_be_read_is_unknown_and_does_not_hold(repository: Repository) -> None:
    path = repository.write_recipe(body="import os, signal; os.kill(os.getpid(), signal.SIGKILL)", name="killed.py")
    for command in (
        ("--", sys.executable, "-I", "-c", "pass"),
        ("--", sys.executable, str(path)),
        ("--", "true"),
        ("--", str(repository.root / "absent")),
    ):
        result = repository.cli("doctor", "--pinned", "--json", *command)
        assert result.code == 1, command
        assert findings(result.json)["state"] == "state-unknown"
        assert findings(result.json)["PYTHONHASHSEED"] == "variable-ok", "what the launch gave is known"


def test_children_are_seen_and_the_program_that_trains_is_judged(repository: Repository) -> None:
    body = """
        import os, subprocess, sys
        if len(sys.argv) == 1:
            env = {**os.environ, "PYTHONHASHSEED": "7"}
            subprocess.run([sys.executable, __file__, "train", "--api-key", "SECRET"], env=env, check=True)
            subprocess.run(["sh", "-c", f"{sys.executable} -c pass"], check=True)
        else:
            import numpy
    """
    result = repository.cli("doctor", "--pinned", "--json", *script(repository, body))
    (process,) = result.json["judged"]
    assert process["processes"] == [f"{sys.executable} {repository.root}/scripts/train.py train --api-key '***'"]
    assert findings(result.json)["PYTHONHASHSEED"] == "variable-differs"
    assert len(result.json["unjudged"]) == 2
    (run,) = repository.runs
    assert not any("SECRET" in state.read_text() for state in run.glob("env.*.json"))


def test_a_child_that_is_killed_is_unknown_unless_those_that_train_say_so(repository: Repository) -> None:
    body = """
        import os, subprocess, sys
        if len(sys.argv) == 1:
            import numpy
            subprocess.run([sys.executable, __file__, "child"])
            {record}
        else:
            os.kill(os.getpid(), 9)
    """
    foreign = repository.cli("doctor", "--pinned", "--json", *script(repository, body.replace("{record}", "")))
    assert foreign.code == 1
    assert [process["processes"] for process in foreign.json["judged"]][1] == ["1 other Python process"]
    assert findings(foreign.json, 1)["state"] == "state-unknown"
    record = "from e2e_registry import MetricRecorder; MetricRecorder().log({'train/loss': 1.0}, step=0)"
    logging = repository.cli("doctor", "--pinned", "--json", *script(repository, body.replace("{record}", record)))
    assert logging.code == 0, logging.out
    assert [process["processes"] for process in logging.json["judged"]] == [["main rank 0"]]


@pytest.mark.slow
def test_a_launcher_is_not_judged_and_its_ranks_are(repository: Repository) -> None:
    body = """
        import torch
        from e2e_registry.determinism import make_deterministic
        make_deterministic(0)
        loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")
        if __name__ == "__main__":
            print(list(loader))
    """
    path = script(repository, body)[-1]
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path)
    result = repository.cli("doctor", "--pinned", "--json", "--", sys.executable, *ranks)
    assert result.code == 0, result.out
    (process,) = result.json["judged"]
    assert [name.endswith("train.py") for name in process["processes"]] == [True, True]
    assert findings(result.json)["deterministic_algorithms"] == "deterministic-on"
    assert any("torch.distributed.run" in name for name in result.json["unjudged"])
    assert sum("multiprocessing.spawn" in name for name in result.json["unjudged"]) == 2, "the data workers"
    loose = script(repository, "import torch; torch.backends.cudnn.benchmark = True", "loose.py")
    found = judged(repository, "--pinned", *loose)
    assert (found["deterministic_algorithms"], found["cudnn.benchmark"]) == ("deterministic-off", "cudnn-benchmark")


# ------------------------------------------------------------------------------------------------ tests


def test_a_test_is_judged_by_its_newest_kept_run_while_nothing_has_changed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit()
    first = repository.cli("doctor", "--test", TEST)
    assert first.code == 0, first.out
    assert len(repository.runs) == 1
    again = repository.cli("doctor", "--test", TEST)
    assert (again.code, len(repository.runs)) == (0, 1)
    assert "kept run of the same source tree" in again.out
    assert repository.cli("doctor", "--test", TEST, "--fresh").code == 0
    assert len(repository.runs) == 2
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    pinned = repository.cli("doctor", "--test", TEST, "--json")
    assert (pinned.code, len(repository.runs)) == (1, 3), "the environment has changed"
    assert findings(pinned.json)["MKL_CBWR"] == "variable-differs"
    monkeypatch.delenv("MKL_CBWR")
    repository.write_recipe("# another source tree")
    repository.cli("doctor", "--test", TEST)
    assert len(repository.runs) == 4
    assert repository.cli("doctor", "--test", TEST, "--profile", "cuda").code == 2


def test_a_test_that_logs_plain_lines_is_read_from_inside(repository: Repository) -> None:
    body = "import json, os; open(os.environ['E2E_METRICS_JSONL'], 'w').write(json.dumps({'step': 0, 'train/loss': 1}))"
    repository.write_recipe(body=body)
    result = repository.cli("doctor", "--test", TEST, "--json")
    assert result.code == 0, result.out
    assert "state" not in findings(result.json)
    (run,) = repository.runs
    read_later = repository.cli("doctor", str(run), "--json")
    assert read_later.json["judged"][0]["findings"] == result.json["judged"][0]["findings"]


# ------------------------------------------------------------------------------------------------ kept runs, shell


def test_a_kept_run_is_judged_by_what_its_writers_left(repository: Repository) -> None:
    repository.write_recipe("import os; os.environ['PYTHONHASHSEED'] = '7'")
    repository.cli("run", "--test", TEST)
    (run,) = repository.runs
    assert repository.cli("doctor", run).code == 0, "set in the process, it changes nothing"
    assert judged(repository, str(run), "--profile", "cuda")[CUBLAS] == "variable-missing"
    state = run / "env.main.rank0.json"
    content = json.loads(state.read_text())
    content["process"]["hash_randomization"] = True
    state.write_text(json.dumps(content))
    assert judged(repository, str(run))["PYTHONHASHSEED"] == "variable-not-effective"
    (run / "metrics.main.rank0.jsonl").write_text("garbage\n{}\n")
    assert judged(repository, str(run))["PYTHONHASHSEED"] == "variable-not-effective", "an invalid recording has states"
    state.unlink()
    assert judged(repository, str(run)) == {"state": "state-unknown"}
    assert repository.cli("doctor", repository.root / "absent").code == 2
    assert repository.cli("doctor", repository.root).code == 2
    assert repository.cli("doctor", run, "--profile", "quantum").code == 2
    assert repository.cli("doctor", run, "--test", TEST).code == 2


def test_ranks_of_which_the_same_was_found_stand_together(repository: Repository) -> None:
    body = """
        import subprocess, sys
        from e2e_registry import MetricRecorder
        if len(sys.argv) == 1:
            for rank in range(3):
                subprocess.run([sys.executable, __file__, str(rank)], check=True)
        else:
            with MetricRecorder(role="train", rank=int(sys.argv[1])) as recorder:
                recorder.log({"train/loss": 1.0}, step=0)
    """
    result = repository.cli("doctor", "--pinned", "--json", *script(repository, body))
    assert result.code == 0, result.out
    assert [process["processes"] for process in result.json["judged"]] == [
        ["train rank 0", "train rank 1", "train rank 2"]
    ]
    assert [name.rpartition("/")[2] for name in result.json["unjudged"]] == ["train.py"]


@pytest.mark.parametrize("profile", list(PROFILES))
def test_the_shell_is_judged_by_what_it_hands_on(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    bare = repository.cli("doctor", "--profile", profile, "--json")
    assert bare.code == 1
    assert findings(bare.json)["OMP_NUM_THREADS"] == "variable-missing"
    assert findings(bare.json).get("MAMBA_DETERMINISTIC", "not-installed") == "not-installed"
    for name, value in PROFILES[profile].variables.items():
        monkeypatch.setenv(name, value)
    pinned = findings(repository.cli("doctor", "--profile", profile, "--json").json)
    assert {pinned[variable.name] for variable in PROFILES[profile].pins} == {"variable-ok"}
    assert not repository.runs
