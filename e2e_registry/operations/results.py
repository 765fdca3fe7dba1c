"""``results.json`` of a check: kept whole and current while it runs, so that a check which is ended loses nothing.

The file is written before the first test and after each, atomically. Until the check came to its own end it says
``partial``, and why; whoever reads it later can tell what was concluded, and what nobody knows. The format is
described field by field in ``docs/results.md`` and, for machines, in ``results.schema.json`` beside this module.
"""

from __future__ import annotations

import datetime
import enum
import functools
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from e2e_registry import __version__
from e2e_registry.comparison import Assessment, TestVerdict
from e2e_registry.config import Settings
from e2e_registry.errors import ExitCode, worst_exit_code
from e2e_registry.operations.selection import Selection, selection_to_json
from e2e_registry.storage import replacing, write_json

RESULTS_FORMAT = 1
RESULTS_FILE = "results.json"
JUNIT_FILE = "junit.xml"


class Ending(enum.Enum):
    """Why results are partial."""

    RUNNING = "running"
    FAIL_FAST = "fail-fast"
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"
    STORAGE = "storage"
    INTERNAL_ERROR = "internal-error"


class Results:
    """The results of one check, in the order in which its tests were selected.

    Args:
        settings: Give the run folder.
        tests: Ids of the selected tests.
        selection: How they were chosen.
        allow_empty: Succeed if there is no test, or all are skipped.

    Attributes:
        has_begun: Whether the check began, so that there is something to show.
    """

    def __init__(
        self, settings: Settings, tests: Sequence[str], selection: Selection, *, allow_empty: bool = False
    ) -> None:
        self._settings = settings
        self._tests = tuple(tests)
        self._selection = selection
        self._allow_empty = allow_empty
        self._started = self._written = _now()
        self._assessments: dict[str, Assessment] = {}
        self._ending: Ending | None = Ending.RUNNING
        self.has_begun = False

    @property
    def path(self) -> Path:
        """Where ``results.json`` is."""
        return self._settings.run_dir / RESULTS_FILE

    @property
    def assessments(self) -> list[Assessment]:
        """What is concluded so far, in the order of selection."""
        return [self._assessments[test] for test in self._tests if test in self._assessments]

    @property
    def exit_code(self) -> ExitCode:
        """What the check answers with, by what is concluded so far."""
        ran = [assessment for assessment in self._assessments.values() if assessment.verdict is not TestVerdict.SKIPPED]
        if not ran:
            return ExitCode.OK if self._allow_empty else ExitCode.NOTHING_SELECTED
        return worst_exit_code(assessment.exit_code for assessment in ran)

    @property
    def not_run(self) -> list[str]:
        """The selected tests of which nothing is concluded yet."""
        return [test for test in self._tests if test not in self._assessments]

    def select(self, tests: Sequence[str]) -> None:
        """Say anew which tests are selected, in their order: for a caller that learns it while they run."""
        self._tests = tuple(tests)
        self._selection = {**self._selection, "tests": self._tests}

    def add(self, assessment: Assessment) -> None:
        """Take what is concluded of a test, selected or not, and write the file. A second time is the same as once.

        Raises:
            StorageError: The file cannot be written; the one that is there says ``partial``.
        """
        self._assessments[assessment.subject] = assessment
        if assessment.subject not in self._tests:
            self.select((*self._tests, assessment.subject))
        self.write()

    def end(self, why_partial: Ending | None) -> None:
        """Write ``results.json`` and ``junit.xml`` for the last time.

        Args:
            why_partial: Why tests were left out; None if all were run.

        Raises:
            StorageError: A file cannot be written.
        """
        from e2e_registry.reports.junit import junit_xml

        self._ending = why_partial
        self.write()
        suite = self._selection.get("suite") or "e2e"
        document = junit_xml(self.assessments, name=suite, not_run=self.not_run)
        with replacing(self._settings.run_dir / JUNIT_FILE) as temporary:
            temporary.write_bytes(document)

    def write(self) -> None:
        """Write ``results.json``.

        Raises:
            StorageError: It cannot be written; what was there is unchanged.
        """
        self.has_begun = True
        self._written = _now()
        write_json(self.path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        partition = self._selection.get("partition")
        return {
            "format": RESULTS_FORMAT,
            "tool": __version__,
            "status": "complete" if self._ending is None else "partial",
            "why_partial": None if self._ending is None else self._ending.value,
            "started": self._started,
            "written": self._written,
            "selection": selection_to_json(self._selection),
            "partition": None if partition is None else str(partition),
            "exit_code": int(self.exit_code),
            "not_run": self.not_run,
            "tests": [assessment.to_json() for assessment in self.assessments],
        }


@functools.cache
def results_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every ``results.json`` of this format holds to."""
    text = files("e2e_registry.operations").joinpath("results.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
