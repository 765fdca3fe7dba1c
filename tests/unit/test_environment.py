"""The facts recorded with a run: composed from real writers, real repositories, and told apart when they differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from e2e_registry.determinism.state import read_state
from e2e_registry.determinism.variables import Origin, child_environment
from e2e_registry.environment import (
    GROUPS,
    arguments_equal,
    compose,
    difference,
    launch_facts,
    platform_facts,
    platform_slug,
    redact_command,
    redact_variables,
    software_equal,
    source_facts,
    source_tree_of_revision,
    without_machine_paths,
)
from e2e_registry.errors import StorageError, UsageError
from e2e_registry.recording import read_run

STANDARDS = Path("tests/standards")
RUNS = Path(".runs")
NOTHING = {"head": None, "dirty": None, "source_tree": None, "head_source_tree": None}


class Checkout:
    """A git work tree with a few committed files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")
        self.write("train.py", "lr = 0.1\n")
        self.write("lib/loss.py", "def loss(): ...\n")
        self.write(".gitignore", "*.log\n.runs/\n")
        (root / "latest").symlink_to("lib/loss.py")
        self.commit("start")

    def git(self, *arguments: str) -> str:
        allowed = ["-c", "protocol.file.allow=always"]
        command = ["git", *allowed, *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    @property
    def facts(self) -> dict[str, Any]:
        return source_facts(self.root, [STANDARDS, self.root / RUNS])

    @property
    def tree(self) -> str:
        tree = self.facts["source_tree"]
        assert re.fullmatch(r"[0-9a-f]{64}", tree)
        return str(tree)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


# --- source -----------------------------------------------------------------------------------------------------------


def test_squash_and_merge_leave_the_source_tree_alone(checkout: Checkout) -> None:
    checkout.git("checkout", "-q", "-b", "feature")
    for step in range(2):
        checkout.write("train.py", f"lr = {step}\n")
        checkout.commit(f"step {step}")
    feature = checkout.facts
    heads = {feature["head"]}
    for kind in ("squash", "no-ff"):
        checkout.git("checkout", "-q", "-B", kind, "main")
        checkout.write("README", "apart\n")
        checkout.commit("main moves on")
        checkout.git("rm", "-q", "README")
        checkout.git("commit", "-q", "-m", "and back")
        checkout.git("merge", "-q", f"--{kind}", "feature", *(["-m", "merge"] if kind == "no-ff" else []))
        if kind == "squash":
            assert checkout.facts["dirty"] is True
            assert checkout.tree == feature["source_tree"]  # the index does not enter
            checkout.commit("squashed")
        merged = checkout.facts
        assert merged["source_tree"] == feature["source_tree"]
        assert merged["dirty"] is False
        heads.add(merged["head"])
    assert len(heads) == 3


def test_what_counts_as_a_change_of_source(checkout: Checkout) -> None:
    def retarget() -> None:
        (checkout.root / "latest").unlink()
        (checkout.root / "latest").symlink_to("train.py")

    trees = [checkout.tree]
    for change in (
        lambda: checkout.write("train.py", "lr = 0.2\n"),
        lambda: (checkout.root / "train.py").chmod(0o755),
        lambda: checkout.write("untracked.py", ""),
        lambda: (checkout.root / "untracked.py").rename(checkout.root / "renamed.py"),
        retarget,
        lambda: Path(os.fsdecode(os.fsencode(checkout.root) + b"/caf\xe9\n.txt")).write_text("not UTF-8"),
        lambda: (checkout.root / "lib/loss.py").unlink(),
    ):
        change()
        assert checkout.facts["dirty"] is True
        trees.append(checkout.tree)
    assert len(set(trees)) == len(trees)
    checkout.commit("all of it")
    assert checkout.tree == trees[-1]
    assert checkout.facts["dirty"] is False


def test_what_does_not_count_as_a_change_of_source(checkout: Checkout) -> None:
    before = checkout.facts
    os.utime(checkout.root / "train.py", (0, 0))
    (checkout.root / "train.py").chmod(0o600)
    checkout.write("output.log", "ignored")
    checkout.write(".runs/1/metrics.jsonl", "{}")
    checkout.write("lib/__pycache__/loss.cpython-311.pyc", "compiled")
    checkout.write("tests/standards/new.parquet", "PAR1")
    assert checkout.facts == before
    checkout.git("add", "tests/standards")
    assert checkout.facts == before
    checkout.commit("record")
    after = checkout.facts
    assert (after["dirty"], after["source_tree"]) == (False, before["source_tree"])
    assert source_facts(checkout.root, [STANDARDS, Path("train.py")])["source_tree"] != before["source_tree"]
    # A neighbour whose name begins alike is not excluded.
    checkout.write("tests/standards_of_old.py", "")
    assert checkout.tree != before["source_tree"]


def test_variables_of_a_git_hook_do_not_mislead(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Checkout(tmp_path / "other")
    other.write("train.py", "other\n")
    expected = checkout.facts
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.root / ".git/index"))
    assert checkout.facts == expected


