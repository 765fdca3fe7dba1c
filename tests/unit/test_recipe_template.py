"""The template in ``docs/recipes.md``, followed to the letter: its files, its diffs, its commands, and what they print.

``UPDATE_GOLDEN=1`` writes what the commands print into the document, except where it says ``...`` on purpose.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from repositories import Repository, stable

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
HEADING = "\n## Your own training script\n"
CHANGED = re.compile(r"`(args=\[[^`]+\])`")
SETTINGS = '[tool.e2e_registry]\ntest_folders = ["tests/e2e"]\nsuites = ["short-cpu"]\n'


class Block(NamedTuple):
    """A fenced block, with the text between it and the block before."""

    prose: str
    language: str
    text: str


def section() -> str:
    return DOCUMENT.read_text().split(HEADING)[1].split("\n## ")[0]


def blocks(text: str) -> Iterator[Block]:
    for match in re.finditer(
        r"(?P<prose>.*?)^```(?P<language>\w+)\n(?P<text>.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        yield Block(match["prose"], match["language"], match["text"])


def commands(console: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with what it is said to print."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def run(repository: Repository, command: str) -> str:
    program, *arguments = shlex.split(command)
    if program == "git":
        return repository.git(*arguments)
    assert program == "e2e-registry"
    done = repository.command(*arguments, env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert done.code in (0, 1), done.err
    return done.out


def is_as_printed(expected: str, found: str, root: Path) -> bool:
    pattern = re.escape(stable(expected, root).rstrip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, stable(found, root).rstrip(), re.DOTALL) is not None


@pytest.mark.slow
def test_the_template_does_what_it_says(repository: Repository) -> None:
    for path in ("scripts/recipe.py", "tests/e2e/test_stub.py"):
        (repository.root / path).unlink()
    (repository.root / "pyproject.toml").write_text(SETTINGS)
    files: list[str] = []
    updated = text = section()
    for block in blocks(text):
        if block.language == "python":
            files.append(re.findall(r"`([\w/.]+\.py)`", block.prose)[-1])
            (repository.root / files[-1]).write_text(block.text)
        if block.language == "diff":
            (repository.root / "change.diff").write_text(block.text)
            repository.git("apply", "change.diff")
            (repository.root / "change.diff").unlink()
        for arguments in CHANGED.findall(block.prose):
            test = repository.root / files[-1]
            before = test.read_text()
            test.write_text(re.sub(r"args=\[.*\]", arguments, before))
            assert test.read_text() != before
        if block.language != "console":
            repository.commit()
            continue
        for command, expected in commands(block.text):
            found = run(repository, command)
            if is_as_printed(expected, found, repository.root):
                continue
            assert os.environ.get("UPDATE_GOLDEN"), found
            assert "..." not in expected, found
            updated = updated.replace(f"$ {command}\n{expected}", f"$ {command}\n{found}", 1)
    if updated != text:
        DOCUMENT.write_text(DOCUMENT.read_text().replace(text, updated))
    assert files == ["scripts/train.py", "tests/e2e/test_train_1xCPU.py"]
