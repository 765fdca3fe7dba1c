"""What the doctor concludes of the processes of a run: who was judged, and whether deterministic mode held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from e2e_registry.determinism.doctor import Finding, Severity, problems
from e2e_registry.errors import ExitCode


@dataclass(frozen=True, slots=True)
class ProcessDiagnosis:
    """Processes of which the same was found.

    Attributes:
        names: What they are called: ``train rank 0``, or a command line.
        findings: Good news and bad, the problems first and the gravest of them at the top.
    """

    names: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that speak against the bits."""
        return tuple(finding for finding in self.findings if finding.is_problem)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for the processes."""
        return {
            "processes": list(self.names),
            "findings": [
                {
                    "code": finding.code,
                    "severity": finding.severity.value,
                    "subject": finding.subject,
                    "message": finding.message,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found under one profile.

    Attributes:
        subject: What was judged: the shell, a test, a run or a command.
        profile: The profile.
        processes: The judged processes, those of which the same was found together.
        unjudged: Processes that were seen and do not train, such as launchers and data workers.
        failure: How the program failed, if it did.
        run: The kept run that the findings come from.
        notes: What should be known beside the findings.
    """

    subject: str
    profile: str
    processes: Sequence[ProcessDiagnosis]
    unjudged: Sequence[str] = ()
    failure: str | None = None
    run: str | None = None
    notes: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether deterministic mode holds: nothing speaks against it, and nothing is unknown."""
        return not any(process.problems for process in self.processes)

    @property
    def exit_code(self) -> ExitCode:
        """What the command answers; of a program that failed, only its findings are certain."""
        if not self.holds:
            return ExitCode.MISMATCH
        return ExitCode.OK if self.failure is None else ExitCode.RUN_FAILED

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "subject": self.subject,
            "profile": self.profile,
            "holds": self.holds,
            "exit_code": int(self.exit_code),
            "judged": [process.to_json() for process in self.processes],
            "unjudged": list(self.unjudged),
            "failure": self.failure,
            "run": self.run,
            "notes": list(self.notes),
        }


def grouped(found: Iterable[tuple[str, Sequence[Finding]]]) -> tuple[ProcessDiagnosis, ...]:
    """Put processes together of which the same was found, in the order in which they come."""
    groups: dict[tuple[Finding, ...], list[str]] = {}
    for name, findings in found:
        groups.setdefault(_in_order(findings), []).append(name)
    return tuple(ProcessDiagnosis(tuple(names), findings) for findings, names in groups.items())


def _in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort: problems by weight, then good news, then what is only worth knowing."""
    order = [Severity.OK, Severity.INFO]
    rest = sorted((finding for finding in findings if not finding.is_problem), key=lambda f: order.index(f.severity))
    return (*problems(findings), *rest)
