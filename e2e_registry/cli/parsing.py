"""Command lines that the usual rules of options cannot express."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

_COMMAND = "e2e_registry.command"


class CommandAfterDashes(TyperCommand):
    """Keeps what follows ``--`` apart from the arguments before it, so that a command is told from a path."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Cut the command line at the first ``--``."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def command_after_dashes(context: typer.Context) -> list[str] | None:
    """Return what followed ``--``; None if there was none."""
    command: list[str] | None = context.meta.get(_COMMAND)
    return command


class ManyValues(TyperCommand):
    """Lets an option that may be repeated take several values at once: ``--runs A B C``."""

    #: The options.
    many = ("--runs", "--against")

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Write the option again before each further value, up to the next option."""
        written: list[str] = []
        current: str | None = None
        for at, arg in enumerate(args):
            if arg == "--":
                return super().parse_args(ctx, [*written, *args[at:]])
            if arg.startswith("-"):
                current = arg if arg in self.many else None
                written.append(arg)
            elif current is not None and written[-1] != current:
                written += [current, arg]
            else:
                written.append(arg)
        return super().parse_args(ctx, written)