def test_no_repository_no_git_no_commit_and_no_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert source_facts(empty) == NOTHING
    assert source_facts(tmp_path / "missing") == NOTHING
    subprocess.run(["git", "init", "-q", str(empty)], check=True)
    (empty / "new.py").write_text("x")
    unborn = source_facts(empty)
    assert (unborn["head"], unborn["dirty"]) == (None, True)
    assert unborn["source_tree"] is not None
    if os.getuid() == 0:  # only root can give a checkout to another user, as containers do
        for path in (empty, empty / ".git"):
            os.chown(path, 12345, 12345)
        assert source_facts(empty) == unborn
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_facts(empty) == NOTHING


def test_submodules_and_repositories_inside_count_by_their_files(checkout: Checkout, tmp_path: Path) -> None:
    library = Checkout(tmp_path / "library")
    checkout.git("submodule", "-q", "add", str(library.root), "vendor/library")
    checkout.commit("vendor")
    trees = [checkout.tree]
    checkout.write("vendor/library/train.py", "lr = 9\n")
    assert checkout.facts["dirty"] is True
    trees.append(checkout.tree)
    Checkout(checkout.root / "nested")
    trees.append(checkout.tree)
    checkout.write("nested/lib/loss.py", "edited\n")
    trees.append(checkout.tree)
    checkout.write("nested/debug.log", "ignored by the repository inside")
    assert checkout.tree == trees[-1]
    assert len(set(trees)) == 4
    clone = tmp_path / "clone"
    checkout.git("clone", "-q", "--no-recurse-submodules", str(checkout.root), str(clone))
    assert source_facts(clone)["source_tree"] not in trees  # the submodule's files are not there


def test_the_whole_work_tree_counts_from_any_folder_and_any_linked_work_tree(
    checkout: Checkout, tmp_path: Path
) -> None:
    assert source_facts(checkout.root / "lib") == source_facts(checkout.root)
    linked = tmp_path / "linked"
    checkout.git("worktree", "add", "-q", "--detach", str(linked))
    assert source_facts(linked) == source_facts(checkout.root)
    checkout.write("train.py", "a neighbour of lib\n")
    assert source_facts(checkout.root / "lib")["source_tree"] != source_facts(linked)["source_tree"]


def test_a_folder_that_became_a_link_is_the_same_before_and_after_the_commit(checkout: Checkout) -> None:
    (checkout.root / "lib").rename(checkout.root / "library")
    (checkout.root / "lib").symlink_to("library")
    before = checkout.tree
    checkout.commit("link")
    assert checkout.tree == before


