"""The command line of a recipe: a Typer option for each field of its ``ScriptArgs`` dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

import typer

from e2e_registry.errors import RegistryError, UsageError

Args = TypeVar("Args")


def command_line(run: Callable[[Args], None], args_type: type[Args]) -> typer.Typer:
    """Return the command line that calls ``run`` with an ``args_type`` built from its options.

    A :class:`~e2e_registry.errors.RegistryError` is printed, without the driver's traceback, and ends the process with
    the error's exit code; any other exception ends it as usual.

    Args:
        run: The recipe; its docstring is the help text.
        args_type: A dataclass whose fields are annotated with ``typer.Option(...)`` and have defaults.
    """
    hints = get_type_hints(args_type, include_extras=True)

    def main(**options: Any) -> None:
        try:
            run(args_type(**options))
        except RegistryError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a program's last words
            raise typer.Exit(error.exit_code) from None

    main.__doc__ = run.__doc__
    main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hint)
            for field in dataclasses.fields(args_type)  # type: ignore[arg-type]
            for hint in [hints[field.name]]
        ]
    )
    main.__annotations__ = {}
    # Typer's own rendering of exceptions cuts long tracebacks and shows local variables; the log needs the plain one.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def parse_env_vars(assignments: Iterable[str], *, flag: str) -> Mapping[str, str]:
    """Return the variables that a repeatable ``NAME=VALUE`` option gives; the last value of a name counts.

    Raises:
        UsageError: An item is not of that form.
    """
    variables = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(
                f"{assignment!r} is not NAME=VALUE", where=flag, hint=f"one variable an option: {flag} MKL_CBWR=AUTO"
            )
        variables[name] = value
    return variables
