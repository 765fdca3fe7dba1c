"""``record`` and ``adopt`` through the command line: what is written, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repositories import Repository, Result, assert_golden

from e2e_registry.standard import Standard

TEST = "tests/e2e/test_stub.py"


def record(repository: Repository, *options: str) -> Result:
    return repository.cli("record", "--test", TEST, *options)


def action(repository: Repository, *options: str) -> str:
    result = record(repository, "--json", *options)
    assert result.code == 0, result.err
    return str(result.json["tests"][0]["action"])


class Untouched:
    """Asserts on leaving that a file was not written: same bytes, same inode, same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.before = self.path.read_bytes(), os.stat(self.path).st_ino, os.stat(self.path).st_mtime_ns

    def __exit__(self, *_: object) -> None:
        now = self.path.read_bytes(), os.stat(self.path).st_ino, os.stat(self.path).st_mtime_ns
        assert now == self.before


def test_a_standard_is_rewritten_only_when_something_that_counts_changed(repository: Repository) -> None:
    """Report: refreshes rewrote whole files, so that timing noise rode along (behaviour 13)."""
    repository.commit()
    created = record(repository, "--reason", "first")
    assert created.code == 0
    assert_golden("record_created", created.out, repository.root)
    with Untouched(repository.standard):
        unchanged = record(repository)
        assert_golden("record_unchanged", unchanged.out, repository.root)
    repository.write_recipe("# an edit that changes no number")
    with Untouched(repository.standard):
        assert action(repository) == "unchanged"
    repository.write_recipe("import sys")
    repository.write_test(args=["--flag"])
    assert action(repository) == "rewritten, values unchanged"
    with Untouched(repository.standard):
        assert action(repository) == "unchanged"
    repository.write_recipe("SCALE = 1.5")
    updated = record(repository)
    assert updated.code == 0
    assert_golden("record_updated", updated.out, repository.root)
    repository.write_test(args=["--flag"], metrics=["data/batch", "train/*"])
    assert action(repository) == "updated"
    assert Standard(repository.standard).metrics == {"data/batch", "train/loss", "train/grad_norm", "speed"}


def test_observed_values_alone_never_cause_a_rewrite(repository: Repository) -> None:
    recipe = repository.write_recipe("import time")
    recipe.write_text(recipe.read_text().replace("100.0 + step", "time.perf_counter()"))
    assert action(repository) == "created"
    with Untouched(repository.standard):
        assert action(repository) == "unchanged"


NOISY = "import os; SCALE = 1.0 + 1e-9 * int.from_bytes(os.urandom(2), 'little')"


def test_runs_that_disagree_are_refused(repository: Repository) -> None:
    """Report: standards recorded once, from a lucky run (behaviour 15)."""
    repository.write_recipe(NOISY)
    refused = record(repository)
    assert refused.code == 1
    assert "refused" in refused.out
    assert "train/loss, step 0" in refused.out
    assert not repository.standard.exists()
    assert action(repository, "--runs", "1") == "created"
    assert Standard(repository.standard).metadata.recorded["runs_agreed"] == "repeat unproven"


def test_series_within_their_tolerance_keep_their_old_rows(repository: Repository) -> None:
    repository.write_recipe(NOISY)
    test = repository.root / TEST
    tolerance = 'tolerances={"train/loss": Tolerance(atol=1e-3, reason="noise")},\n)'
    test.write_text(test.read_text().replace("\n)", f"\n    {tolerance}", 1))
    assert action(repository) == "created"
    before = repository.standard.read_bytes()
    with Untouched(repository.standard):
        assert action(repository) == "unchanged"
    assert action(repository, "--refresh") == "updated"
    assert repository.standard.read_bytes() != before


def test_repeat_unproven_is_lifted_by_a_second_run(repository: Repository) -> None:
    assert action(repository, "--runs", "1") == "created"
    with Untouched(repository.standard):
        assert action(repository, "--runs", "1") == "unchanged"
    assert action(repository) == "rewritten, values unchanged"
    assert Standard(repository.standard).metadata.recorded["runs_agreed"] == 2


def test_one_kept_run_of_the_same_source_tree_counts(repository: Repository) -> None:
    repository.commit()
    assert repository.cli("check", "--test", TEST).code == 3
    result = record(repository, "--json").json["tests"][0]
    assert result["runs_agreed"] == 2
    assert result["reused_run"] == repository.runs[0].relative_to(repository.root).as_posix()
    assert len(repository.runs) == 2
    repository.write_recipe("# another source tree")
    assert record(repository, "--json").json["tests"][0]["reused_run"] is None
    assert len(repository.runs) == 4


def test_without_git_no_kept_run_counts(repository: Repository) -> None:
    repository.cli("check", "--test", TEST)
    assert record(repository, "--json").json["tests"][0]["reused_run"] is None
    recorded = Standard(repository.standard).metadata.recorded
    assert (recorded["head"], recorded["source_tree"]) == (None, None)