def test_a_revision_has_the_tree_of_its_clean_checkout(checkout: Checkout, tmp_path: Path) -> None:
    library = Checkout(tmp_path / "library")
    checkout.write(".gitattributes", "*.bat text eol=crlf\n*.txt text eol=lf\n*.up filter=upper\n")
    checkout.git("config", "filter.upper.smudge", "tr a-z A-Z")
    checkout.git("config", "filter.upper.clean", "tr A-Z a-z")
    checkout.write("run.bat", "echo one\necho two\n")
    checkout.write("shouted.up", "quiet\n")
    checkout.write("tests/standards/a.parquet", "PAR1")
    checkout.write("lib/__pycache__/tracked.pyc", "derived")
    (checkout.root / "train.py").chmod(0o755)
    Path(os.fsdecode(os.fsencode(checkout.root) + b"/caf\xe9\n.txt")).write_text("not UTF-8\n")
    checkout.git("submodule", "-q", "add", str(library.root), "vendor/library")
    checkout.commit("pull request")
    # A later commit has other attributes, and neither it nor the edits after it are asked about.
    checkout.write(".gitattributes", "*.bat text eol=lf\n")
    checkout.write("train.py", "lr = 0.3\n")
    checkout.commit("merge")
    checkout.write("untracked.py", "")
    index, status = checkout.git("ls-files", "--stage"), checkout.git("status", "--porcelain")
    found = source_tree_of_revision(checkout.root / "lib", "HEAD^", [checkout.root / STANDARDS, checkout.root / RUNS])
    assert (checkout.git("ls-files", "--stage"), checkout.git("status", "--porcelain")) == (index, status)
    checkout.git("stash", "-q", "--include-untracked")
    clean = checkout.tree
    checkout.git("checkout", "-q", "HEAD^")
    for name in ("run.bat", "shouted.up"):  # git writes a file again if its content changed, not if its attributes did
        (checkout.root / name).unlink()
        checkout.git("checkout", "-q", "--", name)
    assert (checkout.root / "run.bat").read_bytes() == b"echo one\r\necho two\r\n"
    assert (checkout.root / "shouted.up").read_text() == "QUIET\n"
    assert checkout.tree == found != clean
    # CI's checkout of the merge commit has no submodule, nor has a clean checkout of the head there.
    clone = tmp_path / "clone"
    checkout.git("clone", "-q", "--no-recurse-submodules", str(checkout.root), str(clone))
    assert source_tree_of_revision(clone, "HEAD", [STANDARDS]) == source_facts(clone, [STANDARDS])["source_tree"]
    for revision in ("no-such", "--help", "HEAD:train.py", "a\0b"):
        assert source_tree_of_revision(checkout.root, revision) is None
    assert source_tree_of_revision(tmp_path / "nowhere", "HEAD") is None


