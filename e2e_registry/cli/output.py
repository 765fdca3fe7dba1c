"""What commands print: results to standard output, progress to standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer


def print_json(data: Any) -> None:
    """Print one JSON document, and nothing else, to standard output."""
    typer.echo(json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False))


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show that a recipe runs, and its latest line; yield what takes each line.

    On a terminal the line is rewritten in place; elsewhere the title is printed once, so that a log stays short.
    """
    if not sys.stderr.isatty():
        typer.echo(f"running {title}", err=True)
        yield lambda line: None
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(title)) as status:

        def show(line: str) -> None:
            room = max(console.width - len(title) - 8, 20)
            status.update(escape(f"{title}  {line.strip()[:room]}"))

        yield show
