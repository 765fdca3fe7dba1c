"""``init`` in other repositories, and the whole way of a new user with the built wheel."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from repositories import Result
from terminal import END_OF_INPUT, INTERRUPT, converse

from e2e_registry.config import load_settings

ROOT = Path(__file__).parents[2]
TEST = "tests/e2e/test_linear_model.py"
RECIPE = "scripts/run_linear_model.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "theirs"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def cli(folder: Path, *arguments: str) -> Result:
    from e2e_registry.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return Result(code, out.getvalue(), err.getvalue())


def states(result: Result) -> dict[str, str]:
    return {file["path"]: file["state"] for file in result.json["files"]}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def test_an_empty_repository_records_and_checks_at_once(folder: Path) -> None:
    result = cli(folder, "init", "--action", "owner/e2e_registry@v1")
    assert result.code == 0, result.err
    assert set(contents(folder)) == {
        "pyproject.toml",
        RECIPE,
        TEST,
        ".gitattributes",
        ".gitignore",
        ".pre-commit-config.yaml",
        ".github/workflows/e2e.yml",
    }
    assert f"record --test {TEST}" in result.out
    assert cli(folder, "record", "--test", TEST).code == 0
    assert cli(folder, "check", "--suite", "short").code == 0
    status = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=folder, capture_output=True, text=True)
    assert ".e2e_runs" not in status.stdout
    attributes = "tests/ci/fixtures/e2e_standards/test_linear_model.cpu-x86_64-portable.parquet"
    found = subprocess.run(["git", "check-attr", "merge", attributes], cwd=folder, capture_output=True, text=True)
    assert found.stdout.strip().endswith("merge: unset")
    again = cli(folder, "init", "--json", "--action", "owner/e2e_registry@v1")
    assert set(states(again).values()) == {"unchanged"}


def test_the_example_shows_what_its_flag_is_for(folder: Path) -> None:
    cli(folder, "init")
    test = folder / TEST
    test.write_text(test.read_text().replace('args=["--deterministic-mode"],', "args=[],"))
    refused = cli(folder, "record", "--test", TEST)
    assert (refused.code, "data/batch" in refused.out) == (1, True)


def test_workflow_and_hooks_are_yaml_that_names_what_was_given(folder: Path) -> None:
    options = ["--platform", "cuda-nvidia-h200-1gpu", "--runner", "self-hosted", "--runner", "gpu"]
    assert cli(folder, "init", *options, "--action", "owner/e2e_registry@v1").code == 0
    workflow = yaml.safe_load((folder / ".github/workflows/e2e.yml").read_text())
    job = workflow["jobs"]["e2e"]
    assert job["runs-on"] == ["self-hosted", "gpu"]
    inputs = {"suite": "short", "python-version": "3.11"}
    assert job["steps"][-1] == {"uses": "owner/e2e_registry@v1", "with": inputs}
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert set(job["steps"][-1]["with"]) <= set(action["inputs"])
    assert load_settings(folder).platforms == {
        "cuda-nvidia-h200-1gpu": ("self-hosted", "gpu"),
        "cpu-x86_64-portable": ("self-hosted", "gpu"),
    }
    (repo,) = yaml.safe_load((folder / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert {hook["id"] for hook in repo["hooks"]} <= hooks


def test_a_later_call_adds_what_is_missing_and_leaves_what_became_the_owner_s(folder: Path) -> None:
    assert cli(folder, "init", "--runner", "their-runner").code == 0
    recipe = folder / RECIPE
    recipe.write_text(recipe.read_text().replace("0.1", "0.2"))
    edited = recipe.read_bytes()
    result = cli(folder, "init", "--action", "owner/e2e_registry@v1")
    assert result.code == 0, result.err
    assert recipe.read_bytes() == edited
    workflow = yaml.safe_load((folder / ".github/workflows/e2e.yml").read_text())
    assert workflow["jobs"]["e2e"]["runs-on"] == ["their-runner"]
    # An example that was replaced by a test of one's own does not come back.
    recipe.unlink()
    (folder / TEST).rename(folder / "tests/e2e/test_own.py")
    assert cli(folder, "init", "--force").code == 0
    assert not recipe.exists()
    assert not (folder / TEST).exists()


def test_without_an_address_of_the_action_no_workflow_is_made_up(folder: Path) -> None:
    result = cli(folder, "init")
    assert "--action OWNER/REPO@REF" in result.out
    assert not (folder / ".github").exists()


@pytest.mark.parametrize(
    "found",
    [
        b'[project]\nname = "theirs"\nversion = "1"\n',
        b"# no line end\n[tool.ruff]\nline-length = 100",
        b'[project]\r\nname = "windows"\r\n',
        b"\xef\xbb\xbf[tool.other]\nx = 1\n",
        b"",
    ],
)
def test_what_stands_in_a_file_keeps_its_bytes(folder: Path, found: bytes) -> None:
    (folder / "pyproject.toml").write_bytes(found)
    (folder / ".gitignore").write_bytes(b"*.log")
    (folder / ".gitattributes").write_bytes(b"* text=auto\n")
    result = cli(folder, "init", "--json")
    assert result.code == 0, result.err
    assert states(result)["pyproject.toml"] == "appended to"
    written = (folder / "pyproject.toml").read_bytes()
    assert written.startswith(found)
    assert b"\r\n" not in found or b"\n" not in written.replace(b"\r\n", b"")
    tomllib.loads(written.decode("utf-8-sig"))
    assert load_settings(folder).suites == ("short",)
    assert (folder / ".gitignore").read_bytes() == b"*.log\n.e2e_runs/\n"
    assert (folder / ".gitattributes").read_bytes().startswith(b"* text=auto\n")


def test_settings_that_are_there_hold(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[tool.e2e_registry]\ntest_folders = ["checks"]\nstandards_folder = "golden"\nsuites = ["nightly"]\n'
    )
    result = cli(folder, "init", "--json")
    assert (result.code, states(result)["pyproject.toml"]) == (0, "unchanged")
    assert cli(folder, "record", "--all").code == 0
    assert (folder / "golden/test_linear_model.cpu-x86_64-portable.parquet").exists()
    assert "golden/*.parquet" in (folder / ".gitattributes").read_text()


def test_files_in_the_way_stop_it_before_anything_is_written(folder: Path) -> None:
    recipe = folder / RECIPE
    recipe.parent.mkdir()
    recipe.write_text("print('theirs')\n")
    hooks = folder / ".pre-commit-config.yaml"
    hooks.write_text("repos: []\n")
    before = contents(folder)
    for options in ([], ["--yes"], ["--json"]):
        result = cli(folder, "init", *options)
        assert (result.code, RECIPE in result.err, "--force" in result.err) == (2, True, True)
        assert contents(folder) == before
    forced = cli(folder, "init", "--force", "--json")
    assert states(forced)[RECIPE] == "replaced"
    assert hooks.read_text() == "repos: []\n", "others' hooks are never replaced"
    note = next(file["note"] for file in forced.json["files"] if file["path"] == hooks.name)
    assert "e2e-registry lint" in note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--platform", "no slug"], "--platform"),
        (["--runner", "a, b ]"], "--runner"),
        (["--action", "nonsense"], "--action"),
        (["--action", "owner/repo@v1\n  run: evil"], "--action"),
        (["absent"], "no such folder"),
    ],
)
def test_bad_answers_are_usage_errors(folder: Path, options: list[str], said: str) -> None:
    result = cli(folder, "init", *options)
    assert (result.code, said in result.err) == (2, True)
    assert contents(folder) == {}


def test_a_pyproject_that_cannot_be_extended_is_left_alone(folder: Path) -> None:
    for found in ("this is not TOML", "tool = { other = 1 }\n"):
        (folder / "pyproject.toml").write_text(found)
        result = cli(folder, "init")
        assert (result.code, "Traceback" in result.err) == (2, False)
        assert contents(folder) == {"pyproject.toml": found.encode()}


def test_it_asks_for_the_platform_and_before_replacing(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / RECIPE).write_text("print('theirs')\n")
    answers = ["cpu-x86_64-portable\n", "ubuntu-22.04, big\n", "\n", "n\n"]
    code, shown = converse(folder, ["init"], answers, prompt=r"[\])](\x1b\[0m)?: ")
    assert code == 0, shown
    assert load_settings(folder).platforms == {"cpu-x86_64-portable": ("ubuntu-22.04", "big")}
    assert (folder / RECIPE).read_text() == "print('theirs')\n"
    assert "kept" in shown


# ------------------------------------------------------------------------------------------------ a new user


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the built wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "e2e_registry", source / "e2e_registry", ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "e2e_registry").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged <= names, "everything of the package is in the wheel, templates and hooks too"
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next(environment.glob("lib/*/site-packages"))
    # Folders in a .pth come after this one, and theirs are not read: an editable install there does not count.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return environment


@pytest.mark.slow
def test_a_new_user_goes_from_an_empty_repository_to_an_accepted_change(folder: Path, installed: Path) -> None:
    """Under ten commands, as docs/ci.md has them."""

    def command(*words: str, code: int = 0) -> str:
        environment = {**os.environ, "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    where = command("python", "-c", "import e2e_registry; print(e2e_registry.__file__)")
    assert where.startswith(str(installed)), "the package is the wheel's"
    command("e2e-registry", "init")
    edit(folder / RECIPE, "steps: Annotated", "= 40", "= 30")
    assert "2 runs agree" in command("e2e-registry", "record", "--all")
    command("git", "add", "--all")
    command("git", "commit", "--quiet", "--message", "First standard")
    edit(folder / RECIPE, "lr: Annotated", "= 0.1", "= 0.11")
    failed = command("e2e-registry", "check", "--all", code=1)
    assert "first divergence: train/grad_norm, step 1" in failed
    accepted = command("e2e-registry", "accept", ".e2e_runs", "--yes")
    assert "1 accepted" in accepted
    assert "match" in command("python", "-m", "e2e_registry", "check", "--all")


def edit(file: Path, line: str, old: str, new: str) -> None:
    lines = file.read_text().splitlines(keepends=True)
    (at,) = (number for number, text in enumerate(lines) if line in text)
    end = next(number for number in range(at, len(lines)) if old in lines[number])
    lines[end] = lines[end].replace(old, new)
    file.write_text("".join(lines))


@pytest.mark.parametrize(("key", "code"), [(END_OF_INPUT, 2), (INTERRUPT, 130)])
@pytest.mark.parametrize("num_answers", [0, 3])
def test_a_question_that_nobody_answers_writes_nothing(folder: Path, num_answers: int, key: str, code: int) -> None:
    """Ctrl-D and Ctrl-C, at the first question and at the one about a file in the way."""
    (folder / "scripts").mkdir()
    (folder / RECIPE).write_text("theirs")
    before = contents(folder)
    seen, shown = converse(folder, ["init"], [*["\n"] * num_answers, key], prompt=r"\x1b\[0m: ")
    assert seen == code, shown
    assert ("replace" in shown) == bool(num_answers)
    assert "internal error" not in shown
    assert contents(folder) == before
