"""The command line's entry: the list of commands, and how whatever they raise becomes an exit code.

Command modules import only what their signatures need; an operation is imported when its command runs, so that
``--help`` answers without loading pyarrow, pandas or torch.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from e2e_registry import __version__
from e2e_registry.cli import (
    accept,
    adopt,
    check,
    compare,
    doctor,
    init,
    inventory,
    lint,
    merge,
    plan,
    record,
    repeat,
    run,
    seeds,
)
from e2e_registry.cli.output import lasting_output
from e2e_registry.cli.parsing import CommandAfterDashes, ManyValues
from e2e_registry.errors import ExitCode, RegistryError, StorageError, UsageError, usable_files
from e2e_registry.printable import printable

#: Set to see the traceback of an internal error.
DEBUG_VARIABLE = "E2E_REGISTRY_DEBUG"

app = typer.Typer(
    name="e2e-registry",
    help="Tells maintainers of training code, bit for bit, whether a change moved the numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Terminated(BaseException):
    """SIGTERM arrived: unwinds as Ctrl-C does, so that every descendant of a recipe is ended on the way."""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a command raises into a message without a traceback and the right exit code."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            with usable_files():
                _require_folder()
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except RegistryError as error:
            raise _failed(error) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except Terminated:
            typer.echo("terminated", err=True)
            raise typer.Exit(ExitCode.TERMINATED) from None
        except EOFError:
            unanswered = UsageError("a question was not answered", hint="answer on a terminal, or pass --yes")
            raise _failed(unanswered) from None
        except Exception as error:  # noqa: BLE001  # whatever it is, a user gets a message and exit code 70
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{os.path.basename(place.filename)}:{place.lineno}"
            typer.echo(f"internal error: {type(error).__name__}: {printable(str(error))} ({at})", err=True)
            typer.echo(f"  this is a fault of e2e-registry: report it with the output of {DEBUG_VARIABLE}=1", err=True)
            raise typer.Exit(ExitCode.INTERNAL) from None

    return guarded


def _require_folder() -> None:
    """Refuse to run in a folder that was removed: no relative path means anything there."""
    try:
        os.getcwd()
    except OSError as error:
        hint = "change to a folder that is there"
        raise StorageError(f"the current folder cannot be used: {error.strerror}", hint=hint) from error


def _failed(error: RegistryError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(error.exit_code)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"e2e-registry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


_COMMANDS: dict[str, Callable[..., None]] = {
    "check": check.check,
    "record": record.record,
    "accept": accept.accept,
    "compare": compare.compare,
    "adopt": adopt.adopt,
    "run": run.run,
    "list": inventory.list_,
    "show": inventory.show,
    "plan": plan.plan,
    "merge": merge.merge,
    "doctor": doctor.doctor,
    "lint": lint.lint,
    "repeat": repeat.repeat,
    "seeds": seeds.seeds,
    "init": init.init,
}
#: Commands whose line is read in a way of its own.
_CLASSES: dict[str, type[TyperCommand]] = {"doctor": CommandAfterDashes, "seeds": ManyValues}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=_CLASSES.get(_name))(_guarded(_command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: What follows the program's name; ``sys.argv[1:]`` by default.
    """

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        with lasting_output():
            app(args=None if arguments is None else list(arguments), prog_name="e2e-registry")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return int(ExitCode.OK)


def entry() -> None:
    """Run as the console script."""
    sys.exit(main())
