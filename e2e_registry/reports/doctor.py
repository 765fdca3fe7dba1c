"""Renders a diagnosis: whether deterministic mode holds, and a line for each setting, with its fix."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from e2e_registry.determinism.diagnosis import Diagnosis, ProcessDiagnosis
from e2e_registry.determinism.doctor import Finding, Severity
from e2e_registry.reports.console import print_line
from e2e_registry.reports.values import count_text, listed

#: What became of a variable, in a word; other findings are called by their severity.
_STATUS = {
    "variable-ok": "ok",
    "variable-late": "late",
    "variable-missing": "missing",
    "variable-differs": "differs",
    "variable-not-effective": "no effect",
    "variable-advisory": "advisory",
    "state-unknown": "unknown",
}
_SEVERITY_STATUS = {
    Severity.OK: "ok",
    Severity.INFO: "note",
    Severity.WARNING: "warning",
    Severity.ERROR: "wrong",
}
_STYLES = {Severity.OK: "green", Severity.INFO: "dim", Severity.WARNING: "yellow", Severity.ERROR: "red"}

_STATUS_WIDTH = max(map(len, [*_STATUS.values(), *_SEVERITY_STATUS.values()]))
#: Longer values, such as lists of CPU features, are cut in the lines of settings that are right.
_LONGEST_OK = 110


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the conclusion, then every judged process with its settings, problems first."""
    text = Text("holds" if diagnosis.holds else "does not hold", "green" if diagnosis.holds else "bold red")
    text.append(f"  {diagnosis.subject}", "bold").append(f"  profile {diagnosis.profile}", "cyan")
    console.print(text, soft_wrap=True)
    if diagnosis.failure is not None:
        print_line(console, f"the program {diagnosis.failure}", "red")
    for process in diagnosis.processes:
        _print_process(process, console)
    if diagnosis.unjudged:
        print_line(console, f"seen and not judged, since they do not train: {listed(diagnosis.unjudged)}", "dim")
    for note in diagnosis.notes:
        print_line(console, f"note: {note}")
    if diagnosis.run is not None:
        print_line(console, f"read from {diagnosis.run}", "dim")


def _print_process(process: ProcessDiagnosis, console: Console) -> None:
    found = count_text(len(process.problems), "problem") if process.problems else "no problem"
    print_line(console, f"{listed(process.names)}: {found} in {count_text(len(process.findings), 'finding')}", "bold")
    width = max((len(finding.subject) for finding in process.findings), default=0)
    for finding in process.findings:
        _print_finding(finding, width, console)


def _print_finding(finding: Finding, width: int, console: Console) -> None:
    status = _STATUS.get(finding.code, _SEVERITY_STATUS[finding.severity])
    message = finding.message
    if finding.severity is Severity.OK:
        message = textwrap.shorten(_without_name(finding), _LONGEST_OK, placeholder=" ...")
    line = Text("    ")
    line.append(f"{status:<{_STATUS_WIDTH}}", _STYLES[finding.severity])
    line.append(f"  {finding.subject:<{width}}  {message}")
    console.print(line, soft_wrap=True)
    if finding.fix is not None and finding.severity is not Severity.OK:
        console.print(Text(f"    {'':<{_STATUS_WIDTH}}  {'':<{width}}  fix: {finding.fix}", "dim"), soft_wrap=True)


def _without_name(finding: Finding) -> str:
    """Return the message without the name, which stands before it: ``NAME=value, ...`` becomes ``value, ...``."""
    text = finding.message.removeprefix(finding.subject).removeprefix("=").lstrip()
    return f"empty{text}" if text.startswith(",") else text