def test_ci_names_the_tree_of_the_pull_request(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2E_REGISTRY_HEAD_SOURCE_TREE", "0" * 64)
    assert checkout.facts["head_source_tree"] == "0" * 64
    monkeypatch.setenv("E2E_REGISTRY_HEAD_SOURCE_TREE", "$(id)")
    with pytest.raises(UsageError, match="is no hash"):
        checkout.facts  # noqa: B018


# --- composing --------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from e2e_registry import MetricRecorder
import numpy
for rank in range(2):
    with MetricRecorder(role="train", rank=rank) as recorder:
        recorder.log({"train/loss": 1.0}, step=0)
"""


def test_a_real_run_composes_into_groups_without_paths_or_process_ids(checkout: Checkout, tmp_path: Path) -> None:
    script = checkout.write("scripts/recipe.py", WRITER)
    run_dir = tmp_path / "run"
    preloaded = "/opt/nowhere/libmalloc.so"
    child = child_environment(
        "cpu-portable",
        caller={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO"},
        registration={"OPENBLAS_CORETYPE": "Nehalem", "OMP_PLACES": preloaded},
        python=sys.executable,
    )
    project = Path(__file__).parents[2]
    environment = {**child.variables, "PYTHONPATH": str(project), "E2E_REGISTRY_RUN_DIR": str(run_dir)}
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    facts = launch_facts(
        checkout.root,
        test="tests/e2e/test_recipe.py",
        script="scripts/recipe.py",
        args=["--data", "/data/v1/train", "--config", str(checkout.root / "configs/a.toml"), "--token", "abc"],
        env={"HF_TOKEN": "abc", "CACHE": "${HOME}/cache"},
        seed=3,
        profile="cpu-portable",
        origins={setting.variable.name: setting.origin.value for setting in child.settings},
        exclude=[STANDARDS],
    )
    record = compose(writer_states=read_run(run_dir).writer_states, launch_facts=facts, root=checkout.root)
    text = json.dumps(record)  # plain JSON
    assert tuple(record) == GROUPS
    assert str(tmp_path) not in text
    assert preloaded not in text
    assert not re.search(r'[" =:]/[A-Za-z]', text)
    assert '"abc"' not in text
    assert not {"pid", "executable", "kernel"} & {name.split(".")[-1] for facts in record.values() for name in facts}
    assert record["software"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in record["software"]
    determinism = record["determinism"]
    assert determinism["profile"] == "cpu-portable"
    assert determinism["variables.OMP_NUM_THREADS"] == "1"
    # Whoever set what the profile says anyway is of no account.
    origins = {name: value for name, value in determinism.items() if name.startswith("origins.")}
    assert origins == {"origins.MKL_CBWR": Origin.CALLER.value}
    recipe = record["recipe"]
    assert recipe["args"][:4] == ["--data", recipe["args"][1], "--config", "configs/a.toml"]
    assert re.fullmatch(r"\.\.\./train~[0-9a-f]{8}", recipe["args"][1])
    assert recipe["args"][4:] == ["--token", "***"]
    assert recipe["env.HF_TOKEN"] == "***"
    assert recipe["env.CACHE"] == "${HOME}/cache"
    assert recipe["seed"] == 3
    assert record["source"]["source_tree"] == checkout.tree
    script.write_text(WRITER + "\n")
    changed = launch_facts(checkout.root, script="scripts/recipe.py")["recipe"]["script_sha256"]
    assert changed != recipe["script_sha256"]
    with pytest.raises(StorageError, match="cannot read the script"):
        launch_facts(checkout.root, script="scripts/missing.py")


def state(**changes: Any) -> dict[str, Any]:
    """A writer's state, as it comes back from its file; keywords replace whole groups."""
    return {**json.loads(json.dumps(read_state())), **changes}


def threads(count: int, **variables: Any) -> dict[str, Any]:
    entries = {name: {"initial": value, "current": value, "late": False} for name, value in variables.items()}
    return state(software={"torch": "2.13.0"}, determinism={"torch": {"num_threads": count}}, variables=entries)


def test_disagreeing_writers_stay_visible() -> None:
    states = {
        ("train", 1): threads(2, OMP_NUM_THREADS="2"),
        ("train", 0): threads(1, OMP_NUM_THREADS="1"),
        ("train", 3): threads(1, OMP_NUM_THREADS="1"),
        ("train", 2): threads(1, OMP_NUM_THREADS="1"),
        ("rollout", 0): state(software={"ray": "2.60"}, determinism={"torch": None}, variables={}),
        ("reward", 0): None,
        ("reward", 1): None,
    }
    record = compose(writer_states=states)
    determinism = record["determinism"]
    assert determinism["torch.num_threads"] == {"by_writer": {"train 0,2-3": 1, "train 1": 2}}
    # An unset variable is a value, a library that was not loaded is none.
    assert determinism["variables.OMP_NUM_THREADS"] == {
        "by_writer": {"rollout 0": None, "train 0,2-3": "1", "train 1": "2"}
    }
    assert record["software"]["torch"] == "2.13.0"
    assert record["software"]["ray"] == "2.60"
    assert determinism["unknown_writers"] == "reward 0-1"


def test_a_variable_that_was_set_late_is_not_taken_for_one_that_held() -> None:
    late = {"initial": None, "current": "1", "late": True}
    variables = {"OMP_NUM_THREADS": late, "CUBLAS_WORKSPACE_CONFIG": {**late, "set_in_time": True}}
    determinism = compose(writer_states={("main", 0): state(variables=variables)})["determinism"]
    assert determinism["variables.OMP_NUM_THREADS"] == {"initial": None, "set_late": "1"}
    assert determinism["variables.CUBLAS_WORKSPACE_CONFIG"] == "1"


def test_nothing_known_composes_into_empty_groups() -> None:
    record = compose(writer_states={})
    assert record == {group: {} for group in GROUPS}
    assert difference(record, record) == []
    assert compose(writer_states={("main", 0): {}})["software"] == {}


# --- difference -------------------------------------------------------------------------------------------------------


def recipe(*args: str) -> dict[str, Any]:
    return {"recipe": {"args": list(args)}}


@pytest.mark.parametrize(
    ("want", "got", "expected"),
    [
        (["--lr", "0.003"], ["--lr", "0.003003"], ["recipe --lr: 0.003 -> 0.003003"]),
        (["--lr=0.003"], ["--lr=0.003003"], ["recipe --lr: 0.003 -> 0.003003"]),
        ([], ["--deterministic-mode"], ["recipe --deterministic-mode: none -> set"]),
        (["--a", "1", "--b", "x", "y"], ["--b", "x", "--a", "1"], ["recipe --b: x y -> x"]),
        (["--shift", "-1"], ["--shift", "-2"], ["recipe --shift: -1 -> -2"]),
        (["-n", "1", "-n", "2"], ["-n", "1", "-n", "3"], ["recipe -n: 2 -> 3"]),
        (["train", "--x"], ["eval", "--x"], ["recipe args: train -> eval"]),
        (["--lr", "1"], ["--lr=1"], ["recipe args: --lr 1 -> --lr=1"]),
        (["--a", "--b"], ["--b", "--a"], ["recipe args: --a --b -> --b --a"]),
        (["--a"], ["--a"], []),
    ],
)
def test_arguments_differ_by_option(want: list[str], got: list[str], expected: list[str]) -> None:
    assert [str(entry) for entry in difference(recipe(*want), recipe(*got))] == expected
    assert arguments_equal(recipe(*want), recipe(*got)) is (want == got)


@given(st.lists(st.sampled_from(["--a", "--b", "--a=1", "1", "x", "-n", "-1", "--", ""])), st.data())
def test_any_change_of_arguments_is_a_difference(args: list[str], data: st.DataObject) -> None:
    changed = data.draw(st.permutations(args) | st.just([*args, "y"]) | st.just(args[1:]))
    assert bool(difference(recipe(*args), recipe(*changed))) is (args != changed)


def test_differences_are_grouped_and_say_which_are_expected() -> None:
    want = compose(
        writer_states={("main", 0): threads(1, OMP_NUM_THREADS="1")},
        launch_facts={"source": {"head": "a" * 40, "dirty": False, "source_tree": "1" * 64}},
    )
    got = compose(
        writer_states={("main", 0): threads(2)},
        launch_facts={"source": {"head": "b" * 40, "dirty": False, "source_tree": "2" * 64}},
    )
    got["platform"].update(cpu_model="another", machine="aarch64")
    got["software"]["torch"] = "2.14.0"
    found = difference(want, got)
    assert [entry.group for entry in found] == sorted((entry.group for entry in found), key=GROUPS.index)
    expected = {(entry.group, entry.name) for entry in found if entry.is_informational}
    assert expected == {("platform", "cpu_model"), ("source", "head")}
    lines = [str(entry) for entry in found]
    assert "software torch: 2.13.0 -> 2.14.0" in lines
    assert "determinism torch.num_threads: 1 -> 2" in lines
    assert "determinism variables.OMP_NUM_THREADS: 1 -> none" in lines
    assert "source source_tree: 111111111111 -> 222222222222" in lines
    assert not software_equal(want, got)
    got["software"]["torch"] = "2.13.0"
    assert software_equal(want, got)


def test_of_long_lists_only_what_differs_is_shown_and_types_count() -> None:
    want = {"platform": {"cpu_flags": ["avx", "avx2", "fma"]}, "determinism": {"flag": True, "targets": ["a", "a"]}}
    got = {"platform": {"cpu_flags": ["avx", "avx2", "avx512f"]}, "determinism": {"flag": 1, "targets": ["a"]}}
    assert [str(entry) for entry in difference(want, got)] == [
        "platform cpu_flags: fma -> avx512f",
        "determinism flag: True -> 1",
        "determinism targets: a a -> a",
    ]


def test_a_long_value_is_cut_when_shown() -> None:
    (entry,) = difference({"determinism": {"x": "y" * 10_000}}, {"determinism": {"x": {"by_writer": {"main 0": "z"}}}})
    assert len(str(entry)) < 300
    assert str(entry).endswith("-> {main 0: z}")
    assert entry.want == "y" * 10_000


# --- platform ---------------------------------------------------------------------------------------------------------

X86 = {"system": "Linux", "machine": "x86_64"}
V3 = ["sse4_1", "sse4_2", "avx", "fma", "avx2"]
V4 = [*V3, "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("profile", "platform", "keywords", "expected"),
    [
        ("cpu-portable", X86, {}, "cpu-x86_64-portable"),
        ("cpu-portable", {**X86, "cpu_flags": V4}, {}, "cpu-x86_64-portable"),
        ("cpu-portable", {"system": "Windows", "machine": "AMD64"}, {}, "cpu-x86_64-portable-windows"),
        ("cpu-native", {**X86, "cpu_flags": V4}, {}, "cpu-x86_64-native-avx512"),
        ("cpu-native", {**X86, "cpu_flags": V3}, {}, "cpu-x86_64-native-avx2"),
        ("cpu-native", {**X86, "cpu_flags": ["avx", "avx2"]}, {}, "cpu-x86_64-native-avx"),  # no FMA
        ("cpu-native", {**X86, "cpu_flags": ["sse4_1", "sse4_2"]}, {}, "cpu-x86_64-native-sse4"),
        ("cpu-native", X86, {}, "cpu-x86_64-native-unknown"),
        (
            "cpu-native",
            {**X86, "cpu_flags": {"by_writer": {"main 0": V4, "main 1": V3}}},
            {},
            "cpu-x86_64-native-avx2",
        ),
        ("cpu-native", {"machine": "aarch64", "cpu_flags": ["asimd", "sve"]}, {}, "cpu-aarch64-native-sve"),
        ("cuda", {"gpus": ["NVIDIA H200"] * 2}, {}, "cuda-nvidia-h200-2gpu"),
        ("cuda", {"gpus": [H100] * 8}, {"nodes": 2}, "cuda-nvidia-h100-80gb-hbm3-8gpu-2node"),
        ("cuda", {"gpus": ["NVIDIA H100 PCIe"]}, {}, "cuda-nvidia-h100-pcie-1gpu"),
        ("cuda", {"gpus": ["Tesla V100-SXM2-16GB"]}, {"gpu_count": 4}, "cuda-nvidia-tesla-v100-sxm2-16gb-4gpu"),
        (
            "cuda",
            {"gpus": {"by_writer": {"main 0": None, "train 0": [H100, "NVIDIA H200"]}}},
            {},
            "cuda-nvidia-h100-80gb-hbm3-1gpu-nvidia-h200-1gpu",
        ),
        (
            "cuda",
            {"gpus": ["NVIDIA H200"], "gpu.driver": "570.86.15"},
            {
                "axes": ["torch", "cuda", "cudnn", "driver"],
                "software": {"torch": "2.13.0+cu128", "torch_build.cuda": "12.8", "torch_build.cudnn": 91002},
            },
            "cuda-nvidia-h200-1gpu-torch2.13-cuda12.8-cudnn9.10-driver570.86",
        ),
        ("cpu-portable", X86, {"tag": "Fleet B"}, "cpu-x86_64-portable-fleet-b"),
    ],
)
def test_platform_slugs(profile: str, platform: Mapping[str, Any], keywords: dict[str, Any], expected: str) -> None:
    assert platform_slug(profile, platform=platform, **keywords) == expected


def test_gpus_of_a_state_name_the_platform() -> None:
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 150_000_000_000, "driver": "570.86.15"}
    facts = platform_facts(state(gpus=[gpu, {**gpu, "driver": "570.86.15"}]))
    assert platform_slug("cuda", platform=facts) == "cuda-nvidia-h200-2gpu"
    assert (facts["gpu.driver"], facts["gpu.capability"]) == ("570.86.15", "9.0")


