"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e_registry.errors import StorageError
from e2e_registry.storage import append_text, replacing, write_json


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_strict_json_cannot_hold_is_not_written(tmp_path: Path, number: float) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"number": 1.0})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"number": number})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_while_writing_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.bin"
    with replacing(path) as temporary:
        temporary.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as temporary:
        temporary.write_bytes("no bytes")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="cannot write"), replacing(path):
        pass  # nothing was written, so there is nothing to rename
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a.bin"]


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".a.json.{dead.pid}.0123abcd.tmp"
    kept = [tmp_path / f".a.json.{os.getppid()}.0123abcd.tmp", tmp_path / f".b.json.{dead.pid}.0123abcd.tmp"]
    for file in (left, *kept):
        file.touch()
    write_json(tmp_path / "a.json", {})
    assert not left.exists()
    assert all(file.exists() for file in kept)


def test_a_file_of_others_is_appended_to_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("theirs\n")
    inode = path.stat().st_ino
    append_text(path, "ours\n")
    assert (path.read_text(), path.stat().st_ino) == ("theirs\nours\n", inode)
    with pytest.raises(StorageError, match="cannot append"):
        append_text(tmp_path, "ours\n")
