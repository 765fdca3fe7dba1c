"""``lint``: finds nondeterminism in source."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json, require_output
from e2e_registry.errors import ExitCode, NothingSelectedError, UsageError
from e2e_registry.printable import printable

if TYPE_CHECKING:
    from e2e_registry.determinism.lint import LintReport

#: Fewer files are checked before a counter could be read.
_FILES_WORTH_COUNTING = 200


class LintFormat(enum.StrEnum):
    """How findings are written."""

    TEXT = "text"
    GITHUB = "github"
    JSON = "json"


Paths = Annotated[list[Path] | None, typer.Argument(help="Files and folders to check; the current folder by default.")]
Diff = Annotated[
    str | None, typer.Option("--diff", metavar="BASE", help="Report only what is new since the merge base with BASE.")
]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="CODES", help="Run only these codes or names, commas between them."),
]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", metavar="CODES", help="Leave these codes or names out.")]
Format = Annotated[LintFormat, typer.Option("--format", help="github writes annotations for a workflow's checks page.")]
Explain = Annotated[
    str | None, typer.Option("--explain", metavar="CODE", help="Show why a rule exists and what to write instead.")
]
ListRules = Annotated[bool, typer.Option("--list-rules", help="Show every code with its name.")]


def lint(
    paths: Paths = None,
    diff: Diff = None,
    select: Select = None,
    ignore: Ignore = None,
    output: Format = LintFormat.TEXT,
    json: options.Json = False,
    explain: Explain = None,
    list_rules: ListRules = False,
) -> None:
    """Find nondeterminism in Python source, by reading it; nothing is imported.

    A place that is right as it is says so on its line: "# e2e: allow DET001 -- the reason".
    """
    from e2e_registry.determinism.lint import lint_paths
    from e2e_registry.determinism.lint import select as select_codes

    output = LintFormat.JSON if json else output
    if explain is not None or list_rules:
        _print_documentation(explain, output)
        return
    selection = select_codes(chosen=select or (), ignored=ignore or ())
    with _counting() as on_file:
        report = lint_paths(paths or [Path()], selection=selection, base=diff, on_file=on_file)
    if not report.files and not report.skipped and diff is None:
        raise NothingSelectedError(
            "no Python files here",
            where=", ".join(str(path) for path in paths or [Path()]),
            hint="hidden folders and virtual environments are left out of a walk; a file that is named is checked",
        )
    _print_report(report, output)
    if report.findings:
        raise typer.Exit(ExitCode.MISMATCH)


def _print_report(report: LintReport, output: LintFormat) -> None:
    from e2e_registry.determinism.lint import render_github, render_text, report_json

    if output is LintFormat.JSON:
        print_json(report_json(report))
    else:
        typer.echo(render_github(report) if output is LintFormat.GITHUB else printable(render_text(report)))


def _print_documentation(explain: str | None, output: LintFormat) -> None:
    from e2e_registry.determinism.lint import CATALOGUE, find, render_rule, render_rule_list, rule_json

    if output is LintFormat.GITHUB:
        raise UsageError("--format github annotates findings", hint="--explain and --list-rules write text or json")
    if explain is not None:
        entry = find(explain)
        document: Any = rule_json(entry)
        text = render_rule(entry)
    else:
        document = [rule_json(entry) for entry in CATALOGUE.values()]
        text = render_rule_list(CATALOGUE.values())
    if output is LintFormat.JSON:
        print_json(document)
    else:
        typer.echo(text)
    require_output()


@contextlib.contextmanager
def _counting() -> Iterator[Callable[[int, int], None] | None]:
    """Count files on standard error while many are checked; nothing where it is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:

        def on_file(done: int, total: int) -> None:
            if total >= _FILES_WORTH_COUNTING:
                status.update(f"checked {done} of {total} files")

        yield on_file