def test_this_machine_has_a_slug_before_anything_is_run() -> None:
    facts = platform_facts(read_state())
    assert platform_slug("cpu-native", platform=facts).startswith(f"cpu-{facts['machine'].lower()}-native-")


@pytest.mark.parametrize(
    ("profile", "platform", "keywords", "message"),
    [
        ("cpu-fast", X86, {}, "no determinism profile"),
        ("cpu-portable", {}, {}, "'machine'.* not recorded"),
        ("cuda", X86, {}, "no GPU is recorded"),
        ("cpu-portable", X86, {"axes": ["troch"]}, "unknown platform axis 'troch'"),
        ("cpu-portable", X86, {"axes": ["torch"]}, "'torch' of group 'software', which is not recorded"),
        (
            "cpu-portable",
            X86,
            {"axes": ["torch"], "software": {"torch": {"by_writer": {"main 0": "2.12.0", "train 0": "2.13.0"}}}},
            "differs between the writers",
        ),
    ],
)
def test_a_slug_that_would_say_nothing_is_refused(
    profile: str, platform: Mapping[str, Any], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        platform_slug(profile, platform=platform, **keywords)


FOREIGN = st.text(min_size=1, max_size=80)


@given(gpu=FOREIGN, machine=FOREIGN, tag=FOREIGN, version=FOREIGN, count=st.integers(1, 99))
@example(gpu="A..1", machine="x..86", tag="0..0", version="1..2", count=1)
def test_slugs_are_safe_in_file_names(gpu: str, machine: str, tag: str, version: str, count: int) -> None:
    slugs = [
        platform_slug("cuda", platform={"gpus": [gpu]}, gpu_count=count, tag=tag),
        platform_slug("cpu-portable", platform={"machine": machine, "system": gpu}, tag=tag),
        platform_slug("cpu-portable", platform=X86, axes=["torch"], software={"torch": version}),
    ]
    for slug in slugs:
        assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]*[a-z0-9]", slug)
        assert ".." not in slug
        assert len(slug) <= 200