def test_plain_lines_leave_no_state_so_recording_them_needs_a_word(repository: Repository) -> None:
    repository.write_recipe(
        body="""
        import json, os
        with open(os.environ["E2E_METRICS_JSONL"], "w") as file:
            for step in range(3):
                line = {"step_key": "train/step", "train/step": float(step), "train/loss": 1 / (step + 1)}
                file.write(json.dumps({**line, "tokens": step, "data/batch": 1, "speed": 2.0}) + "\\n")
        """
    )
    refused = record(repository)
    assert refused.code == 2
    assert "--allow-unknown-state" in refused.err
    assert action(repository, "--allow-unknown-state") == "created"
    rows = {(b.key.metric, b.dtype.name): b.steps.tolist() for b in Standard(repository.standard).batches()}
    assert rows["train/loss", "float64"] == [0, 1, 2]
    assert rows["tokens", "int64"] == [0, 1, 2]


#: Two ranks that append to one file, a barrier a step, as a collective is.
TWO_RANKS = """
import json, os, subprocess, sys
if len(sys.argv) > 1:
    with open(os.environ["E2E_METRICS_JSONL"], "a", buffering=1) as file:
        for step, _ in enumerate(sys.stdin):
            file.write(json.dumps({"step": step, "train/loss": float(sys.argv[1]) + step}) + "\\n")
            print("logged", flush=True)
else:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen([sys.executable, __file__, rank], **pipes) for rank in "01"]
    for step in range(3):
        for rank in ranks:
            print("go", file=rank.stdin, flush=True)
            rank.stdout.readline()
    for rank in ranks:
        rank.stdin.close()
        rank.wait()
"""


def test_two_processes_that_share_a_plain_file_are_warned_of_everywhere(repository: Repository) -> None:
    """Report: two ranks in step recorded six points, two a step, and nobody said a word."""
    repository.write_recipe(body=TWO_RANKS)
    repository.write_test(metrics=["train/*"], observe=[])
    said = "metrics.jsonl holds more than one value a step of train/loss (step 0, lines 1 and 2)"
    ran = repository.cli("run", "--test", TEST)
    recorded = record(repository, "--allow-unknown-state", "--export", "out")
    assert recorded.code == 0, recorded.err
    checked = repository.cli("check", "--test", TEST)
    compared = repository.cli("compare", repository.runs[0], "--against", repository.runs[1])
    for result in (ran, recorded, checked, compared):
        assert f"{said}: if several processes write it, nothing tells their values apart" in result.out
    assert said in repository.cli("run", "--test", TEST, "--json").json["warnings"][0]
    assert said in record(repository, "--allow-unknown-state", "--json").json["tests"][0]["warnings"][0]
    assert "more than one value a step" in next((repository.root / "out").rglob("*.md")).read_text()
    assert Standard(repository.standard).metrics == {"train/loss"}, "two values a step are legal, so it is no refusal"


LAX = """
import torch
from e2e_registry import MetricRecorder
from e2e_registry.determinism import make_deterministic

{strict}
recorder = MetricRecorder()
recorder.log({{"train/loss": torch.tensor(1.0)}}, step=0)
"""


def test_a_recipe_that_leaves_the_strict_switches_off_is_recorded_and_checked_with_a_warning(
    repository: Repository,
) -> None:
    test = repository.write_test(metrics=["train/loss"], observe=None)
    repository.write_recipe(body=LAX.format(strict=""))
    warning = "warning: not strict in main rank 0: torch.use_deterministic_algorithms is off"
    recorded = repository.cli("record", "--test", test, "--runs", "1")
    assert recorded.code == 0
    assert warning in recorded.out
    checked = repository.cli("check", "--test", test)
    assert checked.code == 0
    assert warning in checked.out
    (result,) = repository.cli("record", "--test", test, "--runs", "1", "--json").json["tests"]
    assert any("deterministic_algorithms is off" in text for text in result["warnings"])

    repository.write_recipe(body=LAX.format(strict="make_deterministic(0)"))
    assert "warning" not in repository.cli("record", "--test", test, "--runs", "1").out
    assert "warning" not in repository.cli("check", "--test", test).out


def test_several_writers_are_kept_apart(repository: Repository) -> None:
    repository.write_recipe(
        body="""
        import os
        from e2e_registry import MetricRecorder
        RANKS = 2
        for rank in range(RANKS):
            if os.fork() == 0:
                with MetricRecorder(role="train", rank=rank) as recorder:
                    for step in range(3):
                        recorder.log({"train/loss": step + 0.5 * rank}, step=step)
                os._exit(0)
        for _ in range(RANKS):
            os.wait()
        with MetricRecorder(role="rollout") as recorder:
            recorder.log({"rollout/reward": 1.0}, step=0)
        """
    )
    repository.write_test(metrics=["train/loss", "rollout/*"], observe=[])
    repository.record()
    keys = [str(batch.key) for batch in Standard(repository.standard).batches()]
    assert keys == ["rollout/reward [rollout rank 0]", "train/loss [train rank 0]", "train/loss [train rank 1]"]
    recipe = repository.root / "scripts/recipe.py"
    recipe.write_text(recipe.read_text().replace("RANKS = 2", "RANKS = 1"))
    result = repository.cli("check", "--test", TEST)
    assert result.code == 1
    assert "train/loss [train rank 1]: only in the standard (3 points)" in result.out


def test_list_only_and_json(repository: Repository) -> None:
    assert TEST in record(repository, "--list-only").out
    assert not repository.runs
    assert record(repository, "--list-only", "--json").json["tests"][0]["standards"] == []


def test_an_unwritable_standards_folder_is_a_storage_error(repository: Repository) -> None:
    repository.standards.parent.mkdir(parents=True)
    repository.standards.write_text("a file where a folder should be")
    result = record(repository)
    assert result.code == 6
    assert "cannot write" in result.err


# ------------------------------------------------------------------------------------------------ adopt


def test_adopt_makes_a_past_run_the_standard_and_refuses_others(repository: Repository) -> None:
    """Report: ``register`` took any file (behaviour 17)."""
    repository.cli("run", "--test", TEST)
    (good,) = repository.runs
    adopted = repository.cli("adopt", "--test", TEST, "--run", good, "--reason", "accepted")
    assert adopted.code == 0, adopted.err
    assert "repeat unproven" in adopted.out
    assert repository.cli("check", "--test", TEST).code == 0
    repository.write_test(args=["--other"])
    other = repository.cli("adopt", "--test", TEST, "--run", good)
    assert other.code == 2
    assert "--other" in other.err
    repository.write_test()
    assert repository.cli("adopt", "--test", TEST, "--run", good / "metrics.main.rank0.jsonl").code == 2
    run = json.loads((good / "run.json").read_text())
    (good / "run.json").write_text(json.dumps({**run, "outcome": None}))
    with Untouched(repository.standard):
        assert repository.cli("adopt", "--test", TEST, "--run", good).code == 4
    assert repository.cli("adopt", "--test", TEST, "--run", repository.root / "absent").code == 2


# ------------------------------------------------------------------------------------------------ show, list


def test_show_and_list(repository: Repository) -> None:
    repository.record()
    listed = repository.cli("list")
    assert listed.code == 0
    measured = re.compile(r"(?<= 5)( +\d+\.\d)(?= )")
    shown = measured.sub(lambda match: "N.N".rjust(len(match[1])), listed.out)
    assert_golden("list", shown, repository.root)
    shown = repository.cli("show", TEST)
    assert shown.code == 0
    assert "train/grad_norm  float64" in shown.out
    points = repository.cli("show", repository.standard, "--metric", "train/loss")
    assert "train/loss  step 1  0.5  3fe0000000000000" in points.out
    assert repository.cli("show", TEST, "--metric", "absent").code == 2
    assert repository.cli("show", TEST, "--platform", "other").code == 3
    series = repository.cli("show", TEST, "--json").json["standards"][0]["series"]
    assert {entry["metric"] for entry in series} == {"data/batch", "speed", "tokens", "train/grad_norm", "train/loss"}


# ------------------------------------------------------------------------------------------------ kills

# Runs the command line. Before and after each write, fsync or rename that concerns the standards folder it copies that
# folder, and at the n-th of these events it kills its process; it prints their number if it survives.
KILLER = """
import builtins, io, os, shutil, signal, sys
folder, copies, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
events = 0
real_open = io.open

def event():
    global events
    if events == at:
        os.kill(os.getpid(), signal.SIGKILL)
    shutil.copytree(folder, f"{copies}/{events:03}")
    events += 1

def wrapped(function, concerns):
    def call(*args, **kwargs):
        if not concerns(*args):
            return function(*args, **kwargs)
        event()
        result = function(*args, **kwargs)
        event()
        return result
    return call

class Watched(io.FileIO):
    def write(self, data):
        event()
        written = super().write(data)
        event()
        return written

def open_(file, mode="r", *args, **kwargs):
    if str(file).startswith(folder) and set(mode) & set("wxa+"):
        return Watched(file, mode)
    return real_open(file, mode, *args, **kwargs)

import pathlib
builtins.open = io.open = open_
target = lambda fd: os.readlink(f"/proc/self/fd/{fd}").startswith(folder)
os.fsync = wrapped(os.fsync, target)
os.replace = wrapped(os.replace, lambda source, target: str(target).startswith(folder))
from e2e_registry.cli.app import main
code = main(sys.argv[4:])
print(events)
sys.exit(code)
"""


