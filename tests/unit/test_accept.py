"""``accept`` through the command line: what is written, what is refused, and what a hostile artifact can do."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from repositories import Repository, Result
from terminal import END_OF_INPUT, converse

from e2e_registry.standard import Standard

TEST = "tests/e2e/test_stub.py"
SCALED = "SCALE = 1.5"


def zipped(folder: Path, target: Path, *, prefix: str = "") -> Path:
    """Zip a run folder as CI does: its content, whole."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, prefix + path.relative_to(folder).as_posix())
    return target


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return all that lies below a folder, git's own files and kept runs left out."""
    found = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in (".git", ".e2e_runs", "__pycache__")]
        for name in names:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            found[str(path.relative_to(root))] = (mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkout that holds a change, and the artifact of its failing check in another clone: CI's."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "repository").mkdir()
    made = Repository(folder / "repository")
    made.record()
    made.commit()
    made.write_recipe(SCALED)
    made.commit()
    artifact_of(made, folder)
    shutil.rmtree(folder / "ci-0")
    shutil.rmtree(folder / "repository/.e2e_runs")
    return folder


@pytest.fixture
def changed(repository: Repository, prepared: Path, tmp_path: Path) -> tuple[Repository, Path]:
    """A checkout with a change, and CI's artifact of it, to spoil."""
    shutil.copytree(prepared / "repository", repository.root, dirs_exist_ok=True)
    return repository, Path(shutil.copy(prepared / "e2e-0.zip", tmp_path))


def artifact_of(repository: Repository, tmp_path: Path, *, code: int = 1, env: Mapping[str, str] | None = None) -> Path:
    """Clone a checkout, check all its tests there, and return the run folder as a zip."""
    number = len(list(tmp_path.glob("ci-*")))
    clone = tmp_path / f"ci-{number}"
    subprocess.run(["git", "clone", "-q", str(repository.root), str(clone)], check=True)
    result = Repository.__new__(Repository)
    result.root = clone
    checked = result.command("check", "--all", env=env)
    assert checked.code == code, checked.out + checked.err
    return zipped(clone / ".e2e_runs", tmp_path / f"e2e-{number}.zip")


def accept(repository: Repository, artifact: Path | str, *options: str) -> Result:
    return repository.cli("accept", artifact, *options)


def decisions(result: Result) -> list[tuple[str, str]]:
    return [(Path(test["subject"]).stem, test["decision"]) for test in result.json["tests"]]


def edited(artifact: Path, edit: Callable[[str, bytes], bytes | None]) -> Path:
    """Return a copy of a zip whose members went through ``edit``; None drops one."""
    target = artifact.with_name(f"edited-{artifact.name}")
    with zipfile.ZipFile(artifact) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = edit(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


def with_json(artifact: Path, file: str, change: Callable[[Any], None]) -> Path:
    def edit(name: str, data: bytes) -> bytes:
        if name.split("/")[-1] != file:
            return data
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return edited(artifact, edit)


# ------------------------------------------------------------------------------------------------ accepting


def test_a_failing_job_s_artifact_is_accepted_and_the_next_check_passes(changed: tuple[Repository, Path]) -> None:
    repository, artifact = changed
    before = tree(repository.root)
    result = accept(repository, artifact, "--yes", "--reason", "larger on purpose")
    assert result.code == 0, result.err
    assert "train/loss, step 0: want 1.0, got 1.5" in result.out, "the change is shown"
    assert "one run: repeat unproven" in result.out
    after = tree(repository.root)
    assert {name for name in after if before.get(name) != after[name]} == {
        "tests/ci/fixtures/e2e_standards/test_stub.cpu-x86_64-portable.parquet"
    }
    recorded = Standard(repository.standard).metadata.recorded
    assert recorded["runs_agreed"] == "repeat unproven"
    assert recorded["reason"] == "larger on purpose"
    assert repository.cli("check", "--all").code == 0
    again = accept(repository, artifact)
    assert (again.code, "holds this already" in again.out) == (0, True)


def test_without_a_terminal_nothing_is_written(changed: tuple[Repository, Path]) -> None:
    repository, artifact = changed
    before = tree(repository.root)
    for options in ([], ["--json"]):
        result = accept(repository, artifact, *options)
        assert result.code == 2
        assert "--yes" in result.err
    assert decisions(result) == [("test_stub", "pending")]
    assert tree(repository.root) == before


def test_failing_missing_and_incomparable_tests_are_taken_and_the_largest_change_is_first(
    repository: Repository, tmp_path: Path
) -> None:
    for name in ("test_small", "test_large", "test_same"):
        repository.write_recipe(name=f"{name}.py")
        repository.write_test(name, script=f"scripts/{name}.py")
    (repository.root / TEST).unlink()
    assert repository.cli("record", "--all").code == 0
    repository.write_test("test_new", script="scripts/test_same.py")
    repository.write_test("test_broken", script="scripts/test_broken.py")
    repository.write_recipe("SCALE = 1.001", name="test_small.py")
    repository.write_recipe("SCALE = 3.0", name="test_large.py")
    repository.write_recipe("raise SystemExit(3)", name="test_broken.py")
    repository.commit()
    artifact = artifact_of(repository, tmp_path, code=4)
    result = accept(repository, artifact, "--yes", "--json")
    assert result.code == 4, "one test of the artifact failed, and says so"
    assert decisions(result) == [
        ("test_large", "accepted"),
        ("test_small", "accepted"),
        ("test_new", "accepted"),
        ("test_broken", "refused"),
    ]
    named = accept(repository, artifact, "--yes", "--json", "--test", "tests/e2e/test_same.py")
    assert (named.code, decisions(named)) == (0, [("test_same", "unchanged")])
    assert accept(repository, artifact, "--test", "tests/e2e/absent.py").code == 2


def test_an_artifact_of_passing_tests_asks_for_nothing(repository: Repository, tmp_path: Path) -> None:
    repository.record()
    repository.commit()
    assert accept(repository, artifact_of(repository, tmp_path, code=0), "--yes").code == 5


def test_a_platform_is_added_beside_the_old_one(repository: Repository, tmp_path: Path) -> None:
    """The tag is that of the machine that ran it, not of the one that accepts."""
    repository.record()
    repository.commit()
    artifact = artifact_of(repository, tmp_path, code=3, env={"E2E_REGISTRY_PLATFORM_TAG": "ci"})
    before = repository.standard.read_bytes()
    assert accept(repository, artifact, "--yes", "--platform", "elsewhere").code == 5
    result = accept(repository, artifact, "--yes")
    assert result.code == 0, result.err
    assert sorted(path.name for path in repository.standards.iterdir()) == [
        "test_stub.cpu-x86_64-portable-ci.parquet",
        "test_stub.cpu-x86_64-portable.parquet",
    ]
    assert repository.standard.read_bytes() == before


def test_policies_come_from_the_checkout_and_rows_from_the_recording(changed: tuple[Repository, Path]) -> None:
    repository, artifact = changed
    poisoned = edited(artifact, lambda name, data: b"no parquet" if name.endswith(".parquet") else data)
    test = repository.root / TEST
    lenient = 'tolerances={"train/loss": Tolerance(rtol=0.6, reason="this checkout says so")},\n)'
    test.write_text(test.read_text().replace("\n)", f"\n    {lenient}", 1))
    result = accept(repository, poisoned, "--yes", "--allow-other-source")
    assert result.code == 0, result.err
    standard = Standard(repository.standard)
    rows = {batch.key.metric: batch.bits.tolist() for batch in standard.batches()}
    assert standard.metadata.policies["train/loss"]["rtol"] == 0.6
    assert rows["train/loss"][0] == 0x3FF0000000000000, "what its tolerance accepts keeps its old rows"
    assert accept(repository, poisoned, "--yes", "--allow-other-source", "--refresh").code == 0
    rows = {batch.key.metric: batch.bits.tolist() for batch in Standard(repository.standard).batches()}
    assert rows["train/loss"][0] == 0x3FF8000000000000


# ------------------------------------------------------------------------------------------------ refusing


def drop_outcome(run: dict[str, Any]) -> None:
    run["outcome"] = None


def fail(run: dict[str, Any]) -> None:
    run["outcome"] = {"status": "exited", "exit_code": 3, "explanation": "exited with code 3"}


def other_seed(run: dict[str, Any]) -> None:
    run["recipe"]["seed"] = 7


def other_variable(run: dict[str, Any]) -> None:
    run["recipe"]["env"] = {"X": "1"}


def other_script(run: dict[str, Any]) -> None:
    run["recipe"]["script"] = "scripts/other.py"


def other_profile(run: dict[str, Any]) -> None:
    run["profile"] = "cpu-native"


def other_test(run: dict[str, Any]) -> None:
    run["recipe"]["test"] = "tests/e2e/test_elsewhere.py"


def other_source(run: dict[str, Any]) -> None:
    run["source"]["source_tree"] = "0" * 64


def no_source(run: dict[str, Any]) -> None:
    run["source"] = {}


def escape_sequence(run: dict[str, Any]) -> None:
    run["recipe"]["args"] = ["\x1b[2Jcleared"]


def malformed(run: dict[str, Any]) -> None:
    run["recipe"] = ["a list"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (drop_outcome, 4, "incomplete"),
        (fail, 4, "exited with code 3"),
        (other_seed, 2, "seed"),
        (other_variable, 2, "env.X"),
        (other_script, 2, "scripts/other.py"),
        (other_profile, 2, "cpu-native"),
        (other_test, 4, "test_elsewhere"),
        (other_source, 2, "--allow-other-source"),
        (no_source, 2, "--allow-other-source"),
        (escape_sequence, 6, "control characters"),
        (malformed, 4, "recipe is a list"),
    ],
)
def test_what_is_refused_whatever_is_answered(
    changed: tuple[Repository, Path], change: Callable[[dict[str, Any]], None], code: int, said: str
) -> None:
    repository, artifact = changed
    before = tree(repository.root)
    result = accept(repository, with_json(artifact, "run.json", change), "--yes")
    assert result.code == code, result.out + result.err
    assert said in result.out + result.err
    assert "Traceback" not in result.err
    assert f"{tempfile.gettempdir()}/e2e-registry-" not in result.out + result.err, "places are those of the artifact"
    assert tree(repository.root) == before


def test_a_recording_that_breaks_an_invariant_or_is_damaged_is_refused(changed: tuple[Repository, Path]) -> None:
    repository, artifact = changed
    torn = edited(artifact, lambda name, data: data[:-9] if name.endswith(".jsonl") else data)
    assert accept(repository, torn, "--yes").code == 4
    repository.write_test(invariants={"train/loss": {"max": 0.1}})
    result = accept(repository, artifact, "--yes", "--allow-other-source")
    assert (result.code, "breaks" in result.out) == (1, True)
    gone = edited(artifact, lambda name, data: None if name.endswith(".json") and "test_stub" in name else data)
    assert accept(repository, gone, "--yes").code == 4
    other = with_json(artifact, "results.json", lambda data: data["tests"][0].update(subject="tests/e2e/test_gone.py"))
    assert accept(repository, other, "--yes").code == 2
    assert repository.cli("check", "--all").code == 1, "nothing was accepted"


def test_source_that_the_pull_request_s_head_holds_is_enough(changed: tuple[Repository, Path]) -> None:
    """CI checks out a merge commit, whose tree no branch has."""
    repository, artifact = changed

    def merged(run: dict[str, Any]) -> None:
        run["source"].update(head_source_tree=run["source"]["source_tree"], source_tree="0" * 64)

    assert accept(repository, with_json(artifact, "run.json", merged), "--yes").code == 0
    repository.git("checkout", "-q", "--", ".")
    inside = repository.root / "downloaded.zip"
    inside.write_bytes(artifact.read_bytes())
    assert accept(repository, Path("downloaded.zip"), "--yes").code == 0, "the artifact is no source"
    repository.git("checkout", "-q", "--", ".")
    repository.write_recipe("SCALE = 2.0")
    assert accept(repository, artifact, "--yes").code == 2
    assert accept(repository, artifact, "--yes", "--allow-other-source").code == 0


def test_a_standards_folder_that_leads_out_is_refused(changed: tuple[Repository, Path], tmp_path: Path) -> None:
    repository, artifact = changed
    outside = tmp_path / "outside"
    repository.standards.rename(outside)
    repository.standards.symlink_to(outside)
    before = tree(outside)
    assert accept(repository, artifact, "--yes", "--allow-other-source").code == 2
    assert tree(outside) == before


# ------------------------------------------------------------------------------------------------ repeats, attempts


def test_runs_in_the_artifact_that_agree_lift_repeat_unproven(repository: Repository, tmp_path: Path) -> None:
    repository.commit()
    for _ in range(2):
        assert repository.cli("check", "--all").code == 3
    result = accept(repository, ".e2e_runs", "--yes", "--json")
    assert result.code == 0
    assert result.json["tests"][0]["change"]["runs_agreed"] == 2
    assert Standard(repository.standard).metadata.recorded["runs_agreed"] == 2


def test_what_record_left_in_ci_is_accepted_without_results(repository: Repository, tmp_path: Path) -> None:
    """The recording workflow uploads its run folder, and no check was made."""
    repository.write_test("test_second")
    repository.commit()
    for tag in ("a", "b"):
        result = repository.command("record", "--all", env={"E2E_REGISTRY_PLATFORM_TAG": tag})
        assert result.code == 0, result.err
        zipped(repository.root / ".e2e_runs", tmp_path / f"download-{tag}.zip")
        shutil.rmtree(repository.root / ".e2e_runs")
    shutil.rmtree(repository.standards)
    result = accept(repository, tmp_path, "--yes", "--json")
    assert result.code == 0, result.out + result.err
    found = {(test["subject"], test["platform"], test["change"]["runs_agreed"]) for test in result.json["tests"]}
    platforms = ("cpu-x86_64-portable-a", "cpu-x86_64-portable-b")
    assert found == {(f"tests/e2e/{name}.py", slug, 2) for name in ("test_stub", "test_second") for slug in platforms}


def test_runs_in_the_artifact_that_disagree_are_refused(repository: Repository) -> None:
    repository.write_recipe("import os; SCALE = 1.0 + int.from_bytes(os.urandom(2), 'little')")
    repository.commit()
    for _ in range(2):
        repository.cli("check", "--all")
    result = accept(repository, ".e2e_runs", "--yes")
    assert (result.code, "other numbers" in result.out) == (1, True)
    newest = max(repository.root.glob(".e2e_runs/test_stub/*"))
    alone = accept(repository, newest, "--yes")
    assert (alone.code, "repeat unproven" in alone.out) == (0, True)


def test_ci_s_word_that_a_test_does_not_repeat_is_taken(changed: tuple[Repository, Path]) -> None:
    repository, artifact = changed
    flaky = with_json(
        artifact, "results.json", lambda data: data["tests"][0].update(repeat={"label": "nondeterministic"})
    )
    assert accept(repository, flaky, "--yes").code == 1


def test_parts_and_attempts_are_merged_and_the_newest_attempt_wins(repository: Repository, tmp_path: Path) -> None:
    """As `gh run download` lays them: a folder an artifact."""
    repository.write_test("test_second")
    assert repository.cli("record", "--all").code == 0
    repository.commit()
    for scale in (2.0, 3.0):
        repository.write_recipe(f"SCALE = {scale}")
        repository.commit()
        artifact_of(repository, tmp_path)
    download = tmp_path / "download"
    for number in (0, 1):
        with zipfile.ZipFile(tmp_path / f"e2e-{number}.zip") as archive:
            archive.extractall(download / f"e2e-attempt{number}")
    (download / "notes.txt").write_text("not ours")
    for artifact in (download, tmp_path):  # unpacked, and a folder of zips
        result = accept(repository, artifact, "--yes", "--json", *(["--refresh"] if artifact == tmp_path else []))
        assert result.code == 0, result.out + result.err
        assert {test["run"].split("/")[-3] for test in result.json["tests"]} in ({"e2e-attempt1"}, {"e2e-1.zip"})
    assert repository.cli("check", "--all").code == 0


# ------------------------------------------------------------------------------------------------ reviewing


def at_terminal(repository: Repository, artifact: Path, keys: str) -> tuple[int, str]:
    """Run accept on a pseudo-terminal, type, and return the exit code and what was shown."""
    answers = [key if key == END_OF_INPUT else f"{key}\n" for key in keys]
    return converse(repository.root, ["accept", str(artifact)], answers, prompt=r"\](\x1b\[0m)?: ")


def test_accept_reject_and_skip_at_a_terminal(repository: Repository, tmp_path: Path) -> None:
    for name in ("test_a", "test_b", "test_c"):
        repository.write_test(name)
    (repository.root / TEST).unlink()
    repository.commit()
    artifact = artifact_of(repository, tmp_path, code=3)
    code, shown = at_terminal(repository, artifact, "?ars")
    assert code == 0, shown
    assert "asked about again" in shown, "? explains the keys"
    assert [path.name.split(".")[0] for path in repository.standards.iterdir()] == ["test_a"]
    left = accept(repository, artifact, "--json")
    assert decisions(left) == [("test_c", "pending"), ("test_a", "unchanged"), ("test_b", "rejected")]
    named = accept(repository, artifact, "--json", "--yes", "--test", "tests/e2e/test_b.py")
    assert decisions(named) == [("test_b", "accepted")]
    code, shown = at_terminal(repository, artifact, "q")
    assert (code, "1 skipped" in shown.replace("\x1b[0m", "").replace("\x1b[2m", "")) == (0, True)
    code, shown = at_terminal(repository, artifact, "A")
    assert decisions(accept(repository, artifact, "--json", "--yes")) == [
        ("test_a", "unchanged"),
        ("test_b", "unchanged"),
        ("test_c", "unchanged"),
    ]
    repository.write_recipe("SCALE = 3.0")
    repository.commit()
    later = artifact_of(repository, tmp_path, code=1)
    # Ctrl-D is "q": what was written before it is told.
    code, shown = at_terminal(repository, later, f"a{END_OF_INPUT}")
    assert code == 0, shown
    assert re.sub("\x1b.*?m", "", shown).splitlines()[-2].startswith("3 runs: 1 accepted, 2 skipped"), shown


# ------------------------------------------------------------------------------------------------ hostile artifacts


def member(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo()
    info.filename = info.orig_filename = name
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize(
    "name",
    [
        "../escaped/run.json",
        "/etc/run.json",
        "test_stub/../../run.json",
        "a/./run.json",
        "a//run.json",
        "..\\..\\run.json",
        "C:/run.json",
        "a\x1b[2J/run.json",
        "a\nb/run.json",
        "results.json",
    ],
)
def test_names_that_leave_the_archive_or_stand_twice_refuse_it(changed: tuple[Repository, Path], name: str) -> None:
    repository, artifact = changed
    with zipfile.ZipFile(artifact, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that stands twice
        archive.writestr(member(name), b"{}")
    assert_refused(repository, artifact, "one name" if name == "results.json" else "which is refused")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_refuse_the_archive(changed: tuple[Repository, Path], kind: int) -> None:
    repository, artifact = changed
    with zipfile.ZipFile(artifact, "a") as archive:
        archive.writestr(member("test_stub/run.json", kind | 0o777), b"{}")
    assert_refused(repository, artifact, "is a link or a device")


def test_links_and_pipes_in_a_folder_are_not_followed(changed: tuple[Repository, Path], tmp_path: Path) -> None:
    repository, artifact = changed
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(artifact) as archive:
        archive.extractall(folder)
    (run,) = folder.glob("test_stub/*/run.json")
    run.rename(tmp_path / "facts.json")
    run.symlink_to(tmp_path / "facts.json")
    assert_refused(repository, folder, "it is a link or a device")
    run.unlink()
    os.mkfifo(run)
    assert_refused(repository, folder, "it is a link or a device")


def assert_refused(repository: Repository, artifact: Path, said: str = "") -> None:
    before = tree(repository.root.parent)
    result = accept(repository, artifact, "--yes")
    assert (result.code, said in result.err) == (6, True), result.out + result.err
    assert "\x1b" not in result.err
    assert tree(repository.root.parent) == before


def test_bombs_stop_at_the_limits(changed: tuple[Repository, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from e2e_registry.operations import artifact as module

    repository, artifact = changed
    small = module.Limits(members=50, json_bytes=100_000, total_bytes=1_000_000)
    monkeypatch.setattr(module, "Limits", lambda: small)
    spaces = b" " * 200_000

    def fat_facts(name: str, data: bytes) -> bytes:
        return data + spaces if name.endswith("run.json") else data

    def fat_metrics(name: str, data: bytes) -> bytes:
        return data + spaces * 10 if name.endswith(".jsonl") else data

    assert_refused(repository, edited(artifact, fat_facts), "larger than 100,000 bytes")
    result = accept(repository, edited(artifact, fat_metrics), "--yes")
    assert (result.code, "unpacks to more than 1,000,000 bytes" in result.out) == (6, True)
    with zipfile.ZipFile(artifact, "a") as archive:
        for number in range(50):
            archive.writestr(f"{number}", b"")
    assert_refused(repository, artifact, "more than 50 files")


def test_a_directory_longer_than_its_file_can_hold_is_refused(changed: tuple[Repository, Path]) -> None:
    """The size in the end record is what zipfile reads at once."""
    repository, artifact = changed
    data = bytearray(artifact.read_bytes())
    at = data.rindex(b"PK\x05\x06")
    data[at + 12 : at + 16] = (0xFFFFFF00).to_bytes(4, "little")
    for content in (data, b"not a zip at all", b""):
        artifact.write_bytes(content)
        assert_refused(repository, artifact, "not a readable zip")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def paths_of(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = [path]
    for key, value in entries:
        found += paths_of(value, (*path, key))
    return found


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_an_artifact_holds_it_ends_in_a_typed_error_or_a_standard(
    changed: tuple[Repository, Path], data: st.DataObject
) -> None:
    """Facts of any shape, members cut anywhere, bytes flipped: no traceback, and nothing beside the standard."""
    repository, artifact = changed
    repository.git("checkout", "-q", "--", ".")
    before = tree(repository.root)
    kind = data.draw(st.sampled_from(["json", "json", "json", "bytes", "cut", "zip"]))
    with zipfile.ZipFile(artifact) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if "output" not in name}
    suffixes = (".json",) if kind == "json" else (".json", ".jsonl")
    name = data.draw(st.sampled_from(sorted(name for name in members if name.endswith(suffixes))))
    content = members[name]
    if kind == "json":
        document = json.loads(content)
        path = data.draw(st.sampled_from(paths_of(document)))
        members[name] = json.dumps(replaced(document, path, data.draw(json_values))).encode()
    elif kind == "cut":
        members[name] = content[: data.draw(st.integers(0, len(content)))]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        members[name] = content[:at] + data.draw(st.binary(max_size=4)) + content[at + 1 :]
    hostile = artifact.with_name("hostile.zip")
    with zipfile.ZipFile(hostile, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    if kind == "zip":
        raw = bytearray(hostile.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        hostile.write_bytes(raw)
    result = accept(repository, hostile, "--yes", "--allow-other-source", "--allow-unknown-state")
    event(f"{kind}: exit code {result.code}")
    assert result.code in (0, 1, 2, 4, 5, 6), result.err
    assert "\x1b" not in result.out + result.err
    after = tree(repository.root)
    touched = {path for path in after if before.get(path) != after[path]}
    assert all(path.startswith("tests/ci/fixtures/e2e_standards/test_stub.") for path in touched), touched
    for path in touched:
        for _ in Standard(repository.root / path).batches():
            pass
        (repository.root / path).unlink()


# ------------------------------------------------------------------------------------------------ gh

FAKE_GH = r"""#!{python}
import json, pathlib, re, sys
state = json.loads(pathlib.Path(__file__).with_name("state.json").read_text())
command, address = sys.argv[1], sys.argv[-1]
with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
    print(*sys.argv[1:], file=calls)
if state.get("fails"):
    sys.exit(state["fails"])
for pattern, answer in state["answers"].items():
    if command == "api" and re.fullmatch(pattern, address):
        if isinstance(answer, str):
            sys.stdout.buffer.write(pathlib.Path(answer).read_bytes())
        else:
            print(json.dumps(answer))
        sys.exit(0)
print("gh: Not Found (HTTP 404)", file=sys.stderr)
sys.exit(1)
"""


class FakeGh:
    """A `gh` on PATH that answers API calls from a table; addresses as GitHub documents them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "gh"
        program.write_text(FAKE_GH.replace("{python}", sys.executable))
        program.chmod(0o755)

    def answers(self, answers: dict[str, Any], **state: Any) -> None:
        (self.folder / "state.json").write_text(json.dumps({"answers": answers, **state}))

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGh:
    fake = FakeGh(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    return fake


def listed(*artifacts: dict[str, Any]) -> dict[str, Any]:
    return {"total_count": len(artifacts), "artifacts": list(artifacts)}


REPO = r"repos/\{owner\}/\{repo\}"


def test_a_run_and_a_pull_request_are_downloaded_by_gh(changed: tuple[Repository, Path], gh: FakeGh) -> None:
    repository, artifact = changed
    live = {"id": 5, "name": "e2e-results-cpu-1of1-attempt1", "expired": False}
    foreign = {"id": 6, "name": "e2e-standards-cpu", "expired": False}
    answers = {
        rf"{REPO}/actions/runs/1234": {"id": 1234, "head_branch": "feature"},
        rf"{REPO}/actions/runs/1234/artifacts\?.*page=1": listed(foreign, live),
        rf"{REPO}/actions/artifacts/5/zip": str(artifact),
        rf"{REPO}/pulls/12": {"head": {"sha": "c0ffee", "ref": "feature"}},
        rf"{REPO}/actions/runs\?head_sha=c0ffee.*": {"workflow_runs": [{"id": 99}, {"id": 1234}]},
        rf"{REPO}/actions/runs/99/artifacts\?.*": listed(foreign),
    }
    gh.answers(answers)
    for reference in ("1234", "12", "#12"):
        result = accept(repository, reference, "--yes", "--json")
        assert result.code == 0, result.err
        assert result.json["artifact"] == "run 1234"
    assert "artifacts/6" not in gh.calls, "other artifacts stay where they are"
    elsewhere = {pattern.replace(REPO, "repos/owner/name"): answer for pattern, answer in answers.items()}
    gh.answers(elsewhere)
    url = "https://github.example.com/owner/name/actions/runs/1234/attempts/2"
    assert accept(repository, url).code == 0
    assert "--hostname github.example.com" in gh.calls
    assert accept(repository, "77").code == 2, "GitHub knows neither"


def test_an_expired_artifact_yields_the_command_that_makes_a_new_one(
    changed: tuple[Repository, Path], gh: FakeGh
) -> None:
    repository, _ = changed
    expired = {"id": 5, "name": "e2e-results-cpu", "expired": True}
    gh.answers(
        {
            rf"{REPO}/actions/runs/1234": {
                "id": 1234,
                "head_branch": "feature/$(id)",
                "path": ".github/workflows/e2e.yml@refs/heads/main",
            },
            rf"{REPO}/actions/runs/1234/artifacts\?.*": listed(expired),
        }
    )
    result = accept(repository, "1234", "--yes")
    assert (result.code, "gh workflow run e2e.yml --ref 'feature/$(id)'\n" in result.err) == (6, True)
    recording = repository.root / ".github/workflows/record-e2e-standards.yml"
    recording.parent.mkdir(parents=True)
    recording.touch()
    command = "gh workflow run record-e2e-standards.yml --ref 'feature/$(id)' -f "
    result = accept(repository, "1234", "--yes", "--test", TEST)
    assert (result.code, f"{command}test={TEST}\n" in result.err) == (6, True)
    result = accept(repository, "1234", "--yes")
    assert (result.code, f"{command}suite=NAME\n" in result.err) == (6, True)


def test_gh_that_fails_or_is_absent_says_what_to_do(
    changed: tuple[Repository, Path], gh: FakeGh, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, _ = changed
    for digits in ("404", "410"):
        # Report: a timeout for run 18240451 was read as "GitHub knows no run 18240451".
        gh.answers({}, fails=f'error: Get "https://api.github.com/repos/o/n/actions/runs/18{digits}51": i/o timeout')
        timed_out = accept(repository, f"18{digits}51", "--yes")
        assert (timed_out.code, "i/o timeout" in timed_out.err, "knows no" in timed_out.err) == (6, True, False)
    gh.answers({}, fails="gh: \x1b[31mnot logged in")
    result = accept(repository, "1234", "--yes")
    assert (result.code, "gh auth status" in result.err, "\x1b" in result.err) == (6, True, False)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    result = accept(repository, "1234", "--yes")
    assert (result.code, "cli.github.com" in result.err) == (2, True)
    assert accept(repository, "absent.zip", "--yes").code == 2
