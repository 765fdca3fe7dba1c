"""Settings: where they are found, what each key means, and every refusal with its file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e_registry.config import Settings, load_settings
from e2e_registry.errors import ExitCode, UsageError

SECTION = "[tool.e2e_registry]\n"
STRANGER = '[project]\nname = "x"\n'


def write(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pyproject.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def refusal(folder: Path, text: str | bytes) -> UsageError:
    write(folder, text)
    with pytest.raises(UsageError) as caught:
        load_settings(folder, environ={})
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value


# --- Where the root is


def test_the_nearest_section_goes_before_a_nearer_file_without_one(tmp_path: Path) -> None:
    file = write(tmp_path, SECTION)
    write(tmp_path / "package", STRANGER)
    (tmp_path / "package/deep").mkdir()

    settings = load_settings(tmp_path / "package/deep", environ={})

    assert (settings.root, settings.source) == (tmp_path, file)


def test_without_a_section_the_nearest_pyproject_is_the_root(tmp_path: Path) -> None:
    write(tmp_path, STRANGER)
    write(tmp_path / "package", STRANGER)
    (tmp_path / "package/deep").mkdir()

    assert load_settings(tmp_path / "package/deep", environ={}) == Settings(root=tmp_path / "package")


@pytest.mark.parametrize("kind", ["folder", "file of a linked work tree"])
def test_the_search_does_not_leave_the_work_tree(tmp_path: Path, kind: str) -> None:
    write(tmp_path, SECTION)
    top = tmp_path / "checkout"
    (top / "deep").mkdir(parents=True)
    if kind == "folder":
        (top / ".git").mkdir()
    else:
        (top / ".git").write_text("gitdir: elsewhere\n")

    assert load_settings(top / "deep", environ={}) == Settings(root=top)
    assert load_settings(tmp_path, environ={}).source == tmp_path / "pyproject.toml"


def test_without_any_of_these_the_start_is_the_root(tmp_path: Path) -> None:
    assert load_settings(tmp_path, environ={}) == Settings(root=tmp_path)


def test_a_file_starts_the_search_in_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path, SECTION)
    assert load_settings(file, environ={}).root == tmp_path


# --- What the keys mean


def test_every_key(tmp_path: Path) -> None:
    write(
        tmp_path,
        SECTION
        + """
        test_folders = ["./tests/e2e/", "more//tests"]
        standards_folder = "goldens"
        run_folder = "out/runs"
        suites = ["short-cpu", "nightly"]
        labels = ["run: gpu"]
        platform_axes = ["torch", "cuda"]
        [tool.e2e_registry.platforms]
        cpu-x86_64-portable = "ubuntu-24.04"
        "cuda-nvidia-h200-torch2.13" = ["self-hosted", "h200"]
        """,
    )

    settings = load_settings(tmp_path, environ={"E2E_REGISTRY_PLATFORM_TAG": "site-a"})

    assert settings == Settings(
        root=tmp_path,
        test_folders=("tests/e2e", "more/tests"),
        standards_folder="goldens",
        run_folder="out/runs",
        suites=("short-cpu", "nightly"),
        labels=("run: gpu",),
        platform_axes=("torch", "cuda"),
        platforms={
            "cpu-x86_64-portable": ("ubuntu-24.04",),
            "cuda-nvidia-h200-torch2.13": ("self-hosted", "h200"),
        },
        platform_tag="site-a",
        source=tmp_path / "pyproject.toml",
    )
    assert settings.test_dirs == (tmp_path / "tests/e2e", tmp_path / "more/tests")
    assert settings.standards_dir == tmp_path / "goldens"
    assert settings.run_dir == tmp_path / "out/runs"
    assert settings.standard_path("test_a", "cuda-13.0_x") == tmp_path / "goldens/test_a.cuda-13.0_x.parquet"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, b"\xef\xbb\xbf" + SECTION.encode() + b'suites = ["a"]\r\n')
    assert load_settings(tmp_path, environ={}).suites == ("a",)


# --- Refusals


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ("suite = []", "suite", "unknown key\n  did you mean 'suites'?"),
        ("suites = 'a'", "suites", "must be a list of strings, not the string 'a'"),
        ("suites = ['a', 1]", "suites[1]", "must be a string, not the integer 1"),
        ("suites = ['a', true]", "suites[1]", "must be a string, not the boolean True"),
        ("labels = ['']", "labels[0]", "'' is empty"),
        ("labels = [' a']", "labels[0]", "' a' is empty or has spaces around it"),
        ("labels = ['a', 'a']", "labels[1]", "'a' is listed twice"),
        ("test_folders = []", "test_folders", "no test would ever be found"),
        ("test_folders = ['/tests']", "test_folders[0]", "'/tests' is not relative"),
        ("test_folders = ['t', 'a/../../b']", "test_folders[1]", "leaves the root through '..'"),
        ("test_folders = ['C:/tests']", "test_folders[0]", "is not relative"),
        ("test_folders = ['tests\\e2e']", "test_folders[0]", "holds a backslash"),
        ("standards_folder = '~/goldens'", "standards_folder", "is not relative"),
        ("standards_folder = 3", "standards_folder", "must be a folder, not the integer 3"),
        ("standards_folder = ''", "standards_folder", "must be a folder, not the string ''"),
        ("standards_folder = 'tests'", "standards_folder", "'tests' contains test folder 'tests/e2e'"),
        ("run_folder = []", "run_folder", "must be a folder, not an array"),
        ("run_folder = 1979-05-27", "run_folder", "must be a folder, not a date or time"),
        ("run_folder = '.'", "run_folder", "overlaps standards_folder"),
        ("run_folder = 'tests/ci/fixtures/e2e_standards/runs'", "run_folder", "overlaps standards_folder"),
        ("platform_axes = ['trch']", "platform_axes[0]", "unknown platform axis 'trch'\n  did you mean 'torch'?"),
        ("platforms = ['x']", "platforms", "must be a table, not an array"),
        ("platforms = {'a b' = 'x'}", "platforms.a b", "'a b' is not a platform slug"),
        ("platforms = {'-a' = 'x'}", "platforms.-a", "is not a platform slug"),
        ("platforms.cuda-13.0 = 'x'", "platforms.cuda-13", "a slug that holds a dot needs quotes"),
        ("platforms.a = []", "platforms.a", "must be runner labels, not an array"),
        ("platforms.a = 3", "platforms.a", "must be runner labels, not the integer 3"),
        ("platforms.a = ['x', 3]", "platforms.a", "must be runner labels"),
    ],
)
def test_refused_keys_are_named_with_file_and_key(tmp_path: Path, line: str, key: str, says: str) -> None:
    error = refusal(tmp_path, SECTION + line)
    assert error.where == f"{tmp_path / 'pyproject.toml'}:tool.e2e_registry.{key}"
    assert says in str(error)
    assert error.hint


def test_a_section_that_is_no_table(tmp_path: Path) -> None:
    error = refusal(tmp_path, "tool.e2e_registry = 3")
    assert (error.where, error.message) == (
        f"{tmp_path / 'pyproject.toml'}:tool.e2e_registry",
        "expected a table, not the integer 3",
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[tool", "is not valid TOML: "),
        (b"\xff = 1", "is not UTF-8: byte 0 is 0xff"),
        (b"a = " + b"[" * 20_000, "is not valid TOML: "),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_not_skipped(tmp_path: Path, content: bytes, says: str) -> None:
    error = refusal(tmp_path, content)
    assert error.where == str(tmp_path / "pyproject.toml")
    assert error.message.startswith(says)


@pytest.mark.parametrize("tag", ["../x", "a b", "-a", "a.", "ä", "a/b", "a\n"])
def test_a_tag_that_could_not_stand_in_a_file_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(tmp_path, environ={"E2E_REGISTRY_PLATFORM_TAG": tag})
    assert caught.value.where == "E2E_REGISTRY_PLATFORM_TAG"


@pytest.mark.parametrize(
    ("stem", "platform"), [("test_a", "../x"), ("test_a", ""), ("test_a.b", "x"), ("a/b", "x"), ("", "x")]
)
def test_a_standard_stays_in_its_folder_and_its_name_is_unambiguous(tmp_path: Path, stem: str, platform: str) -> None:
    with pytest.raises(UsageError):
        Settings(root=tmp_path).standard_path(stem, platform)


PATHS = st.lists(st.sampled_from(["a", "b", ".", "..", "/", "\\", "C:", "~", " ", "é", "tests", "//"]), max_size=6).map(
    "".join
)


@given(text=PATHS, key=st.sampled_from(["test_folders", "standards_folder", "run_folder"]))
def test_no_folder_ever_leaves_the_root(tmp_path_factory: pytest.TempPathFactory, text: str, key: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "folders"
    value = json.dumps([text] if key == "test_folders" else text)
    write(folder, f"{SECTION}{key} = {value}")
    try:
        found = load_settings(folder, environ={})
    except UsageError as error:
        found, refused = Settings(root=folder), error.where
    else:
        refused = None
    assert refused is None or refused.startswith(f"{folder / 'pyproject.toml'}:tool.e2e_registry.")
    for path in (*found.test_dirs, found.standards_dir, found.run_dir):
        assert path.resolve().is_relative_to(found.root)
    assert not found.run_dir.is_relative_to(found.standards_dir)
    assert not any(tests.is_relative_to(found.standards_dir) for tests in found.test_dirs)
