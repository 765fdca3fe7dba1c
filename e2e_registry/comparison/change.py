"""What became of a standard when a run was recorded or adopted."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e_registry.comparison.assessment import comparison_to_json
from e2e_registry.comparison.result import Comparison
from e2e_registry.errors import ExitCode
from e2e_registry.series import SeriesKey

if TYPE_CHECKING:
    from e2e_registry.environment import EnvironmentDifference

#: What a standard says of its repetition when nothing was compared with the run that it holds.
REPEAT_UNPROVEN = "repeat unproven"


class Action(enum.Enum):
    """What became of a standard."""

    CREATED = "created"
    UPDATED = "updated"
    VALUES_UNCHANGED = "rewritten, values unchanged"
    UNCHANGED = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class StandardChange:
    """A run made, or not made, the standard of its test.

    Attributes:
        subject: The test's id.
        platform: The platform the standard is for.
        action: What became of the standard.
        path: The standard, from the root.
        change: The new run against the old standard; None without one.
        environment: How the new environment differs from the old standard's.
        metadata_changes: What changed beside the values, in words.
        kept_old: Series whose old rows stay, since their tolerance accepts the new ones.
        disagreement: Two runs of the same recipe that do not agree, where that is why nothing was written.
        runs_agreed: How many runs agreed; None for a run that nothing was compared with.
        reused_run: The kept run that counted as one of them.
        run_path: The run whose rows were written.
        num_points: How many values the standard holds.
        warnings: What did not keep the run from becoming the standard, and should be known.
    """

    subject: str
    platform: str
    action: Action
    path: str
    change: Comparison | None = None
    environment: Sequence[EnvironmentDifference] = ()
    metadata_changes: Sequence[str] = ()
    kept_old: Sequence[SeriesKey] = ()
    disagreement: Comparison | None = None
    runs_agreed: int | None = None
    reused_run: str | None = None
    run_path: str | None = None
    num_points: int = 0
    warnings: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers."""
        return ExitCode.MISMATCH if self.action is Action.REFUSED else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for this test."""
        return {
            "subject": self.subject,
            "platform": self.platform,
            "action": self.action.value,
            "path": self.path,
            "change": None if self.change is None else comparison_to_json(self.change),
            "environment": [entry.to_json() for entry in self.environment],
            "metadata_changes": list(self.metadata_changes),
            "kept_old": [str(key) for key in self.kept_old],
            "disagreement": None if self.disagreement is None else comparison_to_json(self.disagreement),
            "runs_agreed": self.runs_agreed or REPEAT_UNPROVEN,
            "reused_run": self.reused_run,
            "run": self.run_path,
            "points": self.num_points,
            "warnings": list(self.warnings),
            "error": None,
            "exit_code": int(self.exit_code),
        }
