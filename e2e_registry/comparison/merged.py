"""What the results of several machines say together: a verdict a test and platform, and what is missing."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from e2e_registry.comparison.assessment import TestVerdict
from e2e_registry.errors import EXIT_CODE_PRECEDENCE, ExitCode, worst_exit_code


def exit_code_of(verdict: TestVerdict, result: Mapping[str, Any]) -> ExitCode:
    """Return what a verdict alone makes a command answer.

    Concluded from the verdict, not from the code that the file holds beside it; only an error says which it is.

    Args:
        verdict: The verdict.
        result: The test's object of ``results.json``.
    """
    if verdict is not TestVerdict.ERROR:
        return verdict.exit_code
    stated = result.get("exit_code")
    return ExitCode(stated) if type(stated) is int and stated in EXIT_CODE_PRECEDENCE else ExitCode.INTERNAL


class Standing(enum.Enum):
    """What a verdict counts for."""

    REQUIRED = "required"
    INFORMATIONAL = "for information"


@dataclass(frozen=True, kw_only=True)
class MergedVerdict:
    """The verdict of one test on one platform, from the latest attempt at it.

    Attributes:
        test: The test's id.
        platform: The platform that the run was on; where none ran, the one that it was planned for.
        verdict: The conclusion; None if there is none.
        standing: What it counts for.
        note: Why it counts for no more, or why there is no verdict.
        job: The job that it comes from.
        quarantine: Until when, and why, a failure blocks nothing; None if it does.
        result: The test's object of ``results.json``; empty if there is none.
    """

    test: str
    platform: str | None
    verdict: TestVerdict | None
    standing: Standing = Standing.REQUIRED
    note: str | None = None
    job: str | None = None
    quarantine: str | None = None
    result: Mapping[str, Any]

    @property
    def has_run(self) -> bool:
        """Whether the test ran at all."""
        return self.verdict not in (None, TestVerdict.SKIPPED)

    @property
    def is_missing(self) -> bool:
        """Whether a verdict is required, and there is none."""
        return self.standing is Standing.REQUIRED and not self.has_run

    @property
    def is_quarantined(self) -> bool:
        """Whether a failure blocks nothing until a date."""
        return self.quarantine is not None and self.has_run

    @property
    def exit_code(self) -> ExitCode:
        """What this verdict alone makes the command answer."""
        if self.standing is Standing.INFORMATIONAL or self.is_quarantined:
            return ExitCode.OK
        if self.verdict is None or self.is_missing:
            return ExitCode.RUN_FAILED
        return exit_code_of(self.verdict, self.result)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``merge --json`` prints for this verdict."""
        return {
            "test": self.test,
            "platform": self.platform,
            "verdict": None if self.verdict is None else self.verdict.value,
            "standing": self.standing.value,
            "note": self.note,
            "job": self.job,
            "exit_code": int(self.exit_code),
            "result": dict(self.result) or None,
        }


@dataclass(frozen=True)
class MergeProblem:
    """Why the results cannot be trusted to be whole.

    Attributes:
        message: What is wrong, and where.
        exit_code: What it makes the command answer.
    """

    message: str
    exit_code: ExitCode


@dataclass(frozen=True, kw_only=True)
class MergedResults:
    """The results of all machines.

    Attributes:
        verdicts: Those that need attention first.
        problems: What makes the merge fail beside the verdicts.
        warnings: What should be known.
        num_jobs: How many ``results.json`` were read.
        may_be_empty: Whether it is success if nothing ran.
    """

    verdicts: Sequence[MergedVerdict]
    problems: Sequence[MergeProblem] = ()
    warnings: Sequence[str] = ()
    num_jobs: int = 0
    may_be_empty: bool = False

    @cached_property
    def failing(self) -> list[MergedVerdict]:
        """The verdicts that make the merge fail."""
        return [verdict for verdict in self.verdicts if verdict.exit_code is not ExitCode.OK]

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers."""
        codes = [verdict.exit_code for verdict in self.verdicts]
        worst = worst_exit_code([*codes, *(problem.exit_code for problem in self.problems)])
        has_run = any(verdict.has_run for verdict in self.verdicts)
        return worst if worst or has_run or self.may_be_empty else ExitCode.NOTHING_SELECTED

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``merge --json`` prints."""
        return {
            "format": 1,
            "exit_code": int(self.exit_code),
            "jobs": self.num_jobs,
            "problems": [problem.message for problem in self.problems],
            "warnings": list(self.warnings),
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }
