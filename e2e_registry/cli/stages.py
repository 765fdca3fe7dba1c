"""Progress of a command that runs several recipes one after the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import typer

from e2e_registry.cli.output import progress


@dataclass
class Stages:
    """Takes what is being run, and each line that it prints."""

    show: Callable[[str], None]
    stage: str = ""

    def on_stage(self, stage: str) -> None:
        """Say what runs now: on a terminal in the status line, elsewhere as a line of the log."""
        self.stage = stage
        if sys.stderr.isatty():
            self.show(stage)
        else:
            typer.echo(f"  {stage}", err=True)

    def on_line(self, line: str) -> None:
        """Show a line of the recipe behind its stage."""
        self.show(f"{self.stage}: {line.strip()}")


@contextlib.contextmanager
def stages(title: str) -> Iterator[Stages]:
    """Show that several runs are under way; yield what takes their stages and lines."""
    with progress(title) as show:
        yield Stages(show)
