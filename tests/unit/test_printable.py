"""Text from outside reaches a terminal, a summary or an artifact as something to read, never to obey."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repositories import Repository

from e2e_registry.comparison import Assessment, TestVerdict
from e2e_registry.comparison.merged import MergedResults, MergedVerdict, MergeProblem
from e2e_registry.errors import ExitCode, RefusedError
from e2e_registry.execution.gpus import GpuProcess
from e2e_registry.printable import STEERING
from e2e_registry.reports.console import assessment_text, make_console
from e2e_registry.reports.github import summary, workflow_commands
from e2e_registry.reports.merged import print_merged

TEST = "tests/e2e/test_stub.py"

#: Turns red, ends a line's beginning, sets the title, turns direction, clears by a C1 code.
HOSTILE = "\x1b[31m red\r\x1b]0;title\x07 \u202eright\x9b2J"

LEFT_BEHIND = f"""
SCALE = 1.5
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", {HOSTILE!r}],
    start_new_session=True,
    stdout=subprocess.PIPE,
)
child.stdout.readline()
"""


def test_a_child_left_behind_is_named_and_its_artifact_accepted(repository: Repository) -> None:
    """Report: a child's command line turned the terminal red, and `accept` refused the checkout's own run."""
    repository.commit()
    repository.record()
    repository.write_recipe(LEFT_BEHIND)
    checked = repository.cli("check", "--all")
    assert "were ended: " in checked.out
    assert r"\x1b[31m red" in checked.out, checked.out
    repository.cli("merge", ".e2e_runs", "--summary", ".e2e_runs/summary.md")
    shown = [checked.out, checked.err, (repository.root / ".e2e_runs/summary.md").read_text()]
    shown += [path.read_text() for path in repository.root.glob(".e2e_runs/**/*.json")]
    shown.append((repository.root / ".e2e_runs/junit.xml").read_text())
    assert [text for text in shown if STEERING.search(text)] == []
    accepted = repository.cli("accept", ".e2e_runs", "--yes")
    assert accepted.code == 0, accepted.err


@given(st.text(st.characters(codec=None), max_size=40))
def test_whatever_a_report_is_given_it_does_not_steer(text: str) -> None:
    error = RefusedError(text, where=text, hint=text)
    process = str(RefusedError(f"in use: {GpuProcess(7, text, '1 MiB')}"))
    assessment = Assessment(
        subject=text,
        verdict=TestVerdict.ERROR,
        platform=text,
        reasons=[text],
        warnings=[text],
        error=error,
        node=text,
        log_tail=text,
        run_path=text,
        next_steps=[text],
        quarantine=text,
    )
    result = {"reasons": [text], "warnings": [text], "error": text, "candidate": text, "log_tail": text}
    verdict = MergedVerdict(test=text, platform=text, verdict=TestVerdict.ERROR, note=text, result=result)
    merged = MergedResults(verdicts=[verdict], problems=[MergeProblem(text, ExitCode.USAGE)], warnings=[text])
    console = make_console()
    with console.capture() as capture:
        print_merged(merged, console)
    lines = workflow_commands(merged)
    for shown in (str(error), process, assessment_text(assessment), summary(merged), capture.get(), *lines):
        assert not STEERING.search(shown)
    assert all("\n" not in line for line in lines)


def test_json_is_the_same_document_and_steers_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from e2e_registry.cli.output import print_json

    document = {HOSTILE: [HOSTILE, "größer\ud800"]}
    print_json(document)
    printed = capsys.readouterr().out
    assert json.loads(printed) == document
    assert not STEERING.search(printed)