# --- redaction --------------------------------------------------------------------------------------------------------

SECRET_NAMES = st.sampled_from(
    [
        "api-key",
        "token",
        "hf_token",
        "WANDB_API_KEY",
        "password",
        "dbPassword",
        "client.secret",
        "AWS_SECRET_ACCESS_KEY",
    ]
)
FORMS = (
    ["--{n}", "{s}"],
    ["--{n}={s}"],
    ["-e", "{n}={s}"],
    ["--env={n}={s}"],
    ["--train-env-vars", '{{"LR": "1", "{n}": "{s}"}}'],
    ["--train-env-vars", '{{\\"{n}\\": \\"{s}\\"}}'],
    ["bash", "-lc", "{n}={s} python train.py --lr 0.1"],
    ["bash", "-c", "python train.py --{n} '{s}' --lr 0.1"],
    ["https://user:{s}@host/repo.git"],
    ["https://host/f?a=1&{n}={s}&b=2"],
    ["-H", "Authorization: Bearer {s}"],
    ["x=hf_{s}"],
    ["+model.{n}={s}", "--lr", "0.1"],
)


@given(SECRET_NAMES, st.from_regex(r"[A-Za-z0-9]{20,40}", fullmatch=True), st.sampled_from(FORMS))
def test_no_form_of_a_secret_survives(name: str, secret: str, form: list[str]) -> None:
    argv = [part.format(n=name, s=secret) for part in form]
    redacted = redact_command(argv)
    assert secret not in " ".join(redacted)
    assert "***" in " ".join(redacted)
    assert len(redacted) == len(argv)
    assert redact_command(redacted) == redacted
    assert secret not in str(redact_variables({name.replace("-", "_"): secret, "OPTIONS": " ".join(argv)}))


