"""What commands print: results to standard output, progress to standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from e2e_registry.printable import STEERING, printable_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: Running tests that are shown at the same time.
_SHOWN = 16


class _LastingStream:
    """A stream whose reader may leave early, as ``head`` does: what nobody reads any more is dropped.

    A command that ended there would not come to its verdict, and whatever it exited with would be taken for one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        # What is left in the stream's buffer must not fail again, here or when the interpreter ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and standard error outlast their readers."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", _LastingStream(stream)) for stream in streams)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams


def print_json(data: Any) -> None:
    """Print one JSON document, and nothing else, to standard output."""
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
    # JSON escapes the control characters of ASCII alone; what is left of them stands inside strings.
    typer.echo(STEERING.sub(lambda match: json.dumps(match[0]).strip('"'), text))


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
            status.update(escape(f"{title}  {printable_line(line.strip())[:room]}"))

        yield show


class SuiteProgress:
    """Shows which tests run, and the latest line of each.

    On a terminal the lines are rewritten in place; elsewhere each test is named as it starts, so that a log stays
    short. Tests start in threads of their own; all else happens in the one that checks.

    Args:
        total: How many tests there are.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_ended = 0
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> SuiteProgress:
        """Begin to show."""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(console=console, get_renderable=self._render, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing of it on the terminal."""
        if self._live is not None:
            self._live.stop()

    def started(self, test: str) -> Callable[[str], None]:
        """Show that a test runs; return what takes each line that its recipe prints."""
        if self._live is None:
            typer.echo(f"running {test}", err=True)
            return lambda line: None
        with self._lock:
            self._lines[test] = ""

        def show(line: str) -> None:
            with self._lock:
                if test in self._lines:
                    self._lines[test] = printable_line(line.strip())

        return show

    @contextlib.contextmanager
    def ended(self, test: str, verdict: str) -> Iterator[None]:
        """Show that a test has ended, and make room for what is printed in this context."""
        with self._lock:
            self._num_ended += 1
            self._lines.pop(test, None)
        if self._live is None:
            if self._total > 1:
                typer.echo(f"[{self._num_ended}/{self._total}] {verdict} {test}", err=True)
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def _render(self) -> Text:
        from rich.text import Text

        with self._lock:
            running = list(self._lines.items())
        lines = [Text(f"{self._num_ended} of {self._total} tests ended, {len(running)} running", "dim")]
        lines += [Text.assemble((test, "bold"), "  ", (line, "dim")) for test, line in running[:_SHOWN]]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