def test_a_kill_at_any_write_fsync_or_rename_leaves_a_whole_standard(repository: Repository, tmp_path: Path) -> None:
    """What a killed process has written stays, and no more comes: its folder is the copy made at that event."""

    def record_and_kill(at: int, copies: Path) -> subprocess.CompletedProcess[str]:
        copies.mkdir()
        arguments = [str(repository.standards), str(copies), str(at), "record", "--test", TEST, "--runs", "1"]
        command = [sys.executable, "-c", KILLER, *arguments]
        return subprocess.run(command, cwd=repository.root, capture_output=True, text=True, check=False)

    repository.record()
    name, old = repository.standard.name, repository.standard.read_bytes()
    old_digest = Standard(repository.standard).metadata.content_digest
    repository.write_recipe("SCALE = 2.0")
    survived = record_and_kill(-1, tmp_path / "copies")
    assert survived.returncode == 0, survived.stderr
    new_digest = Standard(repository.standard).metadata.content_digest
    assert new_digest != old_digest

    def digest_in(folder: Path) -> str:
        """Return what the one standard of a folder holds, which is whole."""
        assert [path.name for path in folder.glob("*.parquet")] == [name]
        standard = Standard(folder / name)
        list(standard.batches())  # verifies the rows
        assert standard.metadata.content_digest != old_digest or (folder / name).read_bytes() == old
        return standard.metadata.content_digest

    found = [digest_in(copy) for copy in sorted((tmp_path / "copies").iterdir())]
    assert len(found) == int(survived.stdout.split()[-1])
    assert len(found) >= 8, "opens, writes, two fsyncs and a rename, each before and after"
    num_old = found.count(old_digest)
    assert found == [old_digest] * num_old + [new_digest] * (len(found) - num_old)
    assert num_old > len(found) - num_old > 0
    for at in (0, num_old - 1, num_old, len(found) - 1):  # the middle two are before and after the rename
        repository.standard.write_bytes(old)
        killed = record_and_kill(at, tmp_path / f"killed at {at}")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        assert digest_in(repository.standards) == found[at]
    assert repository.cli("list", "--json").json["tests"][0]["standards"] == ["cpu-x86_64-portable"]
    record(repository)
    assert os.listdir(repository.standards) == [repository.standard.name], "abandoned temporaries are removed"


# Forks a child for each line of its input, which writes a standard of 50 MB again and again until it is killed.
ZYGOTE = """
import os, signal, sys
from pathlib import Path
import numpy as np
import pyarrow.parquet
from e2e_registry.dtypes import FLOAT64
from e2e_registry.series import SeriesBatch, SeriesKey
from e2e_registry.standard import StandardMetadata, write_standard
count = 2_000_000
def batch(seed):
    bits = np.random.default_rng(seed).integers(0, 2**62, count, dtype=np.uint64)
    steps = np.arange(count)
    return SeriesBatch(SeriesKey("m", "main", 0), FLOAT64, steps, bits, None, lambda: steps)
generations = [batch(seed) for seed in (1, 2)]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nothing is left of a child that has ended
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        for generation in range(int(line), 1000):
            write_standard(Path(sys.argv[1]), [generations[generation % 2]], StandardMetadata(test=None, platform=None))
        os._exit(0)
    print(pid, flush=True)
"""


@pytest.mark.slow
def test_random_kills_inside_the_write_of_a_large_standard(tmp_path: Path) -> None:
    path, rng = tmp_path / "large.parquet", random.Random(5)
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    assert zygote.stdout.readline() == "ready\n"

    def writer(first: int) -> int:
        zygote.stdin.write(f"{first}\n")
        zygote.stdin.flush()
        return int(zygote.stdout.readline())

    def await_end(pid: int) -> None:
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)

    started = time.monotonic()
    await_end(writer(998))
    write_s = (time.monotonic() - started) / 2
    path.unlink()
    digests = set()
    interrupted = 0
    for number in range(30):
        pid = writer(number)
        time.sleep(rng.uniform(0.05, 0.05 + 5 * write_s))
        os.kill(pid, signal.SIGKILL)
        await_end(pid)
        left = list(tmp_path.glob(".*.tmp"))
        interrupted += bool(left)
        for temporary in left:  # each as large as the standard
            temporary.unlink()
        assert len(list(tmp_path.glob("*.parquet"))) <= 1
        if path.exists():
            assert path.stat().st_size > 15_000_000
            standard = Standard(path)
            for _ in standard.batches():
                pass
            digests.add(standard.metadata.content_digest)
    zygote.kill()
    zygote.wait()
    assert len(digests) == 2
    assert interrupted >= 12, "most kills fell inside a write"