@pytest.mark.parametrize(
    "argv",
    [
        ["--lr", "0.003", "--max-tokens", "512", "--tokenizer=bpe", "--eos-token", "</s>", "--pad-token-id", "0"],
        ["--input-key", "prompt", "--label-key=answer", "--reward-key", "score", "--num-tokens=9"],
        ["--token", "${HF_TOKEN}", "--password=$DB_PASSWORD", "API_KEY=${API_KEY}"],
        ["--json", '{"lr": 0.1, "steps": [1, 2]}', "12:30", "https://host/path?x=1", "user@host:dir"],
        ["--passwords-are-not-values", "--author", "me", "--secretary", "x", "--monkey", "y"],
    ],
)
def test_what_is_no_secret_stays(argv: list[str]) -> None:
    assert redact_command(argv) == argv


def test_an_option_after_a_secret_flag_is_not_its_value() -> None:
    assert redact_command(["--use-auth-token", "--lr", "1"]) == ["--use-auth-token", "--lr", "1"]
    assert redact_command(["--password=two words"]) == ["--password=***"]
    assert redact_command(["sh", "-c", "TOKEN=a run --lr 1"]) == ["sh", "-c", "TOKEN=*** run --lr 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/project/scripts/run.py", "scripts/run.py"),
        ("--config=/srv/project/a/../b.toml", "--config=b.toml"),
        ("/srv/project", "."),
        ("/srv/projects", ".../projects~"),
        ("A=/x/lib.so:/y/lib.so", "A=.../lib.so~:.../lib.so~"),
        ('{"data": "/data/train"}', '{"data": ".../train~"}'),
        ("file:///home/me/x", ".../x~"),
        ("a/b ../c ~/d ${HOME}/e {run_dir}/f 1/2", "a/b ../c ~/d ${HOME}/e {run_dir}/f 1/2"),
        ("https://host/a/b s3://bucket/key", "https://host/a/b s3://bucket/key"),
    ],
)
def test_paths_of_the_machine_become_relative_or_masked(text: str, expected: str) -> None:
    found = without_machine_paths(text, Path("/srv/project"))
    assert re.sub(r"~[0-9a-f]{8}", "~", found) == expected
    assert without_machine_paths(found, Path("/srv/project")) == found


def test_different_masked_paths_stay_different() -> None:
    assert without_machine_paths("/data/v1/train") != without_machine_paths("/data/v2/train")
