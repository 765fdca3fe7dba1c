"""What commands print: results to standard output, progress to standard error."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from e2e_registry.errors import StorageError
from e2e_registry.printable import printable_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: Running tests that are shown at the same time.
_SHOWN = 16


#: What the few symbols of reports become where the stream's encoding lacks them.
_FALLBACKS = {"→": "->", "…": "...", "─": "-"}
_IN_ENCODING = "e2e-registry.in-encoding"


def _in_encoding(error: UnicodeError) -> tuple[str, int]:
    """Write what an encoding lacks in ASCII: a report's symbols by their like, all else as an escape sequence."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_FALLBACKS.get(c, c.encode("ascii", "backslashreplace").decode()) for c in lacking), error.end


codecs.register_error(_IN_ENCODING, _in_encoding)


class _LastingStream:
    """A stream that takes whatever is written to it: what cannot be delivered is dropped.

    A command that ended there would not come to its verdict, and whatever it exited with would be taken for one.

    Attributes:
        failure: Why something was lost; None for a reader that left early, as ``head`` does: it has what it wanted.
    """

    #: Typer writes past a stream of ASCII, to its buffer.
    buffer = None

    def __init__(self, stream: TextIO, failure: OSError | None = None) -> None:
        self._stream = stream
        self.failure = failure

    def write(self, text: str) -> int:
        with self._lasting():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.failure = self.failure or error
            # What is left in the stream's buffer must not fail again, here or when the interpreter ends.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and standard error outlast their readers, their disks, their encodings and their absence."""
    with contextlib.ExitStack() as stack:
        if sys.stdin is None:
            sys.stdin = _null(os.O_RDONLY)
        stack.enter_context(_encoding_errors(sys.stdin, "replace"))
        for name in ("stdout", "stderr"):
            given = getattr(sys, name)
            closed = OSError(errno.EBADF, "it is closed") if given is None else None
            stream = _null(os.O_WRONLY) if given is None else given
            stack.enter_context(_encoding_errors(stream, _IN_ENCODING))
            lasting = _LastingStream(stream, closed)
            stack.callback(setattr, sys, name, given)
            stack.callback(lasting.flush)
            setattr(sys, name, lasting)
        yield


def _null(flags: int) -> TextIO:
    """Stand in for a stream that the caller closed, under its number: else the next file that is opened gets that."""
    descriptor = os.open(os.devnull, flags)
    os.set_inheritable(descriptor, True)
    return open(descriptor, "r" if flags == os.O_RDONLY else "w", encoding="utf-8", closefd=False)


@contextlib.contextmanager
def _encoding_errors(stream: TextIO, errors: str) -> Iterator[None]:
    """Have a stream treat what its encoding cannot hold in another way; one that encodes nothing is left alone."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    usual = stream.errors
    with contextlib.suppress(io.UnsupportedOperation):  # an input that was read before
        stream.reconfigure(errors=errors)
    try:
        yield
    finally:
        with contextlib.suppress(io.UnsupportedOperation):
            stream.reconfigure(errors=usual)


def require_output() -> None:
    """End a command whose answer is what it prints: nobody has the answer if that is lost.

    A check's verdict stands without it, and so does whatever a command wrote or did.

    Raises:
        StorageError: Standard output is closed, or could not be written.
    """
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is not None:
        raise StorageError(f"cannot write: {failure.strerror or failure}", where="standard output")


def print_json(data: Any) -> None:
    """Print one JSON document, and nothing else, to standard output.

    In ASCII, as files are written: names that are no text in any encoding have an escape in JSON, and no bytes.
    """
    typer.echo(json.dumps(data, indent=1, allow_nan=False))


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show that a recipe runs, and its latest line; yield what takes each line.

    On a terminal the line is rewritten in place; elsewhere the title is printed once, so that a log stays short.
    """
    if not sys.stderr.isatty():
        typer.echo(f"running {title}", err=True)
        yield lambda line: _echo_notice(title, line)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status(escape(title)) as status:

        def show(line: str) -> None:
            room = max(console.width - len(title) - 8, 20)
            status.update(escape(f"{title}  {printable_line(line.strip())[:room]}"))

        yield show


def _echo_notice(title: str, line: str) -> None:
    """Print why a run does not go on; of what its recipe prints, nothing."""
    from e2e_registry.execution.notice import Notice

    if isinstance(line, Notice):
        typer.echo(f"{title}: {line}", err=True)


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
            return lambda line: _echo_notice(test, line)
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
