"""``init``: makes a repository ready for its first standard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json

if TYPE_CHECKING:
    from e2e_registry.operations.scaffold import PlannedFile, ScaffoldOptions


def init(
    folder: Annotated[Path, typer.Argument(help="The repository's root.")] = Path(),
    platform: Annotated[
        str | None, typer.Option("--platform", help="CI's platform, such as cpu-x86_64-portable.", metavar="SLUG")
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option("--runner", help="A label of CI's runner; may be given more than once.", metavar="LABEL"),
    ] = None,
    action: Annotated[
        str | None,
        typer.Option("--action", help="Where the action of e2e-registry is published.", metavar="OWNER/REPO@REF"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take the defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are in the way.")] = False,
    json: options.Json = False,
) -> None:
    """Write settings, an example test with its recipe, and what git and CI should know; nothing is overwritten.

    Without a terminal, files in the way end it with exit code 2 and nothing is written, unless --force is given.
    """
    from e2e_registry.operations.scaffold import FileState, plan_scaffold, write_scaffold

    is_interactive = not (yes or json) and sys.stdin.isatty() and sys.stdout.isatty()
    choices = _choices(folder, platform, runner, action, is_interactive=is_interactive)
    planned = plan_scaffold(folder, choices)
    planned = _settled(planned, force=force, is_interactive=is_interactive)
    write_scaffold(folder, planned)
    if json:
        print_json({"files": [{"path": file.path, "state": file.state.value, "note": file.note} for file in planned]})
        return
    for file in planned:
        note = "" if file.note is None else f": {file.note.rstrip()}"
        typer.echo(f"{file.state.value:<11}  {file.path}{note}")
    if choices.action is None:
        typer.echo(
            "no workflow: this installation does not say where its action is published; "
            "init --action OWNER/REPO@REF writes one"
        )
    test = next((file.path for file in planned if file.path.endswith("test_linear_model.py")), None)
    if test is not None:
        typer.echo(f"next: e2e-registry record --test {test}")
    if all(file.state is FileState.UNCHANGED for file in planned):
        typer.echo("all of it was there")


def _choices(
    folder: Path, platform: str | None, runners: list[str] | None, action: str | None, *, is_interactive: bool
) -> ScaffoldOptions:
    """Return what the options say, what is asked for, or the defaults."""
    from e2e_registry.operations.scaffold import (
        DEFAULT_PLATFORM,
        DEFAULT_RUNNER,
        ScaffoldOptions,
        has_settings,
        known_action,
    )

    def asked(question: str, default: str) -> str:
        if not is_interactive:
            return default
        from rich.prompt import Prompt

        return Prompt.ask(question, default=default)

    if not has_settings(folder):
        platform = platform or asked("CI's platform", DEFAULT_PLATFORM)
        runners = runners or asked("labels of CI's runner, commas between them", DEFAULT_RUNNER).split(",")
    action = action or known_action() or asked("where the action is published, OWNER/REPO@REF (empty: no workflow)", "")
    return ScaffoldOptions(
        platform=(platform or DEFAULT_PLATFORM).strip(),
        runners=[label.strip() for label in runners] if runners else None,
        action=action.strip() or None,
    )


def _settled(planned: Sequence[PlannedFile], *, force: bool, is_interactive: bool) -> list[PlannedFile]:
    """Decide what becomes of the files that are in the way, before anything is written."""
    from rich.prompt import Confirm

    from e2e_registry.errors import RefusedError
    from e2e_registry.operations.scaffold import FileState, resolved

    conflicts = [file.path for file in planned if file.state is FileState.CONFLICT]
    if conflicts and not (force or is_interactive):
        raise RefusedError(
            f"in the way, with other content: {', '.join(conflicts)}; nothing was written",
            hint="move them, or pass --force to replace them",
        )
    settled = []
    for file in planned:
        if file.state is FileState.CONFLICT:
            replace = force or Confirm.ask(f"replace {file.path}?", default=False)
            file = resolved(file, replace=replace)
        settled.append(file)
    return settled
